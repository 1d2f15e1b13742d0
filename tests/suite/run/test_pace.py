"""When a run will be over, on a clock of the test's own."""

from __future__ import annotations

import pytest
from kernelmark.registry.store.record import Case, Key, Measurement, Record
from kernelmark.suite.run.pace import Pace

SEEN = Measurement({"latency": (1.0,)}, "monotonic")
START_S = {0: 6.0, 1: 6.0, 2: 6.0}
COSTS = {"torch": 1.0, "torch_compile": 9.0}


def record(case: str, implementation: str, replicate: int, status: str = "ok") -> Record:
    made = Case("gelu", case, {}, {}, "bf16", "forward", "5bec", 1, 0)
    return Record(
        made, implementation, "torch", None, replicate, 0, "cold", status,
        None if status == "ok" else "why", SEEN if status == "ok" else None,
    )  # fmt: skip


def test_every_promise_is_right_within_a_factor_of_two() -> None:
    """Three replicates of ten cases; one implementation compiles, one case of it fails and is not tried again."""
    places = [(f"c{i}", name) for i in range(10) for name in COSTS]
    now, promised = [0.0], []
    pace = Pace.of([(Key("gelu", *x, "cold"), r) for r in range(3) for x in places], lambda: now[0])
    assert (pace.total, pace.left_s()) == (60, None)
    for replicate in range(3):
        pace.stage(replicate, "start", False)
        now[0] += START_S[replicate]
        for case, name in places:
            failed = (case, name) == ("c4", "torch_compile")
            if failed and replicate:
                continue
            pace.stage(replicate, "build", True)
            now[0] += COSTS[name] * (1.0 if replicate == 0 else 0.8)
            pace.end(record(case, name, replicate, "error" if failed else "ok"))
            if (left := pace.left_s()) is not None:
                promised.append((now[0], left))
    assert pace.left_s() == 0
    assert pace.ended == pace.total
    wrong = [(at, left) for at, left in promised[:-1] if not 0.5 < left / (now[0] - at) < 2]
    assert wrong == []
    assert len(promised) > 50


def test_a_short_run_on_a_cpu_promises_right_while_its_first_rows_compile() -> None:
    """Seconds of processor time of plan `quick` on two cores: what is first loads what all others find loaded."""
    first = [
        ("rms_norm", "transformers", 3.3), ("rms_norm", "torch_compile", 4.0), ("rms_norm", "kernelmark_cpu", 1.8),
        ("rms_norm", "torch", 0.4), ("softmax", "kernelmark_cpu", 2.1), ("softmax", "torch_compile", 1.6),
        ("softmax", "torch", 0.3), ("train", "torch", 1.4),
    ]  # fmt: skip
    again = {"transformers": 2.5, "torch_compile": 0.9, "kernelmark_cpu": 0.5, "torch": 0.6}
    now, promised = [0.0], []
    pace = Pace.of([(Key("gelu", x, y, "cold"), r) for r in range(3) for x, y, _ in first], lambda: now[0])
    now[0] += 9.0  # loading torch.compile, which no later replicate does
    for replicate in range(3):
        pace.stage(replicate, "start", False)
        now[0] += 1.5
        for case, name, seconds in first:
            pace.stage(replicate, "build", True)
            now[0] += again[name] if replicate else seconds
            pace.end(record(case, name, replicate))
            if (left := pace.left_s()) is not None:
                promised.append((now[0], left))
    wrong = [(at, left) for at, left in promised[:-1] if not 0.5 < left / (now[0] - at) < 2]
    assert wrong == []
    assert len(promised) > 20


def test_inputs_that_cells_share_are_no_start_of_a_worker() -> None:
    """Each case lays its inputs out before its cells, in a stage of no cell; a replicate's start takes 10 s."""
    now, promised = [0.0], []
    keys = [Key("gelu", f"c{i}", "torch", "cold") for i in range(8)]
    pace = Pace.of([(x, r) for r in range(3) for x in keys], lambda: now[0])
    for replicate in range(3):
        pace.stage(replicate, "start", False)
        pace.stage(replicate, "ceilings", False)
        now[0] += 10.0
        for key in keys:
            pace.stage(replicate, "build", True)
            pace.stage(replicate, "build", False)
            now[0] += 0.1
            pace.stage(replicate, "build", True)
            now[0] += 0.9
            pace.end(record(key.case, key.implementation, replicate))
            promised.append((now[0], pace.left_s()))
    assert promised[7] == (
        18.0,
        pytest.approx(2 * (10 + 8 * 0.5)),
    )  # what is again costs half, until that is known
    assert [left for _, left in promised[16:]] == pytest.approx([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0])


def test_rows_cost_what_they_cost_last() -> None:
    """From the second replicate on all takes thrice as long: other work has begun."""
    now = [0.0]
    keys = [Key("gelu", f"c{i}", "torch", "cold") for i in range(10)]
    pace = Pace.of([(x, r) for r in range(4) for x in keys], lambda: now[0])
    for replicate in range(2):
        for key in keys:
            now[0] += 3.0 if replicate else 1.0
            pace.end(record(key.case, key.implementation, replicate))
    assert pace.left_s() == pytest.approx(2 * 10 * 3.0)


def test_what_is_not_to_be_measured_here_costs_nothing() -> None:
    pace = Pace.of([(Key("gelu", "c0", "torch", "cold"), 0)], lambda: 0.0)
    pace.end(record("c0", "kernelmark", 0, "unsupported"))
    assert (pace.ended, pace.left_s()) == (0, None)
