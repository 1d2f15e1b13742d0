"""Tables that people know from elsewhere, and the scoreboard of goals."""

from __future__ import annotations

from typing import Any

import pytest
from kernelmark.registry.analysis.selection import Selection
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.metric import Equivalence, Metric
from kernelmark.registry.store.record import Measurement, Record, Request
from kernelmark.registry.views import goals, named_tables


def run(literal: Any, ms: float = 2.0, operator: str = "rms_norm", **header: Any) -> Journal:
    """Ours 1 ms, `torch` as given, `liger` 3 ms; and a case that `torch` does not have."""
    both = literal.case(operator=operator, tokens=8)
    other = literal.case(operator=operator, name="other", axes={"B": 1}, options={"mask": "a|b", "hot": True})
    out = []
    for r in range(2):
        for case in (both, other):
            out.append(literal.record("kernelmark", 1.0 + r / 100, case=case, replicate=r))
            out.append(literal.record("liger", 3.0, case=case, replicate=r))
        out.append(literal.record("torch", ms * (1 + r / 100), case=both, replicate=r))
    return literal.journal(*out, replicates=2, **header)


def test_a_line_a_kernel(literal: Any) -> None:
    found = named_tables.kernels(run(literal)).splitlines()
    assert [x.strip("| ").split(" | ") for x in found[:4]] == [
        list(named_tables.HEADINGS),
        ["---|---:|---:|---:|---|---:|---:"],
        [
            "rms\\_norm forward (B=2, S=4, D=8, bf16)",
            "1.005",
            "2.010",
            "2.00x [2.00, 2.00]",
            "GB/s",
            "1.990",
            "0.9950",
        ],
        [
            "rms\\_norm forward (B=1, a\\|b, hot, bf16)",
            "1.005",
            "3.000 (liger)",
            "2.99x [2.80, 3.18]",
            "GB/s",
            "1.990",
            "0.6667",
        ],
    ]


def test_a_block_a_configuration(literal: Any) -> None:
    assert named_tables.configurations(run(literal), "liger").splitlines() == [
        "rms_norm forward (B=2, S=4, D=8, bf16)",
        "  liger: 3.000 ± 0 ms",
        "  Ours: 1.005 ± 0.064 ms",
        "  Speedup: 2.99x [2.80, 3.18]",
        "  Throughput: liger: 2,667 tokens/s, Ours: 7,960 tokens/s",
        "",
        "rms_norm forward (B=1, a|b, hot, bf16)",
        "  liger: 3.000 ± 0 ms",
        "  Ours: 1.005 ± 0.064 ms",
        "  Speedup: 2.99x [2.80, 3.18]",
        "",
        "Average Speedup: 2.99x, Median Speedup: 2.99x, Min: 2.99x, Max: 2.99x over 2 configurations.",
        "Run 20261121-000000-aaaa, not yet repeated. Base: liger. In brackets and after ±: 95 % intervals. "
        "Bytes and operations are the least that a case needs.",
    ]


def test_an_unknown_baseline_is_refused_with_what_there_is(literal: Any) -> None:
    with pytest.raises(InputError, match="'fla'; baselines with times: liger, torch"):
        named_tables.kernels(run(literal), "fla")


def test_a_run_with_nothing_to_set_side_by_side_is_refused_with_what_is_missing(literal: Any) -> None:
    bare = literal.journal(literal.record("kernelmark"))
    told = (
        r"run \S+ has no case with a latency of ours and one of a baseline: 1 case with one of ours, 0 with one of"
    )
    for made in (named_tables.kernels, named_tables.configurations):
        with pytest.raises(InputError, match=told) as refused:
            made(bare)
        assert refused.value.exit_code == 2
    with pytest.raises(InputError, match=r"a baseline that the filters leave: 0 cases with .*, 1 with"):
        named_tables.kernels(run(literal), selection=Selection(providers=("torch",)))


# --- goals ----------------------------------------------------------------------------------------------


def standing(name: str, *journals: Journal) -> goals.Standing:
    (found,) = (x for x in goals.scoreboard(journals) if x.goal.name == name)
    return found


def test_a_tick_is_earned_by_the_whole_interval(literal: Any) -> None:
    assert standing("RMSNorm", run(literal, 4.0)).verdict == "earned"
    assert standing("RMSNorm", run(literal, 2.0)).verdict == "missed"
    assert standing("RMSNorm", literal.journal(literal.record("kernelmark"))).verdict == "not measured"


def test_one_process_decides_nothing(literal: Any) -> None:
    once = literal.journal(literal.record("kernelmark", 1.0), literal.record("torch", 9.0))
    found = standing("RMSNorm", once)
    assert (found.verdict, found.found is not None) == ("undecided", True)


def test_the_newest_run_that_has_it_counts(literal: Any) -> None:
    old = run(literal, 9.0, run="20261120-000000-aaaa", created="2026-11-20T00:00:00Z")
    new = run(literal, 2.0)
    other = run(literal, 2.0, "gelu", run="20261122-000000-aaaa", created="2026-11-22T00:00:00Z")
    assert standing("RMSNorm", new, other, old).run == new.header.run


SPARSE = (
    {"name": "flex", "changes": {"attention": "static-90"}},
    {"name": "ours", "base": "kernelmark", "changes": {"attention": "dynamic-90"}},
    {"name": "half", "base": "kernelmark", "changes": {"attention": "static-50"}},
)


def trained(literal: Any, seeds: int = 5, left_out: float = 0.893, **losses: float) -> Journal:
    """Arms that end at so many times the bits of dense attention's, a few hundredths of a per cent by seed."""
    judged = Metric("bits_per_byte", "bit", summary="last", judged=Equivalence(0.0025))
    metrics = (judged, Metric("left_out", "1", better="neither"))
    case = literal.case(
        operator="converge", name="N300", axes={"N": 300}, options={"lr": 1e-3}, primary="bits_per_byte"
    )
    out = []
    for seed in range(seeds):
        for name, times in {"torch": 1.0, **losses}.items():
            bits = 1.2 * times * (1 + 1e-4 * ((seed * 7 + len(name)) % 5))
            seen = Measurement({"bits_per_byte": (bits,), "left_out": (left_out,)}, "own clock")
            out.append(Record(case, name, "torch", "1", seed, 0, "cold", "ok", None, seen))
    return literal.journal(*out, replicates=seeds, metrics=metrics, request=Request(systems=SPARSE))


def test_sparse_attention_is_asked_of_arms_that_leave_out_as_much(literal: Any) -> None:
    def found(**given: Any) -> goals.Standing:
        return standing("Sparse attention", trained(literal, **given))

    earned = found(flex=1.002, ours=1.006, half=1.0)
    assert earned.verdict == "earned"
    assert earned.found is not None
    assert earned.found.value == pytest.approx(0.994, abs=1e-4), "ours, though another's is better"
    assert earned.found.of == "ours, 89 % left out, bits a byte beside torch's after 300 steps, N300"
    assert found(flex=1.002, ours=1.03).verdict == "missed"
    assert found(flex=1.002).verdict == "earned", "another's, where ours was not trained"
    assert found(ours=1.01).verdict == "undecided", "the bound is within the interval"
    assert found(ours=1.006, seeds=4).verdict == "undecided"
    assert found(half=1.0).verdict == "not measured"
    assert found(ours=1.0, left_out=0.8).verdict == "not measured"
    told = goals.table([trained(literal, ours=1.006)])
    assert "| ✓ earned | Sparse attention | 90 % sparse at less than 1 % loss of accuracy | 99.40 % [99.3" in told


def at(literal: Any, operator: str, gpus: int, ms: float, name: str = "kernelmark", **fields: Any) -> list[Any]:
    """Two processes' records of a million tokens on so many GPUs."""
    axes = {"B": 1, "S": 2**20} | ({"gpus": gpus} if gpus > 1 else {})
    case = literal.case(operator=operator, name=f"{gpus}", axes=axes, **fields)
    return [literal.record(name, ms, case=case, replicate=r) for r in range(2)]


def test_scaling_over_gpus_is_against_the_best_of_one(literal: Any) -> None:
    several = "attention_context_parallel"
    journal = literal.journal(
        *at(literal, "attention", 1, 10.0),
        *at(literal, "attention", 1, 8.0, "flash_attn_4"),
        *at(literal, several, 4, 2.1),
        *at(literal, several, 8, 1.05),
        replicates=2,
    )
    found = standing("Context parallel attention", journal)
    assert found.found is not None
    assert (found.verdict, round(found.found.value, 3)) == ("earned", 0.952)
    of = "attention_context_parallel 8 on 8 GPUs (strong, 8.000 ms by flash_attn_4 on one)"
    assert found.found.of == of
    assert standing("Ring attention", journal).verdict == "earned"
    assert standing("Training on several GPUs", journal).verdict == "not measured"


def test_training_scales_weakly_whatever_its_way(literal: Any) -> None:
    journal = literal.journal(
        *at(literal, "train", 1, 100.0, pass_="program", options={"model": "m", "parallel": "single"}),
        *at(literal, "train", 4, 105.0, pass_="program", options={"model": "m", "parallel": "ddp"}),
        replicates=2,
    )
    found = standing("Training on several GPUs", journal)
    assert found.found is not None
    assert (found.verdict, round(found.found.value, 3)) == ("earned", 0.952)
    assert standing("Context parallel attention", journal).verdict == "not measured"


@pytest.mark.parametrize("precision", ["parts_rowwise", "parts_1x128_fused", "float8_tensorwise", "te_1x128"])
def test_fp8_training_against_the_best_in_more_bits(literal: Any, precision: str) -> None:
    case = literal.case(operator="train")
    records = [
        literal.record(name, ms, case=case, replicate=r)
        for r in range(2)
        for name, ms in (("torch", 4.0), ("kernelmark", 3.0), ("ours_fp8", 1.4))
    ]
    request = {"systems": [{"name": "ours_fp8", "precision": precision}]}
    journal = literal.journal(*records, replicates=2, request=request)
    found = standing("FP8 training", journal)
    assert found.found is not None
    assert (found.verdict, round(found.found.value, 2)) == ("earned", 2.14)
    assert standing("FP8 training", literal.journal(*records)).verdict == "not measured"


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "1x128"])
def test_transformer_engines_layers_in_8_bits_are_not_the_best_in_more(literal: Any, name: str) -> None:
    """They are systems of their own, which no request describes."""
    case = literal.case(operator="train")
    times = {"transformer_engine_layers": 3.0, f"transformer_engine_layers_{name}": 2.0, "ours_fp8": 1.5}
    records = [literal.record(x, ms, case=case, replicate=r) for r in range(2) for x, ms in times.items()]
    request = {"systems": [{"name": "ours_fp8", "precision": "parts_rowwise"}]}
    found = standing("FP8 training", literal.journal(*records, replicates=2, request=request)).found
    assert found is not None
    assert round(found.value, 2) == 2.0


def test_the_scoreboard_says_what_is_missing(literal: Any) -> None:
    told = goals.table([run(literal)])
    assert told.endswith("\nRun 20261121-000000-aaaa: not yet repeated.\n")
    assert "| ✗ missed | RMSNorm | 3.6× PyTorch | 2.00× |" in told
    assert "| – not measured | Ring attention | 1,000,000 tokens | – | no run here has rows of it |" in told
