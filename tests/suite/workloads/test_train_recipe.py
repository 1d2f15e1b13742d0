"""A case of training, read: floors and utilization by hand, what is refused, and what a hash covers."""

from __future__ import annotations

import pytest
import torch
from kernelmark.registry.errors import InputError
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._window import Clock, level

SIZES = {"B": 4, "S": 4096}
# Llama of 1.2 billion: tied, so that the table is multiplied.
PARAMETERS = 128256 * 2048 + 16 * (2 * 2048**2 + 2 * 2048 * 1024 + 3 * 2048 * 8192 + 2 * 2048) + 2048
MULTIPLIED = PARAMETERS - 33 * 2048


def case(model: str = "llama-1.2b", dtype: str = "bf16", **options: str | float):
    return train.WORKLOAD.case(SIZES, dtype, "program", model=model, **options)


def test_operations_bytes_and_tokens_by_hand() -> None:
    found = case()
    assert found.tokens == 16384
    assert found.flops == 16384 * (6 * MULTIPLIED + 6 * 16 * 4096 * 2048)
    # bf16: weights twice, gradients out and in, moments and weights in and out; 16 bytes a token and target.
    assert found.bytes == PARAMETERS * 2 * (2 + 2 + 4 + 2) + 16 * 16384
    masters = case(state="master32")
    assert masters.bytes == PARAMETERS * (4 + 4 + 4 * 4 + 2 + 8) + 16 * 16384
    assert masters.flops == found.flops


def test_utilization_and_limit_by_hand() -> None:
    r = train.read(case())
    flops = 16384 * (6 * MULTIPLIED + 6 * 16 * 4096 * 2048)
    assert r.mfu(250.0) == pytest.approx(flops / 0.25 / 989.4e12)
    assert r.limit_ms(690e12, 4.25e12) == pytest.approx(1e3 * (flops / 690e12 + r.bytes / 4.25e12))
    assert r.resident == PARAMETERS * 8


def test_accumulation_reads_weights_once_a_pass() -> None:
    two = train.WORKLOAD.case({**SIZES, "A": 2}, "bf16", "program", model="llama-1.2b")
    assert two.tokens == 2 * 16384
    assert two.bytes - case().bytes == PARAMETERS * 2 * (2 + 2) + 16 * 16384
    assert (case().name, two.name) == ("B4-S4096-llama-1.2b-plain-bf16", "B4-S4096-A2-llama-1.2b-plain-bf16")


def test_a_slice_and_what_a_model_lacks() -> None:
    assert train.read(case(slice="first4")).chosen.configuration.layers == 4
    with pytest.raises(InputError, match="has 2 layers"):
        case("llama-tiny", slice="first4")
    with pytest.raises(InputError, match="model of train"):
        case("llama-9")


def test_positions_that_are_not_there_are_refused() -> None:
    session = Session(Cpu(), 1, 0, Sampling(), Stages())
    with pytest.raises(NotImplementedError, match="positions for 1024 tokens"):
        train.prepare(case("gpt2-124m"), session)


def test_what_can_never_fit_is_said_at_once_with_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 1000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)

    class Pretender(Cpu):
        kind = "cuda"

    session = Session(Pretender(), 1, 0, Sampling(), Stages())
    with pytest.raises(MemoryError, match=f"alone take {PARAMETERS * 8} bytes; the device has 1000"):
        train.prepare(case(), session)


def test_a_models_file_decides_its_own_cases_alone() -> None:
    one, other = case("gpt2-124m"), case("gpt2-350m")
    assert one.spec != other.spec
    assert one.spec == case("gpt2-124m", state="master32").spec


def test_a_warm_up_is_over_when_ten_steps_have_no_slope() -> None:
    assert not level([1.0] * 9)
    assert level([5.0, *[1.0] * 10])
    assert not level([1.02] * 5 + [1.0] * 5)
    assert level([1.004] * 5 + [1.0] * 5)


def test_edges_of_steps_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 2_000_000, 5_000_000])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(times))
    clock = Clock(cuda=False)
    for _ in range(3):
        clock.edge()
    assert clock.take() == [2.0, 3.0]
    assert clock.take() == []
