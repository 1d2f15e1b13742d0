"""Techniques of training beside what was asked for, from literal journals; quality by configuration."""

from __future__ import annotations

from typing import Any

import pytest
from kernelmark.registry.detection.techniques import Setting, bought, configuration, qualities, setting, settings
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.record import Case, Header, Measurement, Record, Request
from kernelmark.registry.views.technique_tables import tables, technique
from kernelmark.suite.workloads import converge, memory_pool, train

SYSTEMS: tuple[dict[str, Any], ...] = (
    {"name": "fp16_scaled", "execution": "compile", "changes": {"dtype": "fp16"}},
    {"name": "fp32", "execution": "compile", "changes": {"dtype": "fp32"}},
    {"name": "float8_rowwise", "execution": "compile", "precision": "float8_rowwise"},
    {"name": "by_part", "recompute": "by_part"},
    {"name": "streamed", "states": "host_streamed"},
    {"name": "topk", "changes": {"gradients": "topk"}},
)
PRECISION = {"model": "gpt2-350m", "state": "master32", "products": "e4m3", "clip": 1.0}
STEPS = (0.0, 500.0, 1000.0)


def header(run: str, metrics: Any) -> Header:
    request = Request(systems=SYSTEMS)
    return Header(
        2, run, "2026-11-22", "0", None, False, "p", 0, 2, "cuda", "k", {}, {}, request=request, metrics=metrics
    )


def records(
    case: Case, name: str, values: dict[str, float] | None, status: Any = "ok", provider: str = "torch"
) -> list[Record]:
    seen = None if values is None else Measurement({x: (y,) for x, y in values.items()}, "events")
    reason = None if seen else "no room. GPU 0 has 139.80 GiB, of which 1 is free"
    return [Record(case, name, provider, "1", x, 0, "cold", status, reason, seen) for x in range(2)]


def step(ms: float, peak: float, activations: float = 4e9, **more: float) -> dict[str, float]:
    return {"step": ms, "peak_allocated": peak, "activations": activations, **more}


def speed() -> Journal:
    case = Case("train", "B16-S1024-x", {"B": 16}, PRECISION, "bf16", "program", "f0", 0, 0, None, "step")
    found = [
        *records(case, "torch", step(200.0, 20e9)),
        *records(case, "torch_compile", step(160.0, 18e9)),
        *records(case, "fp32", step(640.0, 30e9)),
        *records(case, "fp16_scaled", step(170.0, 20e9)),
        *records(case, "float8_rowwise", step(125.0, 15e9)),
        *records(case, "by_part", step(210.0, 15e9, 1e9)),
        *records(case, "streamed", None, "out_of_memory"),
        *records(case, "torch_graph", step(100.0, 22e9)),
    ]
    return Journal(header("speed", train.METRICS), tuple(found))


def learned(loss: float = 1.0, model: str = "gpt2-86m-bytes") -> Journal:
    """Five seeds of float8_rowwise and topk beside PyTorch's own, after 1,000 steps."""
    options = {"model": model, "lr": 1e-3}
    case = Case("converge", "N1000", {"N": 1000}, options, "bf16", "program", "c0", 0, 0, None, "bits_per_byte")
    found = []
    for seed in range(5):
        for name, times in (("torch", 1.0), ("float8_rowwise", loss), ("topk", 1.1)):
            curve = tuple(x * times * (1 + 1e-4 * ((seed * 7 + len(name)) % 5)) for x in (8.0, 2.0, 1.2))
            samples = {"bits_per_byte": (curve[-1],), "bits_by_step": curve, "validated_step": STEPS}
            samples |= {"fp8_share": (0.945,)} if name == "float8_rowwise" else {}
            samples |= {"compression_ratio": (96.0,), "compression_accuracy": (0.62,)} if name == "topk" else {}
            seen = Measurement(samples, "own clock")
            found.append(Record(case, name, "torch", "1", seed, 0, "cold", "ok", None, seen))
    return Journal(header("learned", converge.METRICS), tuple(found))


def pool() -> Journal:
    case = Case("memory_pool", "varying-x", {"S": 1}, {}, "bf16", "program", "p0", 0, 0, None, "reserved_ratio")
    one = {"reserved_ratio": 1.4, "retries": 2, "replay": 3.0, "pool_reserved": 14e9}
    other = {"reserved_ratio": 1.01, "retries": 0, "replay": 4.0, "pool_reserved": 1e10}
    found = [
        *records(case, "torch", one),
        *records(case, "torch_expandable", other),
        *records(case, "torch_rounded", None, "unsupported"),
    ]
    return Journal(header("pool", memory_pool.METRICS), tuple(found))


def line(text: str, begins: str) -> list[str]:
    bare = text.replace("\\", "")  # names are escaped
    (found,) = [x for x in bare.splitlines() if x.startswith(f"| {begins} |")]
    return [x.strip() for x in found.strip("|").split("|")]


def test_a_row_stands_beside_itself_without_the_technique() -> None:
    found = {x.row.implementation: x for x in bought(speed(), {})}
    eight = found["float8_rowwise"]
    assert eight.alike is not None
    assert (eight.alike.implementation, eight.ratio.value) == ("torch_compile", pytest.approx(160 / 125))
    assert {x: round(y.value, 2) for x, y in eight.over.items()} == {"fp32": 5.12, "fp16": 1.36}
    assert eight.native.value == pytest.approx(1.6)
    assert found["by_part"].activations == 0.25
    assert found["by_part"].memory == 0.75
    assert found["torch_graph"].alike.implementation == "torch"
    assert found["torch"].alike is None
    assert found["streamed"].ratio is None


def test_the_tables_as_they_are_printed() -> None:
    text = tables([speed(), learned(), pool()])
    assert line(text, "350M") == [
        "350M", "123.1", "63.4", "1.94×", "52 %", "170.0", "125.0", "1.36× [1.36, 1.36]", "25 %", "float8_rowwise",
        "B16-S1024-x", "equivalent: 1,000 steps equivalent, 105 % rule within (gpt2-86m-bytes, run learned)",
    ]  # fmt: skip
    assert line(text, "by_part") == [
        "by_part", "norms and gates again", "210.0", "0.95× [0.95, 0.95]", "0.95× [0.95, 0.95]",
        "3.05× [3.05, 3.05]", "0.81× [0.81, 0.81]", "15 GB", "−25.0 %", "1 GB", "−75.0 %", "–",
        "−60 % peak, +20 % time", "the same numbers",
    ]  # fmt: skip
    assert line(text, "streamed")[2] == "out of memory: no room"
    assert line(text, "fp16_scaled")[-1] == "quality not shown"
    assert line(text, "torch_graph")[-2:] == ["2.8×, −35 % memory", "quality not shown"]
    assert [line(text, f"varying-x | {x}")[-1] for x in ("torch", "torch_expandable")] == ["", "take this"]
    assert line(text, "1,000") == [
        "1,000", "2.347", "2.351", "+0.17 %", "float8_rowwise", "torch", "N1000", "1.2002", "1.2002", "+0.00%",
        "-0.03% to +0.03%", "equivalent", "equivalent",
    ]  # fmt: skip
    assert line(text, "N1000 | topk") == [
        "N1000", "topk", "96.00×", "62.0 %", "1.0×, 94 %", "+10.00% after 1,000 steps",
        "worse: 1,000 steps worse, 105 % rule exceeded",
    ]  # fmt: skip
    assert "memory that falls by 35 % is not to be had" in text


def test_the_same_numbers_are_those_of_the_same_calls() -> None:
    assert Setting("torch", recompute="by_part").same_numbers
    assert Setting("kernelmark", recompute="every_layer").same_numbers
    # The norm of a fused addition is made again by another kernel.
    assert not Setting("kernelmark", recompute="by_part_wide").same_numbers
    assert not Setting("torch", parts=(("norm", "x"),), recompute="by_part").same_numbers


def test_nothing_to_show() -> None:
    with pytest.raises(
        InputError, match="no row of these runs is of a technique: kernelmark run --plan precision"
    ):
        tables([])


def test_a_verdict_is_of_the_same_configuration_alone() -> None:
    known = qualities([learned()])
    row = next(x.row for x in bought(speed(), known) if x.row.implementation == "float8_rowwise")
    own = settings(speed().header)["float8_rowwise"]
    assert known[configuration(own, row)].verdict == "equivalent"
    assert qualities([learned(1.05)])[configuration(own, row)].verdict == "worse"
    eager = Setting("torch", precision="float8_rowwise")
    assert configuration(eager, row) not in known
    # What changes no number is no other configuration.
    lossless = {"states": "host_streamed", "recompute": "every_layer"}
    moved = Setting("torch", "compile", precision="float8_rowwise", **lossless)
    assert configuration(moved, row) == configuration(own, row)
    updated = Setting("torch", "compile", precision="float8_rowwise", states="host_updated")
    assert configuration(updated, row) != configuration(own, row)


def test_systems_without_a_plan_are_known_by_their_names() -> None:
    assert setting("torch_compile_blocks", "torch", {}) == Setting("torch", "blocks")
    assert setting("kernelmark", "kernelmark", {}) == Setting("kernelmark")
    assert technique(setting("torch_graph", "torch", {})) == "CUDA graph by hand"
    assert not technique(setting("torch", "torch", {}))


def test_an_engines_offloading_stands_beside_the_engine() -> None:
    case = Case("train", "B4-S8192-x", {"B": 4}, PRECISION, "bf16", "program", "f0", 0, 0, None, "step")
    found = [
        *records(case, "torch", step(200.0, 20e9)),
        *records(case, "deepspeed_engine", step(250.0, 20e9), provider="deepspeed"),
        *records(case, "deepspeed_offload", step(1000.0, 8e9), provider="deepspeed"),
    ]
    journal = Journal(header("speed", train.METRICS), tuple(found))
    (offload,) = [x for x in bought(journal, {}) if x.row.implementation == "deepspeed_offload"]
    assert offload.alike is not None
    assert offload.alike.implementation == "deepspeed_engine"
    assert (offload.ratio and offload.ratio.value, offload.memory) == (0.25, 0.4)
    assert technique(offload.setting) == "states and update on the host"
    assert not offload.setting.same_numbers
