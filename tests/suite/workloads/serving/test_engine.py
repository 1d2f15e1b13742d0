"""The engine's cache held to whole sequences in fp32; batching whose answers do not depend on company."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _inference as inference
from kernelmark.suite.workloads._serving.engine import Engine, fitting, step_bytes
from kernelmark.suite.workloads._serving.protocol import Refused, Wanted
from kernelmark.suite.workloads._serving.scheduler import Scheduler, Sequence

CPU = torch.device("cpu")


def engine(catalog: Catalog, model: str = "llama-tiny", sequences: int = 3, cached: int | None = None) -> Engine:
    found = chosen(catalog.models, model)
    weights = inference.initial(found, "fp32", 3, CPU)
    return Engine(Assembly(System("torch"), catalog), found, "fp32", weights, sequences, 48, 16, cached)


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny", "mamba2-tiny"])
def test_steps_give_what_whole_sequences_give(catalog: Catalog, model: str) -> None:
    e = engine(catalog, model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 512, (2, 26), generator=generator)
    rows = [e.hold(30), e.hold(30)]
    e.release(rows[0])
    rows = [rows[1], e.hold(40)]  # rows and pages in another order
    found = [e.prefill(tokens[:, :20], rows).logits]
    found += [e.decode(tokens[:, i], rows).logits for i in range(20, 26)]
    wanted = inference.answer(chosen(catalog.models, model), "fp32", 3, tokens, range(19, 26), catalog)
    assert inference.deviation(model, torch.stack(found, 1), wanted, "fp32") < 1e-5


@pytest.mark.parametrize("model", ["llama-tiny", "mamba2-tiny"])
def test_graphs_of_padded_batches(
    catalog: Catalog, model: str, monkeypatch: pytest.MonkeyPatch, played_graphs: Callable[..., Any]
) -> None:

    monkeypatch.setattr("kernelmark.suite.workloads._serving.engine.captured", played_graphs)
    found = []
    for graphs in (None, {}):
        e = engine(catalog, model, sequences=5)
        e.graphs = graphs
        e.capture()
        tokens = torch.randint(0, 512, (3, 12), generator=torch.Generator().manual_seed(2))
        rows = [e.hold(20) for _ in range(3)]
        first = e.prefill(tokens, rows).token
        steps = [first.float()[:, None].expand(-1, 512)]
        for some in (3, 2, 3):
            logits, token = e.decode(first[:some], rows[:some])
            assert token.tolist() == logits.argmax(-1).tolist()
            steps.append(logits.clone())
        found.append(torch.cat(steps))
        if graphs is not None:
            assert sorted(graphs) == [1, 2, 4, 5]
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_joined_weights(catalog: Catalog) -> None:
    """Names and values are the model's, there is no second copy, and what is not joined is not taken for it."""
    e = engine(catalog)
    layer = e.module.layers[1]
    drawn = dict(inference.initial(chosen(catalog.models, "llama-tiny"), "fp32", 3, CPU))
    own = dict(e.module.named_parameters())
    assert own.keys() == drawn.keys()
    assert all(torch.equal(own[name], x) for name, x in drawn.items())
    joined = inference.whole([layer.query, layer.key, layer.value])
    assert joined is not None
    assert torch.equal(joined, torch.cat([drawn[f"layers.1.{name}"] for name in ("query", "key", "value")]))
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in own.values()}
    assert sum(held.values()) == sum(x.nbytes for x in drawn.values())
    for apart in ([layer.key, layer.query], [layer.query, layer.value], [layer.up, layer.key]):
        assert inference.whole(apart) is None


def test_pages_are_given_and_taken_back(catalog: Catalog) -> None:
    e = engine(catalog, cached=64)
    assert len(e.free) == 4
    row = e.hold(33)
    assert (len(e.free), 0 in e.held[row]) == (1, False)
    assert e.admits(16)
    assert not e.admits(17)
    e.release(row)
    assert len(e.free) == 4
    assert e.cache_bytes == 2 * 2 * 5 * 16 * 2 * 16 * 4  # keys and values, layers, pages, page, heads, head, bytes


def test_as_many_pages_as_memory_has_room_for(catalog: Catalog) -> None:
    """A page of 64 tokens takes 8 MiB of Llama 3.1 8B, and nothing of Mamba-2, whose states have rows."""
    free = 10 * 8 * 2**20
    assert fitting(17, chosen(catalog.models, "llama-3.1-8b"), "bf16", 64, free) == 8
    assert fitting(5, chosen(catalog.models, "llama-3.1-8b"), "bf16", 64, free) == 5
    assert fitting(17, chosen(catalog.models, "mamba2-1.3b"), "bf16", 64, free) == 17


def test_rows_are_copied_when_they_change_only(catalog: Catalog) -> None:
    e = engine(catalog)
    first = e._at([2, 0], 3).clone()
    e._rows[0] = 1  # what a copy would overwrite
    assert e._at([2, 0], 3).tolist() == [1, 0, 3]
    assert first.tolist() == [2, 0, 3]
    assert e._at([2, 0], 2).tolist() == [2, 0]


def test_the_byte_bound(catalog: Catalog) -> None:
    found = chosen(catalog.models, "llama-3.1-8b")
    assert step_bytes(found, "bf16", []) == pytest.approx(15.0e9, rel=0.01)  # without the embedding's table
    cache = step_bytes(found, "bf16", [1023]) - step_bytes(found, "bf16", [])
    assert cache == 2 * 32 * 8 * 128 * 1024 * 2


def wanted(*prompt: int, output: int = 6, temperature: float = 0.0) -> Wanted:
    return Wanted(prompt, output, temperature, 5, True, True, False, True, False)


def together(e: Engine, asked: list[Wanted]) -> list[list[int]]:
    """The answers of requests that run in one scheduler."""
    scheduler = Scheduler(e, end=511)
    found: list[list[int]] = [[] for _ in asked]
    left = threading.Semaphore(0)

    def emit_to(mine: list[int]):  # type: ignore[no-untyped-def]  # a closure
        def emit(tokens: list[int], finish: str | None) -> None:
            mine.extend(tokens)
            if finish:
                left.release()

        return emit

    sequences = [scheduler.add(x, emit_to(mine)) for x, mine in zip(asked, found, strict=True)]
    assert all(isinstance(x, Sequence) for x in sequences)
    scheduler.start()
    for _ in asked:
        assert left.acquire(timeout=30)
    scheduler.stop()
    assert not scheduler.running
    assert not e.held
    return found


def test_answers_do_not_depend_on_company(catalog: Catalog) -> None:
    asked = [wanted(1, 2, 3), wanted(9, 8, output=3), wanted(*range(20)), wanted(7, output=1), wanted(4, 4)]
    alone = [together(engine(catalog), [x])[0] for x in asked]
    assert together(engine(catalog), asked) == alone  # three rows: two wait
    assert [len(x) for x in alone] == [6, 3, 6, 1, 6]
    warm = [wanted(1, 2, 3, temperature=1.0)]
    assert together(engine(catalog), warm) == together(engine(catalog), warm)


def test_a_temperature_next_to_zero_ends_no_engine(catalog: Catalog) -> None:
    """Logits over a temperature that small are infinite, and infinite ones have no shares to draw by."""
    greedy = together(engine(catalog), [wanted(1, 2, 3)])
    assert together(engine(catalog), [wanted(1, 2, 3, temperature=5e-324)]) == greedy


def test_an_engine_that_fails_tells_all(catalog: Catalog) -> None:
    e = engine(catalog)
    e.decode = lambda tokens, rows: 1 / 0  # type: ignore[method-assign,assignment]
    scheduler = Scheduler(e, end=511)
    told: list[str | None] = []
    scheduler.add(wanted(1), lambda tokens, finish: told.append(finish))
    scheduler.add(wanted(2), lambda tokens, finish: told.append(finish))
    scheduler.start()
    scheduler._thread.join(30)
    assert told[-2:] == ["error", "error"]
    with pytest.raises(Refused, match="the engine failed: ZeroDivisionError"):
        scheduler.add(wanted(3), lambda tokens, finish: None)


def test_what_no_engine_runs(catalog: Catalog) -> None:
    with pytest.raises(NotImplementedError, match="bert does not generate"):
        engine(catalog, "bert-tiny")
    found = chosen(catalog.models, "gpt2-tiny")
    with pytest.raises(NotImplementedError, match="positions for 256 tokens, not 300"):
        Engine(Assembly(System("torch"), catalog), found, "fp32", [], 1, 300)
    with pytest.raises(NotImplementedError, match="not by blocks"):
        Engine(Assembly(System("x", execution="blocks"), catalog), found, "fp32", [], 1, 30)
