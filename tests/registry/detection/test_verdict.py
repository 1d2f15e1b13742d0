"""Verdicts as exit codes and in every output."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.registry.detection.comparison_report import ComparisonReport
from kernelmark.registry.detection.decision import Progress
from kernelmark.registry.detection.descriptive import describe
from kernelmark.registry.detection.verdict import (
    EXIT_CODES,
    FAIL_ON,
    KINDS,
    Flag,
    Kind,
    Verdict,
    exit_code,
    fail_on,
    tally,
    worst_first,
)
from kernelmark.registry.detection.verdict_output import to_json, to_junit
from kernelmark.registry.detection.verdict_text import COMMENT_LIMIT, describe_change, explanations, to_markdown
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.record import Key
from kernelmark.registry.views.table import render
from kernelmark.registry.views.verdict_table import verdict_table


def verdict(kind: Kind, change: float | None = None, case: str = "a", flag: str | None = None) -> Verdict:
    flags = () if flag is None else (Flag(flag, 1.0, 2.0, f"{flag} +100.0%"),)
    if change is None:
        return Verdict(Key("rmsnorm", case, "kernelmark", "cold"), kind, "because", flags=flags)
    return Verdict(
        Key("rmsnorm", case, "kernelmark", "cold"),
        kind,
        "because",
        base_value=1.0,
        current_value=1.0 + change,
        change=change,
        low=change - 0.01,
        high=change + 0.01,
        p=0.01,
        detectable=0.034,
        pairs=5,
        flags=flags,
    )


def report(*verdicts: Verdict, **more: object) -> ComparisonReport:
    return ComparisonReport("main @ 1111111", "HEAD @ 2222222", Progress(verdicts), **more)  # type: ignore[arg-type]


class TestExitCode:
    @pytest.mark.parametrize(
        ("kinds", "code"),
        [
            ([], 4),
            (["no change"], 0),
            (["no change", "improvement", "new", "skipped", "warning"], 0),
            (["new"], 4),
            (["skipped", "new"], 4),
            (["not comparable"], 4),
            (["no change", "inconclusive"], 3),
            (["no change", "missing"], 4),
            (["no change", "incorrect"], 4),
            (["inconclusive", "missing"], 4),
            (["no change", "not comparable", "inconclusive"], 4),
            (["regression", "missing", "inconclusive"], 1),
        ],
    )
    def test_default(self, kinds: list[Kind], code: int) -> None:
        assert exit_code([verdict(kind) for kind in kinds]) == code

    @pytest.mark.parametrize(
        ("flag", "code"),
        [
            ("memory", 1),
            ("peak_allocated", 1),
            ("rank_memory", 1),
            ("error", 1),
            ("gradient_error", 1),
            ("energy", 0),
            ("energy_per_token", 0),
        ],
    )
    def test_other_metrics(self, flag: str, code: int) -> None:
        assert exit_code([verdict("no change", 0.0, flag=flag)]) == code

    def test_precedence(self) -> None:
        everything = [verdict("regression"), verdict("missing"), verdict("inconclusive")]
        assert exit_code(everything, others=[2, 5]) == 2
        assert exit_code(everything, others=[5]) == 5
        assert exit_code(everything) == 1
        assert exit_code(everything[1:]) == 4
        assert exit_code([everything[2]]) == 3

    def test_fail_on_changes_what_fails(self) -> None:
        rows = [verdict("warning"), verdict("inconclusive"), verdict("missing")]
        assert exit_code(rows, fail_on(["none"])) == 0
        assert exit_code(rows, fail_on(["warning"])) == 1
        assert exit_code(rows, fail_on(["inconclusive"])) == 3
        assert exit_code(rows, fail_on(["missing", "inconclusive"])) == 4
        assert exit_code(rows, fail_on(["default", "warning"])) == 1
        assert exit_code([verdict("no change", 0.0, flag="energy")], fail_on(["energy"])) == 1

    def test_comparing_nothing_is_4_whatever_fails(self) -> None:
        assert exit_code([], fail_on(["none"])) == 4
        assert exit_code([verdict("not comparable")], fail_on(["none"])) == 4

    def test_names_to_fail_on(self) -> None:
        assert fail_on(["default"]) == FAIL_ON
        assert fail_on(["not-comparable", "no_change"]) == {"not comparable", "no change"}
        with pytest.raises(InputError, match="Did you mean 'regression'"):
            fail_on(["regresion"])

    def test_every_kind_and_metric_has_a_code(self) -> None:
        assert set(EXIT_CODES) == set(KINDS)

    @given(st.lists(st.sampled_from(KINDS), max_size=8), st.sets(st.sampled_from(sorted(EXIT_CODES))))
    def test_always_a_documented_code(self, kinds: list[Kind], fails: set[str]) -> None:
        code = exit_code([verdict(kind) for kind in kinds], fails)
        assert code in (0, 1, 3, 4)
        if "regression" in kinds and "regression" in fails:
            assert code == 1


def test_worst_first_and_tally() -> None:
    rows = [
        verdict("no change", 0.0, "a"),
        verdict("regression", 0.1, "b"),
        verdict("no change", 0.0, "c", flag="memory"),
        verdict("regression", 0.3, "d"),
        verdict("warning", 0.04, "e"),
    ]
    assert [v.key.case for v in worst_first(rows)] == ["d", "b", "e", "c", "a"]
    assert tally(rows) == {"regression": 2, "warning": 1, "no change": 2}


def test_a_speedup_is_the_base_over_the_current_one() -> None:
    assert verdict("improvement", -0.2).speedup == pytest.approx(1.25)


HOSTILE = 'a|b <script> `x` & "q" \x00\x1b[31m [link](u)\nnew'


@pytest.mark.parametrize(
    ("row", "fails", "said"),
    [
        (verdict("regression", 0.12), FAIL_ON, "Regression found"),
        (verdict("regression", 0.12), frozenset(), "Regression found, which does not fail"),
        (verdict("no change", 0.0, flag="memory"), FAIL_ON, "Regression found"),
        (verdict("no change", 0.0, flag="memory"), frozenset(), "No regression"),
        (verdict("improvement", -0.3), frozenset({"improvement"}), "Change found that fails"),
        (verdict("warning", 0.04), FAIL_ON, "No regression"),
    ],
)
def test_a_headline_denies_nothing_that_was_found(row: Verdict, fails: frozenset[str], said: str) -> None:
    assert report(row, fails=fails).headline == said


class TestOutputs:
    rows = (
        verdict("no change", 0.0, "calm"),
        verdict("regression", 0.12, "slow"),
        verdict("missing", None, "gone"),
        verdict("inconclusive", 0.05, "noisy"),
        verdict("no change", 0.001, "fat", flag="memory"),
    )

    def test_json(self) -> None:
        statistics = {self.rows[1].key: describe([1.0, 2.0], [2.0, 3.0])}
        out = json.loads(json.dumps(to_json(report(*self.rows, statistics=statistics))))
        assert (out["exit_code"], out["headline"]) == (1, "Regression found")
        assert out["counts"] == {"regression": 1, "missing": 1, "inconclusive": 1, "no change": 2}
        assert [row["case"] for row in out["verdicts"]] == ["slow", "gone", "noisy", "fat", "calm"]
        worst = out["verdicts"][0]
        assert (worst["operator"], worst["kind"], worst["change"]) == ("rmsnorm", "regression", 0.12)
        assert worst["speedup"] == pytest.approx(1 / 1.12)
        assert worst["statistics"]["samples_base"] == 2
        assert "welch_t" in out["statistics_do_not_decide"]
        assert out["options"]["fail_above"] == 0.05

    def test_junit(self) -> None:
        root = ElementTree.fromstring(to_junit(report(*self.rows)))
        assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
            "tests": "5",
            "failures": "3",
            "errors": "1",
            "skipped": "0",
        }
        kinds = {
            case.get("name"): [(child.tag, child.get("type")) for child in case if child.tag != "system-out"]
            for case in root
        }
        assert kinds == {
            "slow kernelmark cold": [("failure", "regression")],
            "gone kernelmark cold": [("error", "missing")],
            "noisy kernelmark cold": [("failure", "inconclusive")],
            "fat kernelmark cold": [("failure", "memory")],
            "calm kernelmark cold": [],
        }

    def test_junit_of_what_does_not_fail_is_skipped(self) -> None:
        root = ElementTree.fromstring(to_junit(report(*self.rows, fails=frozenset())))
        assert (root.get("failures"), root.get("errors"), root.get("skipped")) == ("0", "0", "2")

    def test_markdown(self) -> None:
        text = to_markdown(report(*self.rows))
        assert text.startswith("### kernelmark: Regression found\n")
        assert text.index("slow") < text.index("gone") < text.index("noisy") < text.index("fat")
        assert "| regression | rmsnorm slow kernelmark | 1 | 1.12 | +12.0 % \\[+11.0 %, +13.0 %\\] |" in text
        assert "<details>\n<summary>1 no change</summary>" in text
        assert "calm" not in text

    def test_markdown_of_nothing_and_of_all_well(self) -> None:
        assert "nothing to compare" in to_markdown(report())
        text = to_markdown(report(verdict("no change", 0.0)))
        assert "No regression" in text
        assert "| verdict |" not in text

    @pytest.mark.parametrize("kind", ["regression", "no change", "missing"])
    def test_a_comment_on_a_thousand_cases_fits(self, kind: Kind) -> None:
        many = [
            Verdict(
                Key(f"operator{i}", f"B4-H32-S{i}-D128-bf16-forward-é", "kernelmark", "cold"), kind, "why " * 80,
                base_value=1.0, current_value=2.0, change=1.0 - i / 1000, low=0.9, high=1.1, detectable=0.03,
            )
            for i in range(1000)
        ]  # fmt: skip
        text = to_markdown(report(*many))
        assert len(text.encode()) < COMMENT_LIMIT
        assert text.endswith("\n")
        if kind == "regression":
            assert "operator0 " in text
            assert "rows more" in text

    def test_hostile_names_break_nothing(self) -> None:
        bad = Verdict(Key(HOSTILE, HOSTILE, HOSTILE, "cold"), "regression", HOSTILE, notes=(HOSTILE,))
        hostile = ComparisonReport(HOSTILE, HOSTILE, Progress((bad,)))
        ElementTree.fromstring(to_junit(hostile))
        json.dumps(to_json(hostile))
        text = to_markdown(hostile)
        assert "<script>" not in text.replace("`" + HOSTILE.replace("`", "'").replace("\n", " "), "")
        (line,) = [line for line in text.splitlines() if line.startswith("| regression")]
        assert line.replace("\\|", "").count("|") == 8
        render(verdict_table(hostile), 120)

    def test_table(self) -> None:
        statistics = {self.rows[1].key: describe([1.0, 2.0], [2.0, 3.0])}
        text = render(verdict_table(report(*self.rows, statistics=statistics)))
        assert text.index("slow") < text.index("gone") < text.index("noisy") < text.index("fat")
        assert "calm" not in text
        assert "Folded: 1 no change" in text
        assert "(cohens d)" in text
        assert "calm" in render(verdict_table(report(*self.rows), everything=True))

    @pytest.mark.parametrize("width", [80, None])
    def test_no_number_is_cut(self, width: int | None) -> None:
        statistics = {self.rows[1].key: describe([1.0, 2.0], [2.0, 3.0])}
        text = render(verdict_table(report(*self.rows, statistics=statistics), everything=True), width)
        assert "…" not in text
        assert width is None or max(map(len, text.splitlines())) <= width
        assert "+12.0 % [+11.0 %, +13.0 %]" in text
        dropped = ", ".join(f"({x})" for x in ("welch t", "welch p", "cohens d", "mann whitney p", "outliers"))
        assert (f"Left out at 80 columns: {dropped}" in " ".join(text.split())) == (width == 80)

    def test_one_line(self) -> None:
        assert describe_change(self.rows[1]) == "regression +12.0 % [+11.0 %, +13.0 %]: because"
        assert describe_change(self.rows[2]) == "missing: because"


def test_what_could_not_have_been_found_is_no_row_of_digits():
    import msgspec

    noisy = msgspec.structs.replace(verdict("inconclusive", 0.1), detectable=8.8e10)
    (said,) = explanations(report(verdict("no change", 0.0), noisy))
    assert "of 3.4 % in the quietest, >1000× in the median, >1000× in the noisiest" in said
