"""Which messages a supervisor believes: literal ones, at literal times."""

from __future__ import annotations

import pytest
from kernelmark.registry.store.record import Case, Ceiling
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.run.conversation import Conversation, OutOfTurn
from kernelmark.suite.run.messages import CeilingDone, Done, Facts, Message, Result, Stage, Task, TaskCell
from msgspec.structs import replace

CASE = Case("double", "N16", {"N": 16}, {}, "fp32", "forward", "5bec", 128, 0)
TASK = Task("cpu", 1, 0, tuple(TaskCell(i, CASE, "plain", "hot") for i in (4, 7)), Sampling(), ceilings=False)
FACTS = Facts({})


def ended(index: int, status="error", reason="no", measurement=None, **spent_s: float) -> Result:
    return Result(index, status, reason, measurement, spent_s)


def said(*messages: tuple[float, Message], task: Task = TASK) -> None:
    conversation = Conversation(task, 100.0)
    for seconds, message in messages:
        conversation.check(message, 100.0 + seconds)


def test_what_the_harness_sends(literal_measurement):
    said(
        (0, Stage("start")),
        (2, FACTS),
        (2, Stage("build", 4)),
        (2, Stage("build")),
        (3, Stage("verify", 4)),
        (5, ended(4, "ok", None, literal_measurement(1.0, 1.0), verify=2)),
        (5, ended(7)),
        (5, Done({"build": 1})),
    )


def test_ceilings_where_they_were_asked_for():
    task = Task("cpu", 1, 0, TASK.cells, Sampling())
    said((1, FACTS), (1, Stage("ceilings")), (2, CeilingDone(Ceiling("copy", 1, 900.0, 0))), task=task)


def test_a_process_may_end_behind_a_case_of_programs_only():
    def task(*cases: Case) -> Task:
        cells = tuple(TaskCell(i, x, "plain", "hot") for i, x in enumerate(cases))
        return Task("cpu", 1, 0, cells, Sampling(), ceilings=False)

    program = replace(CASE, pass_="program")
    other = replace(program, name="N32")
    said((1, FACTS), (2, ended(0)), (2, ended(1)), (3, Done({})), task=task(program, program, other))
    said((1, FACTS), (2, ended(0)), (2, Stage("verify", 1)), (3, Done({})), task=task(program, program))
    for cases in ((program, program), (CASE, other), (CASE, replace(CASE, name="N32"))):
        with pytest.raises(OutOfTurn, match="the end came before the last result"):
            said((1, FACTS), (2, ended(0)), (3, Done({})), task=task(*cases))
    for begun in ((), ((2, Stage("verify", 0)),)):  # it would be started for ever
        with pytest.raises(OutOfTurn, match="the end came before the last result"):
            said((1, FACTS), *begun, (3, Done({})), task=task(program, program))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([(1, FACTS), (1, FACTS)], "facts came twice"),
        ([(1, FACTS), (1, CeilingDone(Ceiling("copy", 1, 1.0, 0)))], "not being measured"),
        ([(1, Stage("verify", 4))], "a stage came of a cell that was not under way"),
        ([(1, FACTS), (1, Stage("verify", 7))], "a stage came of a cell that was not under way"),
        ([(1, FACTS), (1, ended(7))], "a result came of a cell that was not under way"),
        ([(1, FACTS), (1, ended(4)), (1, ended(4))], "a result came of a cell that was not under way"),
        ([(1, FACTS), (1, Stage("verify", 4)), (1, ended(4)), (1, Stage("sample", 4))], "a stage came of a cell"),
        ([(1, FACTS), (1, Done({}))], "the end came before the last result"),
        ([(1, FACTS), (1, ended(4)), (1, ended(7)), (1, Done({"build": 9.0}))], "its stages took longer"),
        ([(1, FACTS), (1, ended(4, "ok", None))], "without what belongs to it"),
        ([(1, FACTS), (1, ended(4, "error", None))], "without what belongs to it"),
    ],
)
def test_what_it_does_not(messages, why):
    with pytest.raises(OutOfTurn, match=why):
        said(*messages)


def test_times_that_did_not_pass(literal_measurement):
    before = [(1, FACTS), (1, Stage("verify", 4))]
    with pytest.raises(OutOfTurn, match="samples took longer"):
        said(*before, (2, ended(4, "ok", None, literal_measurement(1000.0, 1500.0))))
    with pytest.raises(OutOfTurn, match="stages took longer"):
        said(*before, (2, ended(4, "ok", None, literal_measurement(1.0), sample=3.0)))
    with pytest.raises(OutOfTurn, match="stages took longer"):
        said(*before, (2, ended(4, "ok", None, literal_measurement(1.0), sample=float("nan"))))
    with pytest.raises(OutOfTurn, match="was not begun"):
        said((1, FACTS), (2, ended(4, "ok", None, literal_measurement(1.0))))
    task = Task("cpu", 1, 0, TASK.cells, Sampling())
    with pytest.raises(OutOfTurn, match="a ceiling took longer"):
        said((1, FACTS), (2, CeilingDone(Ceiling("copy", 1, 9e3, 0))), task=task)


@pytest.fixture
def literal_measurement():
    """A measurement of these samples in ms."""
    from kernelmark.registry.store.record import Measurement

    return lambda *samples: Measurement({"latency": samples}, "monotonic")
