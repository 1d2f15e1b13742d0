"""The verdict of a comparison as tags on the current side's MLflow runs, so that the UI can filter by it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..detection.comparison_report import ComparisonReport
from ..detection.verdict import Verdict
from ..store.home import Home
from ..store.record import Key
from .entries import SUMMARY
from .store import Store, sync

PREFIX = "verdict"
_TEXT = 500


def has_registry(home: Home) -> bool:
    """Whether there is a registry to write to; none is made for a verdict."""
    return bool(os.environ.get("MLFLOW_TRACKING_URI")) or home.database.exists()


def write_back(
    report: ComparisonReport, base: str, runs: Sequence[str], home: Home, uri: str | None = None
) -> int:
    """Tags the rows of these runs with their verdicts, and the runs as a whole with the worst; how many rows.

    Journals that the registry lacks are recorded first. Idempotent: a tag that stands is not written again, and
    one of an earlier verdict that no longer holds is taken away. Raises `StoreError`.
    """
    sync(home, runs, uri)
    store = Store.open(uri, home)
    wanted = tags(report, base)
    return sum(store.tag(run, wanted, PREFIX) for run in runs)


def tags(report: ComparisonReport, base: str) -> dict[str, dict[str, str]]:
    """Tags by the identity of a row, and those of the whole run."""
    out = {_identity(verdict): _row_tags(verdict, base) for verdict in report.verdicts}
    if report.verdicts:
        worst = report.verdicts[0].kind
        out[SUMMARY] = {PREFIX: worst, "verdict_exit_code": str(report.exit_code), "verdict_baseline": base}
    for attribution in report.attributions:
        if attribution.causes:
            out["/".join(_key(attribution.key))]["verdict_cause"] = ", ".join(attribution.causes)
    for finding in report.findings:
        if len(finding.suspects) == 1:
            out["/".join(_key(finding.key))]["verdict_commit"] = finding.suspects[0].commit
    return out


def _row_tags(verdict: Verdict, base: str) -> dict[str, str]:
    values = {
        PREFIX: verdict.kind,
        "verdict_baseline": base,
        "verdict_reason": verdict.reason[:_TEXT],
        "verdict_change": None if verdict.change is None else f"{verdict.change:+.4f}",
        "verdict_worse": ", ".join(flag.metric for flag in verdict.flags) or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _identity(verdict: Verdict) -> str:
    return "/".join(_key(verdict.key))


def _key(key: Key) -> tuple[str, str, str, str]:
    return key.operator, key.case, key.implementation, key.cache
