"""Energy on a board whose power is known and whose counter moves as NVML's does: in steps, late, and not often."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
from kernelmark.suite.measure import energy
from kernelmark.suite.measure.telemetry import Counter, Nvml, Step

CALL_S = 0.8e-3


@dataclass
class Board:
    """Draws `watts` while calls of `CALL_S` are queued, `idle_w` else; its own time goes on as it is looked at.

    The counter is renewed every `step_s`, give or take `jitter` of that; the readings of power say `sensor` times
    what it draws.
    """

    watts: float
    step_s: float = 0.1
    jitter: float = 0.0
    idle_w: float = 90.0
    sensor: float = 1.0
    starved: float = 0.0
    look_s: float = 5e-5
    now: float = 1000.0
    busy_until: float = 0.0
    joules: float = 0.0
    shown: int = 0
    answers: bool = True
    calls: int = 0
    looks: int = 0
    _next: float = 1000.03
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    NVMLError = RuntimeError

    def pass_(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            until = min(end, self._next, *([self.busy_until] if self.busy_until > self.now else []))
            self.joules += (self.watts if self.busy_until > self.now else self.idle_w) * (until - self.now)
            self.now = until
            if self.now >= self._next:
                self.shown = int(self.joules * 1e3)
                self._next += self.step_s * (1 + self.jitter * self._random.uniform(-1, 1))

    def clock(self) -> float:
        self.pass_(1e-6)
        return self.now

    # What NVML answers.
    def nvmlDeviceGetTotalEnergyConsumption(self, handle) -> int:
        if not self.answers:
            raise RuntimeError("not supported")
        self.looks += 1
        self.pass_(self.look_s)
        return self.shown

    def nvmlDeviceGetFieldValues(self, handle, fields) -> list[SimpleNamespace]:
        assert fields == [186]
        drawn = self.watts if self.busy_until > self.now else self.idle_w
        value = SimpleNamespace(uiVal=int(drawn * self.sensor * 1e3))
        return [SimpleNamespace(nvmlReturn=0, value=value)]

    def nvmlDeviceGetUtilizationRates(self, handle) -> SimpleNamespace:
        """Of the last second, if calls were queued all the while."""
        return SimpleNamespace(gpu=100 if self.now - 1000 >= 1 and self.busy_until > self.now else 37)

    # The load.
    def room(self) -> bool:
        return self.busy_until - self.now <= 50e-3

    def more(self) -> int:
        self.busy_until = max(self.now, self.busy_until) + 4 * CALL_S
        self.calls += 4
        return 4

    def wait(self) -> None:
        self.pass_(max(0.0, self.busy_until - self.now))

    @property
    def idle(self) -> float:
        return self.starved

    def measured(self) -> energy.Energy:
        return energy.measured(Nvml(self, None), self, clock=self.clock, pause=self.pass_)


@pytest.mark.parametrize("watts", [180.0, 420.0, 699.0])
@pytest.mark.parametrize(("step_s", "jitter"), [(0.02, 0.0), (0.02, 0.3), (0.06, 0.1), (0.1, 0.0), (0.1, 0.2)])
def test_energy_is_within_two_percent_of_power_times_time(watts, step_s, jitter):
    found = Board(watts, step_s, jitter).measured()
    assert found.reason == ""
    assert len(found.joules) >= energy.WINDOWS
    assert found.call_ms == pytest.approx(CALL_S * 1e3, rel=0.01)
    assert found.joules == pytest.approx([watts * CALL_S] * len(found.joules), rel=0.02)
    assert all(x / (found.call_ms * 1e-3) == pytest.approx(watts, rel=0.02) for x in found.joules)


@pytest.mark.parametrize("look_s", [0.001, 0.006])
def test_a_board_that_answers_late_is_kept_busy_all_the_same(look_s):
    """As in a virtual machine: six milliseconds a look."""
    board = Board(500, step_s=0.02, look_s=look_s)
    found = board.measured()
    assert found.joules == pytest.approx([500 * CALL_S] * len(found.joules), rel=energy.WINDOW_ACCURACY)
    assert found.watts == pytest.approx(500, rel=0.02)
    assert board.now - 1000 < 1.5


@pytest.mark.parametrize("step_s", [0.02, 0.1])
def test_utilization_is_that_of_these_calls(step_s):
    """NVML's is of up to the last second, in which something else may have run before."""
    assert Board(500, step_s).measured().utilization == 100


def test_a_host_that_is_too_slow_is_left_soon():
    board = Board(500, starved=0.5)
    assert board.measured().utilization is None
    board = Board(500, starved=0.5)
    assert board.measured().reason.startswith("back to back the device waits for the host")
    assert board.now - 1000 < energy.SETTLE_S + 0.1


def test_a_window_between_any_two_readings_is_off_by_far_more():
    """Why energy over latency was more than the board can draw: the counter's steps, on the same board."""
    worst = 0.0
    for begin in range(20):
        board = Board(700.0)
        board.busy_until = math.inf
        board.pass_(0.5 + begin * 0.005)
        first, first_s = board.nvmlDeviceGetTotalEnergyConsumption(None), board.now
        board.pass_(0.25)
        power = (board.nvmlDeviceGetTotalEnergyConsumption(None) - first) / 1e3 / (board.now - first_s)
        worst = max(worst, abs(power / 700 - 1))
    assert worst > 0.1


@pytest.mark.parametrize(
    ("board", "reason"),
    [
        (Board(400, answers=False), "the energy counter gave 0 of 8 windows in 3 s"),
        (Board(400, step_s=0.7), "the energy counter gave 3 of 8 windows in 3 s"),
        (Board(400, starved=0.1), "back to back the device waits for the host"),
        (Board(400, sensor=1.2), "the energy counter says 400 W, readings of power 480 W"),
        (Board(400, look_s=0.06), "the energy counter gave"),
    ],
)
def test_nothing_is_said_that_is_not_known(board, reason):
    found = board.measured()
    assert (found.joules, found.call_ms) == ((), None)
    assert found.reason.startswith(reason)
    assert board.now - 1000 < energy.LIMIT_S + 0.1, "and it does not wait for ever"


def test_ranks_queue_as_many_calls_whatever_room_each_has():
    said: list[bool | None] = []

    def told(value):
        said.append(value)
        return value

    first, other = Board(400), Board(300, step_s=0.05)
    energy.measured(Nvml(first, None), first, told, first.clock, first.pass_)
    answers = iter(said)
    energy.measured(Nvml(other, None), other, lambda value: next(answers), other.clock, other.pass_)
    assert other.calls == first.calls > 0
    assert next(answers, "none left") == "none left"


def test_a_sensor_within_its_accuracy_is_no_objection():
    assert Board(400, sensor=1.04).measured().reason == ""


def test_windows_follow_each_other_and_leave_out_the_way_up():
    counter = Counter()
    for i in range(100):
        counter.read(i * 0.01, (i // 5) * 5 * 1000)
    found = energy.windows(counter.steps, 0.0)
    assert found[0][0].seen_s >= energy.SETTLE_S
    assert all(a[1] == b[0] for a, b in pairwise(found))


def test_a_counter_is_not_looked_at_where_it_cannot_have_moved(monkeypatch):
    """Looks of several processes wait for each other."""
    some, every = Board(500), Board(500)
    found = some.measured()
    with monkeypatch.context() as patch:
        patch.setattr(Counter, "due", lambda self, now_s: True)
        assert every.measured().watts == pytest.approx(found.watts, rel=1e-3)
    assert some.looks < 0.65 * every.looks


@pytest.mark.parametrize(
    ("steps", "now", "due"),
    [
        ([], 0.0, True),
        ([1.0, 1.1, 1.2], 1.21, True),  # two say little
        ([0.9, 1.0, 1.1, 1.2], 1.25, False),
        ([0.9, 1.0, 1.1, 1.2], 1.27, True),
        ([0.9, 1.1, 1.2, 1.4], 1.45, False),  # some were missed: the shortest counts
        ([0.9, 1.1, 1.2, 1.4], 1.47, True),
        ([0.79, 0.8, 0.9, 1.0, 1.1], 1.15, False),  # of long ago
    ],
)
def test_a_step_is_awaited_when_most_of_the_shortest_has_passed(steps, now, due):
    counter = Counter()
    counter.steps += [Step(x, 0.001, int(x * 1e6)) for x in steps]
    assert counter.due(now) is due


def test_steps_are_told_from_readings():
    counter = Counter()
    for seconds, value in [(0, 5), (1, 5), (2, 9), (2.5, 9), (3, 10)]:
        counter.read(seconds, value)
    assert counter.steps == [Step(2, 1, 9), Step(3, 0.5, 10)]
    counter.read(4, 3)  # the driver was loaded anew
    assert counter.steps == []


def test_power_is_known_where_the_steps_were_seen_soon_enough():
    first = Step(1.0, 0.02, 0)
    assert first.power_w(Step(2.0, 0.02, 350_000)) == 350
    assert first.power_w(Step(2.0, 0.03, 350_000)) is None
    assert first.power_w(Step(2.01, 0.04, 350_000), accuracy=0.05) == pytest.approx(350)
    assert first.power_w(first) is None


def test_the_integral_is_of_time_and_not_of_readings():
    assert energy.integral([(0, 100), (1, 100), (2, 300)]) == 150
    assert energy.integral([(0, 100)]) is None
