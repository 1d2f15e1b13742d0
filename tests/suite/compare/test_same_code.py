"""What counts as the same code: words do not, and whatever an implementation reaches by imports does."""

from __future__ import annotations

import pytest
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.compare.same_code import reached, same, shows_launches

KERNEL = '''"""Doubles."""
from ._common import twice
from ..norm._shared import SCALE
import torch


def double(x):
    """Twice x."""
    # By addition.
    return twice(x) * SCALE
'''
FILES = {
    "kernels/activation/double.py": KERNEL,
    "kernels/activation/_common.py": "from .. import plain\n\n\ndef twice(x):\n    return x + x\n",
    "kernels/norm/_shared.py": "SCALE = 1\n",
    "kernels/plain.py": "ONE = 1\n",
    "kernels/activation/other.py": "TWO = 2\n",
}


def tree(folder, **changed):
    for name, text in {**FILES, **changed}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder, folder / "kernels/activation/double.py"


def test_what_a_file_reaches(tmp_path):
    assert set(reached(*tree(tmp_path))) == set(FILES) - {"kernels/activation/other.py"}


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("kernels/activation/double.py", KERNEL.replace("# By addition.", "# Otherwise said."), True),
        ("kernels/activation/double.py", KERNEL.replace("Twice x.", "x and x."), True),
        ("kernels/activation/double.py", KERNEL.replace("import torch\n\n", "import torch\n\n\n\n"), True),
        ("kernels/activation/double.py", KERNEL.replace("* SCALE", "/ SCALE"), False),
        ("kernels/activation/_common.py", FILES["kernels/activation/_common.py"] + "# more\n", True),
        ("kernels/activation/_common.py", "def twice(x):\n    return 2 * x\n", False),
        ("kernels/norm/_shared.py", "SCALE = 2\n", False),
        ("kernels/plain.py", "ONE = 3\n", False),
        ("kernels/activation/other.py", "TWO = 3\n", True),  # nobody imports it
        ("kernels/plain.py", "ONE = open('x')\n", False),
    ],
)
def test_what_counts(tmp_path, file, text, expected):
    one, other = tree(tmp_path / "a"), tree(tmp_path / "b", **{file: text})
    assert same(one, other) is expected


@pytest.mark.parametrize(
    "line",
    [
        "import importlib",
        "from importlib import import_module",
        "TEXT = open(__file__).read()",
        "exec('x = 1')",
        "from . import activation\nTEXT = activation.__file__",
        "import builtins\nx = builtins.__import__('x')",
        "TEXT = globals()['__file__']",
        "from ....elsewhere import x",
        "from ._package import *",
        "def broken(",
    ],
)
def test_nothing_is_claimed_of_what_syntax_does_not_say(tmp_path, line):
    changed = {"kernels/plain.py": f"{line}\n", "kernels/_package/x.py": "", "kernels/_package/__init__.py": ""}
    sides = [tree(tmp_path / name, **changed) for name in "ab"]
    assert not same(*sides)


@pytest.mark.parametrize("package", ["kernels", "kernels/activation", "kernels/norm"])
def test_a_package_runs_before_what_lies_in_it(tmp_path, package):
    sides = [tree(tmp_path / x, **{f"{package}/__init__.py": f"X = {x!r}\n"}) for x in "ab"]
    assert not same(*sides)
    assert same(sides[0], sides[0])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("y = torch.empty(3)", True),
        ("CUDA = torch.cuda._compile_kernel('...', 'spin')", False),
        ("ORDER = torch.from_numpy(numpy.arange(4)).to('cuda')", False),
        ("from torch import frombuffer", False),
        ("torch.ops.load_library('x.so')", False),
        ("torch.autograd.graph.increment_version(x)", True),
        ("with torch.cuda.graph(x): pass", False),
        ("from torch.cuda import graph", False),
    ],
)
def test_whether_all_that_is_launched_can_be_seen(tmp_path, line, expected):
    changed = {"kernels/plain.py": f"import numpy\nimport torch\n{line}\n"}
    assert shows_launches(*tree(tmp_path, **changed)) is expected


def test_our_kernels_can_be_told():
    """Every kernel of this program is reached, and is the same as itself; a system of parts has no one file."""
    catalog = Catalog.default()
    ours = [x for x in catalog.implementations if x.provider == "kernelmark" and x.operator in catalog.operators]
    files = [catalog.file(x) for x in ours]
    assert len(files) > 20
    assert all(x is not None and same(x, x) for x in files)
    shown = {x.operator for x in ours if not x.name.endswith("_cpu") and shows_launches(*catalog.file(x))}
    assert {"rms_norm", "softmax", "gelu", "rope"} <= shown, (
        "or none would ever be found to have the same machine code"
    )
