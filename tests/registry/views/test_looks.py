"""One colour and one shape a library, whoever else is in the report."""

from __future__ import annotations

from importlib import resources
from typing import Any

from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.views.canvas import FILLS, MARKERS
from kernelmark.registry.views.looks import HEXADECIMAL, LIBRARIES, SHAPES, VARIANTS, look, palette


def test_no_two_known_libraries_look_alike() -> None:
    assert len(set(LIBRARIES.values())) == len(LIBRARIES)
    assert {shape for _, shape in LIBRARIES.values()} <= set(SHAPES) <= set(MARKERS)


def test_a_library_looks_the_same_in_every_report(literal: Any) -> None:
    names = ["kernelmark", "torch", *(f"library{i}" for i in range(9))]
    found = [literal.record(x) for x in names] + [literal.record("clone", provider="yardstick")]
    many = palette(rows(literal.journal(*found)))
    for name in ("torch", "library4"):
        few = palette(rows(literal.journal(literal.record(name))))
        assert few[name] == many[name]
    assert list(many)[:2] == ["kernelmark", "torch"]
    assert list(many)[-1] == "clone"


def test_ours_is_a_circle_in_our_colour_and_nobody_elses() -> None:
    assert (look("kernelmark", "kernelmark").colour, look("kernelmark", "kernelmark").shape) == ("--s0", "o")
    others = [look(f"library{i}", f"library{i}") for i in range(200)]
    assert not any(x.ours or x.colour == "--s0" or x.shape == "o" for x in others)
    assert not {(int(x.colour[-1]), x.shape) for x in others} & set(LIBRARIES.values())


def test_implementations_of_a_library_share_its_colour_and_shape_and_differ_in_filling() -> None:
    names = ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "sdpa_math")
    found = [look(x, "sdpa") for x in names]
    assert len({(x.colour, x.shape) for x in found}) == 1
    assert len({x.fill for x in found}) == len({x.dash for x in found}) == 4
    assert all(fill < FILLS for fill in VARIANTS.values())


def test_colours_are_those_of_the_style_sheet() -> None:
    style = resources.files("kernelmark.registry.views").joinpath("report.css").read_text(encoding="utf-8")
    light = style[: style.index("@media")]
    assert {x: f"{x}: {y};" in light for x, y in HEXADECIMAL.items()} == dict.fromkeys(HEXADECIMAL, True)
    assert look("kernelmark", "kernelmark").hexadecimal == "#d55e00"
    assert look("sdpa_flash", "sdpa").hexadecimal != look("sdpa_cudnn", "sdpa").hexadecimal
