"""A small checkpoint made by its command, and parts exchanged in it: a right one, a rounded one, a wrong one."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernelmark.registry.store.record import Case
from kernelmark.suite import cli
from kernelmark.suite import plan as plans
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect, Unavailable
from kernelmark.suite.model import chosen
from kernelmark.suite.system import Assembly, Changes, System
from kernelmark.suite.workloads import _text, _weights, converge, quality
from kernelmark.suite.workloads._lm_eval import MADE, accuracy, continued, examples, language_model, score
from kernelmark.suite.workloads._lm_eval import made as task_of

S = 32


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> str:
    """A folder with a checkpoint of a tiny model, made by the command."""
    folder = tmp_path_factory.mktemp("checkpoints")
    patch = pytest.MonkeyPatch()
    patch.setenv("KERNELMARK_CHECKPOINTS", str(folder))
    arguments = ["checkpoint", "gpt2-tiny", "--data", "synthetic", "--steps", "30", "--batch", "4"]
    with pytest.raises(SystemExit) as ended:
        cli.run_command(cli.cli, [*arguments, "--sequence", str(S), "--device", "cpu"])
    patch.undo()
    assert not ended.value.code
    assert [x.name for x in folder.iterdir()] == ["gpt2-tiny-synthetic-30-B4-S32-seed0-fp32.pt"]
    return str(folder)


@pytest.fixture
def exchange(made, catalog, monkeypatch):
    """Measures a system on that checkpoint."""
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", made)

    def do(system: System, parts: dict | None = None, steps: int = 30, **options: str):
        case = planned(steps, **options)
        session = Session(Cpu(), 3, 0, Sampling(), Stages())
        trainer = quality.assemble(case, Assembly(system, catalog))
        if parts:
            given = trainer.parts
            trainer.parts = lambda device: given(device) | parts
        return quality.measure(case, trainer, session, quality.prepare(case, session))

    return do


def test_the_same_kernels_cost_nothing(exchange, made):
    measured = exchange(System("torch"))
    found = measured.samples
    weights = next(Path(made).iterdir()).read_bytes()
    assert measured.remarks == (f"weights of SHA-256 {hashlib.sha256(weights).hexdigest()[:16]}",)
    assert found["kl"][0] < 1e-8
    assert found["top1_agreement"] == (1.0,)
    assert abs(found["quality_change"][0]) < 1e-6
    assert 4 < found["quality_bits"][0] < 8.5, "it has learned something, of 9 bits that 512 tokens have"
    assert found["needle_bits"][0] > 3
    assert found["copying_bits"][0] > 3


def test_eight_bits_cost_a_little(exchange):
    found = exchange(System("fp8", changes=Changes(products="e4m3_rowwise"))).samples
    assert 1e-6 < found["kl"][0] < 2e-2
    assert found["quality_change"][0] != 0


def test_a_wrong_kernel_is_incorrect(exchange):
    def relu(x, approximate):
        return torch.relu(x)

    with pytest.raises(Incorrect, match="KL divergence .* nats a byte, allowed 1e-05"):
        exchange(System("torch"), parts={"activation": relu})


def exchanged_alone(catalog):
    """Model and system of each row of plan `quality_parts` but the base's."""
    plan = plans.load("quality_parts", catalog, "cuda")
    systems = {x.name: x for x in plan.systems}
    return [
        (str(case.options["model"]), systems[x])
        for case in plan.cases
        for x in plan.only[case.full_name]
        if x != "torch"
    ]


def test_a_plan_exchanges_every_part_of_a_model_by_itself(catalog):
    """What is put in for each part is PyTorch's but for one, and ours is put in for each that logits need."""
    ours: dict[str, set[str]] = {}
    for name, system in exchanged_alone(catalog):
        model = chosen(catalog.models, name)
        assembly = Assembly(system, catalog)
        parts = model.model.parts(model.configuration, 2, 64)
        put_in = {x.operator: assembly.implementation(x.name, x.operator, "cuda") for x in parts}
        ((operator, other),) = [(x, y) for x, y in put_in.items() if y.name != "torch"]
        assert system.parts == {operator: other.name}
        if other.provider == "kernelmark":
            ours.setdefault(name, set()).add(operator)
    assert ours == {
        "gpt2-86m-bytes": {"layer_norm", "attention", "gelu"},
        "mamba2-86m-bytes": {"rms_norm", "add_rms_norm", "causal_conv1d", "ssd", "gated_rms_norm"},
    }


COMPILED = (
    pytest.mark.minutes,  # compiled for CPUs
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # which torch's compiler uses
)


@pytest.mark.parametrize(
    ("operator", "by"),
    [
        ("attention", "sdpa_math"),
        *(pytest.param(x, "kernelmark_cpu", marks=COMPILED) for x in ("attention", "layer_norm", "gelu")),
    ],
)
def test_a_single_part_exchanged_in_a_checkpoint_costs_no_more_than_rounding(exchange, monkeypatch, operator, by):
    """It is called, at least once a layer, and PyTorch's are for all other parts."""
    called: list[tuple[str, str]] = []
    given = Assembly.call

    def call(self, part, of, *rest):
        made, name = given(self, part, of, *rest), self.implementation(part, of, rest[-1]).name
        return lambda *x, **y: (called.append((of, name)), made(*x, **y))[1]

    monkeypatch.setattr(Assembly, "call", call)
    found = exchange(System("alone", parts={operator: by})).samples
    assert called.count((operator, by)) >= 2
    assert {name for of, name in called if of != operator} == {"torch"}
    assert found["kl"][0] < 1e-8
    assert abs(found["quality_change"][0]) < 1e-6


def test_another_function_is_told_and_not_refused(exchange):
    found = exchange(System("linear", changes=Changes(attention="linear"))).samples
    assert found["kl"][0] > 1e-5


def test_what_is_not_here_says_how_to_make_it(exchange):
    with pytest.raises(Unavailable, match="kernelmark checkpoint gpt2-tiny --data synthetic --steps 31"):
        exchange(System("torch"), steps=31)
    with pytest.raises(NotImplementedError, match="parts are exchanged"):
        exchange(System("torch", execution="compile"))


def planned(steps: int = 30, **options: str) -> Case:
    options = {"model": "gpt2-tiny", "data": "synthetic", **options}
    return quality.WORKLOAD.case({"B": 4, "S": S, "N": steps}, "fp32", "program", **options)


def test_other_weights_are_another_case(made, monkeypatch, tmp_path):
    """Whatever their file's name says; and a process that finds others than were planned with measures nothing."""
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", made)
    before = planned()
    assert planned().spec == before.spec
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", str(tmp_path))
    absent = planned()
    found = _weights.Checkpoint(next(Path(made).iterdir())).load("cpu")
    trained = converge.WORKLOAD.case(
        {"B": 4, "S": S, "N": 30}, "fp32", "program", model="gpt2-tiny", data="synthetic"
    )
    assert (
        _weights.save(trained, 0, {name: 2 * x for name, x in found.items()}).name
        == next(Path(made).iterdir()).name
    )
    after = planned()
    assert before.name == absent.name == after.name
    assert len({before.spec, absent.spec, after.spec}) == 3
    for case in (before, absent):
        with pytest.raises(Unavailable, match="data: the checkpoint here is another"):
            quality.prepare(case, Session(Cpu(), 3, 0, Sampling(), Stages()))


def test_weights_of_other_options_stand_beside_each_other_and_are_not_guessed(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", str(tmp_path))
    options = {"model": "gpt2-tiny", "data": "synthetic"}
    for B, sequence, dtype, seed in (
        (4, 32, "fp32", 0),
        (8, 32, "fp32", 0),
        (4, 64, "fp32", 0),
        (4, 32, "bf16", 0),
        (4, 32, "fp32", 1),
    ):
        case = converge.WORKLOAD.case({"B": B, "S": sequence, "N": 30}, dtype, "program", **options)
        _weights.save(case, seed, {"x": torch.zeros(1)})
    assert len(list(tmp_path.iterdir())) == 5
    with pytest.raises(
        Unavailable, match=r"data: 5 checkpoints here, gpt2-tiny-synthetic-30-B4-S32-seed0-bf16\.pt, "
    ):
        quality.prepare(planned(), Session(Cpu(), 3, 0, Sampling(), Stages()))


def test_the_model_and_the_data_are_of_the_case(monkeypatch):
    """What their definitions say is in the hash, as of `converge`."""
    before = planned().spec
    monkeypatch.setattr(_text, "SYNTHETIC", {"train": 1, "validation": 1})
    assert planned().spec != before
    model = converge.read(planned()).chosen.model
    assert {model.module, model.weights} <= {x for x in quality.WORKLOAD.computes(planned()) if callable(x)}


def test_a_checkpoint_that_cannot_be_written_is_an_error(monkeypatch, tmp_path, capsys):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", str(tmp_path))
    monkeypatch.setattr(os, "fsync", full)
    arguments = ["checkpoint", "gpt2-tiny", "--data", "synthetic", "--steps", "1", "--batch", "1"]
    with pytest.raises(SystemExit) as ended:
        cli.run_command(cli.cli, [*arguments, "--sequence", "16", "--device", "cpu"])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert "gpt2-tiny-synthetic-1-B1-S16-seed0-fp32.pt: No space left on device" in said.err
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run_command(cli.cli, ["checkpoint", "gpt2-tny", "--device", "cpu"])
    assert ended.value.code == 2
    assert "gpt2-tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("bert-tiny", ["--data", "synthetic"], "position 7 sees what comes after it"),
        ("gpt2-tiny", ["--data", "synthetic", "--batch", "1100"], "fewer than a batch of 1100 × 16"),
        ("gpt2-tiny", ["--data", "corpus_gpt2"], "a model of 512 tokens, GPT-2's are 50257"),
    ],
)
def test_a_model_that_cannot_learn_so_is_refused(model, options, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", str(tmp_path))
    arguments = ["checkpoint", model, "--steps", "1", "--batch", "1", "--sequence", "16", "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        cli.run_command(cli.cli, [*arguments, *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [0, 3, 900])
def test_a_damaged_checkpoint_is_named(left, monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", str(tmp_path))
    path = tmp_path / "gpt2-tiny-synthetic-3-B1-S16-seed0-fp32.pt"
    torch.save({"embedding": torch.zeros(512, 64)}, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(Unavailable, match=f"{path.name} in .* is no checkpoint or is damaged"):
        _weights.load("gpt2-tiny", "synthetic", 3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda own: list(own.values()), "it is no table of weights by name, but list"),
        (lambda own: {x: y for x, y in own.items() if x != "norm"}, "there is no norm"),
        # What is copied would be broadcast, and more rows be left out.
        (lambda own: own | {"norm": torch.ones(1)}, r"norm has shape \[1\], the model's \[64\]"),
        (lambda own: own | {"norm": 1.0}, r"norm has shape \[\], the model's \[64\]"),
        (lambda own: own | {"head": torch.ones(512, 64)}, "the model has no head"),
    ],
)
def test_a_checkpoint_of_another_model_is_named(changed, said, made, monkeypatch, tmp_path):
    [path] = Path(made).iterdir()
    monkeypatch.setenv("KERNELMARK_CHECKPOINTS", str(tmp_path))
    torch.save(changed(torch.load(path)), tmp_path / path.name)
    with pytest.raises(Unavailable, match=f"{path.name} in .* holds no weights of gpt2-tiny: {said}"):
        _weights.load("gpt2-tiny", "synthetic", 30)


def certain(tokens: torch.Tensor) -> torch.Tensor:
    """Logits by which the next byte is the last one plus one, with e times the weight of any other."""
    return torch.nn.functional.one_hot((tokens + 1) % 256, 256).float()


def test_continuations_are_scored_by_their_bytes():
    likely = 1.0 - torch.tensor(255 + torch.e).log().item()
    found = score(certain, 2, 8, "cpu", [("a", "bcd"), ("a", "bdd"), ("", "x"), ("0123456789", "ab")])
    assert found[0] == (pytest.approx(3 * likely, rel=1e-5), True)
    assert found[1] == (pytest.approx(3 * likely - 2, rel=1e-5), False)
    assert not found[2][1]
    assert found[3] == (pytest.approx(2 * likely - 1, rel=1e-5), False), "of a long context the end counts"


def test_what_follows_is_generated_greedily():
    asked = [("a", {"until": ["f", "zz"]}), ("x" * 20, {"max_gen_toks": 2}), ("", {"until": "\x0d"})]
    assert continued(certain, 2, 8, "cpu", asked) == ["bcde", "yz", "\x0b\x0c"]
    with pytest.raises(NotImplementedError, match="generates greedily"):
        continued(certain, 2, 8, "cpu", [("a", {"do_sample": True, "temperature": 0.7})])


def test_examples_are_made_of_the_text_and_are_the_same_for_everyone():
    text = _text.synthetic().validation
    whole = bytes(text)
    for task in MADE:
        found = examples(task, text, 64, 20)
        assert found == examples(task, text, 64, 20)
        assert len({x["gold"] for x in found}) > 1
        for x in found:
            context, right = x["context"].encode(), x["choices"][x["gold"]].encode()
            assert len(context) + len(right) <= 64
            if task == "corpus_lines":
                assert context + right in whole
            else:
                half = (len(context) + len(right)) // 2
                assert (context + right)[:half] == (context + right)[half:]


def test_lm_eval_is_asked_through_its_own_interface(exchange, monkeypatch):
    """By a stand-in for the library, whose part of the interface is as in lm_eval 0.4.13."""
    model = ModuleType("lm_eval.api.model")
    model.LM = type("LM", (), {})
    library = ModuleType("lm_eval")
    library.simple_evaluate = lambda model, tasks, **rest: {
        "results": {tasks[0]: {"acc,none": float(model.loglikelihood([SimpleNamespace(args=("a", "b"))])[0][1])}}
    }
    for name, module in (
        ("lm_eval", library),
        ("lm_eval.api", ModuleType("lm_eval.api")),
        (model.__name__, model),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    lm = language_model(certain, 1, 8, "cpu")
    assert accuracy("piqa", lm, 5) == 1.0
    long = lm.loglikelihood_rolling([SimpleNamespace(args=("abcdefghijkl",))])
    assert long[0] < 0
    found = exchange(System("torch"), task="piqa").samples
    assert found["task_accuracy"][0] in (0.0, 1.0)

    def offline(**asked):
        raise ConnectionError("no network")

    library.simple_evaluate = offline
    with pytest.raises(Unavailable, match="data: piqa: no network"):
        accuracy("piqa", lm, 5)

    def broken(**asked):
        raise ValueError("an error of ours")

    library.simple_evaluate = broken
    with pytest.raises(ValueError, match="an error of ours"):
        accuracy("piqa", lm, 5)
    loader = ModuleType("datasets.load")
    exec("def load(**asked):\n    raise ValueError('no cache for piqa')", loader.__dict__)
    library.simple_evaluate = loader.load
    with pytest.raises(Unavailable, match="data: piqa: no cache for piqa"):
        accuracy("piqa", lm, 5)


def test_without_the_library_of_tasks_the_reason_says_what_to_install(exchange, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.api.model", raising=False)
    with pytest.raises(Unavailable, match=r"task piqa: lm_eval is not installed: .*'kernelmark\[quality\]'"):
        exchange(System("torch"), task="piqa")


@pytest.mark.lm_eval
@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("task", MADE)
def test_the_library_finds_what_the_scores_say(exchange, task):
    """On a checkpoint: each choice's likelihood by our scoring, the largest against the right one."""
    asked = []

    def seen(logits, B, sequence, device, pairs):
        asked.extend(pairs)
        return score(logits, B, sequence, device, pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernelmark.suite.workloads._lm_eval.score", seen)
        found = exchange(System("torch"), task=task).samples["task_accuracy"][0]
    docs = examples(task, _text.source("synthetic").validation, S, quality.EXAMPLES)
    assert asked == [(x["context"], choice) for x in docs for choice in x["choices"]]
    # A model that knows nothing but that bytes count up is right where chance has it.
    lm = language_model(certain, 4, S, "cpu")
    scored = score(certain, 4, S, "cpu", asked)
    likely = [[x for x, _ in scored[i : i + 4]] for i in range(0, len(scored), 4)]
    right = [x.index(max(x)) == doc["gold"] for x, doc in zip(likely, docs, strict=True)]
    assert accuracy(task_of(task, docs), lm, len(docs)) == pytest.approx(sum(right) / len(docs))
    assert 0 < found < 1


@pytest.mark.lm_eval
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_the_library_asks_for_text_by_its_own_requests():
    from lm_eval.api.instance import Instance

    lm = language_model(certain, 2, 8, "cpu")
    given = {"until": ["f"], "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}
    request = Instance("generate_until", {}, ("a", given), 0, metadata=("mine", 0, 1))
    assert lm.generate_until([request]) == ["bcde"]
