"""What a report says first: the run's own question, and no more than its intervals support."""

from __future__ import annotations

from typing import Any

from kernelmark.registry.analysis.peers import peers
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.analysis.worth import worths
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.views import summary
from kernelmark.registry.views.answer import Answer, answer
from kernelmark.registry.views.crossing import contests


def found(journal: Journal) -> Answer:
    measured = rows(journal)
    return answer(measured, summary.overall(measured), contests(journal, measured), worths(journal))


def runs(literal: Any, ours: list[list[float]], torch: float = 2.0, name: str = "kernelmark") -> Journal:
    """A case for each list, with a time for each replicate."""
    out = []
    for number, times in enumerate(ours):
        case = literal.case(name=f"S{number}", axes={"S": number})
        for r, ms in enumerate(times):
            out.append(literal.record(name, ms, case=case, replicate=r, provider="kernelmark"))
            out.append(literal.record("torch", torch, case=case, replicate=r))
    return literal.journal(*out, replicates=len(ours[0]))


def test_faster_in_all_cases(literal: Any) -> None:
    told = found(runs(literal, [[1.0, 1.0], [0.5, 0.5]]))
    assert told.question == "Is kernelmark faster than the fastest baseline?"
    assert (told.headline, told.verdict) == ("Faster in all 2 cases", "good")
    (mean,) = told.findings
    assert (mean.value, mean.interval, mean.supported) == ("2.83×", "[2.83, 2.83]", True)


def test_faster_slower_and_undecided_are_counted(literal: Any) -> None:
    told = found(runs(literal, [[1.0, 1.0], [4.0, 4.0], [1.0, 4.0]]))
    assert told.headline == "Faster in 1 of 3 cases, slower in 1, 1 undecided"
    assert [(x.mark, x.name, x.count) for x in told.shares] == [
        ("faster", "faster", 1),
        ("open", "undecided", 1),
        ("slower", "slower", 1),
    ]
    (mean,) = told.findings
    assert not mean.supported  # the interval of the mean holds 1


def test_a_noisy_run_gets_no_number_but_the_reason(literal: Any) -> None:
    told = found(runs(literal, [[1.0, 9.0], [8.0, 0.9]], name="kernelmark_cpu"))
    assert told.question == "Is kernelmark_cpu faster than the fastest baseline?"
    assert (told.headline, told.verdict, told.findings) == ("Too noisy to say", "undecided", ())
    assert told.shares == (), "nothing is decided"
    assert told.reason == (
        "The 95 % interval of each of 2 cases holds 1: one kernel would have to be more than 100 times as fast as "
        "the other for it to show in half of them. Between processes times vary by 56 %. More than 2 replicates, "
        "on a machine that does nothing else, show smaller ones."
    )


def test_narrow_intervals_about_one_show_no_difference(literal: Any) -> None:
    told = found(runs(literal, [[1.999, 2.001]]))
    assert told.headline == "No difference shown"
    assert (
        told.reason == "The 95 % interval of the case holds 1; a difference of more than 0.6 % would have shown."
    )


def test_a_single_process_is_too_few(literal: Any) -> None:
    told = found(runs(literal, [[1.0]]))
    assert (told.headline, told.findings) == ("Too few processes to say", ())


def test_without_a_baseline_there_is_no_speedup(literal: Any) -> None:
    told = found(literal.journal(literal.record("kernelmark"), literal.record("x", status="error", reason="y")))
    assert told.headline == "1 of 2 rows measured"


def test_a_run_over_lengths_says_from_which_on(literal: Any) -> None:
    out = []
    for length in (1024, 2048, 4096):
        axes = {"B": 1, "H": 16, "Hkv": 16, "S": length, "D": 128}
        attention = literal.case(operator="attention", name=f"S{length}", axes=axes, options={"mask": "causal"})
        axes = {"B": 1, "S": length, "H": 32, "P": 64, "N": 128, "G": 1}
        ssd = literal.case(operator="ssd", name=f"S{length}", axes=axes)
        axes = {"B": 1, "S": length, "D": 2048, "N": 16}
        scan = literal.case(operator="selective_scan", name=f"S{length}", axes=axes)
        for r in range(5):
            noise = 1 + r / 500
            out.append(literal.record("kernelmark", length**2 / 2e6 * noise, case=attention, replicate=r))
            out.append(literal.record("kernelmark", length / 1e3 * noise, case=ssd, replicate=r))
            out.append(literal.record("kernelmark", 100.0 * noise, case=scan, replicate=r))
    told = found(literal.journal(*out, replicates=5))
    assert told.headline == "ssd from S = 2,000 on"
    assert [x.value for x in told.findings] == ["S = 2,000", "> 4,096"]
    assert told.reason == "Both by kernelmark, width 2048, B1 · bf16 · forward."


def test_ours_against_every_baseline(literal: Any) -> None:
    out = []
    for r in range(2):
        out += [literal.record("kernelmark", 1.0, replicate=r), literal.record("torch", 2.0, replicate=r)]
        out += [literal.record("clone", 0.5, replicate=r, provider="yardstick")]
    journal = literal.journal(*out, literal.record("liger", 3.0), replicates=2)
    (against,) = peers(journal, rows(journal)).values()
    assert against == {"liger": (3.0, None, None), "torch": (2.0, 2.0, 2.0)}
