"""One colour and one shape a library, whoever else is in the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import pytest
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.views.canvas import FILLS, MARKERS
from kernelmark.registry.views.looks import (
    COLOURS,
    HEXADECIMAL,
    KIN,
    LIBRARIES,
    RESHAPED,
    SHAPES,
    VARIANTS,
    Series,
    apart,
    look,
    palette,
)
from kernelmark.suite.catalog import Catalog, Implementation

Charted = Mapping[tuple[str, str], Sequence[Implementation]]


def alike(found: Iterable[Series]) -> list[list[str]]:
    """Names of those that one colour, mark and dash have."""
    names: dict[object, list[str]] = {}
    for x in found:
        names.setdefault((x.colour, x.shape, x.fill, x.dash), []).append(x.name)
    return [x for x in names.values() if len(x) > 1]


def test_no_two_known_libraries_look_alike() -> None:
    assert len(set(LIBRARIES.values())) == len(LIBRARIES)
    assert {shape for _, shape in LIBRARIES.values()} <= set(SHAPES) <= set(MARKERS)


def test_no_two_implementations_of_one_chart_look_alike(charted: Charted) -> None:
    """Of all that the catalog has for an operator or workload on a device."""
    looks = {where: [look(x.name, x.provider) for x in found] for where, found in charted.items()}
    assert {where: alike(x) for where, x in looks.items() if alike(x)} == {}
    lines = {where: apart(x).values() for where, x in looks.items()}
    assert {where: alike(x) for where, x in lines.items() if alike(x)} == {}


def test_systems_that_a_plan_names_look_like_nobody_else_in_their_report(literal: Any) -> None:
    ours = ["kernelmark", "kernelmark_compile", *(f"kernelmark_plan{i}" for i in range(12))]
    found = [literal.record(x, provider="kernelmark") for x in ours]
    found += [literal.record(x, provider="torch") for x in ("torch", "a_plan", "torch_graph", "z_plan", "y_plan")]
    looks = palette(rows(literal.journal(*found)))
    assert not alike(looks.values())
    for name in ("kernelmark", "kernelmark_compile", "torch", "torch_graph"):
        assert looks[name] == look(name, name.partition("_")[0])
    assert {x.colour for x in looks.values() if x.ours} == {"--s0"}


def test_tables_of_looks_name_what_is_there() -> None:
    names = {x.name for x in Catalog.default().implementations}
    assert not {*VARIANTS, *KIN, *RESHAPED} - names - {"specialised", "tma", "tiled", "plain"}
    assert {*KIN.values()} <= {*LIBRARIES}
    assert {*RESHAPED.values()} <= {*SHAPES}


def test_lines_of_one_drawing_look_apart_though_one_alone_of_its_colour_is_open() -> None:
    kept = Series("kept", f"--s{COLOURS}", SHAPES[COLOURS - 1], 1)
    others = [Series(f"other{i}", "--s1", "s", i % FILLS) for i in range(20)]
    assert not alike(apart([kept, *others]).values())


def test_a_library_that_gets_a_look_of_its_own_changes_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"library{i}" for i in range(200)]
    before = {x: look(x, x) for x in names}
    taken = before["library7"]
    known = {**LIBRARIES, "library7": (int(taken.colour[-1]), taken.shape)}
    monkeypatch.setattr("kernelmark.registry.views.looks.LIBRARIES", known)
    changed = {x for x in names if look(x, x) != before[x]}
    alike = {x for x, y in before.items() if (y.colour, y.shape) == (taken.colour, taken.shape)}
    assert changed == alike - {"library7"}


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
