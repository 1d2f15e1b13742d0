"""The A/B's parts: whose code a side runs, what is measured in which stage, what the budget leaves."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.registry.detection.comparison import Options
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.index import Index
from kernelmark.registry.store.journal import Writer, read
from kernelmark.registry.store.record import Header, Key, Measurement, Record
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.compare import interleaved as ab
from kernelmark.suite.compare.interleaved import Interleaved, NotMeasurable, balanced, rooms, rooted, trees
from kernelmark.suite.compare.revisions import Checkout, Revision
from kernelmark.suite.run import supervisor
from kernelmark.suite.run.process import OutOfTime
from kernelmark.suite.run.supervisor import Run

REVISIONS = Revision("base", "b" * 40), Revision("HEAD", "c" * 40)


@pytest.fixture
def folders(root, tmp_path):
    """Two copies of a root that differ in their kernel and in which baselines they have."""
    out = []
    for name, factor in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        (folder / "kernels/cpu").mkdir(parents=True)
        (folder / "kernels/_common.py").write_text(f"FACTOR = {factor}\n")
        (folder / "kernels/cpu/double.py").write_text(
            "from .._common import FACTOR\nfrom ._side import NAME\n\n\ndef double(x):\n    return NAME, FACTOR\n"
        )
        (folder / "kernels/cpu/_side.py").write_text(f"NAME = {name!r}\n")
        out.append(folder)
    shutil.copytree(root / "baselines", out[1] / "baselines")
    return out


def test_a_tree_runs_its_own_code_and_nothing_else(root, folders):
    catalog = Catalog.of(root)
    sides = [catalog.with_code({str(root): str(x)}) for x in folders]
    ours = [next(x for x in side.of_operator("double") if x.name == "kernelmark_cpu") for side in sides]
    calls = [x.load()(None) for x in ours]
    assert [call(1) for call in calls] == [("one", 1), ("two", 2)]
    assert [any(x.provider == "many" for x in side.implementations) for side in sides] == [False, True]
    # The operators are the harness's for both.
    assert sides[0].operators["double"] is sides[1].operators["double"] or (
        sides[0].operator("double") == sides[1].operator("double")
    )


def test_what_a_tree_lacks_is_not_taken_from_the_installed_program(tmp_path):
    own = Catalog.default().roots[0]
    (tmp_path / "kernels/cpu").mkdir(parents=True)
    (tmp_path / "kernels/cpu/gelu.py").write_text("from .._common import cdiv\n")
    catalog = Catalog.default().with_code({str(own.folder): str(tmp_path)})
    assert [(x.operator, x.name) for x in catalog.implementations if x.provider == "kernelmark"] == [
        ("gelu", "kernelmark_cpu")
    ]
    assert (own.folder / "kernels/_common.py").exists()
    with pytest.raises(ModuleNotFoundError, match="_common"):
        catalog.of_operator("gelu")[0].load()


def test_which_roots_a_checkout_holds(sleeper, tmp_path, monkeypatch):
    checkout = Checkout.here(sleeper.folder)
    with pytest.raises(InputError, match="holds no kernels that this program would measure.*KERNELMARK_PATH"):
        rooted(Catalog.default(), checkout)
    monkeypatch.setenv("KERNELMARK_PATH", str(sleeper.folder))
    places = rooted(Catalog.default(), checkout)
    assert places == {str(sleeper.folder): "."}
    assert rooms(places.values()) == ["kernels", "baselines"]
    assert rooms(["deep/er"]) == ["deep/er/kernels", "deep/er/baselines"]
    # A checkout of this program stands for the installed one.
    sleeper.commit(suite__operators__x="", kernels__y="")
    monkeypatch.delenv("KERNELMARK_PATH")
    assert list(rooted(Catalog.default(), checkout).values()) == ["."]


@pytest.fixture
def plan(root, plan_file):
    return plans.load(str(plan_file([16, 64])), Catalog.of(root), "cpu")


def test_a_side_without_what_is_asked_for(root, folders, plan):
    catalog, places = Catalog.of(root), {str(root): "."}
    sides = list(zip(REVISIONS, folders, strict=True))
    both = trees(sides, places, catalog, plan, "cpu", ["kernelmark"])
    assert [len(x.cells) for x in both] == [2, 2]
    with pytest.raises(NotMeasurable, match="only HEAD .* has what is asked for.*unknown implementation 'many'"):
        trees(sides, places, catalog, plan, "cpu", ["many"])
    with pytest.raises(InputError, match="unknown implementation 'nonsense'") as error:
        trees(sides, places, catalog, plan, "cpu", ["nonsense"])
    assert error.value.exit_code == 2
    # What no commit holds cannot have changed.
    with pytest.raises(NotMeasurable, match="nothing that runs on cpu"):
        trees(sides, places, catalog, plan, "cpu", ["yardstick"])


@dataclass
class Bench(Run):
    """A run without workers: a time by commit, case and replicate; a clock that goes on by a second each."""

    def replicate(self, replicate, cells):
        if CLOCK.now >= self.until:
            raise OutOfTime
        if self._writer is None:
            self._begin()
        CLOCK.now += 1
        for cell in cells:
            sample = TIMES[self.commit[0][0]](cell.case.axes["N"], replicate, self.seed)
            code = CODE.get((self.commit[0][0], cell.case.axes["N"])) if self.code_told and not replicate else None
            measured = Measurement({"latency": (sample,) * 6}, "monotonic", code=code)
            one = Record(
                cell.case,
                cell.implementation.name,
                "kernelmark",
                "1",
                replicate,
                0,
                cell.cache,
                "ok",
                None,
                measured,
            )
            self._write_record(one)
        CALLS.append((self.commit[0][0], replicate, self.seed, sorted(x.case.axes["N"] for x in cells)))

    def _begin(self):
        self._writer = Writer(self.path)
        header = Header(
            schema_version=2, run=self.name, created="2026-11-21T00:00:00+00:00", harness="1",
            commit=self.commit[0], dirty=self.commit[1], plan=self.plan.name, seed=self.seed,
            replicates=self.plan.replicates, device="cpu", key="k", conditions={"device": "cpu"}, environment={},
            request=self.plan.request(self.cells, self.request),
        )  # fmt: skip
        self._writer.write(header)
        self.past = supervisor.Journal(header)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()
CALLS: list[tuple[str, int, int, list[int]]] = []
TIMES: dict[str, object] = {}
CODE: dict[tuple[str, int], str] = {}
"""What a commit's case launches."""


def wobble(N: int, replicate: int, seed: int) -> float:
    return 1 + 0.002 * math.sin(37 * N + 11 * replicate + seed)


@pytest.fixture
def make(root, folders, plan, tmp_path, monkeypatch):
    """An A/B of two cases on a bench: the one of N = 64 is 10 % slower now."""
    CLOCK.now, CALLS[:] = 0.0, []
    CODE.clear()
    TIMES.update(b=wobble, c=lambda N, r, s: wobble(N, r + 1, s) * (1.1 if N == 64 else 1))
    monkeypatch.setattr(ab, "Run", Bench)
    monkeypatch.setattr(ab, "time", CLOCK)
    catalog = Catalog.of(root)
    base, current = trees(
        list(zip(REVISIONS, folders, strict=True)), {str(root): "."}, catalog, plan, "cpu", ["kernelmark"]
    )
    told: list[str] = []

    def interleaved(until: float = math.inf) -> Interleaved:
        home = Home(tmp_path / "home")
        home.journals.mkdir(parents=True, exist_ok=True)
        out = Interleaved(base, current, plan, "cpu", home, Index(home), Options(), 7, until, told.append)
        out.told = told
        return out

    return interleaved


def kinds(one: Interleaved) -> dict[int, str]:
    return {16 if "N16" in x.key.case else 64: x.kind for x in one.progress.verdicts}


def test_stage_two_measures_what_was_flagged_on_fresh_pairs(make):
    one = make()
    one.compare()
    assert kinds(one) == {16: "no change", 64: "regression"}
    assert {x.stage for x in one.progress.verdicts} == {1, 2}
    first, second = CALLS[:12], CALLS[12:]
    order = "".join(x[0] for x in first)
    assert all(order[i : i + 4] in ("bccb", "cbbc") for i in range(0, 12, 4)), "AB BA in balanced blocks"
    assert {x[2] for x in first} == {8}
    assert {x[2] for x in second} == {9}, "other inputs"
    assert len(second) == 20
    assert all(x[3] == [64] for x in second)
    journals = [read(x) for x in sorted(one.home.journals.glob("*.jsonl"))]
    assert sorted((x.header.commit[0], x.header.replicates, x.header.request.stage) for x in journals) == [
        ("b", 6, 1), ("b", 10, 2), ("c", 6, 1), ("c", 10, 2),
    ]  # fmt: skip
    by_name = {x.header.run: x for x in journals}
    for x in journals:
        assert by_name[x.header.request.partner].header.request.partner == x.header.run
        assert x.footers[-1].complete
        assert len(x.header.request.cases) == (2 if x.header.request.stage == 1 else 1)


@given(st.integers(2, 6), st.text(max_size=5), st.integers(1, 12))
def test_orders_are_balanced(arms, seed, blocks):
    """Every arm comes as early as late: a linear drift adds the same to each, and so does being second."""
    orders = list(islice(balanced(arms, seed), 2 * blocks))
    assert all(sorted(x) == list(range(arms)) for x in orders)
    for arm in range(arms):
        assert sum(x.index(arm) for x in orders) == blocks * (arms - 1)
    assert orders == list(islice(balanced(arms, seed), 2 * blocks))


def test_the_first_of_a_block_is_random():
    assert {next(balanced(2, str(seed))) for seed in range(20)} == {(0, 1), (1, 0)}


def test_the_same_code_is_measured_once(make, folders):
    """The commits differ in words: one pair shows that the rows still run, and nothing is left to decide."""
    for name in ("kernels/_common.py", "kernels/cpu/_side.py"):
        (folders[1] / name).write_text("# words\n" + (folders[0] / name).read_text())
    one = make()
    one.compare()
    assert kinds(one) == {16: "no change", 64: "no change"}
    assert {x.reason.partition(":")[0] for x in one.progress.verdicts} == {"the same code"}
    assert len(CALLS) == 2
    again = make()
    again.measure_same = True
    again.compare()
    assert kinds(again)[64] == "regression", "as the bench has it, whatever the code is"


def test_the_same_machine_code_is_measured_once(make, folders):
    """The sources differ; what one case launches is the same on both sides, as the first pair shows."""
    CODE.update({("b", 16): "1 launches " + "a" * 64, ("c", 16): "1 launches " + "a" * 64})
    CODE.update({("b", 64): "2 launches " + "a" * 64, ("c", 64): "2 launches " + "b" * 64})
    one = make()
    one.compare()
    assert kinds(one) == {16: "no change", 64: "regression"}
    said = {x.key.case[:3]: x.reason for x in one.progress.verdicts}
    assert said["N16"].startswith("the same machine code: both sides launch 1 kernel with the same grids")
    assert [x[3] for x in CALLS[:4]] == [[16, 64], [16, 64], [64], [64]]
    assert "the same machine code on both sides: 1 row, of which this pair is enough" in one.told
    # Of all rows: the first pair is the last.
    CODE[("c", 64)] = CODE[("b", 64)]
    CALLS.clear()
    again = make()
    CODE.update({(side, N): "3 launches " + "a" * 64 for side in "bc" for N in (16, 64)})
    again.compare()
    assert kinds(again) == {16: "no change", 64: "no change"}
    assert len(CALLS) == 2


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("import math", "no change"),
        ("import ctypes", "regression"),
        ("import cupy", "regression"),
        ("from torch.utils import cpp_extension", "regression"),
        ("GRAPH = torch.cuda.CUDAGraph", "regression"),
    ],
)
def test_launches_that_may_be_hidden_decide_nothing(make, folders, line, kind):
    """The same launches as far as they are seen; this source may run more on a device."""
    for folder in folders:
        (folder / "kernels/cpu/_side.py").write_text(f"NAME = {folder.name!r}\n{line}\n")
    CODE.update({(side, N): "3 launches " + "a" * 64 for side in "bc" for N in (16, 64)})
    one = make()
    one.compare()
    assert kinds(one)[64] == kind


def test_what_the_budget_can_settle_is_said(make):
    one = make(100)
    one.compare()
    before, after = [x for x in one.told if x.startswith("budget")]
    assert before.startswith("budget: 100 s; how long a pair takes is not known yet (16 pairs of a row")
    assert after.startswith("budget: a pair of all rows takes 2 s (measured), so there is time for 49 more pairs")
    assert "which find 5.0 % where processes vary by up to" in after


def test_the_noise_seen_is_remembered(make):
    one = make()
    one.compare()
    remembered = Index(one.home).spreads("k")
    assert {len(x) for x in remembered.values()} == {1}
    make().compare()
    assert {len(x) for x in Index(one.home).spreads("k").values()} == {2}


def test_only_the_rows_named(make):
    one = make()
    one.compare([Key("double", "N64-fp32-forward", "kernelmark_cpu", "hot")])
    assert kinds(one) == {64: "regression"}
    with pytest.raises(NotMeasurable):
        make().compare([Key("double", "N7", "kernelmark_cpu", "hot")])


@pytest.mark.parametrize(
    ("until", "expected", "said"),
    [
        (0, {16: "inconclusive", 64: "inconclusive"}, None),
        (1, {16: "inconclusive", 64: "inconclusive"}, "the budget ended after 0 of 6 pairs"),
        (6, {16: "no change", 64: "inconclusive"}, "the budget ended after 3 of 6 pairs"),
        (12, {16: "no change", 64: "inconclusive"}, None),
        (21, {16: "no change", 64: "inconclusive"}, "the budget ended after 4 of 10 pairs"),
        (23, {16: "no change", 64: "regression"}, "the budget ended after 5 of 10 pairs"),
        (32, {16: "no change", 64: "regression"}, None),
    ],
)
def test_when_the_budget_ends(make, until, expected, said):
    one = make(until)
    one.compare()
    assert kinds(one) == expected
    assert CLOCK.now <= until
    ended = [x for x in one.told if "the budget ended" in x]
    assert ended == ([said] if said else [])


def test_a_worker_is_ended_with_the_budget(root, plan_file, tmp_path, processes):
    catalog = Catalog.of(root)
    plan = plans.load(str(plan_file([16], 1)), catalog, "cpu")
    run = Run(
        plan, plan.cells(catalog, "cpu", ["hangs"]), catalog, "cpu", Home(tmp_path / "home"), seed=1,
        roots=(str(root),), ceilings=False, until=time.monotonic() + 3,
    )  # fmt: skip
    with pytest.raises(OutOfTime), run.session():
        run.replicate(0, run.cells)
    helpers = root / "baselines/helpers"
    if helpers.exists():  # the implementation was reached within the time
        # Killed, but perhaps not taken off the list of processes yet.
        pids = [int(x) for x in helpers.read_text().split()]
        processes.wait_for(lambda: not any(processes.alive(x) for x in pids), "the end of what it started")
    if run.path.exists():
        journal = read(run.path)
        assert journal.records == ()
        assert not journal.footers[-1].complete


def test_one_side_of_a_comparison_is_not_resumed(make):
    one = make()
    one.compare()
    name = one.home.runs()[0]
    with pytest.raises(InputError, match="is one side of a comparison of commits"):
        supervisor.resume(name, one.home, one.base.catalog, supervisor.Silent())
