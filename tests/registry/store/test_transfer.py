"""Journals in and out: whole or not at all, and never merged by guess."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kernelmark.registry.errors import HarnessError, InputError
from kernelmark.registry.store import transfer
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal, read

RUN = "20261120-120000-abcd"
Make = Callable[..., Journal]
Write = Callable[[Journal, Path], Path]


@pytest.fixture
def given(tmp_path: Path, make_journal: Make, write: Write) -> Path:
    """A journal from elsewhere."""
    return write(make_journal(), tmp_path / "given.jsonl")


def compressed(path: Path) -> Path:
    out = path.with_name(f"{path.name}.gz")
    out.write_bytes(gzip.compress(path.read_bytes()))
    return out


@pytest.mark.parametrize("form", ["plain", "compressed"])
def test_import_copies_under_the_runs_name(form: str, given: Path, home: Home) -> None:
    path = compressed(given) if form == "compressed" else given
    assert transfer.import_journal(path, home) == RUN
    assert home.runs() == [RUN]
    assert read(home.find(RUN)) == read(given)
    before = home.journal(RUN).stat().st_mtime_ns
    assert transfer.import_journal(path, home) == RUN
    assert home.journal(RUN).stat().st_mtime_ns == before
    assert [x.name for x in home.journals.iterdir()] == [f"{RUN}.jsonl"]


def test_the_longer_of_two_states_stays(given: Path, home: Home, tmp_path: Path) -> None:
    lines = given.read_bytes().splitlines(keepends=True)
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_bytes(b"".join(lines[:4]))
    home.journals.mkdir(parents=True)
    (home.journals / f"{RUN}.jsonl.gz").write_bytes(gzip.compress(shorter.read_bytes()))
    transfer.import_journal(given, home)
    assert [x.name for x in home.journals.iterdir()] == [f"{RUN}.jsonl"]
    assert home.journal(RUN).read_bytes() == given.read_bytes()
    transfer.import_journal(shorter, home)
    assert home.journal(RUN).read_bytes() == given.read_bytes()


def test_other_content_is_refused(given: Path, home: Home) -> None:
    transfer.import_journal(given, home)
    before = home.journal(RUN).read_bytes()
    lines = given.read_bytes().splitlines(keepends=True)
    given.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(InputError, match="other content from line 3 on"):
        transfer.import_journal(given, home)
    assert home.journal(RUN).read_bytes() == before


def test_a_torn_last_line_is_left_out(given: Path, home: Home) -> None:
    whole = given.read_bytes()
    given.write_bytes(whole[:-30])
    transfer.import_journal(given, home)
    text = home.journal(RUN).read_bytes()
    assert text.endswith(b"\n")
    assert whole.startswith(text)
    assert not read(home.journal(RUN)).torn


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.replace(b'"kind":"ceiling"', b'"kind":"sealing"', 1), "line 10: "),
        (lambda x: x.replace(b'"schema_version":2', b'"schema_version":99', 1), "schema 99"),
        (lambda x: x.replace(RUN.encode(), b"../../etc/passwd"), "has not the form of one"),
        (lambda x: b"", "empty"),
        (lambda x: b"hello\n", "line 1"),
    ],
    ids=["bad line", "newer schema", "a path for a name", "empty", "something else"],
)
def test_what_is_no_journal_is_refused(
    spoil: Callable[[bytes], bytes], message: str, given: Path, home: Home
) -> None:
    given.write_bytes(spoil(given.read_bytes()))
    with pytest.raises(InputError, match=message):
        transfer.import_journal(given, home)
    assert not home.folder.exists()


def test_a_gzip_file_cut_short_is_refused(given: Path, home: Home) -> None:
    path = compressed(given)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="not a whole gzip file"):
        transfer.import_journal(path, home)


def test_a_run_named_latest_is_refused(home: Home, make_journal: Make, write: Write, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stands for the newest run"):
        transfer.checked_run("latest")
    path = write(make_journal(run="latest"), tmp_path / "x.jsonl")
    with pytest.raises(InputError, match="stands for the newest run"):
        transfer.import_journal(path, home)


def test_missing_and_folder(tmp_path: Path, home: Home) -> None:
    with pytest.raises(InputError, match="No such file"):
        transfer.import_journal(tmp_path / "nothing.jsonl", home)
    with pytest.raises(InputError, match="is a folder"):
        transfer.import_journal(tmp_path, home)


def test_a_full_disk_leaves_the_old_one(given: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer.import_journal(given, home)
    before = home.journal(RUN).read_bytes()
    with open(given, "ab") as file:
        file.write(b'{"kind":"ceiling","what":"copy","size":1,"time_ms":1.0,"replicate":0}\n')

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HarnessError, match="No space left on device. Choose another folder with KERNELMARK_HOME"):
        transfer.import_journal(given, home)
    assert home.journal(RUN).read_bytes() == before
    assert [x.name for x in home.journals.iterdir()] == [f"{RUN}.jsonl"]


def test_export_and_back(tmp_path: Path, home: Home, make_journal: Make, write: Write) -> None:
    runs = ["20261120-1-a", "20261120-2-b"]
    for run in runs:
        write(make_journal(run), home.journal(run))
    out = transfer.export(home, runs, tmp_path / "out")
    assert [x.name for x in out] == [f"{x}.jsonl.gz" for x in runs]
    other = Home(tmp_path / "other")
    for path in out:
        transfer.import_journal(path, other)
    assert other.runs() == runs
    assert [read(other.find(x)) for x in runs] == [read(home.find(x)) for x in runs]
    assert transfer.export(home, runs, tmp_path / "out") == out  # the same again is no conflict


def test_export_to_one_file(tmp_path: Path, home: Home, make_journal: Make, write: Write) -> None:
    journal = make_journal()
    write(journal, home.journal(RUN))
    plain = tmp_path / "deep" / "one.jsonl"
    assert transfer.export(home, ["latest"], plain) == [plain]
    assert plain.read_bytes() == home.journal(RUN).read_bytes()
    write(replace(journal, footers=()), home.journal(RUN))
    with pytest.raises(InputError, match="--force"):
        transfer.export(home, ["latest"], plain)
    transfer.export(home, ["latest"], plain, force=True)
    assert plain.read_bytes() == home.journal(RUN).read_bytes()
    write(make_journal("20261121-1-b"), home.journal("20261121-1-b"))
    with pytest.raises(InputError, match="one file and there are 2 runs"):
        transfer.export(home, [RUN, "latest"], plain)
    with pytest.raises(InputError, match="no run to export"):
        transfer.export(home, [], plain)
    (tmp_path / "text").write_text("something else")
    with pytest.raises(InputError, match="neither a folder"):
        transfer.export(home, [RUN], tmp_path / "text")
    with pytest.raises(InputError, match="cannot be written: .*Choose another place with --output"):
        transfer.export(home, [RUN], tmp_path / "text" / "below.jsonl")
