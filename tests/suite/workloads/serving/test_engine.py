"""The engine's cache held to whole sequences in fp32; batching whose answers do not depend on company."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _inference as inference
from kernelmark.suite.workloads._serving import engine_process, wire
from kernelmark.suite.workloads._serving.engine import SHAPES, Engine, Next, fitting, step_bytes
from kernelmark.suite.workloads._serving.messages import EngineSpec
from kernelmark.suite.workloads._serving.protocol import Wanted
from kernelmark.suite.workloads._serving.scheduler import Scheduler
from kernelmark.suite.workloads._serving.wire import Made

from ....serving.alone import alone

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


def test_prompts_are_gated_by_the_part_that_a_system_names_for_it(catalog: Catalog) -> None:
    """Gate, up and their product in one; a step of decoding has products of its own."""
    found = chosen(catalog.models, "llama-tiny")
    tokens = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(1))
    logits = []
    for parts in ({}, {"gate_up_swiglu": "torch"}):
        weights = inference.initial(found, "bf16", 3, CPU)
        e = Engine(Assembly(System("x", parts=parts), catalog), found, "bf16", weights, 3, 48, 16)
        own = e.parts_of(2, 20)
        assert own.keys() & {"gate_up_swiglu"} == parts.keys()
        assert "gate_up_swiglu" not in e.decode_parts(2)
        called = []
        if parts:
            apart = own["gated"]
            own["gated"] = lambda *given, apart=apart, called=called: called.append(given) or apart(*given)
        logits.append(e.prefill(tokens, [e.hold(30), e.hold(30)]).logits)
        assert len(called) == (2 if parts else 0)
    assert torch.allclose(*logits, atol=1e-5)


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


def wanted(*prompt: int, output: int = 6, temperature: float = 0.0, seed: int = 5) -> Wanted:
    return Wanted(prompt, output, temperature, seed, True, True, False, True, False)


def run(scheduler: Scheduler, turns: int = 1000) -> None:
    """All there is to do, within so many turns."""
    for _ in range(turns):
        if not scheduler.busy:
            return
        scheduler.turn()
    raise AssertionError("it does not end")


def together(e: Engine, asked: list[Wanted], ahead: int = 1) -> list[list[int]]:
    """The answers of requests that run in one scheduler, a third of which come while others are under way."""
    found: list[list[int]] = [[] for _ in asked]

    def emit(made: list[Made]) -> None:
        for x in made:
            found[x.number].extend(x.tokens)

    scheduler = Scheduler(e, 511, emit)
    scheduler.ahead = ahead
    for number, x in enumerate(asked):
        if number % 3 == 2:
            scheduler.turn()
        scheduler.add(number, x)
    run(scheduler)
    assert not e.held
    return found


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("model", ["llama-tiny", "mamba2-tiny"])
def test_answers_do_not_depend_on_company(catalog: Catalog, model: str, ahead: int) -> None:
    """Nor on when they are read: some draw at a temperature, and join while passes are under way."""
    asked = [wanted(1, 2, 3), wanted(9, 8, output=3), wanted(*range(20)), wanted(7, output=1), wanted(4, 4)]
    asked += [wanted(5, i, temperature=0.9 * (i % 2), seed=i, output=5 + i) for i in range(6)]
    e = engine(catalog, model)  # three rows: the others wait
    by_itself = [alone(e, x, 511) for x in asked]
    assert together(e, asked, ahead) == by_itself
    assert [len(x) for x in by_itself] == [x.output for x in asked]
    assert by_itself[5:] != [alone(e, msgspec.structs.replace(x, temperature=0.0), 511) for x in asked[5:]]


def test_a_temperature_next_to_zero_ends_no_engine(catalog: Catalog) -> None:
    """Logits over a temperature that small are infinite, and infinite ones have no shares to draw by."""
    greedy = together(engine(catalog), [wanted(1, 2, 3)])
    assert together(engine(catalog), [wanted(1, 2, 3, temperature=5e-324)]) == greedy


def watched(e: Engine, asked: list[Wanted]) -> tuple[Scheduler, list[str], list[Made]]:
    """A scheduler with requests, the passes that it launches and what it tells, in one list and by itself."""
    events: list[str] = []
    told: list[Made] = []
    prefill, decode = e.prefill, e.decode

    def emit(made: list[Made]) -> None:
        events.append("told " + " ".join(str(x.number) for x in made))
        told.extend(made)

    def taken(tokens: torch.Tensor, rows: Sequence[int]) -> Next:
        events.append(f"prompts {tuple(tokens.shape)}")
        return prefill(tokens, rows)

    def step(tokens: torch.Tensor, rows: Sequence[int]) -> Next:
        events.append(f"step {len(rows)}")
        return decode(tokens, rows)

    e.prefill, e.decode = taken, step  # type: ignore[method-assign]
    scheduler = Scheduler(e, 511, emit)
    scheduler.ahead = 1
    for number, x in enumerate(asked):
        scheduler.add(number, x)
    return scheduler, events, told


def test_a_pass_is_launched_before_the_one_before_is_read(catalog: Catalog) -> None:
    scheduler, events, _ = watched(engine(catalog), [wanted(1, 2, output=4)])
    run(scheduler)
    assert events == ["prompts (1, 2)", "step 1", "told 0", "step 1", "told 0", "step 1", "told 0", "told 0"]


def test_prompts_of_one_length_are_read_together(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes of powers of two, in the order of arrival, and so many that others wait no longer than that."""
    monkeypatch.setattr("kernelmark.suite.workloads._serving.scheduler.TAKEN", 20)
    asked = [wanted(*range(5), output=2) for _ in range(6)] + [wanted(*range(30), output=2), wanted(1, output=2)]
    scheduler, events, told = watched(engine(catalog, sequences=9), asked)
    run(scheduler)
    launched = [x for x in events if not x.startswith("told")]
    assert launched == ["prompts (4, 5)", "step 4", "prompts (2, 5)", "step 2", "prompts (1, 30)", "step 1",
                        "prompts (1, 1)", "step 1"]  # fmt: skip
    assert [x.number for x in told if x.finish == "length"] == list(range(8))


def test_what_never_finds_a_place_is_no_request(catalog: Catalog) -> None:
    e = engine(catalog, cached=16)
    with pytest.raises(AssertionError, match="a sequence of 23 tokens never finds a place"):
        Scheduler(e, 511, lambda made: None).add(0, wanted(*range(17)))


def test_parts_of_steps_are_kept(catalog: Catalog) -> None:
    """A graph reads what they hold, however many shapes of prompts come after."""
    e = engine(catalog)
    parts = e.decode_parts(1)
    for size in range(1, SHAPES + 5):
        e.parts_of(1, size)
    assert e.decode_parts(1) is parts
    assert len(e._shapes) == SHAPES


def test_who_leaves_makes_room_and_gets_no_more(catalog: Catalog) -> None:
    e = engine(catalog, sequences=1)
    scheduler, _, told = watched(e, [wanted(1, output=30), wanted(2, output=3), wanted(3, output=3)])
    scheduler.turn()
    scheduler.give_up(0)  # with a pass under way
    scheduler.give_up(1)  # it waits
    scheduler.give_up(7)
    before = len(told)
    run(scheduler)
    scheduler.give_up(2)  # it is over
    assert [x.number for x in told[before:]] == [2, 2, 2]
    assert [y for x in told[before:] for y in x.tokens] == together(engine(catalog), [wanted(3, output=3)])[0]
    assert not e.held


def test_a_sequence_that_ends_by_its_token_leaves_no_trace(catalog: Catalog) -> None:
    """The step that was launched before its end was known writes into its row, which the next sequence takes."""
    first = together(engine(catalog), [wanted(1, 2)])[0]
    end = Wanted((1, 2), 20, 0.0, 5, True, True, False, False, False)  # ends by `end`
    e = engine(catalog, sequences=1)
    found: list[Made] = []
    scheduler = Scheduler(e, first[1], found.extend)
    scheduler.ahead = 1
    scheduler.add(0, end)
    scheduler.add(1, wanted(3, output=3))
    run(scheduler)
    mine = [x for x in found if x.number == 0]
    assert [x.finish for x in mine] == [None] * (first.index(first[1])) + ["stop"]
    assert [y for x in found if x.number for y in x.tokens] == together(engine(catalog), [wanted(3, output=3)])[0]


def served(monkeypatch: pytest.MonkeyPatch, e: Engine, messages: list[wire.ToEngine]) -> list[wire.FromEngine]:
    """What an engine's process answers to messages, by real pipes; its engine is this one."""
    monkeypatch.setattr(engine_process, "engine", lambda spec: e)
    (given, give), (taken, take) = os.pipe(), os.pipe()
    spec = EngineSpec({}, "llama-tiny", "whole", "fp32", 3, "cpu", 3, 48)
    with os.fdopen(give, "wb", buffering=0) as into:
        for message in [wire.Build(spec, 511), *messages]:
            into.write(wire.framed(message))
        thread = threading.Thread(target=_process, args=(given, take))
        thread.start()
        inbox, found = wire.Inbox(taken), []
        while not inbox.ended and not any(isinstance(x, wire.Failed) or _last(x) for x in found):
            found += [wire.from_engine(x) for x in inbox.take(wait=True)]
    thread.join(30)
    assert not thread.is_alive(), "it ends when nobody can ask any more"
    for x in (given, taken):
        os.close(x)
    return found


def _process(given: int, take: int) -> None:
    try:
        engine_process.run(wire.Inbox(given), take)
    finally:
        os.close(take)


def _last(message: wire.FromEngine) -> bool:
    return isinstance(message, wire.Gave) and any(x.finish for x in message.made)


def test_an_engine_in_a_process_of_its_own(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    found = served(monkeypatch, engine(catalog), [wire.Ask(5, wanted(1, 2, 3)), wire.Leave(4)])
    assert isinstance(found[0], wire.Built)
    made = [y for x in found[1:] if isinstance(x, wire.Gave) for y in x.made]
    assert {x.number for x in made} == {5}
    assert [y for x in made for y in x.tokens] == together(engine(catalog), [wanted(1, 2, 3)])[0]


def test_an_engine_that_fails_says_why(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    e = engine(catalog)
    e.decode = lambda tokens, rows: 1 / 0  # type: ignore[method-assign,assignment]
    found = served(monkeypatch, e, [wire.Ask(1, wanted(1)), wire.Ask(2, wanted(2))])
    assert found[-1] == wire.Failed("the engine failed: ZeroDivisionError: division by zero")
    assert "ZeroDivisionError: division by zero" in capfd.readouterr().err


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 40), min_size=1))
def test_frames_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    data = b"".join(len(x).to_bytes(wire.SIZE, "big") + x for x in bodies)
    frames, found, at = wire.Frames(), [], 0
    for size in itertools.cycle(cuts):
        found += frames.feed(data[at : at + size])
        at += size
        if at >= len(data):
            break
    assert found == bodies


@pytest.mark.parametrize(
    ("B", "graphs", "eager"), [(1, 1, 1), (3, 4, 4), (33, 64, 64), (65, 96, 128), (129, 160, 200), (200, 200, 200)]
)
def test_sizes_of_steps(catalog: Catalog, B: int, graphs: int, eager: int) -> None:
    e = engine(catalog)
    e.sequences = 200
    assert e._size(B) == eager
    e.graphs = {}
    assert e._size(B) == graphs


def test_what_no_engine_runs(catalog: Catalog) -> None:
    with pytest.raises(NotImplementedError, match="bert does not generate"):
        engine(catalog, "bert-tiny")
    found = chosen(catalog.models, "gpt2-tiny")
    with pytest.raises(NotImplementedError, match="positions for 256 tokens, not 300"):
        Engine(Assembly(System("torch"), catalog), found, "fp32", [], 1, 300)
    with pytest.raises(NotImplementedError, match="not by blocks"):
        Engine(Assembly(System("x", execution="blocks"), catalog), found, "fp32", [], 1, 30)
