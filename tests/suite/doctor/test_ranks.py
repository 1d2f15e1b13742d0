"""What the doctor makes of planted faults of ranks, on literal journals (`make test-ranks`: on real ones)."""

from __future__ import annotations

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.record import Case, Header, Measurement, Record
from kernelmark.suite.doctor import ranks
from kernelmark.suite.doctor.examination import QUICK

CASE = Case("shared_chain", "N240-gpus2-fp32-forward", {"N": 240, "gpus": 2}, {}, "fp32", "forward", "5", 1, 1)
ENDS = {
    "skipped_chunk": ("incorrect", "verify: rank 1 of 2: output: relative error 0.2"),
    "stale_flag": ("incorrect", "verify: rank 1 of 2: output: relative error 1.2"),
    "hang": ("timeout", "verify: not finished within 16 s: rank 1 of 2 is in x.py:3 f; the others wait"),
    "kill": ("crashed", "verify: rank 1 of 2: its process was ended by SIGKILL"),
}


def journal(slower=1.05, **ends) -> Journal:
    def record(name, replicate, ms, status="ok", reason=None):
        seen = None if ms is None else Measurement({"latency": (ms,) * 7}, "monotonic")
        return Record(CASE, name, "rank_faults", None, replicate, 0, "cold", status, reason, seen)

    timed = [
        record(name, i, ms) for i in range(4) for name, ms in (("honest", 1.0), ("straggler", slower + i / 1e3))
    ]
    header = Header(2, "run", "", "0.1.0", None, False, "doctor", 0, 4, "cpu", "k", {}, {})
    return Journal(header, (*timed, *(record(name, 0, None, *end) for name, end in (ENDS | ends).items())))


def verdicts(seen: Journal) -> dict[str, str]:
    return {x.name: x.verdict for x in ranks.judge(seen, 2)}


def test_all_is_caught():
    assert set(verdicts(journal()).values()) == {"caught"}
    assert len(verdicts(journal())) == 5


def test_a_straggler_that_does_not_show_is_missed():
    """As the mean over ranks would give it, or rank 0's own time."""
    assert verdicts(journal(slower=1.0))[ranks.STRAGGLER] == "missed"


@pytest.mark.parametrize("fault", ENDS)
def test_a_rank_that_is_not_named_is_missed(fault):
    status, reason = ENDS[fault]
    unnamed = journal(**{fault: (status, reason.replace("rank 1 of 2", "a rank"))})
    assert verdicts(unnamed)[ranks.ENDS[fault][0]] == "missed"


@pytest.mark.ranks
def test_planted_faults_of_ranks_are_caught(tmp_path):
    found = {x.name: x.verdict for x in ranks.planted("cpu", Home(tmp_path), 2, QUICK)}
    assert found.pop(ranks.STRAGGLER) in ("caught", "unsure")
    assert set(found.values()) == {"caught"}
