"""`kernelmark show`, `compare` and `report`: through the real command line, with its exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kernelmark.registry.store.journal import encode
from kernelmark.registry.store.record import Case, Footer, Header, Measurement, Record
from kernelmark.suite import cli

Call = Callable[..., tuple[int, str, str]]

FIRST, SECOND, OTHER = "20261119-090000-aaaa", "20261120-080000-bbbb", "20261121-070000-cccc"


def timed(ms):
    return Measurement({"latency": (ms,)}, "events")


def write(path: Path, run: str, ms: float, driver: str = "580") -> None:
    case = Case("gelu", "M4-bf16-forward", {"M": 4}, {}, "bf16", "forward", "5bec", 100, 0)
    header = Header(
        schema_version=2,
        run=run,
        created="2026-11-20T00:00:00Z",
        harness="0.1.0",
        commit="0" * 40,
        dirty=False,
        plan="quick",
        seed=1,
        replicates=2,
        device="cuda",
        key=driver,
        conditions={"driver": driver},
        environment={},
    )
    lines = [
        Record(case, name, name, "1", r, 0, "cold", "ok", None, timed(ms * k * (1 + r / 100)))
        for name, k in (("kernelmark", 1), ("torch", 2))
        for r in range(2)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    footer = Footer("2026-11-20T00:01:00Z", 60.0, True, {"sample": 60.0})
    path.write_bytes(b"".join(encode(x) for x in (header, *lines, footer)))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with two runs that compare, and one made with another driver."""
    folder = tmp_path / "home"
    monkeypatch.setenv("KERNELMARK_HOME", str(folder))
    for run, ms, driver in ((FIRST, 1.0, "580"), (SECOND, 1.1, "580"), (OTHER, 1.0, "590")):
        write(folder / "journals" / f"{run}.jsonl", run, ms, driver)
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line; gives exit code, output and error output."""

    def do(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.run_command(cli.cli, list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return do


def test_show_prints_a_table(home: Path, call: Call) -> None:
    code, out, _ = call("show", "latest")
    assert code == 0
    assert OTHER in out
    assert "kernelmark" in out
    assert "2.00×" in out


def test_show_json_is_the_documented_object(home: Path, call: Call) -> None:
    code, out, _ = call("show", FIRST, "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["run"], told["comparability_key"], told["commit"]) == (FIRST, "580", "0" * 40)
    assert {x["implementation"]: x["pass"] for x in told["rows"]} == {"kernelmark": "forward", "torch": "forward"}
    assert told["rows"][0]["limit_ms"] is None
    assert told["crossings"] == told["extrapolated"] == []


def test_show_takes_a_path(home: Path, call: Call) -> None:
    code, out, _ = call("show", str(home / "journals" / f"{FIRST}.jsonl"))
    assert code == 0
    assert FIRST in out


@pytest.mark.parametrize("command", [("show",), ("compare", FIRST), ("report",)])
def test_an_unknown_run_is_a_message_and_code_2(home: Path, call: Call, command: tuple[str, ...]) -> None:
    code, out, err = call(*command, "nonsense")
    assert (code, out) == (2, "")
    assert "unknown run 'nonsense'" in err
    assert FIRST in err
    assert "Traceback" not in err


def test_a_damaged_journal_is_a_message_with_the_line(home: Path, call: Call) -> None:
    path = home / "journals" / f"{FIRST}.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"kind":"footer"', b'"kind":"footsie"'))
    code, _, err = call("show", FIRST)
    assert code == 2
    assert "line 6" in err


def test_compare_prints_changes_and_no_verdict(home: Path, call: Call) -> None:
    code, out, _ = call("compare", FIRST, SECOND)
    assert code == 0
    assert "+10.0%" in out
    assert "2 rows compared" in out


def test_compare_json(home: Path, call: Call) -> None:
    code, out, _ = call("compare", FIRST, SECOND, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["compared"] == 2
    assert told["rows"][0]["ratio"] == pytest.approx(1.1)


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_compare_of_what_cannot_be_compared_is_code_4_and_names_why(
    home: Path, call: Call, extra: tuple[str, ...]
) -> None:
    code, out, _ = call("compare", FIRST, OTHER, *extra)
    assert code == 4
    assert "conditions differ: driver" in out


def report(call: Call, *arguments: str) -> tuple[int, str, str]:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed")
    return call("report", *arguments)


def test_report_goes_to_the_home_and_prints_its_path(home: Path, call: Call) -> None:
    code, out, _ = report(call, "latest")
    assert code == 0
    path = Path(out.strip())
    assert path == home / "reports" / f"{OTHER}.html"
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_report_of_several_runs_to_a_file_in_a_new_folder(home: Path, call: Call, tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    code, out, _ = report(call, FIRST, SECOND, "--output", str(path))
    assert (code, out.strip()) == (0, str(path))
    assert "2 runs side by side" in path.read_text(encoding="utf-8")
    code, out, _ = report(call, FIRST, SECOND, OTHER)
    assert Path(out.strip()).name == f"{FIRST}_and_2_more.html"


def test_report_to_a_place_that_cannot_be_written(home: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "page.html", Path("/proc/none/page.html")):
        code, _, err = report(call, FIRST, "--output", str(place))
        assert code == 2
        assert f"cannot be written to {place}" in err
        assert "--output" in err


def test_report_without_its_libraries_says_what_to_install(
    home: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, _, err = call("report", FIRST)
    assert code == 2
    assert "kernelmark[registry]" in err


def test_a_runs_name_from_a_foreign_journal_cannot_leave_the_reports_folder(home: Path, call: Call) -> None:
    path = home / "foreign.jsonl"
    write(path, "../../evil name", 1.0)
    code, _, err = report(call, str(path))
    assert code == 2
    assert "has not the form of one" in err
    assert not list(home.rglob("*.html"))


def test_arguments_are_required(call: Call) -> None:
    for command in (("show",), ("compare", "latest"), ("report",)):
        code, _, err = call(*command)
        assert code == 2
        assert "Missing argument" in err


def test_help_of_each_command(call: Call) -> None:
    for command in ("show", "compare", "report"):
        code, out, _ = call(command, "--help")
        assert code == 0
        assert "latest" in out
