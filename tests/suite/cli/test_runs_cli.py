"""`kernelmark runs`, the home that is used, filters, formats, completion: through the real command line."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from filelock import FileLock
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import encode
from kernelmark.registry.store.record import Case, Footer, Header, Measurement, Record, Request
from kernelmark.suite import cli
from kernelmark.suite.cli.regression import command as detector

Call = Callable[..., tuple[int, str, str]]
OLD, NEW, SIDE = "20261119-090000-aaaa", "20261120-080000-bbbb", "20261121-070000-cccc"


def write(folder: Path, run: str, ms: float, request: Request | None = None) -> None:
    header = Header(
        schema_version=2, run=run, created="2026-11-20T00:00:00Z", harness="0.1.0", commit=run[-1] * 40,
        dirty=False, plan="quick", seed=1, replicates=3, device="cuda", key="k",
        conditions={"gpu": "NVIDIA H200"}, environment={}, request=request or Request(),
    )  # fmt: skip
    lines = []
    for size in (1024, 16384):
        for pass_ in ("forward", "backward"):
            case = Case(
                "attention", f"B1-H16-Hkv16-S{size}-D128-causal-bf16-{pass_}",
                {"B": 1, "H": 16, "Hkv": 16, "S": size, "D": 128}, {"mask": "causal"}, "bf16", pass_, "5bec",
                size * 1000, size**2,
            )  # fmt: skip
            for name, k in (("kernelmark", 1.0), ("flash_attn_4", 1.06), ("transformers_eager", 12345.678)):
                for r in range(3):
                    slower = ms if name == "kernelmark" and size == 1024 else 1.0
                    samples = {
                        "latency": (slower * k * size / 1e4 * (1 + r / 500),),
                        "conversion": (0.123456,),
                        "memory": (9e9,),
                    }
                    seen = Measurement(samples, "events")
                    lines.append(Record(case, name, name, "1", r, 0, "cold", "ok", None, seen))
    path = folder / "journals" / f"{run}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    footer = Footer("2026-11-20T00:01:00Z", 60.0, True, {"sample": 60.0})
    path.write_bytes(b"".join(encode(x) for x in (header, *lines, footer)))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Two runs that somebody asked for, and then a side of a comparison."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KERNELMARK_HOME", raising=False)
    folder = tmp_path / ".kernelmark"
    write(folder, OLD, 1.0, Request(note="before the change"))
    write(folder, NEW, 1.5)
    write(folder, SIDE, 1.0, Request(partner=OLD, stage=1))
    return Home()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line; gives exit code, output and error output."""

    def do(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.run_command(cli.cli, list(arguments))
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return do


def test_latest_is_the_latest_that_somebody_asked_for(home: Home, call: Call) -> None:
    assert home.find("latest").name == f"{NEW}.jsonl"
    code, out, _ = call("runs")
    assert code == 0
    assert [x.split()[0] for x in out.splitlines() if x.startswith("2026")] == [NEW, OLD]
    assert "before the change" in out
    assert "in .kernelmark (the current directory's own)" in out
    _, out, _ = call("runs", "--all")
    assert [x.split()[0] for x in out.splitlines() if x.startswith("2026")] == [SIDE, NEW, OLD]
    assert OLD in next(x for x in out.splitlines() if x.startswith(SIDE))
    for run in (OLD, NEW):
        home.journal(run).unlink()
    code, _, err = call("show", "latest")
    assert code == 2
    assert "only sides of comparisons" in err


def test_a_journal_that_cannot_be_read_is_listed_and_no_older_one_takes_its_place(home: Home, call: Call) -> None:
    path = home.journal("20261122-000000-dddd")
    path.write_bytes(b"{}\n")
    (line,) = [x for x in call("runs")[1].splitlines() if x.startswith(path.stem)]
    assert line.split() == [path.stem, "–", "not", "readable", "–", "–", "–"]
    code, _, err = call("show", "latest")
    assert code == 2
    assert str(path) in err


def test_a_run_that_is_named_tagged_and_noted(home: Home, call: Call) -> None:
    assert call("runs", "name", "latest", "candidate")[0] == 0
    assert call("runs", "tag", "candidate", "h200", "fp8")[0] == 0
    assert call("runs", "tag", "candidate", "fp8", "--remove")[0] == 0
    assert call("runs", "note", "candidate", "after\x1b[31m it")[0] == 0
    (found,) = json.loads(call("runs", "--tag", "h200", "--json")[1])["runs"]
    assert (found["run"], found["name"], found["tags"], found["note"]) == (
        NEW,
        "candidate",
        ["h200"],
        "after\x1b[31m it",
    )
    assert "\x1b" not in call("runs")[1]
    assert NEW in call("show", "candidate")[1]
    for name, said in (
        ("latest", "is taken"),
        ("candidate", "is taken"),
        (OLD[:4], "is taken"),
        ("a/b", "no run"),
    ):
        code, _, err = call("runs", "name", OLD, name)
        assert code == 2
        assert said in err or "is not a run's name" in err
    assert call("runs", "name", "candidate")[0] == 0
    code, _, err = call("show", "candidate")
    assert code == 2
    assert "unknown run 'candidate'" in err
    code, _, err = call("runs", "note", str(home.journal(OLD)), "x")
    assert code == 0  # by its path, and it is of this home


def test_deleting(home: Home, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call("runs", "name", NEW, "candidate")
    home.logs.mkdir()
    (home.logs / f"{NEW}.log").write_text("x")
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    code, out, _ = call("runs", "delete", "candidate")
    assert code == 130
    assert str(home.journal(NEW)) in out
    assert home.journal(NEW).exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, err = call("runs", "delete", "candidate")
    assert code == 2
    assert "give --yes. Nothing was deleted." in err
    assert home.journal(NEW).exists()
    assert call("runs", "delete", "candidate", "--yes")[0] == 0
    assert home.runs() == [OLD, SIDE]
    assert not (home.logs / f"{NEW}.log").exists()
    assert "candidate" not in home.names()
    write(tmp_path / "other", NEW, 1.0)
    code, _, err = call("runs", "delete", str(tmp_path / "other" / "journals" / f"{NEW}.jsonl"), "--yes")
    assert code == 2
    assert "is no run of .kernelmark" in err


def test_a_tag_that_is_none_is_not_called_a_name(home: Home, call: Call) -> None:
    code, _, said = call("runs", "tag", OLD, "two words")
    assert (code, "'two words' is not a tag: letters, digits, - and _ only" in said) == (2, True)


def test_a_tag_that_no_run_has(home: Home, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "No run has tag zz. None has any; `kernelmark runs tag RUN TAG` gives one."
        in call("runs", "--tag", "zz")[1]
    )
    call("runs", "tag", OLD, "good", "a")
    assert "No run has tag zz. Tags: a, good.\n" in call("runs", "--tag", "zz")[1]
    assert "No run has all of the tags a, zz. Tags: a, good.\n" in call("runs", "--tag", "a", "--tag", "zz")[1]
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "empty"))
    assert "No runs; make one with `kernelmark run`" in call("runs", "--tag", "zz")[1]


def test_a_run_is_deleted_whole_and_not_while_a_shard_is_measured(call: Call, home: Home) -> None:
    (home.scratch / NEW).mkdir(parents=True)
    (home.scratch / NEW / "state.pt").write_bytes(b"x")
    lock = home.shards / f"{NEW}.2-of-4.lock"
    home.shards.mkdir()
    with FileLock(lock):
        code, _, err = call("runs", "delete", NEW, "--yes")
        assert code == 2
        assert "is being measured; end that first" in err
        assert home.journal(NEW).exists()
    assert str(home.scratch / NEW) in call("runs", "delete", NEW)[1]
    assert call("runs", "delete", NEW, "--yes")[0] == 0
    assert not lock.exists()
    assert not (home.scratch / NEW).exists()


def test_what_was_delivered_of_a_run_is_deleted_and_not_while_it_is_driven(call: Call, home: Home) -> None:
    """Else `run --resume RUN --parallel` would take it in again."""
    delivered = home.fleet / NEW / "deliveries" / "1-aaaa" / "journal.jsonl"
    delivered.parent.mkdir(parents=True)
    delivered.write_bytes(home.journal(NEW).read_bytes())
    with FileLock(home.fleet / NEW / "driver.lock"):
        assert call("runs", "delete", NEW, "--yes")[0] == 2
        assert delivered.exists()
    assert str(home.fleet / NEW) in call("runs", "delete", NEW)[1]
    assert call("runs", "delete", NEW, "--yes")[0] == 0
    assert not (home.fleet / NEW).exists()


def test_the_home_of_the_user(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.toml"
    monkeypatch.setenv("KERNELMARK_CONFIG", str(config))
    monkeypatch.delenv("KERNELMARK_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine", OLD, 1.0)
    config.write_text(f'home = "{tmp_path}/mine"\n[defaults.show]\nimplementation = "kernelmark"\n')
    code, out, _ = call("runs")
    assert code == 0
    assert f"in {tmp_path}/mine ({config} says so)" in out
    out = call("show", "latest")[1]
    assert "kernelmark" in out
    assert "flash_attn_4" not in out
    assert "flash_attn_4" in call("show", "latest", "--implementation", "flash_attn_4")[1]
    (tmp_path / ".kernelmark").mkdir()  # a project's own comes first
    assert "the current directory's own" in call("runs")[1]
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "mine"))
    assert "KERNELMARK_HOME says so" in call("runs")[1]
    for text, said in (
        ("[defaults.show]\nimplementaton = 3\n", "unknown option of show 'implementaton'. Did you mean"),
        ("[defaults.shwo]\ncsv = true\n", "unknown command 'shwo'. Did you mean 'show'? Known: list, run,"),
        ("hom = 1\n", "unknown field `hom`"),
        ("home = \n", "Invalid value"),
    ):
        config.write_text(text)
        code, out, err = call("show", "latest")
        assert (code, out) == (2, "")
        assert said in err
        assert str(config) in err
    for absent, said in ((tmp_path / "absent.toml", "No such file"), (tmp_path, "Is a directory")):
        monkeypatch.setenv("KERNELMARK_CONFIG", str(absent))
        code, out, err = call("runs")
        assert (code, out) == (2, "")
        assert str(absent) in err
        assert said in err


def test_forms_of_the_configuration_file_and_of_the_command_line(
    home: Home, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    monkeypatch.setenv("KERNELMARK_CONFIG", str(config))
    config.write_text("[defaults.runs]\ncsv = true\nall = true\n[defaults.show]\njson = false\n")
    assert len(list(csv.DictReader(io.StringIO(call("runs")[1])))) == 3  # the side, too
    assert json.loads(call("runs", "--json")[1])["runs"]
    assert "in .kernelmark" in call("runs", "--table")[1]
    assert not call("show", OLD)[1].startswith("{")
    code, out, err = call("show", OLD, "--csv", "--json")
    assert (code, out) == (2, "")
    assert "--json and --csv exclude each other; give one of them." in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("list", "attention"),
        ("list", "--plans"),
        ("list", "--cases"),
        ("list", "--providers"),
        ("list", "--models"),
        ("runs", "--all"),
        ("show", "latest"),
        ("compare", OLD, NEW),
        ("history",),
        ("history", "attention", "--all"),
        ("image", "list"),
    ],
)
def test_every_table(home: Home, call: Call, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    """Piped nothing is cut; at 80 columns lines fit, numbers are whole, and what is left out is named."""
    code, piped, _ = call(*arguments)
    assert code == 0
    assert "…" not in piped
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    code, narrow, _ = call(*arguments)
    assert code == 0
    assert "…" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    numbers = re.compile(r"(?<![\w.,-])[\d,]+\.\d+(?:%|×)?(?![\w.,-])")
    assert set(numbers.findall(narrow)) <= set(numbers.findall(piped))
    if max(map(len, piped.splitlines())) > 80 and arguments[0] == "show":
        assert "Left out at 80 columns: conv ms" in narrow


@pytest.mark.parametrize(
    ("filtered", "rows"),
    [
        (("--axis", "S=1024"), 6),
        (("--axis", "S=1024,16384", "--pass", "backward", "--implementation", "kernelmark"), 2),
        (("--case", "S1024-forward", "--provider", "torch", "--provider", "kernelmark"), 1),
        (("--operator", "attention", "--dtype", "bf16", "--status", "ok"), 12),
    ],
)
def test_the_same_filters_everywhere(home: Home, call: Call, filtered: tuple[str, ...], rows: int) -> None:
    for command in (("show", "latest"), ("compare", OLD, NEW)):
        code, out, _ = call(*command, *filtered, "--csv")
        assert code == 0
        assert len(list(csv.DictReader(io.StringIO(out)))) == rows
        code, out, _ = call(*command, *filtered, "--json")
        assert len(json.loads(out)["rows"]) == rows
        assert call(*command, *filtered, "--markdown")[1].count("| ") > rows
    assert len(json.loads(call("history", *filtered, "--json")[1])["operators"][0]["series"]) == rows


def test_what_changed_most_comes_first(home: Home, call: Call) -> None:
    code, out, _ = call("compare", OLD, NEW, "--only-changed")
    assert code == 0
    told = [x.split() for x in out.splitlines() if x.startswith("attention")]
    assert told[0] == ["attention", "12", "0", "10", "2", "+7.0%"]
    assert [x[2:4] for x in told[1:]] == [["kernelmark", "slower"]] * 2
    assert "12 rows compared" in out
    found = json.loads(call("compare", OLD, NEW, "--json")[1])
    assert found["overall"] | {"ratio": None} == {
        "operator": "all", "metric": "", "rows": 12, "faster": 0, "undecided": 10, "slower": 2, "ratio": None,
    }  # fmt: skip
    assert found["overall"]["ratio"] == pytest.approx(1.5 ** (2 / 12))
    by_case = list(csv.DictReader(io.StringIO(call("compare", NEW, OLD, "--sort", "case", "--csv")[1])))
    assert [x["standing"] for x in by_case if x["implementation"] == "kernelmark"].count("faster") == 2


def test_completion(home: Home, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("bash", "zsh", "fish"):
        code, out, _ = call("completion", shell)
        assert code == 0
        assert f"_KERNELMARK_COMPLETE={shell}_complete" in out
    call("runs", "name", OLD, "older")
    complete = BashComplete(cli.cli, {}, "kernelmark", "_KERNELMARK_COMPLETE")
    for words, found in (
        (["show", "20261120"], [NEW]),
        (["show", "ol"], ["older"]),
        (["list", "fused_lin"], ["fused_linear_cross_entropy"]),
        (["run", "--plan", "stan"], ["standard"]),
        (["run", "--implementation", "flash_attn_4"], ["flash_attn_4"]),
        (["show", "--status", "una"], ["unavailable"]),
        (["com"], ["compile", "compare", "completion"]),
        (["validate", "ol"], ["older"]),
        (["judge", "softm"], ["softmax"]),
        (["worth", "llama-tin"], ["llama-tiny"]),
        (["bench", "h100-v"], ["h100-vllm"]),
        (["run", "--plan", "mine.to"], ["mine.to"]),  # no plan of that name: the shell offers files
    ):
        assert [x.value for x in complete.get_completions(words[:-1], words[-1])] == found
    monkeypatch.setenv("KERNELMARK_PATH", "/no/such/folder")
    assert complete.get_completions(["list"], "g") == []  # a mistake is for the command to tell


NAMED = {"run", "operator", "operators", "implementation", "implementations", "plan", "resume", "model", "image"}
ELSEWHERE = {"fleet run --image", "capture --plan", "bench --run", "run --run"}
"""What names something that is not here, or not yet: a digest, a file to be written, a new run."""


def test_whatever_takes_a_name_completes_it() -> None:
    def commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
        if isinstance(group, click.Group):
            for name in group.list_commands(click.Context(group)):
                yield from commands(group.get_command(click.Context(group), name), f"{path} {name}".strip())
        else:
            yield path, group

    found = [*commands(cli.cli, ""), ("regression_detector", detector)]
    silent = [
        f"{path} {x.opts[0]}"
        for path, command in found
        for x in command.params
        if {x.name, x.opts[0].lstrip("-")} & NAMED and x._custom_shell_complete is None
    ]
    assert set(silent) == ELSEWHERE
    assert len(found) > 30


def test_bash_itself_completes(home: Home, tmp_path: Path) -> None:
    """The script that is printed, in a bash."""
    program = (
        f'PATH="{Path(sys.executable).parent}:$PATH"; eval "$(kernelmark completion bash)"; '
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _${1}_completion $1; '
        'echo "${COMPREPLY[@]}"; }; ask kernelmark show 20261120; ask regression_detector --operator softm'
    )
    told = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (told.stdout, told.stderr) == (f"{NEW}\nsoftmax\n", "")


def test_a_command_that_does_not_exist_names_the_nearest(call: Call) -> None:
    code, _, err = call("shwo")
    assert code == 2
    assert "No such command 'shwo'. Did you mean 'show'? Known: list, run," in err
