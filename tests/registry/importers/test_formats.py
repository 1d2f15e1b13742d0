"""Files of other tools: real examples, what becomes of them, and errors that name the place.

`pytest_benchmark.json` is what pytest-benchmark 5.3.1 wrote, host and kernel names taken out; the others follow
the formats' documentation.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.errors import InputError
from kernelmark.registry.importers.formats import FORMATS, made, read, take_in
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal, encode, parse
from kernelmark.registry.store.record import Request

EXAMPLES = Path(__file__).with_name("examples")
FILES = {
    "pytest-benchmark": "pytest_benchmark.json",
    "google-benchmark": "google_benchmark.json",
    "nvbench": "nvbench.json",
    "go": "go.txt",
    "asv": "asv.json",
    "hyperfine": "hyperfine.json",
    "tritonbench": "tritonbench.json",
    "flashinfer-bench": "flashinfer_bench.jsonl",
    "vllm-bench": "vllm_bench.json",
    "guidellm": "guidellm.json",
    "aiperf": "aiperf.jsonl",
}


def only(journals: list[Journal]) -> Journal:
    """The journal, where there is one."""
    (journal,) = journals
    return journal


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., Path]:
    """An example with one field set to something else, by its path; `...` takes it out."""

    def altered(form: str, value: Any, *path: Any) -> Path:
        document = json.loads((EXAMPLES / FILES[form]).read_text())
        at = document
        for step in path[:-1]:
            at = at[step]
        if value is ...:
            del at[path[-1]]
        else:
            at[path[-1]] = value
        shutil.copytree(EXAMPLES / "nvbench.json-bin", tmp_path / "nvbench.json-bin", dirs_exist_ok=True)
        out = tmp_path / FILES[form]
        out.write_text(json.dumps(document))
        return out

    return altered


def test_every_format_has_an_example() -> None:
    assert FILES.keys() == FORMATS.keys()


@pytest.mark.parametrize("form", FORMATS)
def test_an_example_becomes_a_valid_journal(form: str) -> None:
    journal = only(made(form, [EXAMPLES / FILES[form]]))
    lines = (journal.header, *journal.records, *journal.footers)
    assert parse(b"".join(encode(x) for x in lines)).records == journal.records
    assert journal.header.request == Request(imported_from=form)
    assert journal.header.replicates == (3 if form == "hyperfine" else 1)
    assert rows(journal)
    said = encode(journal.header).decode()
    assert '"host"' not in said, "the host's name stays out"


def samples(form: str) -> dict[str, tuple[float, ...]]:
    records = only(made(form, [EXAMPLES / FILES[form]])).records
    return {f"{x.case.operator} {x.case.name}": x.primary for x in records if x.measurement}


def test_pytest_benchmark() -> None:
    document = json.loads((EXAMPLES / "pytest_benchmark.json").read_text())
    found = samples("pytest-benchmark")
    assert [*found] == ["t_bench.py test_sum[100]", "t_bench.py test_sum[1000]", "t_bench.py test_sort"]
    data = document["benchmarks"][0]["stats"]["data"]
    assert found["t_bench.py test_sum[100]"] == pytest.approx([1e3 * x for x in data])
    header = only(made("pytest-benchmark", [EXAMPLES / "pytest_benchmark.json"])).header
    assert header.commit == "0123456789abcdef0123456789abcdef01234567"
    assert (header.conditions["tool_version"], header.conditions["python"]) == ("5.3.1", "3.11.7")
    assert header.created == "2026-11-21T03:46:47+00:00"


def test_pytest_benchmark_without_raw_data(altered: Callable[..., Path]) -> None:
    path = altered("pytest-benchmark", ..., "benchmarks", 0, "stats", "data")
    first = only(made("pytest-benchmark", [path])).records[0]
    assert first.measurement is not None
    assert len(first.primary) == 1
    assert first.measurement.batch == 5


def test_google_benchmark() -> None:
    found = samples("google-benchmark")
    assert found["BM_Sum BM_Sum/64"] == pytest.approx((31.2e-6, 30.9e-6, 31.4e-6))
    assert found["BM_Copy BM_Copy/4096/real_time"] == pytest.approx((1.52e-3, 1.49e-3, 1.55e-3))
    broken = only(made("google-benchmark", [EXAMPLES / "google_benchmark.json"])).records[-1]
    assert (broken.status, broken.reason) == ("error", "no such file")


def test_google_benchmark_of_aggregates_alone(tmp_path: Path) -> None:
    document = json.loads((EXAMPLES / "google_benchmark.json").read_text())
    document["benchmarks"] = [x for x in document["benchmarks"] if x["run_type"] == "aggregate"]
    path = tmp_path / "aggregates.json"
    path.write_text(json.dumps(document))
    (results,), _ = read("google-benchmark", path)
    assert [len(x.samples_ms) for x in results.benchmarks] == [1, 1]
    assert results.benchmarks[0].samples_ms == pytest.approx((31.2e-6,))


def test_go() -> None:
    found = samples("go")
    assert found == {
        "example.org/sums BenchmarkSum/n=64-8": pytest.approx((32.91e-6, 33.02e-6)),
        "example.org/sums BenchmarkCopy-8": pytest.approx((1712e-6,)),
    }
    header = only(made("go", [EXAMPLES / "go.txt"])).header
    assert header.conditions["cpu"] == "AMD EPYC 7B13"


def test_tools_that_load_servers() -> None:
    """What failed has no time; each latency says what it counts from."""
    assert samples("vllm-bench") == {
        "serve rate=inf/s concurrency=1 itl": pytest.approx((10, 11, 12, 10)),
        "serve rate=inf/s concurrency=1 last token from sending": pytest.approx((41, 52)),
        "serve rate=inf/s concurrency=1 ttft from sending": pytest.approx((20, 30)),
    }
    assert only(made("vllm-bench", [EXAMPLES / "vllm_bench.json"])).header.created == "2026-11-22T10:15:00+00:00"
    assert samples("guidellm") == {
        "serve load 1 kind=constant rate=5.0 dispatch": pytest.approx((0, 300)),
        "serve load 1 kind=constant rate=5.0 request from sending": pytest.approx((50, 60)),
        "serve load 1 kind=constant rate=5.0 tpot": pytest.approx((11,)),
        "serve load 1 kind=constant rate=5.0 ttft from sending": pytest.approx((20.5, 21.5)),
    }
    assert samples("aiperf") == {
        "serve request from sending": pytest.approx((50, 55)),
        "serve ttft from sending": pytest.approx((20, 20)),
    }
    without = only(made("aiperf", [EXAMPLES / "aiperf.jsonl"])).records[-1]
    assert (without.status, without.reason) == ("error", "no request has a inter_token_latency; 1 failed")


def test_files_that_the_tools_wrote() -> None:
    """guidellm 0.8.1, AIPerf 0.13.0 and vLLM 0.26's client on our server: three requests, the rest cut off."""

    def samples_of(name: str, file: str) -> dict[str, tuple[float, ...]]:
        journal = only(made(name, [EXAMPLES / "measured" / file]))
        return {x.case.name: x.measurement.samples["latency"] for x in journal.records if x.measurement}

    load = "load 1 type=concurrent streams=2 max_concurrency=2"
    found = samples_of("guidellm", "guidellm.json")
    assert found[f"{load} ttft from sending"] == pytest.approx((4010.2, 4052.2, 7.956), rel=1e-3)
    assert found[f"{load} tpot"] == pytest.approx((15.33, 12.35, 11.75), rel=1e-3)
    found = samples_of("aiperf", "aiperf.jsonl")
    assert found["request from sending"] == pytest.approx((335.9, 328.2, 392.0), rel=1e-3)
    assert found["ttft from sending"] == pytest.approx((48.50, 63.31, 38.94), rel=1e-3)
    # A request's time less its first token, over 15 tokens: AIPerf's own figure.
    assert found["tpot"] == pytest.approx((19.157, 17.660, 23.540), rel=1e-3)
    found = samples_of("vllm-bench", "vllm_bench.json")
    assert found["rate=inf/s concurrency=2 ttft from sending"] == pytest.approx((4757.9, 4741.4, 38.54), rel=1e-3)
    assert len(found["rate=inf/s concurrency=2 itl"]) == 9


def test_requests_that_failed_without_a_reason(altered: Callable[..., Path]) -> None:
    """vLLM's client then writes an empty error, no tokens, and 0 s to the first of them."""
    every = {x.case.name: x.primary for x in only(made("vllm-bench", [EXAMPLES / FILES["vllm-bench"]])).records}
    path = altered("vllm-bench", [0, *[16] * 2], "output_lens")
    found = {x.case.name: x.primary for x in only(made("vllm-bench", [path])).records}
    for name, values in every.items():
        if "itl" not in name:
            assert found[name] == values[1:]


def test_answers_in_one_piece_have_no_gaps(altered: Callable[..., Path]) -> None:
    records = only(made("vllm-bench", [altered("vllm-bench", [[], [], []], "itls")])).records
    assert [x.reason for x in records if not x.primary] == ["no answer came in more than one piece"]


def test_what_no_journal_can_hold(altered: Callable[..., Path]) -> None:
    """Half of a surrogate pair, which JSON can name and UTF-8 cannot."""
    for form, *place in (("vllm-bench", "model_id"), ("guidellm", "metadata", "guidellm_version")):
        journal = only(made(form, [altered(form, "m\ud800", *place)]))
        assert b"m?" in encode(journal.header)
        assert all(encode(x) for x in journal.records)
    skipped = altered("nvbench", "why \ud800", "benchmarks", 0, "states", 2, "skip_reason")
    assert b"why ?" in encode(only(made("nvbench", [skipped])).records[-1])


@pytest.mark.parametrize(
    ("form", "file", "when"),
    [("guidellm", "guidellm.json", "2026-11-22T22:06:54"), ("aiperf", "aiperf.jsonl", "2026-11-22T22:09:13")],
)
def test_a_copy_of_a_file_is_the_same_run(tmp_path: Path, form: str, file: str, when: str) -> None:
    """Both files say when requests began; when the file was written is another matter."""
    copy = tmp_path / file
    copy.write_bytes((EXAMPLES / "measured" / file).read_bytes())
    os.utime(copy, (1e9, 1e9))
    header = only(made(form, [copy])).header
    assert header.created == f"{when}+00:00"
    assert header.run == only(made(form, [EXAMPLES / "measured" / file])).header.run


def test_nvbench() -> None:
    found = samples("nvbench")
    assert found["copy Device=0 Elements=2^20"] == pytest.approx((12.5e-3, 12.25e-3, 12.75e-3, 12.5e-3))
    assert found["copy Device=0 Elements=2^24"] == pytest.approx((45e-3,))
    journal = only(made("nvbench", [EXAMPLES / "nvbench.json"]))
    assert (journal.header.device, journal.header.conditions["gpu"]) == ("cuda", "NVIDIA H200")
    assert journal.records[-1].reason == "Out of memory"
    assert {x.cache for x in journal.records} == {"cold"}


@pytest.mark.parametrize(
    ("form", "value", "path", "said"),
    [
        ("pytest-benchmark", ..., ("benchmarks",), r"pytest_benchmark.json: no field 'benchmarks'"),
        ("pytest-benchmark", 3, ("benchmarks",), r"benchmarks: expected an array, found a number"),
        (
            "pytest-benchmark",
            ["x"],
            ("benchmarks", 1, "stats", "data"),
            r"benchmarks\[1\].stats.data\[0\]: expected a",
        ),
        ("pytest-benchmark", [-1], ("benchmarks", 0, "stats", "data"), r"stats.data\[0\]: -1 is below 0"),
        ("pytest-benchmark", "noon", ("datetime",), r"'noon' is no ISO 8601 time"),
        ("pytest-benchmark", [], ("benchmarks",), r"no benchmark in it"),
        (
            "google-benchmark",
            "min",
            ("benchmarks", 0, "time_unit"),
            r"benchmarks\[0\].time_unit: unknown unit 'min'",
        ),
        ("google-benchmark", ..., ("benchmarks", 1, "real_time"), r"benchmarks\[1\]: no field 'real_time'"),
        ("google-benchmark", ..., ("context",), r"no field 'context'"),
        ("vllm-bench", [0.1], ("ttfts",), r"not equally long: errors 3, ttfts 1, itls 3, output_lens 3"),
        ("vllm-bench", 1e306, ("ttfts", 0), r"ttfts\[0\]: 1e\+306 is too long for a time"),
        ("vllm-bench", "0001-01-01T00:00:00+14:00", ("date",), r"is no ISO 8601 time"),
        ("nvbench", None, ("benchmarks", 0, "states", 0, "name"), r"states\[0\]: no field 'name'"),
        (
            "nvbench",
            "9",
            ("benchmarks", 0, "states", 0, "summaries", 2, "data", 1, "value"),
            r"16 bytes, .*says 9 samples",
        ),
        (
            "nvbench",
            "gone.bin",
            ("benchmarks", 0, "states", 0, "summaries", 2, "data", 0, "value"),
            r"gone.bin is not there; it belongs beside nvbench.json",
        ),
        (
            "nvbench",
            "inf",
            ("benchmarks", 0, "states", 1, "summaries", 0, "data", 0, "value"),
            r"no finite number",
        ),
    ],
)
def test_errors_name_the_field(
    altered: Callable[..., Path], form: str, value: object, path: tuple[object, ...], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        made(form, [altered(form, value, *path)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("BenchmarkX-8 10 12 ns/op 3\n", "go.txt: line 1: values and units do not pair up"),
        ("goos: linux\nBenchmarkX-8 10 fast ns/op\n", "go.txt: line 2: 'fast' is no number"),
        ("BenchmarkX-8 10 3 B/op\n", "line 1: no time, which would be in ns/op or sec/op"),
        ("BenchmarkX-8 10 -3 ns/op\n", "line 1: -3 ns/op is no time"),
        ("hello\n", "no line begins with Benchmark"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "go.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read("go", path)
    path.write_text('{\n  "a": nonsense\n}\n')
    with pytest.raises(InputError, match="go.txt: line 2: no JSON"):
        read("nvbench", path)
    with pytest.raises(InputError, match="unknown format 'golang'. Did you mean|unknown format 'golang'. Known"):
        read("golang", path)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*FORMATS]), st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_crash_a_reader(tmp_path: Path, form: str, raw: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(raw)
    with pytest.raises(InputError):
        read(form, path)


def test_twice_the_same_file_is_one_run(home: Home) -> None:
    path = EXAMPLES / FILES["google-benchmark"]
    assert take_in("google-benchmark", [path], home) == take_in("google-benchmark", [path], home)
    assert len(home.runs()) == 1


def test_files_of_several_processes_are_one_run(altered: Callable[..., Path], tmp_path: Path, home: Home) -> None:
    first = EXAMPLES / FILES["pytest-benchmark"]
    second = altered("pytest-benchmark", [2e-6] * 5, "benchmarks", 0, "stats", "data")
    journal = only(made("pytest-benchmark", [first, second], "f" * 40))
    assert (journal.header.replicates, journal.header.commit) == (2, "f" * 40)
    assert {x.replicate for x in journal.records} == {0, 1}
    other = altered("pytest-benchmark", "Another CPU", "machine_info", "cpu", "brand_raw")
    with pytest.raises(InputError, match="no one run: they differ in cpu"):
        take_in("pytest-benchmark", [first, other], home)


def test_a_name_twice_is_refused(altered: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"test_sum\[1000\] occurs twice"):
        made("pytest-benchmark", [altered("pytest-benchmark", "test_sum[1000]", "benchmarks", 0, "name")])


def test_asv() -> None:
    assert samples("asv") == {
        "sums.Sums sums.Sums.time_sum(100)": pytest.approx((11e-3, 12e-3, 13e-3)),
        "sums sums.time_copy": pytest.approx((2.0,)),
    }
    journal = only(made("asv", [EXAMPLES / "asv.json"]))
    assert [x.reason for x in journal.records if not x.measurement] == ["asv gives no result for it"]
    assert journal.header.commit == "0123456789abcdef0123456789abcdef01234567"
    assert journal.header.conditions["cpu"] == "AMD EPYC 7B13"
    assert "somebody" not in encode(journal.header).decode()


def test_asv_tells_kinds_by_the_functions_name_alone(tmp_path: Path) -> None:
    """`TimeSuite` is the class of asv's own first example; bytes and counts in it are no times."""
    document = json.loads((EXAMPLES / "asv.json").read_text())
    names = ("a.TimeSuite.time_x", "a.TimeSuite.track_x", "a.TimeSuite.peakmem_x", "time_a.mem_x", "a.timeraw_x")
    document["results"] = {x: [[2.0], []] for x in names}
    path = tmp_path / "asv.json"
    path.write_text(json.dumps(document))
    found = only(made("asv", [path])).records
    assert [x.case.name for x in found] == ["a.TimeSuite.time_x", "a.timeraw_x"]


def test_what_google_benchmark_skipped_has_no_time(tmp_path: Path) -> None:
    document = json.loads((EXAMPLES / "google_benchmark.json").read_text())
    skipped = {"name": "BM_S", "run_name": "BM_S", "run_type": "iteration", "real_time": 0.0, "skipped": True}
    document["benchmarks"] = [skipped | {"skip_message": "no AVX here"}]
    path = tmp_path / "skipped.json"
    path.write_text(json.dumps(document))
    (record,) = only(made("google-benchmark", [path])).records
    assert (record.status, record.reason, record.primary) == ("error", "no AVX here", ())


def test_googles_complexity_is_no_benchmark(tmp_path: Path) -> None:
    document = json.loads((EXAMPLES / "google_benchmark.json").read_text())
    before = len({x["run_name"] for x in document["benchmarks"]})
    fitted = {"run_name": "BM_Sort", "run_type": "aggregate", "time_unit": "ns"}
    document["benchmarks"] += [
        fitted | {"name": "BM_Sort_BigO", "aggregate_name": "BigO", "real_coefficient": 2.0, "big_o": "N"},
        fitted | {"name": "BM_Sort_RMS", "aggregate_name": "RMS", "rms": 0.1},
    ]
    path = tmp_path / "complexity.json"
    path.write_text(json.dumps(document))
    assert len({x.case.name for x in only(made("google-benchmark", [path])).records}) == before


@pytest.mark.parametrize(("value", "said"), [(math.nan, "no finite number"), (-1.0, "below 0 and no time")])
def test_nvbenchs_samples_are_times(tmp_path: Path, value: float, said: str) -> None:
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    (samples,) = (tmp_path / "nvbench.json-bin").iterdir()
    raw = samples.read_bytes()
    samples.write_bytes(struct.pack("<f", value) + raw[4:])
    with pytest.raises(InputError, match=rf"{samples.name}: sample 1: .*{said}"):
        made("nvbench", [tmp_path / "nvbench.json"])


def test_what_a_journal_refuses_is_said_of_the_file(altered: Callable[..., Path], home: Home) -> None:
    """The journal that is made of it lies in a folder that is gone."""
    path = altered("pytest-benchmark", 1e300, "benchmarks", 1, "stats", "iterations")
    name = only(made("pytest-benchmark", [path])).records[1].case.full_name
    with pytest.raises(InputError, match=rf"^{path.name}: benchmark {re.escape(name)}: batch: 1\d+ is not within"):
        take_in("pytest-benchmark", [path], home)
    path = altered("guidellm", "0\x001", "metadata", "guidellm_version")
    with pytest.raises(InputError, match=rf"^{path.name}: harness: .* is no name"):
        take_in("guidellm", [path], home)


def test_tests_of_two_classes_may_share_a_name(tmp_path: Path) -> None:
    document = json.loads((EXAMPLES / "pytest_benchmark.json").read_text())
    one = document["benchmarks"][0] | {"name": "test_x", "group": None}
    document["benchmarks"] = [one | {"fullname": f"t.py::{x}::test_x"} for x in ("TestA", "TestB")]
    document["benchmarks"] += [one | {"fullname": f"{x}.py::test_x", "group": "g"} for x in "ab"]
    path = tmp_path / "classes.json"
    path.write_text(json.dumps(document))
    assert [x.case.full_name for x in only(made("pytest-benchmark", [path])).records] == [
        "t.py/TestA::test_x",
        "t.py/TestB::test_x",
        "g/a.py::test_x",
        "g/b.py::test_x",
    ]


def test_a_command_of_hyperfine_that_failed_keeps_its_parameters(tmp_path: Path) -> None:
    document = json.loads((EXAMPLES / "hyperfine.json").read_text())
    failed = document["results"][1]
    document["results"] = [failed | {"parameters": {"n": x}} for x in "12"]
    path = tmp_path / "failed.json"
    path.write_text(json.dumps(document))
    assert [x.case.name for x in only(made("hyperfine", [path])).records] == ["false n=1", "false n=2"]


def test_hyperfines_times_are_of_processes_of_their_own() -> None:
    journal = only(made("hyperfine", [EXAMPLES / "hyperfine.json"]))
    assert [(x.case.name, x.replicate, x.primary) for x in journal.records[:3]] == [
        ("sort numbers threads=2", i, pytest.approx((ms,))) for i, ms in enumerate((100.0, 101.0, 102.0))
    ]
    assert journal.records[3].reason == "it ended with exit code 1 1 times"
    twice = only(made("hyperfine", [EXAMPLES / "hyperfine.json"] * 2))
    assert twice.header.replicates == 6
    assert {x.replicate for x in twice.records if x.measurement} == {*range(6)}


def test_tritonbench(tmp_path: Path) -> None:
    records = only(made("tritonbench", [EXAMPLES / "tritonbench.json"])).records
    assert [(x.case.operator, x.case.name, x.implementation, x.primary) for x in records] == [
        ("softmax_fwd", "(4096, 256)", "naive_softmax", (0.0512,)),
        ("softmax_fwd", "(4096, 256)", "triton_softmax", (0.0123,)),
        ("softmax_fwd", "(4096, 384)", "triton_softmax", ()),
    ]
    path = tmp_path / "op_gemm_x1.csv"
    path.write_text("x_val;aten-latency;aten-tflops;triton-latency\n(16, 16);0.5 (±1.2%);3;0.25\n")
    records = only(made("tritonbench", [path])).records
    assert [(x.case.operator, x.implementation, x.primary) for x in records] == [
        ("gemm", "aten", (0.5,)),
        ("gemm", "triton", (0.25,)),
    ]


def test_flashinfer_bench() -> None:
    journal = only(made("flashinfer-bench", [EXAMPLES / "flashinfer_bench.jsonl"]))
    assert [(x.case.name, x.implementation, x.status, x.primary) for x in journal.records] == [
        ("batch_size32-0a1b2c3d", "rmsnorm_triton", "ok", (0.0091,)),
        ("batch_size32-0a1b2c3d", "rmsnorm_wrong", "incorrect", ()),
    ]
    assert journal.header.conditions["gpu"] == "NVIDIA_H100"


def test_results_of_go_under_different_notes_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "go.txt"
    line = "BenchmarkX-8 10 {} ns/op\n"
    path.write_text(f"goos: linux\nnote: before\n{line.format(10)}note: after\n{line.format(20)}")
    journal = only(made("go", [path]))
    assert {x.case.name: x.primary for x in journal.records} == {
        "BenchmarkX-8 note:before": pytest.approx((1e-5,)),
        "BenchmarkX-8 note:after": pytest.approx((2e-5,)),
    }
    assert "note" not in journal.header.conditions
    path.write_text(f"goos: linux\nnote: before\n{line.format(10)}{line.format(20)}")
    journal = only(made("go", [path]))
    assert (journal.header.conditions["note"], len(journal.records)) == ("before", 1)


def test_nvbench_on_two_devices_is_two_runs(tmp_path: Path, home: Home) -> None:
    document = json.loads((EXAMPLES / "nvbench.json").read_text())
    document["devices"].append({**document["devices"][0], "id": 1, "name": "NVIDIA L4"})
    document["devices"][0]["id"] = 0
    (benchmark,) = document["benchmarks"]
    mean = benchmark["states"][1]
    benchmark["states"] = [mean, {**mean, "device": 1, "name": mean["name"].replace("Device=0", "Device=1")}]
    path = tmp_path / "nvbench.json"
    path.write_text(json.dumps(document))
    first, second = made("nvbench", [path])
    assert [x.header.conditions["gpu"] for x in (first, second)] == ["NVIDIA H200", "NVIDIA L4"]
    assert first.header.run != second.header.run
    assert first.records[0].case == second.records[0].case
    assert len(take_in("nvbench", [path], home)) == 2


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b"\xff\xfe",
        b"1" * 10_000,
        b'{"results": 1e999}',
        b"null",
        b"\0" * 99,
    ],
)
def test_what_is_no_file_of_results_is_an_input_error(tmp_path: Path, form: str, raw: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(raw)
    with pytest.raises(InputError):
        made(form, [path])


def test_long_and_odd_names_become_names(tmp_path: Path, home: Home) -> None:
    document = json.loads((EXAMPLES / "hyperfine.json").read_text())
    document["results"][0]["command"] = "x" * 5_000_000
    document["results"][1]["command"] = "a\x1b[31m\nb"
    path = tmp_path / "hyperfine.json"
    path.write_text(json.dumps(document))
    (run,) = take_in("hyperfine", [path], home)
    names = {x.case.name for x in home.load(run).records}
    assert all(len(x) <= 200 for x in names)
    assert "\x1b" not in "".join(names)
