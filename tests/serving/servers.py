"""The servers that the programs here measure: answers of planted times, and a model of a million parameters."""

from __future__ import annotations

import msgspec
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.system import System
from kernelmark.suite.workloads._serving import children
from kernelmark.suite.workloads._serving.messages import EngineSpec, Planted, Spec

MODEL = "llama-1m"
VOCABULARY = 1024
LONGEST = 128
START_S = 120.0


def planted(plan: Planted) -> children.Running:
    """Our server over a backend of planted times and faults; each event says when it was written."""
    return children.ours(Spec(MODEL, VOCABULARY, LONGEST, planted=plan, stamps=True), START_S)


def small() -> children.Running:
    """Our server over our engine on one thread of a CPU; it stamps too."""
    assert chosen(Catalog.default().models, MODEL).configuration.vocabulary == VOCABULARY
    engine = EngineSpec(
        system=msgspec.to_builtins(System("torch")),
        model=MODEL,
        slice="whole",
        dtype="fp32",
        seed=1,
        device="cpu",
        sequences=8,
        longest=LONGEST,
        page=16,
        threads=1,
    )
    return children.ours(Spec(MODEL, VOCABULARY, LONGEST, engine=engine, stamps=True), START_S)
