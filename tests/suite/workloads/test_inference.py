"""`forward`, `generate` and `serve` on a tiny model: what is right is measured, what is wrong is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from kernelmark.baselines._terms import forward_only
from kernelmark.registry.store.record import Case, Measurement
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.implementation import Implementation
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import _inference as inference
from kernelmark.suite.workloads import forward, generate, serve, train
from kernelmark.suite.workloads._forward import PartsPasses
from kernelmark.suite.workloads._generate import PartsGenerates
from kernelmark.suite.workloads._inference import LAST, initial, read, skippable
from kernelmark.suite.workloads._serving.children import ServerFailed
from kernelmark.suite.workloads._serving.engine import Engine, Next
from kernelmark.suite.workloads._serving.latencies import Window
from kernelmark.suite.workloads._serving.load import Load
from kernelmark.suite.workloads._serving.messages import Seen
from kernelmark.suite.workloads._serving.quantized import PRECISIONS

SAMPLING = Sampling(min_samples=4, max_samples=8, min_seconds=0, max_seconds=60, warmup_s=0)
TORCH = System("torch")


def session() -> Session:
    return Session(Cpu(), 11, 0, SAMPLING, Stages())


def passes(case: Case, system: Any) -> Measurement:
    given = session()
    return forward.measure(case, system, given, forward.prepare(case, given))


def a_pass(model: str = "llama-tiny") -> Case:
    return forward.WORKLOAD.case({"B": 2, "S": 24}, "fp32", "program", model=model)


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama-tiny", "torch"), ("bert-tiny", "torch"), ("gpt2-tiny", "transformers_model")],
)
def test_a_pass_is_measured(catalog: Catalog, model: str, name: str) -> None:
    case = a_pass(model)
    system = next(x for x in catalog.of_operator("forward") if x.name == name)
    found = passes(case, system.load()(case)).samples
    assert len(found["pass"]) >= 4
    assert found["logits_error"][0] < 1e-5
    assert found["samples_per_s"][0] > 0


class Stale(PartsPasses):
    """Gives the logits of the first pass for ever."""

    kept: Any = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = super().__call__(tokens)
        found: torch.Tensor = self.kept
        return found


class Blind(PartsPasses):
    """NaN in one logit."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().__call__(tokens)
        found[0, -1, 0] = float("nan")
        return found


class Tires(PartsPasses):
    """Computes nothing any more after some passes: those that are checked first, or all that are timed alone."""

    count, passes = 0, 10

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count <= self.passes:
            self.kept = super().__call__(tokens)
        return self.kept if self.count <= self.passes else 0 * self.kept


class TiresInTheQueue(Tires):
    """The first pass, three at least to warm up, eight in the window, then those in a queue."""

    passes = 12

    def load(self, *arguments: Any) -> None:
        super().load(*arguments)
        self.count = 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Tires, "the last pass of the timed window: logits are off"),
        (TiresInTheQueue, "the last of the queued passes: logits are off"),
        (Stale, "a random pass of the timed window: logits are off"),
        (Blind, "the first pass: logits are off by nan"),
    ],
)
def test_a_wrong_pass_has_no_time(catalog: Catalog, kind: Callable[[Assembly], PartsPasses], message: str) -> None:
    with pytest.raises(Incorrect, match=message):
        passes(a_pass(), kind(Assembly(TORCH, catalog)))


def refused_in_training(assembly: Assembly) -> None:
    """A training by these parts, up to where it begins to step."""
    case = train.WORKLOAD.case({"B": 2, "S": 24}, "fp32", "program", model="llama-tiny")
    given = session()
    train.measure(case, train.assemble(case, assembly), given, train.prepare(case, given))


class OneForward:
    """A catalog in which one operator's PyTorch is a library that has no backward pass, and notes its calls."""

    def __init__(self, catalog: Catalog, operator: str) -> None:
        self.catalog, self.replaced = catalog, operator
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.catalog, name)

    def of_operator(self, operator: str) -> tuple[Implementation, ...]:
        there = self.catalog.of_operator(operator)
        if operator != self.replaced:
            return there
        (own,) = (x for x in there if x.name == "torch")

        @forward_only("Onward")
        def factory(case: Any) -> Callable[..., Any]:
            call = own.load()(case)

            def noted(**inputs: Any) -> Any:
                self.calls += 1
                return call(**inputs)

            return noted

        return (*there, replace(own, name="onward", provider="onward", load=lambda: factory))


def test_what_has_no_backward_pass_takes_part_where_there_are_no_gradients(catalog: Catalog) -> None:
    onward = OneForward(catalog, "attention_decode")
    named = Assembly(System("x", parts={"attention_decode": "onward"}), onward)
    generated(a_generation(), PartsGenerates(named, 16))
    assert onward.calls >= 2 * 5  # two layers, and five steps after a prompt
    onward = OneForward(catalog, "attention")
    named = Assembly(System("x", parts={"attention": "onward"}), onward)
    passes(a_pass(), PartsPasses(named))
    assert onward.calls >= 2 * 4
    assert named.gradients
    assert not named.inferring.plain.gradients
    with pytest.raises(NotImplementedError, match=r"^attention: Onward has no backward pass of it"):
        refused_in_training(named)


def test_onednn_multiplies_where_there_are_no_gradients(catalog: Catalog) -> None:
    named = Assembly(System("x", parts={"linear": "onednn"}), catalog)
    spec = catalog.operator("matmul")
    axes, options = {"M": 3, "N": 40, "K": 24}, spec.case({"M": 3, "N": 40, "K": 24}, "fp32", "forward").options
    multiply = named.inferring.call("linear", "matmul", axes, options, "fp32", "cpu")
    x, weight = torch.randn(3, 24), torch.randn(40, 24)
    assert torch.allclose(multiply(a=x, b=weight.mT, bias=None, gated=False), x @ weight.mT, atol=1e-4)
    with pytest.raises(NotImplementedError, match=r"^linear: oneDNN, so called, has no backward pass of it$"):
        named.call("linear", "matmul", axes, options, "fp32", "cpu")


def generated(case: Case, system: Any) -> Measurement:
    given = session()
    return generate.measure(case, system, given, generate.prepare(case, given))


def a_generation(model: str = "llama-tiny") -> Case:
    return generate.WORKLOAD.case({"B": 3, "S": 20, "N": 6}, "fp32", "program", model=model, page=16)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-tiny", "torch"),
        ("mamba2-tiny", "torch"),
        ("llama-tiny", "transformers_generate"),
        ("llama-tiny", "transformers_generate_batch"),
    ],
)
def test_a_generation_is_measured(catalog: Catalog, model: str, name: str) -> None:
    case = a_generation(model)
    system = next(x for x in catalog.of_operator("generate") if x.name == name).load()(case)
    system.remarks = ("said by the system",)
    measured = generated(case, system)
    assert measured.remarks == system.remarks
    found = measured.samples
    rounds = len(found["generation"])
    assert (len(found["first_token"]), len(found["token"])) == (rounds, 5 * rounds)
    assert found["generation_error"][0] < 1e-5
    assert 0 < found["byte_fraction"][0] < 1
    for whole, first in zip(found["generation"], found["first_token"], strict=True):
        assert whole > first


@pytest.mark.parametrize("model", ["llama-tiny", "mamba2-tiny"])
def test_a_compiled_step_is_one_graph_and_right(catalog: Catalog, model: str) -> None:
    """Traced, and then run as PyTorch's own operators: what compiles them is no part of a test of seconds."""
    case = a_generation(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    system = PartsGenerates(Assembly(System("traced", execution="aot_eager"), catalog), 16)
    assert generated(case, system).samples["generation_error"][0] < 1e-5
    counted = torch._dynamo.utils.counters
    assert not counted["graph_break"]
    assert counted["stats"]["unique_graphs"] == 1  # of four, of which three are asked for
    engine = system.engine
    engine.capture()
    assert counted["stats"]["unique_graphs"] == 3  # of one, two and three, which is all


def test_an_engine_compiles_few_sizes(catalog: Catalog) -> None:
    chosen = read(a_generation(), catalog)
    weights = list(initial(chosen, "fp32", 1, torch.device("cpu")))
    for execution, sequences, said in (("compile", 129, "batches of up to 128"), ("blocks", 1, "by blocks")):
        with pytest.raises(NotImplementedError, match=said):
            Engine(Assembly(System("x", execution=execution), catalog), chosen, "fp32", weights, sequences, 32)  # type: ignore[arg-type]  # a word of `Execution`


def test_few_of_long_prompts_are_held_to_the_model_in_fp32() -> None:
    assert generate.compared(3, 1024, 1) == [0, 1, 2]
    found = generate.compared(64, 4096, 1)
    assert (found[0], found[-1], len(found)) == (0, 63, 4)
    assert generate.compared(64, 4096, 2) != found
    assert generate.compared(8, 8192, 1) == [0, 7]
    assert generate.compared(8, 131072, 1) == [7]
    assert generate.compared(1, 131072, 1) == [0]


def test_the_work_of_reading_prompts() -> None:
    """Two operations a weight and token, but the table of logits once, and causal attention."""
    axes = {"B": 2, "S": 8192, "N": 4}
    case = generate.WORKLOAD.case(axes, "bf16", "program", model="llama-3.1-8b")
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    attention = 2 * 8192 * 32 * 4096
    head = 2 * 4096 * 128256
    assert generate.prompt_flops(case) == 2 * (8192 * (2 * 32 * layer + attention) + head)


class Forgets(PartsGenerates):
    """Decodes without what was generated before: the cache's lengths do not grow."""

    def load(self, *arguments: Any) -> None:
        super().load(*arguments)
        step = self.engine.decode

        def decode(tokens: torch.Tensor, rows: Any) -> Next:
            found = step(tokens, rows)
            self.engine.lengths -= 1
            return found

        self.engine.decode = decode  # type: ignore[method-assign]


class Swaps(PartsGenerates):
    """Takes keys for values and values for keys out of the joined product of a step."""

    def load(self, *arguments: Any) -> None:
        super().load(*arguments)
        products, several = self.engine.products, self.engine.products.several

        def swapped(x: Any, *weights: Any) -> Any:
            q, k, v = several(x, *weights)
            return q, v, k

        products.several = swapped  # type: ignore[method-assign]


class Guesses(PartsGenerates):
    """Gives tokens that it did not choose, after the first generation."""

    count = 0

    def generate(self, prompt: torch.Tensor, N: int, stamp: Callable[[], None]) -> torch.Tensor:
        self.count += 1
        found = super().generate(prompt, N, stamp)
        return found if self.count == 1 else (found + 7) % 512


class Tired(PartsGenerates):
    """Gives zeros at once after some generations."""

    count = 0

    def generate(self, prompt: torch.Tensor, N: int, stamp: Callable[[], None]) -> torch.Tensor:
        self.count += 1
        if self.count <= 5:
            return super().generate(prompt, N, stamp)
        for _ in range(N):
            stamp()
        return torch.zeros(len(prompt), N, dtype=torch.int64)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgets, "after given tokens: logits are off"),
        (Swaps, "after given tokens: logits are off"),
        (Guesses, "a random generation of the timed window: the logit of a chosen token"),
    ],
)
def test_a_wrong_generation_has_no_time(
    catalog: Catalog, kind: Callable[[Assembly, int], PartsGenerates], message: str
) -> None:
    with pytest.raises(Incorrect, match=message):
        generated(a_generation(), kind(Assembly(TORCH, catalog), 16))


def test_who_tires_has_no_time(catalog: Catalog) -> None:
    """A generation of two tokens is one step: the window has eight, of which the first three are right."""
    eight = Sampling(min_samples=8, max_samples=8, min_seconds=0, max_seconds=60, warmup_s=0)
    given = Session(Cpu(), 11, 0, eight, Stages())
    case = generate.WORKLOAD.case({"B": 3, "S": 20, "N": 2}, "fp32", "program", model="llama-tiny", page=16)
    with pytest.raises(Incorrect, match=r"(the last|a random) generation of the timed window: the logit of a"):
        generate.measure(case, Tired(Assembly(TORCH, catalog), 16), given, generate.prepare(case, given))


class Wavers(PartsGenerates):
    """Chooses the second of two tokens that are as good, here any other one, in each generation another time."""

    count = 0

    def generate(self, prompt: torch.Tensor, N: int, stamp: Callable[[], None]) -> torch.Tensor:
        self.count += 1
        found = super().generate(prompt, N, stamp)
        found[0, self.count % N] = self.count
        return found


@pytest.mark.parametrize(("kind", "answers"), [(PartsGenerates, 1), (Wavers, 2)])
def test_the_model_in_fp32_reads_a_text_once(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, kind: type[PartsGenerates], answers: int
) -> None:
    case, given = a_generation(), session()
    expected, answer, read = generate.prepare(case, given), inference.answer, []

    def counted(*of: Any) -> torch.Tensor:
        read.append(of)
        return answer(*of)

    monkeypatch.setattr(inference, "answer", counted)
    monkeypatch.setattr(inference, "chosen_well", lambda what, tokens, wanted, dtype: judged.append(wanted))
    judged: list[torch.Tensor] = []
    run = generate.Run(case, kind(Assembly(TORCH, catalog), 16), given, expected)
    run.verify()
    tokens, _, _ = run.generate(run.prompt(2))
    run.check_tokens("another of the same prompts", run.prompt(2), tokens)
    assert (len(read), len(judged)) == (answers, 2), "held to it is every one"
    assert torch.equal(*judged) == (answers == 1)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """A CPU's kernels as they are written: to compile them takes longer than the test."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def in_8_bits(model: str, products: str = "e4m3") -> Case:
    axes = {"B": 2, "S": 20, "N": 6}
    return generate.WORKLOAD.case(axes, "bf16", "program", model=model, page=16, products=products)


EIGHT_BITS = {x: System(x, parts={"fp8_matmul": "kernelmark_cpu"}, precision=x) for x in PRECISIONS}  # type: ignore[arg-type]  # words of `Precision`


COMPILERS = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
"""What loading torch's compiler says, whether it compiles or not."""


@COMPILERS
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_products_of_8_bits_generate(catalog: Catalog, uncompiled: None, model: str, precision: str) -> None:
    case = in_8_bits(model)
    system = generate.assemble(case, Assembly(EIGHT_BITS[precision], catalog))
    found = generated(case, system).samples
    assert 0.02 < found["generation_error"][0] < 0.2  # rounding is seen
    plain = read(case, catalog)
    weights = plain.model.parameters(plain.configuration)
    assert weights < found["weight_bytes"][0] < 2 * weights
    assert case.bytes < in_8_bits(model, "dtype").bytes


class Misscaled(PartsGenerates):
    """Takes the scale of another row of the weights for each."""

    def load(self, *arguments: Any) -> None:
        super().load(*arguments)
        assert self.engine.quantized is not None
        held = self.engine.quantized._held
        for key, (values, scale) in held.items():
            held[key] = values, scale * torch.linspace(0.2, 1.8, len(scale))[:, None]


@COMPILERS
def test_a_wrong_scale_has_no_time(catalog: Catalog, uncompiled: None) -> None:
    with pytest.raises(Incorrect, match=r"after given tokens: logits are off .* allowed 0\.25 in E4M3"):
        generated(in_8_bits("llama-tiny"), Misscaled(Assembly(EIGHT_BITS["parts_rowwise"], catalog), 16, "e4m3"))


class Skips(PartsGenerates):
    """Leaves a layer out: what it adds by is 0."""

    def load(self, chosen: Any, B: int, S: int, N: int, dtype: str, weights: Any) -> None:
        adds = tuple(f"layers.{SKIPPED}.{name}" for name in LAST)
        super().load(chosen, B, S, N, dtype, ((name, x * 0 if name in adds else x) for name, x in weights))


LAYERS, SKIPPED = 12, 9


@COMPILERS
def test_a_skipped_layer_of_many_has_no_time_in_8_bits(
    catalog: Catalog, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size would not show it in a deep model, where rounding moves logits as far."""
    tiny = read(a_generation(), catalog)
    deep = replace(tiny, configuration=replace(tiny.configuration, layers=LAYERS))
    monkeypatch.setattr(generate, "read", lambda case: deep)
    monkeypatch.setattr("kernelmark.suite.workloads._inference.E4M3_LOGITS", 0.5)
    given, case = session(), in_8_bits("llama-tiny")
    expected = generate.prepare(case, given)
    whole, skips = (
        generate.Run(case, kind(Assembly(EIGHT_BITS["parts_rowwise"], catalog), 16, "e4m3"), given, expected)
        for kind in (PartsGenerates, Skips)
    )
    whole.verify()
    assert whole.missing is not None
    assert 0 < whole.missing < 0.2
    with pytest.raises(Incorrect, match=rf"as if (9|10)\d% of layer {SKIPPED} were missing, allowed 30%"):
        skips.verify()


def test_of_long_prompts_some_layers_are_skipped() -> None:
    assert skippable(32, 1024, 1) == list(range(32))
    assert len(set(skippable(32, 8192, 1))) == 4
    assert skippable(32, 8192, 1) != skippable(32, 8192, 2)
    assert len(skippable(2, 1 << 20, 1)) == 1


@pytest.mark.parametrize(
    ("products", "changed", "message"),
    [
        ("dtype", {}, "another case's: products = e4m3"),
        ("e4m3", {"precision": "float8_rowwise"}, "are of training"),
        ("e4m3", {"recompute": "every_layer"}, "are of training"),
    ],
)
def test_8_bits_that_cannot_be(catalog: Catalog, products: str, changed: dict[str, str], message: str) -> None:
    case = in_8_bits("llama-tiny", products)
    system = msgspec.structs.replace(EIGHT_BITS["parts_rowwise"], **changed)
    with pytest.raises(NotImplementedError, match=message):
        generated(case, generate.assemble(case, Assembly(system, catalog)))


def load(**options: Any) -> Case:
    axes = {"rate": 0, "users": 2, "requests": 16, "input": 12, "output": 5} | options.pop("axes", {})
    chosen = {"model": "llama-1m", "load": "closed", "slo": "2000-100"} | options
    return serve.WORKLOAD.case(axes, "fp32", "program", **chosen)


def test_a_million_parameters_are_served(catalog: Catalog, nvml: Callable[..., Any]) -> None:
    """And what the board says meanwhile is kept, a planted one here."""
    case = load()
    given = session()
    given.device.nvml = nvml(sm=[1500, 1980], temperature=[61])  # type: ignore[misc]  # a CPU has none
    system = serve.assemble(case, Assembly(TORCH, catalog))
    found = serve.measure(case, system, given, serve.prepare(case, given))
    samples = found.samples
    assert 3 <= len(samples["request"]) == len(samples["ttft"]) == len(samples["tpot"])
    assert samples["failed"] == (0.0,)
    assert "ttft_p99" not in samples  # of 500 at least
    assert len(samples["stamp_end"]) == len(samples["stamp_first"]) == 16
    assert all(a <= b for a, b in zip(samples["stamp_sent"], samples["stamp_first"], strict=True))
    assert samples["output_per_s"][0] > samples["served_per_s"][0] > 0
    assert found.telemetry is not None
    assert (found.telemetry.sm_mhz, found.telemetry.temperature_c) == ((1500, 1980), 61)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (load(axes={"rate": 1000}), "never mixed"),
        (load(axes={"users": 0}), "never mixed"),
        (load(load="poisson", axes={"users": 0}), "never mixed"),
        (load(load="poisson"), "never mixed"),
        (load(axes={"requests": 5}), "no steady window"),
        (load(load="search", slo="none", axes={"users": 0, "rate": 1000}), "needs limits"),
        (load(load="search", axes={"users": 0, "rate": 1000, "requests": 554}), "at least 555 requests"),
        (load(model="gpt2-tiny", axes={"input": 300}), "positions for 256"),
    ],
)
def test_loads_that_cannot_be(case: Case, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        serve.prepare(case, session())


@pytest.mark.parametrize(
    ("assemble", "case"),
    [(serve.assemble, load()), (generate.assemble, a_generation()), (forward.assemble, a_pass())],
    ids=["serve", "generate", "forward"],
)
def test_a_change_of_training_is_no_system_of_inference(
    catalog: Catalog, assemble: Callable[[Case, Assembly], Any], case: Case
) -> None:
    """Measured without the change, the row would have the name of what it is not."""
    arm = Assembly(System("fp16_scaled", changes=Changes(dtype="fp16")), catalog)
    with pytest.raises(NotImplementedError, match=r"fp16_scaled changes how a model trains.*`converge`"):
        assemble(case, arm)


def test_what_the_engine_does_not_run_is_unsupported_of_a_server_too(catalog: Catalog) -> None:
    case, given = load(), session()
    system = serve.assemble(case, Assembly(System("saves", recompute="every_layer"), catalog))
    with pytest.raises(NotImplementedError, match=r"^recomputing, optimizer states"):
        serve.measure(case, system, given, serve.prepare(case, given))


class Limited(serve.Run):
    """A search at a server that meets the limits up to a rate, where each rate takes seconds of a played clock."""

    def __init__(self, upto: float, left_s: float, rate: float = 4.0) -> None:
        axes = {"users": 0, "rate": round(1000 * rate), "requests": 600}
        self.case = load(load="search", axes=axes)
        self.load, self.limits = serve.read_load(self.case), serve.limits(self.case)
        self.searched = self.found = None
        self.probes, self.start_ms, self.system = [], 1.0, SimpleNamespace(checked=True)
        self.upto, self.left_s, self.session = upto, left_s, self  # type: ignore[assignment]  # its clock

    def loaded(self, wanted: Load, number: int = 0) -> serve.Loaded:
        self.left_s -= wanted.requests / wanted.rate
        outcome = "ok" if wanted.rate <= self.upto else "timeout"
        seen = [Seen(i, i, 0, 1, 1, 2, tokens=1, outcome=outcome) for i in range(500)]
        return serve.Loaded(wanted, (), seen, Window(0, 500), 0, (), False)


class Refused(serve.Run):
    """A closed load at a server that answers each user once, and nobody after that."""

    def __init__(self) -> None:
        self.case = load()
        self.load, self.limits = serve.read_load(self.case), serve.limits(self.case)
        self.session = session()

    def ask(self, asked: Any, users: int, chunks_per_s: float) -> tuple[list[Seen], list[float], int]:
        seen = []
        for x in asked:
            ok = x.number < users
            stamps = {"first": x.number + 2, "last": x.number + 2} if ok else {}
            end, outcome = x.number + 3, "ok" if ok else "http 429"
            seen.append(Seen(x.number, x.number, x.number + 1, end=end, outcome=outcome, **stamps))
        return seen, [], 0


def test_a_window_in_which_nothing_ended_well_is_no_measurement() -> None:
    """Its row would have no latency, of which no record can be made."""
    with pytest.raises(ServerFailed, match=r"no request of the steady window ended well: \d+ × http 429$"):
        Refused().one_load()


@pytest.mark.parametrize(
    ("upto", "left_s", "tried", "rate", "said"),
    [
        (10.0, 1e9, [4, 8, 16, 11.3, 9.51, 10.4], 9.51, "^$"),
        (1.5, 1e9, [4, 2, 1, 1.41, 1.68, 1.54], 1.41, "^$"),
        (3.0, 800.0, [4, 2], 2, r"ended early: 2 requests/s meets the SLO, 4 does not; a further rate may take"),
        (1e9, 1e9, [4 * 2**i for i in range(10)], 2048, r"no higher one was tried; 10 rates were tried"),
    ],
)
def test_a_search_ends_with_what_is_known(
    upto: float, left_s: float, tried: list[float], rate: float, said: str
) -> None:
    run = Limited(upto, left_s)
    run.search()
    assert run.searched is not None
    assert run.found is not None
    assert [x for x, _ in run.searched.tried] == pytest.approx(tried, rel=0.01)
    samples = run.summarize().samples
    assert samples["probe_rate"] == pytest.approx(sorted(tried), rel=0.01)
    for name in ("ttft", "tpot"):  # a rate at which nobody is answered in time has the longest tail there is
        tails = zip(samples["probe_rate"], samples[f"probe_{name}_p99"], strict=True)
        assert all((ms == 60e3) == (x > upto) for x, ms in tails)
    assert samples["probe_saturated"] == (0.0,) * len(tried)
    assert run.searched.low == run.found.wanted.rate == pytest.approx(rate, rel=0.01)
    assert run.left_s > 0
    assert re.search(said, run.searched.said or "")


def test_a_search_without_a_rate_that_meets_says_how_far_it_came() -> None:
    """Halving for ever would take longer each time."""
    for left_s, said in (
        (1800.0, r"no rate down to 1 requests/s meets the SLO; a further rate may take longer"),
        (60.0, r"no rate was tried: 4 requests/s may take longer than the deadline leaves"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            Limited(0.0, left_s).search()


class Drowned(Limited):
    """The same at a server that answers nobody at a rate above that."""

    def loaded(self, wanted: Load, number: int = 0) -> serve.Loaded:
        found = super().loaded(wanted, number)
        self._well(found.seen)
        return found

    def _recovered(self, kept: float) -> None:
        """It does at once."""


@pytest.mark.parametrize(("answers", "asked"), [(1, 1), (3, 3), (99, serve.RECOVERIES)])
def test_a_server_that_was_drowned_is_asked_until_it_answers(answers: int, asked: int) -> None:
    """One request at a time, and not for ever."""
    run = Drowned(0.0, 1e9)
    run.session = SimpleNamespace(left_s=1e9, seed=7)
    seen: list[int] = []

    def ask(requests: Any, users: int, tokens: float) -> Any:
        seen.append(len(requests))
        return [SimpleNamespace(outcome="ok" if len(seen) == answers else "timeout")], 0.0, 0.0

    run.ask = ask
    serve.Run._recovered(run, 0.0)
    assert seen == [1] * asked


def test_a_rate_at_which_nothing_ends_well_does_not_end_a_search() -> None:
    run = Drowned(1.5, 1e9)
    run.search()
    assert run.searched is not None
    assert run.searched.tried == [(pytest.approx(x, rel=0.01), x < 1.5) for x in (4, 2, 1, 1.41, 1.68, 1.54)]
    assert run.searched.low == pytest.approx(1.41, rel=0.01)


def test_a_server_that_answers_at_no_rate_at_all_has_failed() -> None:
    said = "no request ended well: 500 × timeout; nor at any other of the 10 rates tried"
    with pytest.raises(ServerFailed, match=f"^{said}$"):
        Drowned(0.0, 1e9).search()


def test_one_rate_that_drowned_a_server_says_nothing_of_others() -> None:
    """For want of time none was tried."""
    with pytest.raises(NotImplementedError, match="meets the SLO"):
        Drowned(0.0, 400.0).search()
