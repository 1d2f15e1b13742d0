"""The Python interface: the same stages and the same gate, in this process."""

from __future__ import annotations

import mmap
import re
import sys

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.suite import api
from kernelmark.suite import memory as memory_module
from kernelmark.suite.api import (
    BaselineConfig,
    MemoryProfiler,
    Runner,
    compare,
    compare_implementations,
    run_benchmark,
)
from kernelmark.suite.measure import limits
from kernelmark.suite.measure.stopping import Sampling

FEW = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=5, warmup_s=0)
AXES = {"N": 32}


@pytest.fixture
def runner(root, monkeypatch):
    """A `Runner` on `double` and two of its implementations, with the quickest of ceilings."""
    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    monkeypatch.setattr(limits, "COPY_BYTES", {"cpu": [1 << 14, 1 << 16]})
    monkeypatch.setattr(limits, "MATMUL_SIZE", {"cpu": 16})
    monkeypatch.setattr(limits, "SAMPLING", FEW)
    return Runner("double", "cpu", only=("plain", "wrong", "absent"), sampling=FEW)


def mine(case):
    return lambda x: x + x


def test_a_runner_measures_what_is_there_and_what_is_added(runner):
    runner.add("mine", mine)
    records = runner.run(AXES, "fp32", cache="hot", replicates=2)
    assert {(x.implementation, x.replicate, x.status) for x in records} == {
        (name, replicate, status)
        for name, status in (("plain", "ok"), ("wrong", "incorrect"), ("mine", "ok"))
        for replicate in (0, 1)
    }
    assert runner.records == list(records)
    rows = {x.implementation: x for x in runner.rows()}
    assert rows["mine"].replicates == 2
    assert runner.ceilings
    assert rows["mine"].limit is None, "with a hot cache bytes set none"
    assert rows["wrong"].value() is None
    journal = runner.journal()
    assert journal.header.replicates == 2
    assert {x.what for x in journal.ceilings} == {"copy", "read", "write", "matmul"}
    more = runner.run({"N": 64}, "fp32", cache="hot")
    assert len(runner.records) == 6 + len(more)


def test_what_is_measured_again_adds_up(runner, monkeypatch):
    """Of two records of one number rows would lose one."""

    def replicate(self, device, cells, number, seed, listener):
        return [x.record(number, 0, "error", "not measured", None, {}) for x in cells]

    monkeypatch.setattr(Runner, "_open", lambda self, listener=None: None)
    monkeypatch.setattr(Runner, "_replicate", replicate)
    for axes, count in ((AXES, 2), ({"N": 64}, 1), (AXES, 1)):
        runner.run(axes, "fp32", replicates=count)
    plain = [(x.case.axes["N"], x.replicate) for x in runner.records if x.implementation == "plain"]
    assert plain == [(32, 0), (32, 1), (64, 0), (32, 2)]


def test_a_name_is_taken_once(runner):
    runner.add("mine", mine)
    for name in ("mine", "plain"):
        with pytest.raises(InputError, match=f"double has an implementation named '{name}' already"):
            runner.add(name, mine)


def test_mistakes(runner):
    with pytest.raises(InputError, match="unknown axis of double 'M'"):
        runner.run({"M": 3}, "fp32")
    with pytest.raises(InputError, match="unknown dtype of double 'bf16'"):
        runner.run(AXES)
    with pytest.raises(InputError, match="unknown operator 'doubel'. Did you mean 'double'"):
        compare("doubel", {}, AXES)


@pytest.mark.parametrize(
    ("made", "asked", "said"),
    [
        ({"device": "gpu"}, {}, "no device 'gpu' here. Here: "),
        ({"device": "xpu"}, {}, "no device 'xpu' here. Here: "),
        ({"only": ("plian",)}, {}, "unknown implementation of double 'plian'. Did you mean 'plain'"),
        ({}, {"cache": "warm"}, "unknown cache 'warm'. Known: cold, hot"),
        ({}, {"replicates": 0}, "replicates is 0; it is at least 1"),
        ({}, {"axes": {"N": "8"}}, "axis N is '8'; sizes are integers"),
        ({}, {"axes": {"N": 8.5}}, "axis N is 8.5; sizes are integers"),
    ],
)
def test_what_no_type_keeps_out(runner, made, asked, said):
    runner = Runner("double", **{"device": "cpu", "sampling": FEW} | made)
    with pytest.raises(InputError, match=re.escape(said)):
        runner.run(**{"axes": AXES, "dtype": "fp32"} | asked)


def test_one_of_ours_is_held_against_the_baselines(runner):
    runner.add("mine", mine, provider="kernelmark")
    runner.run(AXES, "fp32", cache="hot")
    assert {x.best_baseline for x in runner.rows() if x.status == "ok"} == {"plain"}


def test_compare(runner, monkeypatch):
    monkeypatch.setattr(api, "Runner", lambda operator: runner)
    records = compare("double", {"mine": mine}, AXES, "fp32", cache="hot")
    assert {x.implementation: x.status for x in records} == {"plain": "ok", "wrong": "incorrect", "mine": "ok"}


def test_memory_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with MemoryProfiler() as memory:
        pass
    assert (memory.before_bytes, memory.after_bytes, memory.peak_bytes) == (None, None, None)
    assert memory.seconds >= 0
    assert "torch sees no CUDA device" in memory.why["peak_bytes"]
    assert "peak_bytes: not measured: torch sees no CUDA device" in str(memory)


class Kernel:
    """A process's files as the kernel has them, with a high-water mark that can be reset."""

    def __init__(self) -> None:
        self.resident = self.mark = 100

    def take(self, change: int) -> None:
        self.resident += change
        self.mark = max(self.mark, self.resident)

    def __truediv__(self, name: str) -> Kernel:
        return self

    def read_text(self) -> str:
        return f"Name:\tx\nVmHWM:\t  {self.mark} kB\nVmRSS:\t  {self.resident} kB\n"

    def write_text(self, text: str) -> None:
        assert text == "5"
        self.mark = self.resident


def test_memory_of_the_host(monkeypatch, tmp_path):
    kernel = Kernel()
    monkeypatch.setattr(memory_module, "PROCESS", kernel)
    kernel.take(800)
    kernel.take(-800)
    with MemoryProfiler() as outer:
        kernel.take(500)
        kernel.take(-500)
        with MemoryProfiler() as inner:
            kernel.take(70)
            kernel.take(-70)
    assert (outer.host_before_bytes, outer.host_peak_bytes) == (100 * 1024, 500 * 1024)
    assert (inner.host_before_bytes, inner.host_peak_bytes) == (100 * 1024, 70 * 1024)
    assert "host_peak_bytes" not in outer.why
    monkeypatch.setattr(memory_module, "PROCESS", tmp_path)
    with MemoryProfiler() as memory:
        pass
    assert memory.host_peak_bytes is None
    assert "does not let a process reset its high-water mark: No such file" in memory.why["host_peak_bytes"]


def test_memory_of_this_host():
    with MemoryProfiler() as memory, mmap.mmap(-1, 30_000_000) as block:
        block.write(bytes(30_000_000))  # fresh pages: those of the heap may be left from before
    if memory.host_peak_bytes is None:
        pytest.skip(f"not measured here: {memory.why['host_peak_bytes']}")
    assert memory.host_peak_bytes > 25_000_000


def test_rows_are_a_table_in_a_notebook_and_a_data_frame(runner, monkeypatch):
    runner.run(AXES, dtype="fp32")
    rows = runner.rows()
    page = rows._repr_html_()
    assert page.startswith("<table>")
    assert page.count("<tr>") == len(rows) + 1
    assert "plain" in page
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = rows.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["implementation"]) == [x.implementation for x in rows]
    assert frame["latency_ms"].iloc[0] == rows[0].value()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        rows.frame()


def test_memory_blocks_hand_the_high_water_mark_on(monkeypatch):
    """torch keeps one mark; here it is a script."""
    import torch

    now = {"allocated": 100, "mark": 100, "reserved": 1000}

    def reset() -> None:
        now["mark"] = now["allocated"]

    def allocate(change: int) -> None:
        now["allocated"] += change
        now["mark"] = max(now["mark"], now["allocated"])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now["mark"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: now["reserved"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    with MemoryProfiler() as outer:
        allocate(500)
        allocate(-500)
        with MemoryProfiler() as inner:
            allocate(70)
            allocate(-30)
    assert (inner.before_bytes, inner.after_bytes, inner.peak_bytes) == (100, 140, 70)
    assert (outer.before_bytes, outer.after_bytes, outer.peak_bytes) == (100, 140, 500)
    assert outer.reserved_peak_bytes == 1000


def test_a_summary_says_speedup_and_throughput(runner):
    runner.add("mine", mine)
    for n in (32, 64):
        runner.run({"N": n}, "fp32", cache="hot")
    lines = {x.split(":")[0]: x for x in runner.summary().splitlines()}
    assert lines.keys() == {"plain", "mine"}
    x = r"[\d.]+x"
    said = rf"mine: {x} speedup, [+-]\d+% throughput; mean {x}, median {x}, min {x}, max {x} over 2 cases"
    assert re.fullmatch(said, lines["mine"])


def test_run_benchmark_takes_one_flat_configuration(runner):
    found = run_benchmark("double", {"N": 16, "dtype": "fp32"}, trials=7, runner=runner)
    assert {x.implementation: x.status for x in found} == {"plain": "ok", "wrong": "incorrect"}
    assert next(x for x in found if x.implementation == "plain").get().samples == 7
    again = run_benchmark("double", {"N": 32, "dtype": "fp32"}, trials=7, runner=runner)
    assert {x.axes["N"] for x in again} == {32}
    with pytest.raises(InputError, match="unknown axis of double 'batch_size'"):
        run_benchmark("double", {"batch_size": 2, "dtype": "fp32"}, runner=runner)


def test_compare_implementations(runner):
    config = {"N": 64, "dtype": "fp32"}
    found = compare_implementations("double", ["plain", "slow"], config, ["latency", "memory", "samples_per_s"], 6)
    assert found.keys() == {"plain", "slow"}
    assert found["slow"]["latency"] > 10 > found["plain"]["latency"]
    assert found["plain"]["memory"] is None  # nobody counts a CPU's
    assert found["slow"]["speedup"] < 1
    with pytest.raises(InputError, match="unknown metric 'latencies'. Did you mean 'latency'"):
        compare_implementations("double", ["plain"], config, ["latencies"])
    with pytest.raises(InputError, match="unknown implementation 'plane'"):
        compare_implementations("double", ["plane"], config)


def test_a_baseline_in_a_file(runner, tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text("def doubled(case):\n    return lambda x: x + x\n")
    place = f"{path}:doubled"
    runner.add_baseline(BaselineConfig("theirs", place, supported_models=["gpt2"]))
    runner.add_baseline(BaselineConfig("large", place, hardware_requirements={"min_vram_gb": 1e6}))
    found = {x.implementation: x for x in runner.run(AXES, "fp32", cache="hot")}
    assert found["theirs"].status == "ok"
    assert found["large"].status == "unsupported"
    assert "needs a GPU with 1e+06 GB" in found["large"].reason
    for wrong, said in (
        (BaselineConfig("a", "theirs.py:doubled"), "is no FILE.py:FACTORY that exists"),
        (BaselineConfig("a", f"{path}:tripled"), "has no function 'tripled'"),
        (BaselineConfig("a", place, hardware_requirements={"vram": 1}), "unknown hardware requirement 'vram'"),
    ):
        with pytest.raises(InputError, match=said):
            runner.add_baseline(wrong)


def test_figures_of_memory():
    mine, theirs = MemoryProfiler(), MemoryProfiler()
    assert mine.peak_memory_gpu() is None
    assert mine.efficiency_score() is None
    assert (mine.peak_memory_cpu(), mine.get_peak_memory()) == (None, None)
    mine.host_peak_bytes = 20_000_000
    assert (mine.peak_memory_cpu(), mine.get_peak_memory()) == (0.02, 0.02)
    mine.peak_bytes, mine.reserved_peak_bytes, theirs.peak_bytes = 850_000_000, 1_000_000_000, 1_000_000_000
    assert (mine.peak_memory_gpu(), mine.get_peak_memory()) == (0.85, 0.85)
    assert mine.efficiency_score() == pytest.approx(85)
    assert mine.efficiency_score(theirs) == pytest.approx(15)
