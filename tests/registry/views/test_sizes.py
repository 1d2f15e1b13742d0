"""Which cases lie on a line over a size."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from kernelmark.registry.analysis.ceilings import Ceilings
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.store.metric import Metric
from kernelmark.registry.views.grouping import cases
from kernelmark.registry.views.lines import over_sizes, roofline
from kernelmark.registry.views.looks import palette
from kernelmark.registry.views.report import render
from kernelmark.registry.views.sizes import ARRAY, BYTES, PARAMETERS, Sweep, array_bytes, sweeps


def swept(literal: Any, *axes: dict[str, int], **more: Any) -> tuple[Sweep, ...]:
    made = [literal.case(name=str(x), axes=x, **more) for x in axes]
    return sweeps(cases(rows(literal.journal(*(literal.record(case=x) for x in made)))))


def test_nothing_but_one_size_differs(literal: Any) -> None:
    found = swept(literal, *({"B": b, "S": s} for b in (1, 2) for s in (4, 1, 2)))
    assert [(x.axis, x.common, x.sizes) for x in found] == [
        ("S", "bf16 · B1", (1, 2, 4)),
        ("S", "bf16 · B2", (1, 2, 4)),
    ]


def test_the_batch_may_shrink_as_the_sequence_grows(literal: Any) -> None:
    (found,) = swept(literal, *({"B": 16 // s, "S": s, "D": 64} for s in (1, 2, 4)))
    assert (found.axis, found.common) == ("S", "bf16 · D64 · B × S = 16")


def test_shapes_that_differ_in_several_sizes_lie_over_their_bytes_if_they_only_move_them(literal: Any) -> None:
    made = [
        literal.case(name=f"{i}", axes={"M": m, "D": d}, bytes=m * d)
        for i, (m, d) in enumerate(((1, 8), (8, 2), (4, 8)))
    ]
    (found,) = sweeps(cases(rows(literal.journal(*(literal.record(case=x) for x in made)))))
    assert (found.axis, found.sizes) == (BYTES, (8, 16, 32))
    busy = [literal.case(name=f"{x.name}f", axes=x.axes, bytes=x.bytes, flops=9) for x in made]
    assert sweeps(cases(rows(literal.journal(*(literal.record(case=x) for x in busy))))) == ()


def test_a_collective_lies_over_the_bytes_of_its_array(literal: Any) -> None:
    sizes = (2**9, 2**15, 2**27)
    made = [
        literal.case(name=f"N{n}-gpus{p}-{x}", axes={"N": n, "gpus": p}, dtype=x)
        for p, x in ((2, "bf16"), (4, "bf16"), (2, "fp32"))
        for n in (*sizes, 0)
    ]
    found = rows(literal.journal(*(literal.record(case=x) for x in made)))
    lines = sweeps(cases(found))
    assert [(x.axis, x.common, x.sizes) for x in lines] == [
        (ARRAY, "bf16 · gpus2", (2**10, 2**16, 2**28)),
        (ARRAY, "bf16 · gpus4", (2**10, 2**16, 2**28)),
        (ARRAY, "fp32 · gpus2", (2**11, 2**17, 2**29)),
    ]
    drawn = over_sizes(lines[0], palette(found)) or ""
    assert re.findall(r">(\d+ [KM]iB)<", drawn) == ["1 KiB", "64 KiB", "256 MiB"]
    assert "<title>64 KiB: " in drawn
    # On one GPU nothing is sent: N is a size as any other.
    (alone,) = swept(literal, *({"N": n} for n in sizes))
    assert (alone.axis, alone.sizes) == ("N", sizes)


@pytest.mark.parametrize(
    ("dtype", "size"), [("bf16", 2), ("fp32", 4), ("int8", 1), ("e4m3", 1), ("e5m2", 1), ("odd", None)]
)
def test_bytes_of_an_array_follow_from_its_type_s_name(dtype: str, size: int | None) -> None:
    assert array_bytes({"N": 1}, dtype) == size


def test_two_cases_are_no_line(literal: Any) -> None:
    assert swept(literal, {"S": 1}, {"S": 2}) == ()


def test_a_line_an_implementation_and_the_limit(literal: Any) -> None:
    from kernelmark.registry.store.record import Ceiling

    made = [literal.case(name=f"S{s}", axes={"S": s}, bytes=10**6 * s) for s in (1, 2, 4)]
    records = [literal.record(name, x.axes["S"], case=x) for x in made for name in ("kernelmark", "torch")]
    journal = literal.journal(Ceiling("copy", 10**6, 0.5, 0), *records)
    found = rows(journal)
    (sweep,) = sweeps(cases(found))
    drawn = over_sizes(sweep, palette(found))
    assert drawn is not None
    assert drawn.count("stroke-dasharray") == 1  # the limit's
    assert "S = 4: torch 4.000 ms" in drawn
    share = over_sizes(sweep, palette(found), limits=True)
    assert share is not None
    assert "50 % of the limit" in share


def test_a_program_s_tokens_and_memory_lie_over_its_sizes_beside_its_time(literal: Any) -> None:
    """Until memory ends, which is marked in each drawing. A kernel's page has neither."""
    metrics = [
        Metric("tokens_per_s", "tokens/s", "higher", label="tokens/s", shown="table"),
        Metric("peak_allocated", "B", shown="table"),
        Metric("prompt_tokens", "tokens/s", "higher"),
    ]
    made = [literal.case(name=f"B{b}", axes={"B": b}, pass_="program") for b in (1, 2, 4)]
    records = [
        literal.record(
            "torch",
            case=x,
            beside={"tokens_per_s": 3e4 * x.axes["B"], "peak_allocated": 2e9 * x.axes["B"], "prompt_tokens": 1.0},
        )
        for x in made[:2]
    ]
    records.append(literal.record("torch", case=made[2], status="out_of_memory", reason="no room"))
    metrics = [*literal.header().metrics, *metrics]
    page = render([literal.journal(*records, metrics=metrics)])
    captions = re.findall(r"<figure><figcaption>([^<]*) is better</figcaption>", page)
    assert [x for x in captions if "okens" in x or "memory" in x or "Peak" in x] == [
        "Tokens/s: higher",
        "Peak allocated: lower",
    ]
    assert "<title>B = 2: torch 60,000 tokens/s</title>" in page
    assert "<title>B = 2: torch 4 GB</title>" in page
    assert len(re.findall(r">\d+k<", page)) > 1
    assert page.count("<title>B = 4: torch out of memory</title>") == 3
    kernels = [msgspec.structs.replace(x, case=msgspec.structs.replace(x.case, pass_="forward")) for x in records]
    assert "Tokens/s: higher" not in render([literal.journal(*kernels, metrics=metrics)])


def test_a_roofline_has_a_dot_for_ours_and_one_for_the_fastest_baseline(literal: Any) -> None:
    case = literal.case(bytes=10**6, flops=10**9)
    times = {"kernelmark": 1.0, "torch": 2.0, "liger": 3.0}
    found = rows(literal.journal(*(literal.record(x, ms, case=case) for x, ms in times.items())))
    ceilings = Ceilings({10**6: 0.001}, {"bf16": 10**11})
    drawn = roofline("bf16", cases(found), ceilings, palette(found))
    assert drawn is not None
    assert drawn.count("<title>") == 2
    assert "1.000 TFLOP/s at 1,000 FLOP/B" in drawn
    assert "liger" not in drawn
    assert roofline("fp32", cases(found), ceilings, palette(found)) is None


def test_where_memory_ends_is_marked(literal: Any) -> None:
    """By one implementation at a size, by all at the next: neither is a gap without a word."""
    made = [literal.case(name=f"S{s}", axes={"S": s}) for s in (1, 2, 4, 8)]
    no_room = {"status": "out_of_memory", "reason": "no room"}
    records = [literal.record(name, 1.0, case=x) for x in made[:2] for name in ("kernelmark", "torch")]
    records += [literal.record("kernelmark", 1.0, case=made[2])]
    records += [literal.record("torch", case=made[2], **no_room)]
    records += [literal.record(name, case=made[3], **no_room) for name in ("kernelmark", "torch")]
    found = rows(literal.journal(*records))
    (sweep,) = sweeps(cases(found))
    assert sweep.sizes == (1, 2, 4, 8)
    drawn = over_sizes(sweep, palette(found))
    assert drawn is not None
    assert re.findall(r"<title>(S = \d: \w+ out of memory)</title>", drawn) == [
        "S = 4: torch out of memory",
        "S = 8: kernelmark out of memory",
        "S = 8: torch out of memory",
    ]
    short = [x for x in records if x.case.axes["S"] != 2 and x.status != "ok"]
    assert sweeps(cases(rows(literal.journal(*records[:2], *short)))) == ()  # one point is no line


def test_models_lie_over_their_parameters(literal: Any) -> None:
    sizes = {"small": (16, 512), "middle": (16, 512), "large": (4, 2048)}
    made = [
        literal.case(name=name, axes={"B": b, "S": s}, options={"model": name}) for name, (b, s) in sizes.items()
    ]
    made.append(literal.case(name="other", axes={"B": 1, "S": 64}, options={"model": "other"}))
    counts = dict(zip(sizes, (124 * 10**6, 355 * 10**6, 6_738_415_616), strict=True)) | {"other": 10**9}
    parameters = {f"{x.operator}/{x.name}": counts[x.name] for x in made}
    records = [literal.record(case=x) for x in made]
    records[2] = literal.record(case=made[2], status="out_of_memory", reason="no room")
    found = rows(literal.journal(*records))
    assert sweeps(cases(found)) == ()
    (sweep,) = sweeps(cases(found), parameters)
    assert (sweep.axis, sweep.sizes) == (PARAMETERS, tuple(counts[x] for x in sizes))
    assert "B × S = 8,192" in sweep.common
    drawn = over_sizes(sweep, palette(found))
    assert drawn is not None
    assert "small, 124M parameters: " in drawn
    assert "large, 6.74B parameters: " in drawn
    assert "out of memory" in drawn
