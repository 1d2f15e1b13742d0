"""A comparison of two commits over a fleet: the verdicts of its shards are those of the whole, joined.

Both sides of a pair are always of one host, so a verdict needs nothing of another shard: its noise is that host's,
and its level does not hang on how many rows there are (`registry/detection/decision.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from ...registry.detection.comparison import Options
from ...registry.detection.comparison_report import ComparisonReport
from ...registry.detection.decision import Progress
from ...registry.detection.verdict import Verdict
from ...registry.detection.verdict_output import SCHEMA_VERSION
from ...registry.errors import InputError
from ...registry.store.record import DeviceKind, Key
from ..catalog import Catalog
from ..compare.interleaved import rooted, trees
from ..compare.revisions import Checkout, Revision
from ..plan import Plan


def narrowed(
    plan: Plan,
    catalog: Catalog,
    checkout: Checkout,
    sides: Mapping[str, Revision],
    device: DeviceKind,
    implementations: Sequence[str],
) -> Plan:
    """The plan with the cases alone that an A/B of these revisions measures: no shard shall have nothing to do."""
    if plan.systems:
        raise InputError(f"plan {plan.name!r} names systems; compare such a plan on one machine.")
    with checkout.copies(sides) as folders:
        both = [(revision, folders[name]) for name, revision in sides.items()]
        found = trees(both, rooted(catalog, checkout), catalog, plan, device, implementations)
    mine = {cell.case.full_name for tree in found for cell in tree.cells}
    cases = tuple(x for x in plan.cases if x.full_name in mine)
    return replace(plan, cases=cases, only={key: names for key, names in plan.only.items() if key in mine})


class Report(msgspec.Struct, frozen=True):
    """What of a shard's `regression_detector --json` the whole is made of."""

    schema_version: int
    base: str
    current: str
    options: Options
    fail_on: tuple[str, ...]
    remarks: tuple[str, ...]
    verdicts: tuple[Verdict, ...]


def parse(text: bytes) -> Report:
    """A shard's report. Raises `InputError` for what is none."""
    try:
        raw = msgspec.json.decode(text)
        if raw["schema_version"] != SCHEMA_VERSION:
            raise InputError(
                f"a report of schema {raw['schema_version']!r}, and this kernelmark reads {SCHEMA_VERSION}."
            )
        fields = [x for x in Verdict.__struct_fields__ if x != "key"]
        rows = [
            {"key": {x: row[x] for x in Key.__struct_fields__}, **{x: row[x] for x in fields}}
            for row in raw["verdicts"]
        ]
        return msgspec.convert({**raw, "verdicts": rows}, Report)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"not a report of regression_detector: {str(error)[:300]}") from None


def join(reports: Mapping[int, Report]) -> ComparisonReport:
    """The reports of shards as one. Raises `InputError` where they are not of one question."""
    first = reports[min(reports)]
    for shard, x in reports.items():
        if (x.base, x.current, x.options, x.fail_on) != (first.base, first.current, first.options, first.fail_on):
            raise InputError(
                f"shard {shard} compares {x.base} with {x.current}, another {first.base} with {first.current}."
            )
    verdicts = [x for shard in sorted(reports) for x in reports[shard].verdicts]
    remarks = dict.fromkeys(x for shard in sorted(reports) for x in reports[shard].remarks)
    return ComparisonReport(
        first.base,
        first.current,
        Progress(tuple(verdicts)),
        first.options,
        frozenset(first.fail_on),
        remarks=tuple(remarks),
    )
