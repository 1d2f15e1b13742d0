"""The report: self-contained, escaped, honest about what is missing, and the same bytes for the same journal."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import time
from datetime import date
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from kernelmark.registry.analysis.releases import Package, Releases
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.record import Ceiling
from kernelmark.registry.views import charts, grouping, lines, report
from kernelmark.registry.views.crossing import contests
from kernelmark.registry.views.looks import palette
from kernelmark.registry.views.report import render

pytest.importorskip("jinja2", reason="Jinja2 is not installed")

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart: tags balanced or not, identifiers, links, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._attributes(attrs)

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [x or "" for name, x in attrs if name == "id"]
        self.links += [x or "" for name, x in attrs if name in ("href", "src")]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)
        elif self.open[-1] == "script":
            self.scripts.append(data)


def sizes(literal: Any, count: int, **more: Any) -> list[Any]:
    return [
        literal.case(name=f"S{2**i}-bf16-forward", axes={"S": 2**i}, bytes=10**6 * 2**i, **more)
        for i in range(count)
    ]


def measured(literal: Any, cases: list[Any], replicates: int = 3) -> list[Any]:
    """Ours 1.5× to 3× as fast as `torch`, a yardstick, one unsupported implementation."""
    out: list[Any] = [Ceiling("copy", 10**6, 0.001, 0), Ceiling("copy", 10**9, 0.5, 0)]
    for case in cases:
        ms = case.bytes / 10**9
        for r in range(replicates):
            noise = 1 + 0.001 * r
            seen = {"memory": case.bytes, "energy": ms / 2, "error": 1e-3, "launch": ms + 0.01}
            out += [
                literal.record("kernelmark", ms * noise, case=case, replicate=r, beside=seen),
                literal.record("torch", 3 * ms, case=case, replicate=r, beside=seen),
                literal.record("liger", 1.5 * ms, case=case, replicate=r, beside=seen),
                literal.record("clone", ms / 2, case=case, replicate=r, provider="yardstick"),
                literal.record("flash", case=case, replicate=r, status="unsupported", reason="no fp32 here"),
            ]
    return out


@pytest.fixture(scope="module")
def page(literal: Any) -> str:
    """The report of a complete GPU run of three cases."""
    return render([literal.journal(*measured(literal, sizes(literal, 3)), literal.footer(), replicates=3)])


def test_a_conversion_has_a_column_where_any_row_has_one(literal: Any, page: str) -> None:
    assert "<th>Conv ms</th>" not in page
    (case,) = sizes(literal, 1)
    ours, theirs = (
        literal.record("kernelmark", case=case),
        literal.record("vllm", case=case, beside={"conversion": 0.1234}),
    )
    found = render([literal.journal(ours, theirs)])
    assert "<th>Conv ms</th>" in found
    assert ">0.1234<" in found
    assert Page(found).faults == []


def crossing(literal: Any) -> list[Any]:
    """Attention and ssd of one width, whose times cross at S = 2000 and whose memory does not."""
    out = []
    for length in (1024, 2048, 4096):
        attention = literal.case(
            operator="attention",
            name=f"S{length}",
            axes={"B": 1, "H": 16, "Hkv": 16, "S": length, "D": 128},
            options={"mask": "causal"},
        )
        axes = {"B": 1, "S": length, "H": 32, "P": 64, "N": 128, "G": 1}
        ssd = literal.case(operator="ssd", name=f"S{length}", axes=axes)
        for r in range(5):
            for case, ms in ((attention, length**2 / 2e6), (ssd, length / 1e3)):
                seen = {"memory": 1000 * length if case is ssd else 4000 * length}
                out.append(literal.record("kernelmark", ms * (1 + r / 500), case=case, replicate=r, beside=seen))
    return out


def test_where_an_operator_overtakes_attention(literal: Any, page: str) -> None:
    found = Page(render([literal.journal(*crossing(literal), literal.footer(), replicates=5)]))
    assert found.faults == []
    assert {x.removeprefix("#") for x in found.links} <= set(found.ids)
    assert "run1-crossing" in found.ids
    assert "ssd (kernelmark) ssd is faster from S = 2,000 on" in found.text
    assert "ssd needs less memory from S = 1,024 on, the shortest that both have" in found.text
    assert "ssd 2,000" in found.text  # in the drawing
    assert "run1-crossing" not in page


def test_a_crossing_is_drawn_where_it_lies(literal: Any) -> None:
    """Between 1024 and 2048 at 2000's place, the same bytes each time."""
    journal = literal.journal(*crossing(literal), replicates=5)
    found = rows(journal)
    (contest,) = contests(journal, found)
    drawn = lines.over_lengths(contest, "time")
    assert drawn is not None
    assert drawn == lines.over_lengths(contest, "time")
    (tip,) = re.findall(r'cx="([0-9.]+)"[^>]*><title>ssd is faster from ', drawn)
    places = {
        int(length.replace(",", "")): float(x)
        for x, length in re.findall(
            r'cx="([0-9.]+)"[^>]*><title>attention \(kernelmark\) at S = ([\d,]+): ', drawn
        )
    }
    octave = places[2048] - places[1024]
    assert float(tip) == pytest.approx(places[1024] + octave * math.log2(2000 / 1024), abs=0.6)


def test_curves_without_memory_are_not_drawn(literal: Any) -> None:
    bare = [
        msgspec.structs.replace(
            x.measurement, samples={y: z for y, z in x.measurement.samples.items() if y != "memory"}
        )
        for x in crossing(literal)
    ]
    records = [msgspec.structs.replace(x, measurement=y) for x, y in zip(crossing(literal), bare, strict=True)]
    journal = literal.journal(*records, replicates=5)
    found = rows(journal)
    (contest,) = contests(journal, found)
    assert lines.over_lengths(contest, "memory") is None
    assert "Peak memory of a call beyond its inputs" not in render([journal])


# --- the page as such -----------------------------------------------------------------------------------


def test_tags_balance_and_identifiers_are_unique(page: str) -> None:
    found = Page(page)
    assert found.faults == []
    assert found.open == []
    assert sorted(found.ids) == sorted(set(found.ids))


def test_it_opens_offline(page: str) -> None:
    found = Page(page)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert not {"link", "img", "iframe", "object"} & set(found.tags)
    assert all(x.startswith("#") for x in found.links)


def test_every_link_within_the_page_leads_somewhere(page: str) -> None:
    found = Page(page)
    assert {x.removeprefix("#") for x in found.links} <= set(found.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(found.ids)


def test_charts_are_inline_with_text_as_text_and_colours_of_the_page(page: str) -> None:
    drawn = re.findall(r'<svg viewBox="0 0 480 .*?</svg>', page, re.S)
    assert len(drawn) == 5  # latency and fraction over sizes, then by case, and the copy
    drawn += re.findall(r'<svg viewBox="0 0 330 .*?</svg>', page, re.S)
    assert len(drawn) == 7  # an operator's strip, and the axis above it
    for svg in drawn:
        assert "<text" in svg or "<circle" in svg
        assert "var(--" in svg
    assert all(f"{x}:" in page for x in set(re.findall(r"var\((--[a-z0-9-]+)\)", page)))


def test_the_same_journal_gives_the_same_bytes(literal: Any, page: str) -> None:
    again = render([literal.journal(*measured(literal, sizes(literal, 3)), literal.footer(), replicates=3)])
    assert again == page


def test_it_serves_dark_print_and_phone(page: str) -> None:
    for what in ("prefers-color-scheme: dark", "@media print", "max-width: 640px", 'name="viewport"'):
        assert what in page


# --- what it says ---------------------------------------------------------------------------------------


def test_title_has_device_date_commit_plan_and_key(page: str) -> None:
    text = Page(page).text
    for what in ("NVIDIA H200", "2026-11-21 00:00:00 UTC", "0123456789ab", "quick, 3 replicates", "key0"):
        assert what in text


def test_the_summary_comes_before_the_detail(page: str) -> None:
    text = Page(page).text
    places = [
        text.index(x)
        for x in (
            "Is kernelmark faster than the fastest baseline?",
            "Faster in all 3 cases",
            "By operator Ours against",
            "Every case 3 cases",
            "All rows of rms_norm, forward",
            "Peak memory Most bytes",
            "Energy Of a call among others",
            "Ceilings and rooflines What",
            "Hashed into the comparability key",
            "How the run's time was spent",
            "Skipped or failed 1 reason",
            "How to read this A row",
        )
    ]
    assert places == sorted(places)


def test_speedups_category_and_limit_are_the_rows(page: str) -> None:
    text = Page(page).text
    assert "1.50× [1.49, 1.50] kernelmark over the fastest baseline of each case, geometric mean of 3" in text
    assert "rms_norm 3 1.50× [1.49, 1.50] 3.00× 3 0 0 1.50× 1.50×" in text
    assert "no fp32 here" in text
    assert "yardstick" in text
    assert "75.0 %" in text  # sampling's share of the time
    assert "overhead" in text
    assert "25 % went outside building, verifying, warming up and sampling" in text


def test_versions_stand_with_their_age_and_the_newest(literal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    days = {"1.0": date(2026, 10, 9), "1.2": date(2026, 11, 20)}
    known = Releases(date(2026, 11, 24), {"torch": "torch"}, {"torch": Package("1.2", days)})
    monkeypatch.setattr(report, "releases", lambda: known)
    found = [literal.record(x, 1.0) for x in ("kernelmark", "torch", "liger")]
    text = Page(render([literal.journal(*found)])).text
    assert "Implementation Version Age at the run Newest release (2026-11-24)" in text
    for line in ("kernelmark 1.0 – –", "torch 1.0 43 days 1.2", "liger 1.0 age not known –"):
        assert line in text


@pytest.mark.parametrize("torch", [1.0, 100.0])
def test_a_value_below_zero_costs_no_report(literal: Any, torch: float) -> None:
    """Of a workload's own metric, say: it has no place on an axis, which is of logarithms for values far apart."""
    journal = literal.journal(
        literal.record("kernelmark", -0.5), literal.record("torch", torch), literal.record("liger", 1.1)
    )
    assert "0.5" in Page(render([journal])).text


def test_unknown_is_a_dash_and_never_zero(literal: Any) -> None:
    case = literal.case(bytes=0)
    text = Page(render([literal.journal(literal.record("kernelmark", 1.0, case=case))])).text
    assert "limit –" in text
    assert "0 %" not in text.replace("100 %", "").split("How to read this")[0]
    assert "Not known for any row of this run" in text
    assert "GB/s" not in text.split("Ceilings and rooflines")[0]


def test_a_cpu_run_says_so_at_the_top(literal: Any) -> None:
    journal = literal.journal(literal.record(), literal.footer(), device="cpu", conditions={"cpu": "Xeon"})
    text = Page(render([journal])).text
    assert "CPU: Xeon" in text[:300]
    assert "not of a GPU" in text[:600]


def test_a_killed_run_says_so_at_the_top(literal: Any) -> None:
    text = Page(render([literal.journal(literal.record("kernelmark", 1.0))])).text
    assert "INCOMPLETE" in text[:300]
    assert "left no account of its own" in text


def test_throttled_unconverged_and_lost_replicates_are_flagged(literal: Any) -> None:
    found = [
        literal.record("a", throttled=(0, 1, 2)),
        literal.record("b", converged=False),
        literal.record("c"),
        literal.record("c", replicate=1, status="crashed", reason="signal 11"),
    ]
    html = render([literal.journal(*found)])
    table = html[html.index("All rows of") :]
    for flag in (">throttled<", ">not converged<", ">lost replicates<"):
        assert flag in table
    assert "1 of 2 replicates: crashed: signal 11" in html


def test_everything_from_a_journal_is_escaped(literal: Any) -> None:
    evil = '"><script>alert(1)</script>&amp;'
    case = literal.case(name=evil, operator=f"op{evil}", options={"mask": evil})
    found = [
        literal.record(f"x{evil}", case=case, provider=evil, version=evil),
        literal.record("kernelmark", 2.0, case=case),
        literal.record("other", case=case, status="error", reason=f"why {evil}"),
    ]
    header = literal.header(
        run=evil,
        plan=evil,
        commit=evil,
        key=evil,
        created=evil,
        harness=evil,
        conditions={"gpu": evil, evil: evil},
        environment={evil: evil},
    )
    # Not gone through its bytes: reading refuses such names, and the page must not lean on that.
    html = render([Journal(header, tuple(found), footers=(literal.footer(spent_s={evil: 1.0}),))])
    assert "<script>alert" not in html
    found_page = Page(html)
    assert found_page.faults == []
    assert found_page.tags.count("script") == 2  # the data, in which nothing can end the element, and ours
    data, ours = found_page.scripts
    assert json.loads(data)["cases"][0]["case"] == evil
    assert not set("<>&") & set(data)
    assert hashlib.sha256(ours.encode()).digest() == base64.b64decode(re.findall(r"'sha256-(.*?)'", html)[0])
    assert "&amp;amp;" in html  # an ampersand that was already written out stays what it was


def test_a_dollar_sign_is_no_formula(literal: Any) -> None:
    html = render([literal.journal(literal.record(case=literal.case(options={"mask": "$x_1$"}, axes={"S": 1})))])
    assert "$x_1$" in html


def test_a_run_without_rows(literal: Any) -> None:
    found = Page(render([literal.journal()]))
    assert found.faults == []
    assert "no speedup to sum up" in found.text
    assert "0 of 0 rows measured" in found.text


def test_a_run_in_which_nothing_succeeded(literal: Any) -> None:
    text = Page(render([literal.journal(literal.record(status="error", reason="no driver"))])).text
    assert "No implementation has a value here." in text
    assert "no driver" in text


def test_an_interval_that_says_nothing_is_called_wide(literal: Any) -> None:
    noisy = [literal.record("kernelmark", x, replicate=i) for i, x in enumerate((1.0, 50.0))]
    html = render([literal.journal(*noisy, literal.record("torch", 3.0))])
    assert "[wide]</span>" in html
    assert "[wide]" in Page(html).text


def test_two_implementations_of_ours_can_be_told_apart(literal: Any) -> None:
    looks = palette(
        rows(
            literal.journal(literal.record("kernelmark"), literal.record("kernelmark_cpu", provider="kernelmark"))
        )
    )
    assert looks["kernelmark"] != looks["kernelmark_cpu"]
    assert {x.colour for x in looks.values()} == {"--s0"}
    assert [(x.shape, x.fill > 0) for x in looks.values()] == [("o", False), ("o", True)]


def test_a_time_of_zero_breaks_nothing(literal: Any) -> None:
    found = [literal.record("kernelmark", 0.0), literal.record("torch", 1.0)]
    assert Page(render([literal.journal(Ceiling("copy", 8, 1.0, 0), *found)])).faults == []


def test_no_journal_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one run"):
        render([])


def test_a_missing_library_says_what_to_install(literal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"jinja2.*pip install 'kernelmark\[registry\]'"):
        render([literal.journal()])


# --- several runs ---------------------------------------------------------------------------------------


def test_runs_side_by_side_with_a_comparison_of_their_common_rows(literal: Any) -> None:
    cases = sizes(literal, 2)
    first = literal.journal(*measured(literal, cases), literal.footer(), run="first")
    second = literal.journal(*measured(literal, cases[:1]), literal.footer(), run="second")
    html = render([first, second])
    found = Page(html)
    assert found.faults == []
    assert sorted(found.ids) == sorted(set(found.ids))
    assert "2 runs side by side" in found.text
    assert "4 rows have the same key in both" in found.text
    assert "only in first" in found.text
    assert "[−" in found.text or "[0.0" in found.text


def test_runs_of_different_conditions_are_not_compared_and_the_difference_is_named(literal: Any) -> None:
    first = literal.journal(*measured(literal, sizes(literal, 1)), run="first")
    other = {"gpu": "NVIDIA H100", "driver": "580.1"}
    second = literal.journal(*measured(literal, sizes(literal, 1)), run="second", key="key1", conditions=other)
    text = Page(render([first, second])).text
    assert "no ratio is formed between the two runs" in text
    assert "conditions differ: gpu" in text
    assert "rows have the same key in both" not in text


# --- size and time --------------------------------------------------------------------------------------


def test_a_large_run_stays_small_and_quick(literal: Any) -> None:
    cases = [
        literal.case(
            operator="attention",
            name=f"B{b}-S{s}-D{d}-{mask}",
            axes={"B": b, "S": s, "D": d},
            options={"mask": mask},
            flops=10**9 * b * s,
        )
        for b in (1, 2, 4)
        for s in (128, 256, 512, 1024, 2048)
        for d in (64, 128)
        for mask in ("causal", "full")
    ]
    found = measured(literal, cases, replicates=2)
    begin = time.monotonic()
    html = render([literal.journal(*found)])
    assert len(html) < 2e6
    assert time.monotonic() - begin < 20


# --- groups, looks, text --------------------------------------------------------------------------------


def group_journal(literal: Any, **axes: list[int]) -> Any:
    import itertools

    for values in itertools.product(*axes.values()):
        sizes_ = dict(zip(axes, values, strict=True))
        name = "-".join(f"{x}{y}" for x, y in sizes_.items())
        yield literal.record(case=literal.case(name=name, axes=sizes_))


def test_a_group_tells_what_is_common_and_labels_what_differs(literal: Any) -> None:
    (group,) = grouping.groups(rows(literal.journal(*group_journal(literal, B=[4, 32], D=[64]))))
    assert group.common == "bf16 · D64"
    assert group.labels == ("B4", "B32")


def test_a_group_of_one_case_is_labelled_by_its_sizes(literal: Any) -> None:
    (group,) = grouping.groups(rows(literal.journal(literal.record())))
    assert (group.common, group.labels) == ("bf16", ("B2-S4-D8",))


def test_many_cases_are_split_by_the_axis_with_fewest_values(literal: Any) -> None:
    found = grouping.groups(
        rows(literal.journal(*group_journal(literal, B=[1, 2, 4, 8, 16, 32, 64], D=[64, 128])))
    )
    assert [x.common for x in found] == ["bf16 · D64", "bf16 · D128"]
    assert [len(x.cases) for x in found] == [7, 7]


def test_options_split_before_sizes(literal: Any) -> None:
    cases = [
        literal.case(name=f"{s}-{causal}", axes={"S": s}, options={"causal": causal})
        for s in range(8)
        for causal in (True, False)
    ]
    found = grouping.groups(rows(literal.journal(*(literal.record(case=x) for x in cases))))
    assert sorted(x.common for x in found) == ["causal · bf16", "not causal · bf16"]


def test_no_group_is_larger_than_the_limit_and_no_case_is_lost(literal: Any) -> None:
    journal = literal.journal(*group_journal(literal, S=list(range(40))))
    found = grouping.groups(rows(journal))
    assert all(len(x.cases) <= grouping.CASES_IN_A_GROUP for x in found)
    assert sum(len(x.cases) for x in found) == 40


def test_cold_and_hot_are_told_apart_by_label(literal: Any) -> None:
    (group,) = grouping.groups(rows(literal.journal(literal.record(), literal.record(cache="hot"))))
    assert sorted(group.labels) == ["cold cache", "hot cache"]


def test_latency_axis_is_logarithmic_only_over_a_wide_range(literal: Any) -> None:
    def group(*latencies: float) -> grouping.Group:
        cases = [literal.case(name=f"S{i}", axes={"S": i}) for i in range(len(latencies))]
        found = [literal.record(samples=x, case=y) for x, y in zip(latencies, cases, strict=True)]
        return grouping.groups(rows(literal.journal(*found)))[0]

    assert charts.logarithmic(group(1.0, 100.0))
    assert not charts.logarithmic(group(1.0, 2.0))
