"""The terminal's tables, as they come out at 80 columns without a terminal."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from kernelmark.registry.store.record import Ceiling
from kernelmark.registry.views.comparison_page import comparison_page
from kernelmark.registry.views.comparison_table import compare
from kernelmark.registry.views.table import Page, render
from kernelmark.registry.views.tables import run_table


def printed(page: Page, width: int | None = 80) -> str:
    return render(page, width)


def journal(literal: Any, scale: float = 1.0, **header: Any) -> Any:
    lines: list[Any] = [Ceiling("copy", 10**6, 1.0, 0), Ceiling("copy", 10**9, 1000.0, 0)]
    for size in (1024, 16384):
        case = literal.case(
            operator="attention",
            name=f"B1-H16-S{size}-D128-causal-bf16-forward",
            axes={"B": 1, "H": 16, "S": size, "D": 128},
            options={"causal": True},
            bytes=size * 1000,
        )
        for r in range(3):
            ms = size / 1000 * (1 + r / 500)
            lines += [
                literal.record("kernelmark", ms * scale, case=case, replicate=r, version="0.1"),
                literal.record("sdpa_efficient", 2 * ms, case=case, replicate=r),
                literal.record("torch", 4 * ms, case=case, replicate=r),
                literal.record("sdpa_flash", case=case, replicate=r, status="unsupported", reason="no GQA here"),
            ]
    return literal.journal(*lines, literal.footer(), replicates=3, **header)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_run_fits_its_width_and_no_number_is_cut(literal: Any, width: int) -> None:
    text = printed(run_table(journal(literal)), width)
    assert all(len(x) <= width for x in text.splitlines())
    assert "…" not in text
    assert "\x1b" not in text  # no colours where nobody sees them


def test_a_run_says_where_what_and_how_fast(literal: Any) -> None:
    text = printed(run_table(journal(literal)))
    for what in (
        "NVIDIA H200",
        "plan quick",
        "commit 0123456789ab",
        "key0",
        "attention · forward · causal · bf16",
    ):
        assert what in text
    (line,) = [x for x in text.splitlines() if x.startswith("S1024 ")]
    assert line.split() == ["S1024", "kernelmark", "1.026", "0.5%", "0.9980", "100%", "2.00×", "4.00×"]
    assert "2.00×" in text.splitlines()[-1]  # how ours stands


def test_a_conversion_has_a_column_where_any_row_has_one(literal: Any) -> None:
    without = journal(literal)
    assert "conv" not in printed(run_table(without))
    told = [
        msgspec.structs.replace(
            x,
            measurement=msgspec.structs.replace(
                x.measurement, samples=x.measurement.samples | {"conversion": (0.25,)}
            ),
        )
        if x.implementation == "sdpa_efficient"
        else x
        for x in without.records
    ]
    for width in (80, 200):
        text = printed(run_table(literal.journal(*without.ceilings, *told)), width)
        assert "conv ms" in text
        assert all(len(x) <= width for x in text.splitlines())
        (line,) = [x for x in text.splitlines() if x.startswith("S1024 ")]
        assert line.split()[2:5] == ["1.026", "0.5%", "–"]
        assert text.count(" 0.2500 ") == 2


@pytest.mark.parametrize(("ms", "shown"), [(0.0199, True), (0.02, False)])
def test_a_row_below_20_microseconds_stands_beside_its_time_with_the_launch(
    literal: Any, ms: float, shown: bool
) -> None:
    case = literal.case(operator="rms_norm", name="M64-N1024-bf16-forward", axes={"M": 64, "N": 1024}, bytes=10**5)
    records = [
        literal.record("kernelmark", ms, case=case, beside={"launch": 0.0461}),
        literal.record("torch", 0.031, case=case, beside={"launch": 0.0529}),
    ]
    for width in (80, 200):
        text = printed(run_table(literal.journal(*records, literal.footer())), width)
        assert all(len(x) <= width for x in text.splitlines())
        found = [x for x in ("incl. launch", "0.0461", "0.0529") if x in text]
        assert len(found) == (3 if shown else 0)


def test_failures_are_gathered_below_with_their_reason(literal: Any) -> None:
    text = printed(run_table(journal(literal)))
    assert "unsupported ×2  sdpa_flash in attention: no GQA here" in text


def test_a_lost_replicate_a_throttled_row_and_a_killed_cpu_run_are_told(literal: Any) -> None:
    lines = [
        literal.record("torch", throttled=(0, 1, 2)),
        literal.record("torch", replicate=1, status="crashed", reason="signal 11"),
    ]
    text = printed(run_table(literal.journal(*lines, device="cpu", conditions={"cpu": "Xeon"})))
    for what in ("CPU: Xeon", "! CPU run", "! Incomplete", "torch*", "lost replicates ×1", "signal 11", "–"):
        assert what in text


def test_an_empty_run(literal: Any) -> None:
    assert "Nothing was measured." in printed(run_table(literal.journal()))


def test_markup_in_a_reason_is_text(literal: Any) -> None:
    text = printed(run_table(literal.journal(literal.record(status="error", reason="[red]x[/red] [/]"))))
    assert "[red]x[/red] [/]" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_comparison_shows_change_and_interval(literal: Any, width: int) -> None:
    second = journal(literal, 1.1, run="20261122-000000-bbbb")
    text = printed(comparison_page(compare(journal(literal), second)), width)
    assert all(len(x) <= width for x in text.splitlines())
    assert "+10.0%" in text
    assert "[+9.5, +10.5]" in text
    assert "0.0%" in text
    assert "6 rows compared" in text
    assert "×2  not measured: both runs: unsupported: no GQA here" in text
    assert "regress" not in text


def test_a_comparison_of_no_times_says_better_and_worse(literal: Any) -> None:
    def sized(value: float) -> Any:
        case = literal.case(primary="memory")
        return literal.journal(
            *(literal.record(case=case, replicate=i, beside={"memory": value}) for i in range(3))
        )

    text = printed(comparison_page(compare(sized(1e6), sized(2e6))), 120)
    assert "torch           worse" in text
    assert "slower" not in text


def test_a_comparison_names_the_conditions_that_differ(literal: Any) -> None:
    second = journal(literal, key="key1", conditions={"gpu": "NVIDIA H200", "driver": "590.2"})
    text = printed(comparison_page(compare(journal(literal), second)))
    assert "driver: 580.1 → 590.2" in text
    assert "×6  not comparable: conditions differ: driver" in text
    assert "rows compared" not in text


def test_a_comparison_notes_a_changed_version(literal: Any) -> None:
    first = literal.journal(literal.record(version="1"))
    text = printed(comparison_page(compare(first, literal.journal(literal.record(version="2", cache="cold")))))
    assert "torch*" in text
    assert "* torch: version 1 → 2" in text


def test_importing_tables_does_not_import_rich_matplotlib_or_jinja() -> None:
    code = "import sys, kernelmark.registry.views.tables, kernelmark.registry.views.report; "
    code += "print([x for x in ('rich', 'matplotlib', 'jinja2', 'scipy.stats') if x in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "[]"
