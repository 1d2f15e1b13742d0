"""Finding runs: by name, beginning, `latest` or path, and messages that say what exists."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import encode

RUNS = ("20261119-090000-aaaa", "20261120-080000-bbbb", "20261120-230000-cccc")


@pytest.fixture
def filled(literal: Any, home: Home) -> Home:
    """A home with three runs, the second one compressed."""
    home.journals.mkdir(parents=True)
    for number, run in enumerate(RUNS):
        text = encode(literal.header(run=run)) + encode(literal.record())
        path = home.journal(run)
        if number == 1:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text))
        else:
            path.write_bytes(text)
    return home


def test_default_folder_is_in_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Home().folder == Path(".kernelmark")
    monkeypatch.setenv("KERNELMARK_HOME", "/elsewhere")
    assert Home().folder == Path("/elsewhere")
    assert Home(Path("given")).folder == Path("given")
    monkeypatch.setenv("KERNELMARK_HOME", "")
    assert Home().folder == Path(".kernelmark")


def test_everything_lies_below_the_folder(home: Home) -> None:
    for path in (home.journals, home.reports, home.logs, home.database, home.journal("x")):
        assert home.folder in path.parents
    assert not home.folder.exists()  # asking makes nothing


def test_runs_are_listed_oldest_first_compressed_ones_too(filled: Home) -> None:
    assert filled.runs() == list(RUNS)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (RUNS[0], 0),
        (RUNS[1], 1),
        ("latest", 2),
        ("20261119", 0),
        ("20261120-08", 1),
    ],
)
def test_a_run_is_found_by_name_beginning_or_latest(filled: Home, asked: str, found: int) -> None:
    assert filled.load(asked).header.run == RUNS[found]


def test_the_latest_is_so_by_its_header_whatever_its_name(filled: Home, literal: Any) -> None:
    for run, created in (("q2", "2026-11-02T00:00:00Z"), ("early", "2027-01-01T00:00:00+01:00")):
        filled.journal(run).write_bytes(
            encode(literal.header(run=run, created=created)) + encode(literal.record())
        )
    assert filled.runs() == ["q2", *RUNS, "early"]
    assert filled.latest() == "early"
    # Written by another program, in another order.
    other = msgspec.to_builtins(literal.header(run="other", created="2027-02-01T00:00:00Z"))
    filled.journal("other").write_bytes(msgspec.json.encode(dict(reversed(other.items()))) + b"\n")
    assert filled.latest() == "other"
    # One that does not say when it was made is as old as its file.
    unreadable = filled.journal("unreadable")
    unreadable.write_bytes(b"{}\n")
    for written, at in ((0, 0), (2e9, -1)):
        os.utime(unreadable, (written, written))
        assert filled.runs()[at] == "unreadable"


def test_a_whole_name_is_found_whatever_the_labels_are(filled: Home) -> None:
    (filled.folder / "labels.json").write_bytes(b"{")
    assert filled.load(RUNS[0]).header.run == RUNS[0]
    with pytest.raises(InputError, match=r"labels\.json cannot be read: .* mend it, or move it away"):
        filled.find("20261119")


def test_a_run_is_found_by_its_journals_path(filled: Home) -> None:
    for path in filled.journals.iterdir():
        assert filled.find(str(path)) == path
        assert filled.load(str(path)).path == path


def test_an_ambiguous_beginning_names_what_it_fits(filled: Home) -> None:
    with pytest.raises(InputError, match=f"'20261120' is ambiguous: {RUNS[1]}, {RUNS[2]}"):
        filled.find("20261120")


def test_an_unknown_run_names_the_nearest_and_what_exists(filled: Home) -> None:
    with pytest.raises(InputError) as caught:
        filled.find("20261119-090000-aaab")
    assert f"Did you mean '{RUNS[0]}'?" in str(caught.value)
    assert "latest" in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_empty_home_says_how_to_make_a_run(home: Home) -> None:
    for asked in ("latest", "2026"):
        with pytest.raises(InputError, match=r"no runs in .*kernelmark run"):
            home.find(asked)


@pytest.mark.parametrize("asked", ["none.jsonl", "none.jsonl.gz", "folder/none"])
def test_a_path_that_is_not_there(filled: Home, asked: str) -> None:
    with pytest.raises(InputError, match="no journal at"):
        filled.find(asked)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; name a folder"):
        Home(tmp_path / "file").find("latest")
