"""What was published of peers, and how a row stands to it."""

from __future__ import annotations

from typing import Any

import pytest
from kernelmark.registry.analysis import published as known
from kernelmark.registry.analysis.published import Figure, parse, repeats, speed

FIGURE = """
[[figure]]
peer = "liger"
operator = "rms_norm"
case = "case"
axes = { B = 2 }
dtype = "bf16"
pass = "forward"
value = 100
unit = "GB/s"
gpu = "H100"
bound = "memory"
source = "https://example.org"
where = "table 1"
date = "2026-01-01"
"""
NONE = """
[[none]]
why = "none was found"
peers = ["xformers"]
"""


def figure(**changes: Any) -> Figure:
    import msgspec

    (found,) = parse(FIGURE + NONE).figures
    return msgspec.structs.replace(found, **changes)


def test_a_figure_has_a_unit_a_gpu_and_a_source() -> None:
    assert parse(FIGURE + NONE).peers == {"liger", "xformers"}
    for wrong, says in (
        (FIGURE.replace("H100", "B200"), "gpu is B200"),
        (FIGURE.replace('unit = "GB/s"', 'unit = "×"'), "exactly where the unit is ×"),
        (FIGURE.replace("value = 100", "value = 0"), "a value above 0"),
        (FIGURE.replace('source = "https://example.org"', ""), "source"),
    ):
        with pytest.raises(ValueError, match=says):
            parse(wrong + NONE)


@pytest.mark.parametrize(
    ("changes", "measured", "gpu", "says"),
    [
        ({}, 100.0, "NVIDIA H100 80GB HBM3", 1.0),
        ({}, 480 / 3.35, "NVIDIA H200", 1.0),  # the same share of a larger bandwidth
        ({"unit": "ms"}, 100 / 4.8 * 3.35, "NVIDIA H200", 1.0),
        ({"unit": "ms"}, 200.0, "NVIDIA H100 80GB HBM3", 0.5),
        ({"unit": "TFLOP/s", "bound": "compute"}, 90.0, "NVIDIA H200", 0.9),
        ({"unit": "×", "over": "torch"}, 150.0, "NVIDIA H200", 1.5),
        ({}, 100.0, "NVIDIA H100 PCIe", None),
        ({}, None, "NVIDIA H200", None),
    ],
)
def test_kinds_of_gpu_that_multiply_alike_are_compared(
    changes: dict[str, Any], measured: float | None, gpu: str, says: float | None
) -> None:
    found = speed(figure(**changes), measured, gpu)
    assert found == (says if says is None else pytest.approx(says))


def test_the_newest_row_with_a_time_repeats_a_figure(literal: Any) -> None:
    case = literal.case(operator="rms_norm", name="case", bytes=10**9, flops=10**12)
    h200 = {"conditions": {"gpu": "NVIDIA H200"}}
    old = literal.journal(
        literal.record("liger", 2.0, case=case), literal.record("torch", 3.0, case=case), run="old", **h200
    )
    later = {"run": "new", "created": "2027-01-01T00:00:00Z", **h200}
    new = literal.journal(literal.record("liger", case=case, status="error", reason="broken"), **later)
    units = {"GB/s": 500.0, "TFLOP/s": 500.0, "ms": 2.0, "×": 1.5}
    asked = [figure(unit=x, over="torch" if x == "×" else "") for x in units]
    assert [x.measured for x in repeats([old, new], asked)] == list(units.values())
    assert {x.run for x in repeats([old, new], asked)} == {"old"}
    (broken,) = repeats([new], [figure()])
    assert broken.row is not None
    assert (broken.row.status, broken.measured, broken.agrees) == ("error", None, None)
    other = literal.journal(
        literal.record("liger", 4.0, case=case), **later | {"conditions": {"gpu": "NVIDIA L4"}}
    )
    assert [x.run for x in repeats([old, other], [figure()])] == ["old"]
    assert [x.speed for x in repeats([other], [figure()])] == [None]
    (absent,) = repeats([old], [figure(case="other")])
    assert absent.row is None


def test_the_table_that_comes_with_the_program_is_sourced() -> None:
    table = known.published()
    assert all(x.source.startswith("https://") and x.where for x in table.figures)
    named = [x for y in table.none for x in y.peers]
    assert len(named) == len(set(named))
    assert not {x.peer for x in table.figures} & set(named)
