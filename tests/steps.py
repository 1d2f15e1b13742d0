"""Journals of training steps on several GPUs, made by the model that predictions have."""

from __future__ import annotations

from kernelmark.registry.analysis.scaling import Link
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.metric import LATENCY, Metric
from kernelmark.registry.store.record import Case, Header, Measurement, Record

NVLINK = Link(0.004, 350e6)
"""4 µs a call, 350 GB/s."""
COMPUTE, BUCKETS = 30.0, (25e6,) * 40
HIDES = 2.0
"""ms of communication that are hidden."""
METRICS = (
    LATENCY,
    Metric("step", "ms"),
    Metric("sent", "B"),
    Metric("compression_ratio", "1"),
    Metric("algbw", "GB/s", better="higher"),
)


def stepped(world, ms, way="ddp", sent=BUCKETS, ratio=None) -> Record:
    axes = {"B": 1, "S": 4096} | ({"gpus": world} if world > 1 else {})
    way = way if world > 1 else "single"
    case = Case(
        "train", f"S4096-{world}-{way}", axes, {"parallel": way}, "bf16", "program", "5", 1, 1, primary="step"
    )
    samples = {"step": (ms * 0.998, ms, ms * 1.002), "sent": sent if world > 1 else ()}
    samples |= {} if ratio is None else {"compression_ratio": (ratio,)}
    return Record(
        case, "ours", "kernelmark", None, 0, 0, "cold", "ok", None,
        Measurement({name: values for name, values in samples.items() if values}, "events"),
    )  # fmt: skip


def reduced(world, size, ms, place="in") -> Record:
    case = Case("all_reduce", f"{size}-{world}-{place}", {"N": size // 2, "gpus": world}, {"place": place}, "bf16",
                "forward", "5", 2 * size, 0)  # fmt: skip
    return Record(
        case, "torch_distributed", "torch", None, 0, 0, "cold", "ok", None,
        Measurement({"latency": (ms,) * 3, "algbw": (size / ms / 1e6,) * 3}, "events"),
    )  # fmt: skip


def truth(world, buckets=BUCKETS) -> float:
    return COMPUTE + max(0.0, sum(NVLINK.all_reduce_ms(x, world) for x in buckets) - HIDES)


def journal(*records) -> Journal:
    header = Header(
        2,
        "run",
        "2026-11-21T00:00:00Z",
        "0.1.0",
        None,
        False,
        "distributed",
        0,
        1,
        "cuda",
        "k",
        {},
        {},
        metrics=METRICS,
    )
    sizes = (1 << 16, 1 << 20, 1 << 28)
    return Journal(header, (*(reduced(2, x, NVLINK.all_reduce_ms(x, 2)) for x in sizes), *records))
