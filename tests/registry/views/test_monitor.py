"""The device over a run: the strips, what is not recorded, and what was throttled."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.record import Telemetry
from kernelmark.registry.views.monitor import monitored
from kernelmark.registry.views.report import render

CAP = "software power cap"


def seen(clock: int, *reasons: str) -> Telemetry:
    return Telemetry(sm_mhz=(clock, 2000), power_w=650.0, temperature_c=50, reasons=reasons)


@pytest.fixture
def journal(literal: Any) -> Journal:
    """Two processes; in the first the clock fell to 1500 MHz for half of our samples, in the second hardly."""
    given: list[tuple[str, Telemetry, float | None, tuple[int, ...], int]] = [
        ("torch", seen(1990), 97.0, (), 0),
        ("kernelmark", seen(1500, CAP), None, (0, 1), 0),
        ("torch", seen(1970, CAP), 64.0, (3,), 1),
    ]
    lines = [
        literal.record(
            name,
            [1.0] * 4,
            telemetry=telemetry,
            beside={"utilization": busy},
            throttled=marked,
            replicate=replicate,
        )
        for name, telemetry, busy, marked, replicate in given
    ]
    return literal.journal(*lines, literal.footer(), replicates=2)


def test_the_strips_of_a_run(journal: Journal) -> None:
    found = monitored(journal)
    assert [x for x, _ in found.drawings] == ["SM clock, MHz", "utilization, %"]
    assert found.steady == ("power 650 W", "temperature 50 °C")
    assert found.missing == ("memory clock",)
    assert (found.samples, found.marked, found.measured_s, found.sampling) == (12, 3, 3.0, 0.75)
    drawn = dict(found.drawings)
    assert "aria-label='utilization, 64.00 to 97.00 %'" in drawn["utilization, %"]
    # Seconds 1 to 3 of 3 from 64 to 1116 pixels: the second process, marked, ends at the right and at the bottom,
    # and what has no utilization has no bar. A line stands where the second process begins, and lines lead from
    # where samples begin to where they end.
    grid, replicates, plain, warned = re.findall(r"d='([^']*)'", drawn["utilization, %"])
    assert (grid, replicates) == ("M64 8.0H1116M64 58.0H1116", "M765 2V62")
    assert (plain, warned) == ("M415 8.0V6.5M64 8.0H415", "M1116 58.0V56.5M765 58.0H1116")
    _, _, plain, warned = re.findall(r"d='([^']*)'", drawn["SM clock, MHz"])
    assert plain == "M415 9.0V7.5M64 9.0H415M64 8.0H415"
    assert warned == "M765 58.0V8.0M1116 11.0V8.0M415 58.0H765M415 8.0H765M765 11.0H1116M765 8.0H1116"


def test_a_program_whose_samples_bear_no_marks_says_that_it_was_throttled(literal: Any) -> None:
    """A server's requests are not marked one by one; the device is asked while all of them come."""
    lines = [
        literal.record("kernelmark", telemetry=seen(clock, *reasons), replicate=i)
        for i, (clock, *reasons) in enumerate([(1140, CAP), (1200, CAP), (1980,)])
    ]
    journal = literal.journal(*lines, literal.footer(), replicates=3)
    found = monitored(journal)
    assert (found.marked, found.within) == (0, 2)
    _, _, plain, warned = re.findall(r"d='([^']*)'", dict(found.drawings)["SM clock, MHz"])
    assert (plain.count("V"), warned.count("V")) == (1, 2)
    pytest.importorskip("jinja2", reason="Jinja2 is not installed")
    said = "No sample was marked with a throttle reason. Within 2 measurements one was raised at some time: those"
    assert said in re.sub(r"\s+", " ", render([journal]))


def test_what_was_throttled(journal: Journal) -> None:
    slow, fast = monitored(journal).throttled
    assert (slow.row.implementation, slow.share, slow.clock, slow.slowed) == ("kernelmark", 0.5, 0.75, True)
    assert (fast.row.implementation, fast.share, fast.reasons, fast.slowed) == ("torch", 1 / 8, (CAP,), False)


def test_power_that_the_board_cannot_have_taken_is_not_drawn_but_said(literal: Any) -> None:
    """Journals from before power was taken by whole steps of the energy counter have up to 1.8 times the limit."""

    def found(*watts: float, **conditions: Any) -> Any:
        seen = [Telemetry(power_w=x) for x in watts]
        lines = [literal.record("torch", telemetry=x, replicate=i) for i, x in enumerate(seen)]
        return monitored(literal.journal(*lines, replicates=len(lines), conditions=conditions))

    limited = found(300.0, 735.0, 735.1, 1195.4, power_limit_w=700.0)
    assert "aria-label='power, 300.0 to 735.0 W'" in dict(limited.drawings)["power, W"]
    said = "2 of 4 readings of power, up to 1,195 W, are above the board's limit of 700 W by more than 5 %"
    assert limited.doubted.startswith(said)
    assert found(300.0, 700.0, power_limit_w=700.0).doubted is None
    unlimited = found(300.0, 1195.4)  # a board that does not tell its limit
    assert unlimited.doubted is None
    assert "to 1,195 W'" in dict(unlimited.drawings)["power, W"]
    for odd in ("700 W", "", True, -1, None):  # a header from elsewhere may say anything
        assert found(300.0, 1195.4, power_limit_w=odd).doubted is None
    all_above = found(800.0, power_limit_w=700.0)
    assert "power" not in all_above.missing
    assert all_above.doubted.startswith("1 of 1 readings")


def test_nothing_is_drawn_of_a_device_that_told_nothing(literal: Any) -> None:
    found = monitored(literal.journal(literal.record("torch", 1.0)))
    assert (found.drawings, found.throttled) == ((), ())
    assert found.missing == ("SM clock", "memory clock", "power", "temperature", "utilization")


def test_the_report_has_them(journal: Journal) -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed")
    page = render([journal])
    part = page[page.index("The device over the run</h2>") :].partition("</section>")[0]
    text = re.sub(r"\s+", " ", re.sub(r"<svg.*?</svg>|<[^>]+>", " ", part, flags=re.DOTALL))
    assert (
        "Over 3.0 s of measuring, in the order measured, a line where a fresh process begins. 3 of 12 samples "
        "were taken while a throttle reason was raised: those bars are amber. "
        "Throughout: power 650 W, temperature 50 °C. Not recorded: memory clock." in text
    )
    assert "2 rows that were throttled most" in text
    assert "kernelmark 50 % 75 % software power cap" in text
    assert part.count("<svg class='monitor'") == 2
