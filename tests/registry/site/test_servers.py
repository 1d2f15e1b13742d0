"""The page of servers: which groups of loads there are, and in which order."""

from __future__ import annotations

from typing import Any

from kernelmark.registry.site.facts import facts, run_of
from kernelmark.registry.site.servers import served
from kernelmark.registry.site.timeline import Measured


def run(literal: Any, name: str, device: str, model: str, users: int) -> list[Measured]:
    """A run of our server under loads of 1, 2, … users."""
    cases = [
        literal.case(
            operator="serve",
            name=f"{model}-users{x}",
            axes={"users": x, "rate": 0, "requests": 8, "input": 8, "output": 8},
            options={"model": model, "load": "closed"},
            pass_="program",
        )
        for x in range(1, users + 1)
    ]
    header = {"device": device, "conditions": {"gpu": "NVIDIA H200"} if device == "cuda" else {"cpu": "AMD EPYC"}}
    journal = literal.journal(*(literal.record("kernelmark", case=x) for x in cases), run=name, **header)
    found = facts(journal)
    return [(run_of(journal, found), x) for x in found]


def test_gpus_come_first_and_of_a_device_what_had_most_loads(literal: Any) -> None:
    given = [
        *run(literal, "a", "cpu", "llama-1m", 3),
        *run(literal, "b", "cuda", "llama-1b", 1),
        *run(literal, "c", "cuda", "llama-8b", 2),
    ]
    found = [(x.device, x.what.partition(" ")[0], len(x.loads)) for x in served(given, {})]
    assert found == [
        ("NVIDIA H200", "llama-8b", 2),
        ("NVIDIA H200", "llama-1b", 1),
        ("CPU: AMD EPYC", "llama-1m", 3),
    ]
