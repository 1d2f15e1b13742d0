"""Modules that import alone and lightly, and names that shadow nobody's.

Which floor may import which is checked by import-linter (`make contracts`).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1]
FLOORS = ("suite", "kernels", "baselines", "registry")
STANDARD = {*sys.stdlib_module_names, "__future__"}


def files(floor: str) -> list[Path]:
    found = sorted((HOUSE / floor).rglob("*.py"))
    assert found
    return found


def imported(path: Path, tree: ast.AST, body_only: bool = False) -> Iterator[str]:
    """Absolute names of what a file imports; `body_only` leaves out functions and type checking."""
    here = ("kernelmark", *path.relative_to(HOUSE).parent.parts)
    nodes = _top(tree) if body_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{x.name}" for x in node.names)


def _top(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from _top(node)


@pytest.mark.parametrize("floor", ["baselines", "suite/operators"])
def test_what_listing_imports_needs_no_library(floor):
    wrong = [
        f"{path.relative_to(HOUSE)}: {name}"
        for path in files(floor)
        for name in imported(path, ast.parse(path.read_text()), body_only=True)
        if name.partition(".")[0] not in {*STANDARD, "kernelmark"}
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ["kernels", "docker"])
def test_no_package_that_would_shadow_anothers(room):
    """transformers and MLflow import `kernels` and `docker`, and mean other people's."""
    assert not (HOUSE / room / "__init__.py").exists()


PARAMETERS = 20
"""Of a function that Triton compiles; more are grouped in tuples or aggregates."""
FIELDS = 12
"""Of such a group."""


def decorated(node: ast.AST, word: str) -> bool:
    return any(word in ast.unparse(x) for x in getattr(node, "decorator_list", ()))


@pytest.mark.parametrize("family", ["state_space", "convolution", "quantization"])
def test_what_kernels_take_can_be_read(family):
    wrong = []
    for path in files(f"kernels/{family}"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and decorated(node, "jit"):
                count, most = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]), PARAMETERS
            elif isinstance(node, ast.ClassDef) and (
                decorated(node, "aggregate") or "NamedTuple" in map(ast.unparse, node.bases)
            ):
                count, most = sum(isinstance(x, ast.AnnAssign) for x in node.body), FIELDS
            else:
                continue
            if count > most:
                wrong.append(f"{path.relative_to(HOUSE)}: {node.name} has {count}")
    assert wrong == []


ALONE = """
import os, sys, traceback
bad = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        bad.append(name)
print(*bad)
"""


@pytest.mark.parametrize("floor", FLOORS)
def test_each_module_imports_alone(floor):
    """Each in a process of its own, so that none lives off what another one imported before it."""
    names = []
    for path in files(floor):
        parts = path.relative_to(HOUSE).with_suffix("").parts
        names.append(".".join(["kernelmark", *parts]).removesuffix(".__init__").removesuffix(".__main__"))
    first = (
        "import click, filelock, msgspec, numpy, pynvml, rich.console, scipy.special\n"  # others', once for all
    )
    if floor == "kernels":
        pytest.importorskip("triton", reason="triton is not installed")
        first += "import torch, triton\ntorch.compile(lambda x: x)\n"  # which loads the compiler
    if floor == "registry" and not _installed("mlflow"):
        names = [x for x in names if not x.startswith("kernelmark.registry.tracking")]
    done = subprocess.run(
        [sys.executable, "-c", first + ALONE, *names],
        capture_output=True,
        text=True,
        env={x: y for x, y in os.environ.items() if not x.startswith("COV")}
        | {"PYTHONSAFEPATH": "1", "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.stdout.split() == [], done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_our_kernels_are_nobody_elses():
    """With PYTHONSAFEPATH, as the Makefile and the images set it, not even from the checkout itself."""
    code = "import importlib.util as u; s = [u.find_spec(x) for x in ('kernels', 'suite', 'registry', 'docker')]; "
    code += "print(*(x and (x.origin or list(x.submodule_search_locations)) for x in s))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )
    assert str(HOUSE) not in done.stdout.replace(sys.prefix, "")


def test_every_package_is_installed():
    """A folder that pyproject.toml forgets would be missing from a wheel, and only there."""
    import tomllib

    listed = set(tomllib.loads((HOUSE / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {
        ".".join(["kernelmark", *path.parent.relative_to(HOUSE).parts])
        for floor in FLOORS
        for path in files(floor)
    }
    assert there <= listed
