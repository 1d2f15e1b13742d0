"""What people call runs: kept apart from the journals, and nothing of it is lost to a second writer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store import labels
from kernelmark.registry.store.home import Home


def test_fields_add_up_and_an_empty_label_is_not_kept(home: Home) -> None:
    assert labels.read(home.folder) == {}
    labels.change(home.folder, "a", name="first")
    assert labels.change(home.folder, "a", note="x").name == "first"
    assert labels.read(home.folder) == {"a": labels.Label("first", (), "x")}
    labels.change(home.folder, "a", name=None, note=None)
    assert labels.read(home.folder) == {}


def test_two_writers_at_once(home: Home) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda x: labels.change(home.folder, f"run{x}", note=str(x)), range(20)))
    assert len(labels.read(home.folder)) == 20


def test_a_file_that_is_none(home: Home) -> None:
    home.folder.mkdir()
    for text in (b"{", b'{"a": {"nmae": "x"}}', b"\xff"):
        (home.folder / "labels.json").write_bytes(text)
        with pytest.raises(InputError, match=r"labels.json cannot be read"):
            labels.read(home.folder)


def test_a_home_that_cannot_be_written(home: Home) -> None:
    home.folder.parent.mkdir(exist_ok=True)
    home.folder.write_text("a file")
    with pytest.raises(InputError, match="cannot be written"):
        labels.change(home.folder, "a", note="x")
