"""A finished comparison for machines: JSON and JUnit XML."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import msgspec

from .comparison_report import ComparisonReport
from .descriptive import WHY_NOT
from .verdict import EXIT_CODES, Verdict, tally
from .verdict_text import describe_change

SCHEMA_VERSION = 1


def to_json(report: ComparisonReport) -> dict[str, Any]:
    """The whole comparison as JSON's types; changes are fractions, times in ms."""
    rows = []
    for verdict in report.verdicts:
        row = msgspec.to_builtins(verdict)
        times = verdict.unit == "ms"
        row = {
            **row.pop("key"),
            **row,
            "base_ms": verdict.base_value if times else None,
            "current_ms": verdict.current_value if times else None,
            "speedup": verdict.speedup,
        }
        if verdict.key in report.statistics:
            row["statistics"] = msgspec.to_builtins(report.statistics[verdict.key])
        for name, found in (("attribution", report.attributions), ("bisection", report.findings)):
            for x in found:
                if x.key == verdict.key:
                    row[name] = {k: v for k, v in msgspec.to_builtins(x).items() if k != "key"}
        rows.append(row)
    out: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "base": report.base,
        "current": report.current,
        "mode": report.progress.mode,
        "exit_code": report.exit_code,
        "headline": report.headline,
        "counts": tally(report.progress.verdicts),
        "options": msgspec.to_builtins(report.options),
        "fail_on": sorted(report.fails),
        "remarks": list(report.remarks),
        "verdicts": rows,
    }
    if report.statistics:
        out["statistics_do_not_decide"] = WHY_NOT
    return out


def to_junit(report: ComparisonReport) -> str:
    """JUnit XML, a test case per row: what fails is a failure, or an error where it could not be compared."""
    suite = ElementTree.Element("testsuite", name=_xml(f"kernelmark {report.base} .. {report.current}"))
    counts = dict.fromkeys(("failure", "error", "skipped"), 0)
    for verdict in report.verdicts:
        key = verdict.key
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_xml(key.operator),
            name=_xml(f"{key.case} {key.implementation} {key.cache}"),
            time=f"{_seconds(verdict):.9f}",
        )
        element = _junit_element(verdict, report.fails)
        if element is not None:
            tag, name, message = element
            ElementTree.SubElement(case, tag, type=_xml(name), message=_xml(message))
            counts[tag] += 1
        details = [describe_change(verdict), *(f.reason for f in verdict.flags), *verdict.notes]
        ElementTree.SubElement(case, "system-out").text = _xml("\n".join(x for x in details if x))
    suite.set("tests", str(len(report.progress.verdicts)))
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(counts[tag]))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _seconds(verdict: Verdict) -> float:
    return (verdict.current_value or 0.0) / 1000 if verdict.unit == "ms" else 0.0


def _junit_element(verdict: Verdict, fails: frozenset[str]) -> tuple[str, str, str] | None:
    failing = [flag for flag in verdict.flags if flag.metric in fails]
    if verdict.kind in fails and verdict.kind != "no change":
        tag = "error" if EXIT_CODES[verdict.kind] == 4 else "failure"
        return tag, verdict.kind, verdict.reason
    if failing:
        return "failure", failing[0].metric, "; ".join(flag.reason for flag in failing)
    if verdict.kind in ("inconclusive", "missing", "incorrect", "not comparable", "new", "skipped"):
        return "skipped", verdict.kind, verdict.reason
    return None


def _xml(text: str) -> str:
    """XML 1.0 has no place for control characters, and a library's error message may hold any."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)
