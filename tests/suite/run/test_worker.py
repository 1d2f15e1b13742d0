"""A worker's walk over its cells, in this process: on the CPU, and on a device that breaks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from dataclasses import replace

import msgspec
import pytest
import torch
from kernelmark.registry.store.record import Ceiling, Measurement
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure import limits
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.run import fingerprint, worker
from kernelmark.suite.run.messages import CeilingDone, Done, Facts, Message, Result, Stage, Task, TaskCell
from kernelmark.suite.run.worker import catalog_of, work
from kernelmark.suite.workloads import train

SAMPLING = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=5, warmup_s=0)


@pytest.fixture
def task(root):
    """A task of `double`: implementations at the given sizes."""

    def make(*implementations: str, N=(16,), **fields) -> Task:
        operator = Catalog.of(root).operators["double"]
        cases = [operator.case({"N": n}, "fp32", "forward") for n in N]
        cells = [(case, name) for case in cases for name in implementations]
        return Task(
            device="cpu",
            seed=1,
            replicate=0,
            cells=tuple(TaskCell(10 + i, case, name, "hot") for i, (case, name) in enumerate(cells)),
            sampling=SAMPLING,
            roots=(str(root),),
            **({"ceilings": False} | fields),
        )

    return make


def run(task: Task, device=None) -> list[Message]:
    sent: list[Message] = []
    work(task, sent.append, device or Cpu(), {"threads": 2})
    return sent


def results(sent: list[Message]) -> dict[int, Result]:
    return {x.index: x for x in sent if isinstance(x, Result)}


def test_messages_come_in_order(task):
    sent = run(task("plain", "copy"))
    assert sent[0] == Facts({"threads": 2}, fingerprint.python_facts())
    assert isinstance(sent[-1], Done)
    assert sent[-1].spent_s.keys() == {"build"}
    stages = [(x.name, x.index) for x in sent if isinstance(x, Stage)]
    assert stages[:2] == [("build", 10), ("build", None)]
    walk = ["build", "verify", "warm up", "calibrate", "sample", "verify", "summarize"]
    assert stages[2:] == [(name, 10) for name in walk] + [(name, 11) for name in walk]
    ended = results(sent)
    assert [x.status for x in ended.values()] == ["ok", "ok"]
    assert ended[10].measurement.samples["error"] == (0,)
    assert "error" not in ended[11].measurement.samples  # a yardstick has no answer to check
    assert ended[10].spent_s.keys() == set(walk)


def test_each_failure_is_a_status(task):
    ended = results(run(task("wrong", "hoards", "fails", "unable", "plain")))
    assert [(x.status, x.reason) for x in ended.values()][2:] == [
        ("error", "verify: ValueError: no such luck"),
        ("unsupported", "build: only on Sundays"),
        ("ok", None),
    ]
    assert ended[10].status == "incorrect"
    assert ended[11].status == "out_of_memory"


def test_ceilings_come_first_where_asked_for(task, monkeypatch):
    made = Ceiling("copy", 1 << 14, 0.001, 0)
    monkeypatch.setattr(limits, "measure", lambda device, replicate: iter([made]))
    sent = run(task("plain", ceilings=True))
    assert sent[1:3] == [Stage("ceilings"), CeilingDone(made)]
    assert sent[-1].spent_s.keys() == {"ceilings", "build"}
    assert not any(isinstance(x, CeilingDone) for x in run(task("plain")))


def test_inputs_that_cannot_be_built_end_their_case_only(task, root):
    path = root / "operators" / "double.py"
    path.write_text(
        path.read_text().replace("import torch\n", "import torch\n\n    assert case.axes['N'] != 16\n")
    )
    ended = results(run(task("plain", "slow", N=(16, 32))))
    assert [x.status for x in ended.values()] == ["error", "error", "ok", "ok"]
    assert ended[10].reason == ended[11].reason == "building the inputs: AssertionError"


def test_a_check_that_cannot_be_prepared_is_tried_once_for_all_systems():
    """And its seconds count once."""

    def prepare(case, session):
        time.sleep(0.01)
        raise MemoryError("no room for the answer")

    case = train.WORKLOAD.case({"B": 1, "S": 8}, "fp32", "program", model="llama-tiny", state="plain")
    catalog = Catalog.default()
    catalog.__dict__["workloads"] = {"train": replace(train.WORKLOAD, prepare=prepare)}
    cells = tuple(TaskCell(i, case, name, "hot") for i, name in enumerate(("torch", "torch_compile")))
    sent: list[Message] = []
    work(Task("cpu", 1, 0, cells, SAMPLING, ceilings=False), sent.append, Cpu(), {"threads": 2}, catalog)
    first, second = results(sent).values()
    assert first.reason == second.reason == "preparing the check: no room for the answer"
    assert first.status == second.status == "out_of_memory"
    assert first.spent_s["prepare"] >= 0.01
    assert second.spent_s == {}


@pytest.mark.parametrize(("held", "measured"), [(worker.HELD, [0, 1]), (worker.HELD + 1, [0])])
def test_a_process_that_still_holds_programs_leaves_the_next_case_to_another(held, measured):
    """It says that it is done; who asked sees what is left."""

    class Full(Cpu):
        def held(self):
            return held

    given = {"model": "llama-tiny", "state": "plain"}
    cases = [train.WORKLOAD.case({"B": 1, "S": s}, "fp32", "program", **given) for s in (8, 9)]
    catalog = Catalog.default()
    seen = Measurement({"step": (1.0,)}, "monotonic")
    workload = replace(train.WORKLOAD, prepare=lambda *_: None, measure=lambda *_: seen)
    catalog.__dict__["workloads"] = {"train": workload}
    cells = tuple(TaskCell(i, x, "torch", "hot") for i, x in enumerate(cases))
    sent: list[Message] = []
    work(Task("cpu", 1, 0, cells, SAMPLING, ceilings=False), sent.append, Full(), {"threads": 2}, catalog)
    assert list(results(sent)) == measured
    assert isinstance(sent[-1], Done)


@pytest.mark.parametrize(
    ("left", "measured"), [(worker.HELD, ["ok", "out_of_memory", "ok"]), (worker.HELD + 1, ["ok"])]
)
def test_what_has_no_room_beside_what_was_left_is_left_to_another_process(left, measured):
    """The first program leaves so much; what the case itself holds does not count."""

    class Full(Cpu):
        bytes = 7 * worker.HELD  # the answer's

        def held(self):
            return self.bytes

        def synchronize(self):
            if self.bytes < 0:  # with the second program what was left went too
                self.bytes = 0

    device = Full()
    seen = Measurement({"step": (1.0,)}, "monotonic")

    calls = iter(("goes", "has no room", "goes"))

    def measure(case, system, session, prepared):
        device.bytes = 7 * worker.HELD + left
        if next(calls) == "has no room":
            device.bytes = -1
            raise MemoryError("no room")
        return seen

    case = train.WORKLOAD.case({"B": 1, "S": 8}, "fp32", "program", model="llama-tiny", state="plain")
    catalog = Catalog.default()
    workload = replace(train.WORKLOAD, prepare=lambda *_: None, measure=measure)
    catalog.__dict__["workloads"] = {"train": workload}
    names = ("torch", "torch_compile", "torch_compile_blocks")
    cells = tuple(TaskCell(i, case, name, "hot") for i, name in enumerate(names))
    sent: list[Message] = []
    work(Task("cpu", 1, 0, cells, SAMPLING, ceilings=False), sent.append, device, {"threads": 2}, catalog)
    assert [x.status for x in results(sent).values()] == measured
    assert isinstance(sent[-1], Done)


def test_a_failure_leaves_the_inputs_as_they_were(task, root):
    path = root / "baselines" / "many.py"
    path.write_text(path.read_text().replace('raise ValueError("no', 'x.zero_()\n    raise ValueError("no'))
    ended = results(run(task("fails", "plain")))
    assert [x.status for x in ended.values()] == ["error", "ok"]


class Broken(Cpu):
    """A device whose context breaks with the first failure of an implementation."""

    broken = False

    def synchronize(self) -> None:
        if Broken.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Left(Exception):
    """Stands for the end of the process."""


def left(code: int) -> None:
    raise Left(code)


@pytest.fixture
def breaks(monkeypatch):
    """A call that breaks the device; the end of the process is an exception."""
    monkeypatch.setattr(worker.os, "_exit", left)
    monkeypatch.setattr(Broken, "broken", False)

    def call(*arguments, **named):
        Broken.broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    return call


def test_a_broken_context_ends_the_process_after_the_result(task, root, breaks, monkeypatch):
    catalog = Catalog.of(root)
    module = catalog.roots[0].module("baselines", "many")
    monkeypatch.setitem(module.IMPLEMENTATIONS["double"], "fails", lambda case: breaks)
    sent: list[Message] = []
    with pytest.raises(Left) as end:
        work(task("plain", "fails", "slow"), sent.append, Broken(), {}, catalog)
    assert end.value.args == (worker.BROKEN_CONTEXT,)
    ended = results(sent)
    assert [x.status for x in ended.values()] == ["ok", "error"]
    assert "illegal memory access was encountered" in ended[11].reason
    assert "\n" not in ended[11].reason


def test_a_context_that_breaks_while_building(task, root, breaks):
    catalog = Catalog.of(root)
    operator = catalog.operators["double"]
    spoilt = type(
        "Spoilt", (), {"definition": lambda self, name: type(operator)(**{**vars(operator), "inputs": breaks})}
    )
    sent: list[Message] = []
    with pytest.raises(Left):
        work(task("plain", "slow"), sent.append, Broken(), {}, spoilt())
    assert [x.status for x in results(sent).values()] == ["error", "error"]


def test_a_device_that_answers_again_is_used_again(task, root, breaks, monkeypatch):
    """Restoring failed once, but the context lives: the error goes up, and the process ends by it."""
    catalog = Catalog.of(root)
    monkeypatch.setattr(worker, "_leave_if_broken", lambda device, error: None)
    module = catalog.roots[0].module("baselines", "many")
    monkeypatch.setitem(module.IMPLEMENTATIONS["double"], "fails", lambda case: breaks)
    sent: list[Message] = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        work(task("fails", "plain"), sent.append, Broken(), {}, catalog)
    assert list(results(sent)) == [10]


@pytest.mark.parametrize(
    ("error", "judged"),
    [
        (Incorrect("output: 3 of 4"), ("incorrect", "output: 3 of 4")),
        (NotImplementedError(), ("unsupported", "not implemented")),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), ("out_of_memory", "CUDA out of memory.")),
        (MemoryError(), ("out_of_memory", "out of memory")),
        (RuntimeError("x: can't allocate memory: y"), ("out_of_memory", "x: can't allocate memory: y")),
        (ModuleNotFoundError("No module named 'x'"), ("unavailable", "ModuleNotFoundError: No module named 'x'")),
        (ValueError(), ("error", "ValueError")),
        (ValueError("a" * 400), ("error", "ValueError: " + "a" * 300)),
        (AssertionError("\n  first\nsecond"), ("error", "AssertionError: first")),
    ],
)
def test_judged(error, judged):
    assert worker._judged(error) == judged


def test_compiled_code_is_forgotten_between_cases(task, monkeypatch):
    import torch._dynamo

    forgotten = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: forgotten.append(0))
    run(task("plain", "copy", N=(16, 32)))
    assert len(forgotten) == 2
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    run(task("plain"))
    assert len(forgotten) == 2


def test_classes_that_inspect_remembers_are_forgotten_between_cases(task, monkeypatch):
    """As Python has it from 3.12 on; a class of a model holds its weights."""

    @functools.lru_cache
    def remembered(x: object) -> object:
        return x

    monkeypatch.setattr(inspect, "_shadowed_dict_from_mro_tuple", remembered, raising=False)
    remembered(int)
    run(task("plain"))
    assert remembered.cache_info().currsize == 0


def test_tasks_and_messages_travel(task):
    asked = task("plain")
    assert msgspec.json.decode(msgspec.json.encode(asked), type=Task) == asked
    for message in run(asked):
        assert msgspec.json.decode(msgspec.json.encode(message), type=Message) == message
    assert catalog_of(()).operators.keys() == Catalog.default().operators.keys()


def test_an_own_kernels_tuning_is_recorded(task, root):
    (root / "kernels" / "cpu").mkdir(parents=True)
    (root / "kernels" / "cpu" / "double.py").write_text(
        "from types import SimpleNamespace\n\n_kernel = SimpleNamespace(best_config='BLOCK: 64')\n\n\n"
        "def double(x):\n    return x + x\n"
    )
    (ended,) = results(run(task("kernelmark_cpu"))).values()
    assert ended.measurement.tuning == {"_kernel": "BLOCK: 64"}


def test_all_is_done_inside_of_the_device(task):
    class Entered(Cpu):
        inside = False

        @contextlib.contextmanager
        def using(self):
            Entered.inside = True
            yield
            Entered.inside = False

        def synchronize(self) -> None:
            assert Entered.inside

    assert results(run(task("plain"), Entered()))[10].status == "ok"
