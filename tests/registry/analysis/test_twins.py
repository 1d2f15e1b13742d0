"""Cases that differ in layout or in length alone, on literal journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kernelmark.registry.analysis.twins import twins, verdict
from kernelmark.registry.store.record import Case, Record, Request
from kernelmark.registry.views import calls_table

EXPECTED = Path(__file__).with_name("twins.md")


def attention(literal: Any, storage: str = "bshd", S: int = 4096, **changes: Any) -> Case:
    options = {"mask": "causal", "storage": storage}
    about = {"operator": "attention", "name": f"S{S}-{storage}-bf16", "options": options, "axes": {"B": 2, "S": S}}
    return literal.case(**about | changes)


def timed(literal: Any, case: Case, *ms: float, name: str = "kernelmark") -> list[Record]:
    provider = "kernelmark" if name.startswith("kernelmark") else name
    return [literal.record(name, x, case=case, replicate=i, provider=provider) for i, x in enumerate(ms)]


def test_quotients_are_paired_over_processes(literal: Any) -> None:
    """Every process is twice as slow as the one before it, which no quotient sees."""
    first = timed(literal, attention(literal, "bhsd"), 1.0, 2.0, 4.0)
    other = timed(literal, attention(literal, "bshd"), 1.01, 2.02, 4.04, 100.0)
    (found,) = twins(literal.journal(*first, *other, replicates=4))
    assert (found.what, found.case.name, found.against.name) == ("layout", "S4096-bshd-bf16", "S4096-bhsd-bf16")
    assert (found.ratio, found.low, found.high) == pytest.approx((1.01, 1.01, 1.01))
    assert found.verdict == "earned"


@pytest.mark.parametrize(
    ("ms", "said"),
    [((1.01, 1.01), "earned"), ((1.03, 1.03), "missed"), ((0.9, 1.1), "undecided"), ((1.01,), "undecided")],
)
def test_the_interval_decides(literal: Any, ms: tuple[float, ...], said: str) -> None:
    lines = timed(literal, attention(literal, S=5120), *(1.0 for _ in ms))
    (found,) = twins(literal.journal(*lines, *timed(literal, attention(literal, S=5000), *ms)))
    assert found.what == "length"
    assert found.verdict == said


def test_what_was_asked_for_and_is_missing_is_not_shown(literal: Any) -> None:
    cases = tuple(attention(literal, x) for x in ("bhsd", "bshd", "packed"))
    lines = [*timed(literal, cases[0], 1.0, 1.0), *timed(literal, cases[1], 1.0, 1.0)]
    journal = literal.journal(*lines, request=Request(cases=cases))
    bshd, packed = twins(journal)
    assert (bshd.verdict, packed.verdict, packed.missing) == (
        "earned", "not shown", "S4096-packed-bf16: not measured",
    )  # fmt: skip
    assert verdict(journal, [bshd]) == "earned"
    assert verdict(journal, [bshd, packed]) == verdict(journal, []) == "not shown"
    part = literal.journal(*lines, request=Request(cases=cases, shard=(1, 2)))
    assert verdict(part, [bshd]) == "not shown"


def test_another_process_is_no_pair(literal: Any) -> None:
    lines = [literal.record("kernelmark", 1.0, case=attention(literal, "bhsd"))]
    lines += [literal.record("kernelmark", 1.0, case=attention(literal), replicate=1)]
    (found,) = twins(literal.journal(*lines, replicates=2))
    assert found.missing == "no process timed both"


def test_whoever_differs_in_more_is_no_twin(literal: Any) -> None:
    cases = [attention(literal, "bhsd"), attention(literal, S=2048), attention(literal, S=5000)]
    cases += [attention(literal, S=5120, dtype="fp16"), attention(literal, "packed", dtype="fp16")]
    assert not twins(literal.journal(*(x for case in cases for x in timed(literal, case, 1.0))))


def test_peers_have_no_part_in_it(literal: Any) -> None:
    lines = [*timed(literal, attention(literal, "bhsd"), 1.0, name="cudnn")]
    lines += timed(literal, attention(literal), 9.0, name="cudnn")
    (found,) = twins(literal.journal(*lines))
    assert (found.implementation, found.verdict) == ("kernelmark", "not shown")


def test_the_page(literal: Any) -> None:
    """A layout that misses its goal, one that ours cannot run, and a length in a single process."""
    cases = [attention(literal, x) for x in ("bhsd", "bshd", "packed")]
    lengths = [attention(literal, S=x) for x in (5120, 5000)]
    lines = [*timed(literal, cases[0], 1.0, 1.0), *timed(literal, cases[0], 2.0, 2.0, name="cudnn")]
    lines += timed(literal, cases[1], 1.25, 1.25)
    lines += [literal.record("kernelmark", case=cases[2], status="unsupported", reason="no views")]
    lines += [*timed(literal, lengths[0], 4.0), *timed(literal, lengths[1], 4.04)]
    request = Request(models={"attention/S4096-bhsd-bf16": ("m",)})
    text = calls_table.table(literal.journal(*lines, replicates=2, request=request))
    assert text[text.index("Goal:") :] == EXPECTED.read_text()
