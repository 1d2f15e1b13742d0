"""The drawing of `docs/architecture.md` is that of the code's imports."""

from __future__ import annotations

TOLD = "run `python docs/architecture.py --write` and look at what changed"


def test_every_room_imports_what_the_data_file_says(program):
    architecture = program("architecture")
    known = architecture.rooms()
    found = architecture.measured(known)
    assert {x.name: set(x.imports) for x in known.values()} == found, TOLD
    assert architecture.DATA.read_text(encoding="utf-8") == architecture.data(known, found)


def test_the_drawing_is_that_of_the_data_file(program):
    architecture = program("architecture")
    page = architecture.PAGE.read_text(encoding="utf-8")
    assert architecture.placed(page, {"drawing": str}) != page
    assert architecture.placed(page, architecture.BLOCKS) == page, TOLD


def test_every_room_exists_and_what_it_loads_is_one(program):
    architecture = program("architecture")
    known = architecture.rooms()
    for room in known.values():
        assert room.loads <= known.keys()
        assert all((architecture.ROOT / x).exists() for x in room.paths)


def test_what_follows_is_not_drawn(program):
    edges = {"a": {"b", "c"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}
    assert program("architecture").reduced(edges) == [("a", "b"), ("b", "c"), ("b", "d"), ("d", "b")]
