"""What goes into a container, and what it says and leaves on its way out."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.suite.container.launch import Job, _stream, unpack
from kernelmark.suite.container.session import Taken, with_roots

REFERENCE = Path(__file__).resolve().parents[3] / "registry" / "reference"


class Talking:
    """A container whose output comes in pieces of so many bytes."""

    def __init__(self, text: str, size: int) -> None:
        data = text.encode()
        self.pieces = [data[i : i + size] for i in range(0, len(data), size)]

    def attach(self, **how: bool) -> list[bytes]:
        return self.pieces

    def start(self) -> None:
        pass


def test_letters_cut_by_a_chunk_are_whole_again(capsys):
    text = "── ± 1.08× µs\n"
    assert _stream(Talking(text, 1), quiet=False) == text
    assert capsys.readouterr().out == text


def archive(files: dict[str, bytes], *others: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))
        for entry in others:
            made.addfile(entry)
    return buffer.getvalue()


def entry(name: str, kind: bytes, to: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, to
    return made


def test_links_pipes_and_other_names_are_left_where_they_are(tmp_path, monkeypatch):
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # Python 3.11.2, which Debian 12 has, is without it
    files = {"journals/a.jsonl": b"a", "journals/shards/a.1-of-2.jsonl": b"s", "logs/a.log": b"l"}
    others = {"logs/../../out.log": b"-", "/journals/b.jsonl": b"-", "journals/x.txt": b"-", "logs/a/b.log": b"-"}
    unpack(
        archive(
            files | others,
            entry("logs", tarfile.DIRTYPE),
            entry("logs/passwd.log", tarfile.SYMTYPE, "/etc/passwd"),
            entry("logs/hard.log", tarfile.LNKTYPE, "logs/a.log"),
            entry("logs/pipe.log", tarfile.FIFOTYPE),
            entry("journals/folder.jsonl", tarfile.DIRTYPE),
        ),
        tmp_path,
    )
    assert {str(x.relative_to(tmp_path)): x.read_bytes() for x in tmp_path.rglob("*") if not x.is_dir()} == files


def test_a_journal_that_is_none_is_kept_and_in_no_others_way(tmp_path):
    left, home = tmp_path / "left", Home(tmp_path / "home")
    good = gzip.decompress((REFERENCE / "20261121-105936-48c0.jsonl.gz").read_bytes())
    unpack(archive({"journals/0.jsonl": b"not a journal\n", "journals/1.jsonl": good, "logs/a.log": b"l"}), left)
    taken = Taken()
    for _ in range(2):
        taken.take(left, home)
    assert taken.runs == ["20261121-105936-48c0"] * 2
    assert [x.partition(": line 1")[0] for x in taken.refused] == [
        f"{home.folder}/refused/{i}.jsonl" for i in (0, 1)
    ]
    assert (home.folder / "refused" / "1.jsonl").read_bytes() == b"not a journal\n"
    assert (home.logs / "a.log").read_bytes() == b"l"


def test_a_home_that_is_closed_is_no_fault_of_the_journals(tmp_path):
    left, home = tmp_path / "left", Home(tmp_path / "home")
    home.folder.write_text("a file")
    unpack(archive({"journals/0.jsonl": b"not a journal\n"}), left)
    with pytest.raises(InputError, match="not a kernelmark journal"):
        Taken().take(left, home)


def test_kernels_of_ones_own_go_along_under_the_name_of_their_folder(tmp_path):
    for name, text in {
        "operators/a.py": "A",
        "kernels/cpu/a.py": "B",
        "kernels/__pycache__/a.pyc": "-",
        "x.py": "-",
    }.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "empty").mkdir()
    job = with_roots(Job(["run"], files={"plan/p.toml": b"P"}), [tmp_path / "empty", tmp_path / "mine"])
    held = {"roots/1/mine/operators/a.py": b"A", "roots/1/mine/kernels/cpu/a.py": b"B"}
    assert job.files == {"plan/p.toml": b"P"} | held
    assert job.variables == {"KERNELMARK_PATH": "/results/roots/1/mine"}
    assert with_roots(Job(["run"]), []) == Job(["run"])
