"""Devices side by side: the newest run of each, and an empty cell for what was not run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kernelmark.registry.analysis.selection import Selection
from kernelmark.registry.errors import InputError
from kernelmark.registry.views.device_table import by_device, case_table, device_table
from kernelmark.registry.views.hardware_table import hardware_table
from kernelmark.registry.views.table import render


def journal(literal: Any, run: str, gpu: str, cases: dict[str, float], day: int = 1, **more: Any) -> Any:
    lines = []
    for name, ours in cases.items():
        case = literal.case(name=name)
        lines.append(literal.record("kernelmark", ours, provider="kernelmark", case=case))
        lines += [literal.record("torch", 2.0, case=case), literal.record("liger", 1.5, case=case)]
    return literal.journal(
        *lines, run=run, created=f"2026-11-{day:02d}T00:00:00Z", conditions={"gpu": gpu}, **more
    )


def printed(table: Any) -> str:
    return render([table])


def test_the_newest_run_of_each_device_speaks_whatever_the_order(literal: Any) -> None:
    old, new = journal(literal, "a", "H200", {"S1": 4.0}), journal(literal, "b", "H200", {"S1": 1.0}, day=2)
    other = journal(literal, "c", "L4", {"S2": 1.0})
    for given in ([old, new, other], [other, new, old]):
        found = by_device(given)
        assert found.devices == ("H200", "L4")
        cells = {x.case: x.cells for x in found.rows}
        assert (cells["S1"]["H200"].run, cells["S1"]["H200"].value) == ("b", 1.0)
        assert (cells["S1"]["H200"].over_eager, cells["S1"]["H200"].over_best) == (2.0, 1.5)
        assert "L4" not in cells["S1"]


def test_what_was_not_run_says_so(literal: Any) -> None:
    found = by_device(
        [journal(literal, "a", "H200", {"S1": 1.0, "S2": 1.0}), journal(literal, "c", "L4", {"S2": 4.0})]
    )
    rows = found.to_builtins()["rows"]
    assert rows[0]["cells"]["L4"] is None
    assert msgspec.json.encode(found.to_builtins())
    summary = printed(device_table(found))
    assert "2.00× / 1.50×" in summary
    assert "1 of 2 cases" in summary
    text = printed(case_table(found, "rms_norm"))
    assert "not run" in text
    assert "4.000 ms" in text
    assert "0.50× / 0.38×" in text


def test_ours_that_failed_has_its_status_and_a_run_without_ours_no_cell(literal: Any) -> None:
    bad = literal.record("kernelmark", provider="kernelmark", status="out_of_memory", reason="80 GB")
    failed = literal.journal(bad, run="a", conditions={"gpu": "T4"})
    without = literal.journal(literal.record("torch", 1.0), run="b", conditions={"gpu": "A100"})
    found = by_device([failed, without])
    (row,) = found.rows
    assert set(row.cells) == {"T4"}
    assert "out of memory" in printed(case_table(found, "rms_norm"))
    assert "not run" in printed(device_table(found))


def test_another_librarys_rows_alone_are_refused(literal: Any) -> None:
    """A device's column is about ours: a table without rows would look as if nothing had been measured."""
    with pytest.raises(InputError, match="no row of kernelmark is among those asked for"):
        by_device([journal(literal, "a", "H200", {"S1": 1.0})], Selection(implementations=("liger",)))


def test_a_device_without_ours_takes_no_case_from_the_others(literal: Any) -> None:
    """As a run of another tool, which was imported, is."""
    own = [journal(literal, "a", "NVIDIA H200", {"S1": 1.0}), journal(literal, "b", "NVIDIA L4", {"S1": 4.0})]
    without = literal.journal(literal.record("torch", 1.0), run="c", conditions={"gpu": "NVIDIA A100"})
    text = printed(hardware_table(by_device([*own, without])))
    assert "1 cases that all measured devices have" in text
    assert "4.000 ms" in text


def test_hardware_as_rows_over_the_cases_that_all_measured_devices_have(literal: Any) -> None:
    """The second case is the H200's alone: it is in no mean. What nobody measured is `not run` throughout."""
    found = by_device(
        [
            journal(literal, "a", "NVIDIA H200", {"S1": 1.0, "S2": 0.001}),
            journal(literal, "b", "AMD Instinct MI300X", {"S1": 4.0}),
            journal(literal, "c", "Something else", {"S1": 2.0}),
        ]
    )
    text = printed(hardware_table(found))
    assert "geometric means over 1 cases that all measured devices have" in text
    cells = {x.split("  ")[0].strip(): x.split() for x in text.splitlines()}
    assert cells["NVIDIA H200"][2:] == ["2.000", "ms", "1.000", "ms", "2.00×", "1.50×", "1"]
    assert cells["AMD Instinct MI300X"][3:] == ["2.000", "ms", "4.000", "ms", "0.50×", "0.38×", "1"]
    for name in ("NVIDIA T4", "Intel Arc, XPU", "CPU: Apple", "AMD MI250"):
        assert cells[name][-10:] == ["not", "run"] * 5
    order = [x for x in cells if x in ("NVIDIA T4", "NVIDIA H200", "AMD Instinct MI300X", "Something else")]
    assert order == ["NVIDIA T4", "NVIDIA H200", "AMD Instinct MI300X", "Something else"]
    assert "AMD MI300" not in cells


def test_hardware_without_a_common_case_has_no_times(literal: Any) -> None:
    found = by_device([journal(literal, "a", "H200", {"S1": 1.0}), journal(literal, "b", "L4", {"S2": 4.0})])
    text = printed(hardware_table(found))
    assert "each device's own cases" in text
    assert " ms" not in text
    assert "0.50×" in text
