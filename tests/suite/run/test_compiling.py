"""Rows compiled ahead: how they are dealt to processes, how they end, and what is left on disk."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import pytest
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.run.compiling import FEW, Compiling, RowEnded, ahead, dealt


@pytest.fixture
def make(root, plan_file, tmp_path):
    """Processes for a plan of `double`, and its cells."""

    def compiling(N=(16,), implementations=("plain",), processes=2, deadline_s=60.0):
        catalog = Catalog.of(root)
        plan = plans.load(str(plan_file(list(N), 1, deadline_s)), catalog, "cpu")
        cells = ahead(plan.cells(catalog, "cpu", implementations), catalog, "cpu")
        made = Compiling(plan, "cpu", processes, 1, tmp_path / "log", tmp_path / "scratch", roots=(str(root),))
        return made, cells

    return compiling


def test_each_row_ends_and_costs_no_other(make, processes, root):
    made, cells = make((16,), ("plain", "wrong", "killed", "hangs", "fails", "unable", "absent"), deadline_s=1.5)
    ended: list[RowEnded] = []
    assert made.run(cells, ended.append) > 0
    found = {}
    for x in ended:
        found.setdefault(x.cell.implementation.name, []).append((x.status, x.reason))
    assert found == {
        "plain": [("ok", None)],
        "wrong": [("ok", None)],  # nobody looks at its answer here
        "killed": [("crashed", "its process was ended by SIGKILL")],
        "hangs": [("timeout", "not finished within 6 s, at many.py:32 hangs")],
        "fails": [("error", "compile: ValueError: no such luck")],
        "unable": [("unsupported", "build: only on Sundays")],
    }
    helpers = [int(x) for x in (root / "baselines" / "helpers").read_text().split()]
    processes.wait_for(lambda: not any(map(processes.alive, helpers)), "the workers' helpers to end")


def test_a_worker_that_cannot_start_is_told_of_each_row(make, tmp_path):
    made, cells = make((16, 32))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    ended: list[RowEnded] = []
    dataclasses.replace(made, python=lambda name: broken).run(cells, ended.append)
    assert [(x.status, x.reason) for x in ended] == [("error", "its process ended with exit code 7")] * 2


def test_who_is_still_at_work_is_not_waited_for(make, processes):
    """As on Ctrl-C: what listens raises, and the processes end."""
    made, cells = make((16,), ("plain", "hangs"))
    before = set(processes.children(os.getpid()))

    def interrupted(ended: RowEnded) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        made.run(cells, interrupted)
    assert set(processes.children(os.getpid())) <= before


def test_cases_stay_whole_and_processes_are_worth_their_start(make):
    _, cells = make(range(16, 16 + 3 * FEW), ("plain", "slow"))
    lots = dealt(cells, 4)
    assert [len(x) for x in lots] == [12] * 4
    assert sorted(id(x) for lot in lots for x in lot) == sorted(map(id, cells))
    names = [{x.case.name for x in lot} for lot in lots]
    assert not any(a & b for i, a in enumerate(names) for b in names[:i])
    assert len(dealt(cells[:4], 4)) == 1
    assert dealt((), 4) == []


def test_what_must_be_apart_has_processes_of_its_own(make):
    _, cells = make((16, 32), ("plain", "slow"))
    apart = dataclasses.replace(cells[0].implementation, apart=True)
    elsewhere = dataclasses.replace(cells[0].implementation, environment="vllm")
    changed = [dataclasses.replace(cells[i], implementation=x) for i, x in ((0, apart), (1, elsewhere))]
    lots = dealt([*changed, *cells[2:]], 4)
    kinds = [{(x.implementation.environment, x.implementation.apart) for x in lot} for lot in lots]
    assert kinds[0] == {("vllm", False)}  # what may take longest comes first
    assert sorted(map(sorted, kinds)) == [[("core", False)], [("core", True)], [("vllm", False)]]


def test_states_of_the_cache_are_one_and_programs_are_left_out():
    catalog = Catalog.default()
    plan = plans.load("quick", catalog, "cpu").but(None, "both", None)
    cells = plan.cells(catalog, "cpu", ("kernelmark", "torch"))
    found = ahead(cells, catalog, "cpu")
    assert {x.identity for x in found} < {x.identity for x in cells}
    assert len(found) == len({(x.case.full_name, x.implementation.name) for x in found})
    train = plans.load("train_tiny", catalog, "cpu")
    assert ahead(train.cells(catalog, "cpu", ()), catalog, "cpu") == ()


CHOOSES = '''
import json
import os
from pathlib import Path

import triton
import triton.language as tl

REQUIRES = ("torch",)


def kernel(x, N: tl.constexpr):
    tl.store(x, N)


def chooses(case):
    """Tells what of its choices is left where the next process looks."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.codecache import PersistentCache

    cache = PersistentCache()
    path = cache.get_local_cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    cache.update_local_cache({"tiles": 64})
    tuned = triton.autotune([triton.Config({"N": 1})], [], cache_results=True)(triton.jit(kernel))
    graphs = torch._inductor.config.fx_graph_cache, torch._functorch.config.enable_autograd_cache
    folders = [os.environ[x] for x in ("HELION_CACHE_DIR", "QUACK_CACHE_DIR", "TILELANG_CACHE_DIR")]
    told = {"tiles": path.exists(), "tuned": tuned.cache_results, "graphs": graphs, "folders": folders}
    Path(__file__).with_name("told").write_text(json.dumps(told))
    return lambda x: x * 2


def replaces(case):
    """Leaves something in the process that others would compile with."""
    import torch

    torch.use_deterministic_algorithms(True)
    return lambda x: x * 2


IMPLEMENTATIONS = {"double": {"replaces": replaces, "chooses": chooses}}
'''


def test_what_compilers_choose_is_not_kept(make, root, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    (root / "baselines" / "choices.py").write_text(CHOOSES)
    made, cells = make((16,), ("chooses",))
    ended: list[RowEnded] = []
    made.run(cells, ended.append)
    assert [(x.status, x.reason) for x in ended] == [("ok", None)]
    told = json.loads((root / "baselines" / "told").read_text())
    assert (told["tiles"], told["tuned"], told["graphs"]) == (False, False, [False, False])
    assert {Path(x).parent for x in told["folders"]} == {tmp_path / "scratch"}


def test_what_one_row_switches_is_put_back_for_the_next(make, root):
    asked = "    import torch\n\n    assert not torch.are_deterministic_algorithms_enabled()\n"
    text = CHOOSES.replace("    cache = PersistentCache()", asked + "    cache = PersistentCache()")
    (root / "baselines" / "choices.py").write_text(text)
    made, cells = make((16,), ("replaces", "chooses"), processes=1)
    ended: list[RowEnded] = []
    made.run(sorted(cells, key=lambda x: x.implementation.name, reverse=True), ended.append)
    assert [(x.cell.implementation.name, x.status, x.reason) for x in ended] == [
        ("replaces", "ok", None), ("chooses", "ok", None)
    ]  # fmt: skip


def test_what_listens_raises_at_once(make):
    """And the others, at work for longer, are not waited for."""
    made, cells = make(range(16, 16 + FEW + 1), ("plain", "hangs"))
    assert len(dealt(cells, 2)) == 2
    quick = [x for x in cells if x.implementation.name == "plain"]
    slow = [x for x in cells if x.implementation.name == "hangs"]
    elsewhere = dataclasses.replace(slow[0].implementation, apart=True)
    apart = [dataclasses.replace(x, implementation=elsewhere) for x in slow]

    def raises(ended: RowEnded) -> None:
        raise ValueError("no disk")

    begin = time.monotonic()
    with pytest.raises(ValueError, match="no disk"):
        made.run([*apart, *quick], raises)
    assert time.monotonic() - begin < 60
