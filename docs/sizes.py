"""How large functions are, and how many parameters the GPU functions take: `python docs/sizes.py [COMMIT]`.

Prints, for the working tree or a commit, the distribution of parameters over functions that Triton compiles
(`triton.jit`, `gluon.jit`), of fields over their aggregates, and of lines over all functions by top-level folder,
with the largest of each. `tests/kernels/test_sizes.py` holds the first two to their limits, and the tables of
`docs/architecture.md` to what this prints.
"""

from __future__ import annotations

import ast
import io
import itertools
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("suite", "registry", "kernels", "baselines")
MOST_PARAMETERS = 20
"""Of a function that Triton compiles: more belong into tuples, aggregates or a constexpr configuration."""
MOST_FIELDS = 12
"""Of an aggregate."""
BANDS = {"parameters": (5, 10, 15, 20, 30), "lines": (20, 50, 100)}
"""Where the columns of the tables in `docs/architecture.md` end; the last one is what is more."""
NAMED = 5
"""So many of the largest are named."""


@dataclass(frozen=True)
class Sized:
    """A function or an aggregate, and how large it is: lines, parameters or fields."""

    file: str
    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.size:5}  {self.file}: {self.name}"


Sources = Iterable[tuple[str, str]]
"""Paths in the repository with their texts."""


def of_tree(folders: Iterable[str] = FOLDERS, root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """The Python files of these folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def of_commit(commit: str, root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """The same of a commit."""
    packed = subprocess.run(
        ["git", "-C", str(root), "archive", commit, "--", *FOLDERS], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name, file.read().decode()


def functions(sources: Sources) -> list[Sized]:
    """Every function by lines, from its first decorator's to its last."""
    return [
        Sized(file, node.name, (node.end_lineno or 0) - min(x.lineno for x in (node, *node.decorator_list)) + 1)
        for file, node in _nodes(sources)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def compiled(sources: Sources) -> list[Sized]:
    """Functions that Triton compiles, by parameters."""
    return [
        Sized(file, node.name, len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]))
        for file, node in _nodes(sources)
        if isinstance(node, ast.FunctionDef) and _decorated(node, ("triton.jit", "gluon.jit"))
    ]


def aggregates(sources: Sources) -> list[Sized]:
    """Triton's aggregates by fields."""
    return [
        Sized(file, node.name, sum(isinstance(x, ast.AnnAssign) for x in node.body))
        for file, node in _nodes(sources)
        if isinstance(node, ast.ClassDef) and _decorated(node, ("aggregate", "gl.aggregate", "tl.aggregate"))
    ]


def _nodes(sources: Sources) -> Iterator[tuple[str, ast.AST]]:
    for file, text in sources:
        for node in ast.walk(ast.parse(text)):
            yield file, node


def _decorated(node: ast.FunctionDef | ast.ClassDef, names: Sequence[str]) -> bool:
    decorators = (x.func if isinstance(x, ast.Call) else x for x in node.decorator_list)
    return any(ast.unparse(x) in names for x in decorators)


def shares(found: Sequence[Sized], bands: Sequence[int]) -> list[int]:
    """Percent of them in each band, and beyond the last."""
    ends = (-1, *bands, sys.maxsize)
    counts = [sum(low < x.size <= high for x in found) for low, high in itertools.pairwise(ends)]
    return [round(100 * count / max(1, len(found))) for count in counts]


def told(title: str, found: Sequence[Sized], limit: int | None = None) -> list[str]:
    """A distribution in lines: how many there are, quantiles, how many are over the limit, and the largest."""
    if not found:
        return [f"{title}: none"]
    sizes = sorted(x.size for x in found)
    middle, high = (sizes[min(len(sizes) - 1, int(share * len(sizes)))] for share in (0.5, 0.9))
    over = "" if limit is None else f", {sum(x > limit for x in sizes)} over {limit}"
    largest = sorted(found, key=lambda x: -x.size)[:NAMED]
    return [f"{title}: {len(sizes)}; median {middle}, p90 {high}, most {sizes[-1]}{over}", *map(str, largest)]


def report(sources: Sources) -> str:
    """All distributions."""
    sources = list(sources)
    lines = told("parameters of compiled functions", compiled(sources), MOST_PARAMETERS)
    lines += told("fields of aggregates", aggregates(sources), MOST_FIELDS)
    for folder in FOLDERS:
        own = [x for x in sources if x[0].startswith(f"{folder}/")]
        lines += told(f"lines of functions, {folder}", functions(own))
    of_kernels = [x for x in sources if x[0].startswith("kernels/")]
    for what, found in (("parameters", compiled(sources)), ("lines", functions(of_kernels))):
        bands = ", ".join(f"up to {x}" for x in BANDS[what])
        lines.append(f"percent by {what} ({bands}, more): {' '.join(map(str, shares(found, BANDS[what])))}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(of_commit(sys.argv[1]) if len(sys.argv) > 1 else of_tree()))
