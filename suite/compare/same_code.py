"""Whether two commits have the same code of an implementation: as source, or as the machine code that is launched.

Source, before anything runs, on any device: what a file imports, compared as syntax. Comments, docstrings,
formatting and line numbers do not count; in one environment equal source is compiled to equal code. Where code
looks at files, at its own source or at names made at run time, what it does cannot be read off its syntax, and
nothing is claimed.

Machine code, after one pair, on a GPU: what the calls of both sides launched (`measure/machine_code.py`). A name
that was changed, or code that another case needs, is no difference there. Whether all that a call launches is seen
is read off the source of both sides: see `shows_launches`.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ...registry.store.record import Measurement

SELF_MADE = frozenset(
    {
        "__file__",
        "__import__",
        "__loader__",
        "__path__",
        "__spec__",
        "eval",
        "exec",
        "globals",
        "open",
        "importlib",
        "inspect",
        "pkgutil",
        "runpy",
    }
)
"""Names by which code can depend on more than the modules that it imports."""
HIDDEN = frozenset(
    {
        "CUDAGraph",
        "_compile_kernel",
        "as_tensor",
        "asarray",
        "compile",
        "cpp_extension",
        "ctypes",
        "from_dlpack",
        "from_numpy",
        "frombuffer",
        "graph",
        "jiterator",
        "load_library",
        "make_graphed_callables",
        "subprocess",
    }
)
"""Names by which code can run on a device what neither Triton nor torch's operations show, or give it numbers of
the host's, such as an order of tiles, of which these show the shape alone.
"""
HARMLESS = "torch.autograd.graph"
"""What torch keeps of derivatives, no `torch.cuda.graph`. All our kernels count their writes by it."""
SHOWN = frozenset({"torch", "triton", "numpy"}) | sys.stdlib_module_names
"""Packages whose use is seen in what they launch, but for `HIDDEN`."""
PACKAGE = "kernelmark"
SAME_SOURCE = "the same code: all that its file imports is equal but for comments and docstrings; measured once"
SAME_MACHINE_CODE = (
    "the same machine code: both sides launch {launches} with the same grids and arguments; measured once"
)


def same(first: tuple[Path, Path], second: tuple[Path, Path]) -> bool:
    """Whether two files, each given as (root folder, file), reach the same code below their roots."""
    one, other = (reached(*x) for x in (first, second))
    return one is not None and one == other


def launched(first: Measurement | None, second: Measurement | None) -> str | None:
    """What two measurements launched, if that is known of both and the same: "3 kernels"."""
    if first is None or second is None or first.code is None or first.code != second.code:
        return None
    count = first.code.partition(" ")[0]
    return f"{count} kernel" if count == "1" else f"{count} kernels"


def shows_launches(root: Path, start: Path) -> bool:
    """Whether all that a file's code runs on a device is launched by Triton or torch, where it can be seen."""
    found = reached(root, start)
    return found is not None and all(_shows(root / name) for name in found)


@lru_cache(maxsize=1024)
def _shows(path: Path) -> bool:
    tree = ast.parse(path.read_bytes())
    names = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
    names |= {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) if ast.unparse(x) != HARMLESS}
    packages: set[str] = {PACKAGE}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parts = [x.name.split(".") for x in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            parts = [[*(node.module or "").split("."), x.name] for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [[PACKAGE, x.name] for x in node.names]
        else:
            continue
        packages |= {x[0] for x in parts}
        names |= {y for x in parts for y in x}
    return not names & HIDDEN and packages <= SHOWN | {PACKAGE}


def reached(root: Path, start: Path) -> dict[str, str] | None:
    """By path below the root, a hash of each module that a file imports, itself among them; None if it cannot be
    told from the syntax."""
    found: dict[str, str] = {}
    left = [start]
    while left:
        path = left.pop()
        left += _packages(path, root)
        name = path.relative_to(root).as_posix()
        if name in found:
            continue
        read = _read(path, root)
        if read is None:
            return None
        found[name], imports = read
        left += imports
    return found


def _packages(path: Path, root: Path) -> Iterator[Path]:
    """The files of the packages that a module lies in, which run before it does."""
    for folder in path.parents:
        if not folder.is_relative_to(root):
            return
        if (own := folder / "__init__.py").is_file() and own != path:
            yield own


@lru_cache(maxsize=1024)
def _read(path: Path, root: Path) -> tuple[str, tuple[Path, ...]] | None:
    """A module's hash and the files below the root that it imports; None if it does more than its syntax says."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
    # A module's file is also known to who imports it: `tuned.__file__` leads to the table beside it.
    names |= {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and x.attr.startswith("__")}
    imported = [y for x in ast.walk(tree) for y in _imported(x, path, root)]
    if names & SELF_MADE or any(x is None for x in imported):
        return None
    for node in ast.walk(tree):
        _without_docstring(node)
    digest = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return digest, tuple(x for x in imported if x is not None)


def _imported(node: ast.AST, path: Path, root: Path) -> Iterator[Path | None]:
    """The files below the root that an import statement names; None for one that cannot be followed."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first, *rest = alias.name.split(".")
            if first in SELF_MADE:
                yield None
            elif first == PACKAGE:
                yield from _files(root.joinpath(*rest), ())
    elif isinstance(node, ast.ImportFrom):
        parts = (node.module or "").split(".") if node.module else []
        names = tuple(x.name for x in node.names)
        if node.level:
            folder = path
            for _ in range(node.level):
                folder = folder.parent
            if not folder.is_relative_to(root):
                yield None
            else:
                yield from _files(folder.joinpath(*parts), names)
        elif parts[0] == PACKAGE:
            yield from _files(root.joinpath(*parts[1:]), names)
        elif parts[0] in SELF_MADE:
            yield None


def _files(module: Path, names: tuple[str, ...]) -> Iterator[Path | None]:
    """A module's file, or of a package its own and those of the names taken from it.

    What does not lie below the root is of the harness or of the environment, which both sides share.
    """
    if (file := module.with_suffix(".py")).is_file():
        yield file
    elif module.is_dir():
        if (own := module / "__init__.py").is_file():
            yield own
        for name in names:
            if name == "*":
                yield None
            yield from _files(module / name, ())


def _without_docstring(node: ast.AST) -> None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        body = node.body
        # Also the strings below attributes: a string that is a statement does nothing.
        kept = [x for x in body if not (isinstance(x, ast.Expr) and _is_text(x.value))]
        node.body = kept or [ast.Pass()]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
