"""`kernelmark site` and `kernelmark compare --by device`: what they take, and what they say is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kernelmark.registry.errors import InputError
from kernelmark.suite.cli import cli
from kernelmark.suite.cli.site import _expected

REFERENCE = Path(__file__).resolve().parents[3] / "registry" / "reference"
ONE = REFERENCE / "detector" / "environment-1"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(x) for x in arguments])


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own."""
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_folder_of_journals_becomes_a_site(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed")
    out = tmp_path / "site"
    done = run("site", ONE, "--output", out)
    assert done.exit_code == 0, done.output
    assert "8 added, 8 in all, 8 rows" in done.output
    page = (out / "operator" / "ssd.html").read_text()
    assert (
        "triton: 3.7.1 \\u2192 3.6.0" in page or "triton: 3.7.1 → 3.6.0" in page or "triton: 3.6.0 → 3.7.1" in page
    )
    assert "not run" in (out / "coverage.html").read_text()  # what exists comes from the catalog
    again = run("site", "--output", out)  # the home is empty: what the site holds is enough
    assert "0 added, 8 in all" in again.output
    assert "1 added, 1 in all" in run("site", ONE / "1-base.jsonl.gz", "--output", out, "--fresh").output


def test_every_operator_has_a_family() -> None:
    """Also one that no folder of kernels for GPUs has: of exchanges, or the one that its name ends with."""
    found = {name: x.family for name, x in _expected().items()}
    assert (found["expert_exchange"], found["int8_linear"], found["train"]) == (
        "collective",
        found["linear"],
        "workloads",
    )
    assert all(found.values())


def test_fresh_does_not_delete_what_it_is_to_read(tmp_path: Path) -> None:
    journals = tmp_path / "site" / "journals"
    journals.mkdir(parents=True)
    (tmp_path / "site" / "site.db").touch()
    (journals / "a.jsonl.gz").write_bytes((ONE / "1-base.jsonl.gz").read_bytes())
    done = run("site", journals, "--output", tmp_path / "site", "--fresh")
    assert isinstance(done.exception, InputError)
    assert "--fresh deletes what the site holds" in str(done.exception)
    assert (journals / "a.jsonl.gz").is_file()


def test_pyarrow_is_asked_for_only_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed")
    header = gzip.decompress((ONE / "1-base.jsonl.gz").read_bytes()).splitlines(keepends=True)[0]
    (tmp_path / "empty.jsonl").write_bytes(header)
    for there in (True, False):  # no row makes no file, with pyarrow or without
        monkeypatch.setattr("kernelmark.suite.cli.site.find_spec", lambda name, there=there: there or None)
        done = run("site", tmp_path / "empty.jsonl", "--output", tmp_path / f"site-{there}")
        assert done.exit_code == 0, done.output
        assert "0 rows" in done.output
        assert ("pip install pyarrow" in done.output) is not there


def test_the_home_is_the_default(own_home: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="Jinja2 is not installed")
    (own_home / "journals").mkdir(parents=True)
    text = gzip.decompress((ONE / "1-base.jsonl.gz").read_bytes())
    (own_home / "journals" / "20261121-192747-7aed.jsonl").write_bytes(text)
    assert "1 added" in run("site", "--output", tmp_path / "site").output
    assert gzip.decompress((tmp_path / "site/journals/20261121-192747-7aed.jsonl.gz").read_bytes()) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("site", "--output", "x"), "no journal in .*home/journals; make one"),
        (("site", "--output", "x", "--url", "javascript:alert(1)"), "is no address: write https://HOST/PATH"),
        (("site", "--output", "x", "--journals", "ftp://x/y"), "is no address"),
        (("compare", "--by", "device"), "no runs in .*; make one"),
        (("compare", "--by", "device", "--operator", "rope", ONE / "1-base.jsonl.gz"), "unknown operator 'rope'"),
    ],
)
def test_wrong_usage_says_what_to_do(
    arguments: tuple[object, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert not list(tmp_path.iterdir())
    assert isinstance(done.exception, InputError)
    assert done.exception.exit_code == 2
    with pytest.raises(InputError, match=message):
        raise done.exception


@pytest.mark.parametrize(
    ("given", "named"),
    [(["--sort", "case"], "--sort"), (["--only-changed", "--sort", "change"], "--only-changed and --sort")],
)
def test_options_of_two_runs_are_not_ignored_for_devices(given: list[str], named: str) -> None:
    done = run("compare", "--by", "device", *given, ONE / "1-base.jsonl.gz")
    assert done.exit_code == 2
    assert f"--by device does not take {named}:" in done.output


@pytest.mark.parametrize(
    ("runs", "message"), [(["a"], "Missing argument 'RUN'"), (["a", "b", "c"], "3 runs are too many")]
)
def test_two_runs_are_compared(runs: list[str], message: str) -> None:
    done = run("compare", *runs)
    assert done.exit_code == 2
    assert message in done.output
    assert "--by device takes any number" in done.output


def test_devices_side_by_side() -> None:
    given = [ONE / "1-base.jsonl.gz", ONE / "1-current.jsonl.gz"]
    done = run("compare", "--by", "device", "--json", *given)
    found = json.loads(done.output)
    assert found["devices"] == ["NVIDIA H200"]
    assert found["rows"][0]["cells"]["NVIDIA H200"]["run"] == "20261121-192747-3869"
    assert "NVIDIA H200" in run("compare", "--by", "device", "--operator", "ssd", *given).output
