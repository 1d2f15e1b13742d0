"""The page on whether peers are as fast as published."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from kernelmark.registry.analysis.published import Figure, Missing, Published
from kernelmark.registry.analysis.releases import Package, Releases
from kernelmark.registry.store.record import Request
from kernelmark.registry.views import fidelity

RELEASES = Releases(
    date(2026, 11, 24), {"liger": "liger-kernel"}, {"liger-kernel": Package("1.2", {"1.0": date(2026, 10, 9)})}
)
EXPECTED = Path(__file__).with_name("fidelity.md")


def figure(peer: str, value: float, **more: Any) -> Figure:
    about = {
        "axes": {"B": 2},
        "dtype": "bf16",
        "pass_": "forward",
        "gpu": "H100",
        "bound": "compute",
        "unit": "TFLOP/s",
    }
    where = {"source": "https://example.org/a", "where": "table 1", "date": "2026-01-01"}
    return Figure(peer=peer, operator="rms_norm", case="case", value=value, **{**about, **where, **more})


def test_each_figure_and_each_peer_without_one(literal: Any) -> None:
    """At 500 TFLOP/s and 500 GB/s."""
    case = literal.case(operator="rms_norm", name="case", bytes=10**9, flops=10**12)
    records = [
        literal.record("liger", 2.0, case=case),
        literal.record("mine", 4.0, case=case),
        literal.record("vllm", case=case, status="unavailable", reason="environment 'vllm' is not installed"),
        literal.record("arm", 4.0, case=case),
        literal.record("torchao", case=case, status="incorrect", reason="verify: output"),
    ]
    asked = Request(systems=({"name": "arm", "base": "torch"},))
    run = literal.journal(*records, conditions={"gpu": "NVIDIA H200"}, request=asked)
    known = Published(
        figures=(
            figure("liger", 520),
            figure("liger", 400, more="it is faster by now", by="somebody"),
            figure("liger", 1000, less="clocks"),
            figure("liger", 500, unit="GB/s", bound="memory"),
            figure("liger", 2, unit="×", over="mine"),
            figure("liger", 2, unit="×", over="quack"),
            figure("vllm", 500, wrong="scales"),
            figure("torchao", 500, wrong="scales"),
            figure("quack", 500),
        ),
        none=(Missing("none was found", ("xformers", "fla")),),
    )
    assert fidelity.table([run], known, RELEASES) == EXPECTED.read_text()


def test_another_kind_of_gpu_is_not_compared(literal: Any) -> None:
    case = literal.case(operator="rms_norm", name="case", flops=10**12)
    run = literal.journal(literal.record("liger", 2.0, case=case), conditions={"gpu": "NVIDIA L4"})
    assert "| not compared: NVIDIA L4 is of another kind |" in fidelity.table(
        [run], Published((figure("liger", 1),), ()), RELEASES
    )
