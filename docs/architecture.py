"""Draws `docs/architecture.md` from `docs/architecture.toml`, which is held to the imports of the code.

    python docs/architecture.py            prints what each room imports, and the drawing
    python docs/architecture.py --write    writes both into the two files

What a room is and does is written by hand in the TOML file; what it imports is read from the code. A test
compares the two, so that neither a new import nor a new room goes unnoticed.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from _page import placed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DATA = HERE / "architecture.toml"
PAGE = HERE / "architecture.md"
LEAVES = ("suite", "registry", "kernels", "baselines")


@dataclass(frozen=True)
class Room:
    """Files that belong together: paths from the root, of files or of folders."""

    name: str
    does: str
    paths: tuple[str, ...]
    imports: frozenset[str]
    loads: frozenset[str]
    """Rooms whose files it loads by name, which no import shows."""


def rooms() -> dict[str, Room]:
    """The rooms as the data file has them."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))["room"]
    return {
        x["name"]: Room(
            x["name"], x["does"], tuple(x["paths"]), frozenset(x["imports"]), frozenset(x.get("loads", ()))
        )
        for x in data
    }


def room_of(path: Path, known: Mapping[str, Room]) -> str:
    """The room of a file. Raises KeyError where the data file has none."""
    here = path.relative_to(ROOT)
    above = {x.as_posix() for x in (here, *here.parents)}
    for room in known.values():
        if not above.isdisjoint(room.paths):
            return room.name
    raise KeyError(f"{here} is in no room: name it in docs/architecture.toml")


def imported(path: Path) -> Iterator[Path]:
    """The files of this repository that a file imports, in functions and for types too."""
    package = ("kernelmark", *path.relative_to(ROOT).parent.parts)
    for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [x.name.split(".") for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*(package[: len(package) - node.level + 1] if node.level else ())]
            module = base + (node.module.split(".") if node.module else [])
            names = [[*module, x.name] for x in node.names]
        else:
            continue
        for parts in names:
            if parts[0] == "kernelmark":
                yield from _file(parts[1:])


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements; expressions, which are most of a tree, are passed over."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        for x in getattr(node, name, ()):
            if isinstance(x, ast.stmt):
                yield x
            yield from _statements(x)


def _file(parts: list[str]) -> Iterator[Path]:
    """The longest beginning of a dotted name that is a file or a package."""
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path
                return


def measured(known: Mapping[str, Room]) -> dict[str, set[str]]:
    """What each room imports of the others, by the code. The packages' own `__init__` files hold names only."""
    found: dict[str, set[str]] = {name: set() for name in known}
    for leaf in LEAVES:
        for path in sorted((ROOT / leaf).rglob("*.py")):
            here = room_of(path, known)
            there = {room_of(x, known) for x in imported(path) if x != ROOT / leaf / "__init__.py"}
            found[here] |= there - {here}
    return found


def reduced(edges: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others: a → c goes where a → b → … → c is drawn.

    Rooms that import each other are drawn with both arrows.
    """
    reach = {x: _reach(x, edges) for x in edges}
    kept = []
    for a, targets in edges.items():
        for c in sorted(targets):
            mutual = a in reach[c]
            between = any(b != c and c in reach[b] and b not in reach[c] for b in targets if a not in reach[b])
            if mutual or not between:
                kept.append((a, c))
    return kept


def _reach(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        for x in edges[todo.pop()] - found:
            found.add(x)
            todo.append(x)
    return found


def drawing(known: Mapping[str, Room]) -> str:
    """A Mermaid flowchart: one box a room, one frame a leaf; dotted are files that are loaded by name."""
    lines = ["```mermaid", "flowchart TD"]
    for leaf in LEAVES:
        inside = [x for x in known.values() if x.name.partition("/")[0] == leaf]
        lines.append(f"    subgraph {leaf}")
        lines += [f'        {_id(x.name)}["<b>{x.name}</b><br/>{x.does}"]' for x in inside]
        lines.append("    end")
    edges = {x.name: set(x.imports) for x in known.values()}
    lines += [f"    {_id(a)} --> {_id(b)}" for a, b in reduced(edges)]
    lines += [f"    {_id(x.name)} -.-> {_id(y)}" for x in known.values() for y in sorted(x.loads)]
    return "\n".join([*lines, "```"]) + "\n"


def _id(name: str) -> str:
    return re.sub(r"\W", "_", name)


def data(known: Mapping[str, Room], found: Mapping[str, set[str]]) -> str:
    """The data file with the imports found."""
    head = DATA.read_text(encoding="utf-8").partition("[[room]]")[0]
    blocks = []
    for room in known.values():
        lines = [f'name = "{room.name}"', f'does = "{room.does}"', f"paths = {_list(room.paths)}"]
        lines.append(f"imports = {_list(sorted(found[room.name]))}")
        if room.loads:
            lines.append(f"loads = {_list(sorted(room.loads))}")
        blocks.append("[[room]]\n" + "\n".join(lines) + "\n")
    return head + "\n".join(blocks)


def _list(names: tuple[str, ...] | list[str]) -> str:
    return "[" + ", ".join(f'"{x}"' for x in names) + "]"


BLOCKS = {"drawing": lambda: drawing(rooms())}


if __name__ == "__main__":
    before = rooms()
    text = data(before, measured(before))
    if sys.argv[1:] == ["--write"]:
        DATA.write_text(text, encoding="utf-8")
        PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), BLOCKS), encoding="utf-8")
    else:
        print(text, drawing(before), sep="\n", end="")
