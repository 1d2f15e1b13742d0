"""The limits of what Triton compiles: parameters, fields of aggregates; and a table of barriers in each header."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sizes():
    """The program `docs/sizes.py`."""
    spec = importlib.util.spec_from_file_location("docs_sizes", ROOT / "docs" / "sizes.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sources(sizes):
    return list(sizes.of_tree(["kernels"]))


EXAMPLE = '''
@triton.jit(do_not_specialize=["b"])
def kernel(a, b, *, c: tl.constexpr):
    """Two lines."""

@aggregate
class Ring:
    full: object
    empty: object

def other(): ...
'''


def test_what_counts(sizes):
    example = [("kernels/x.py", EXAMPLE)]
    assert [(x.name, x.size) for x in sizes.compiled(example)] == [("kernel", 3)]
    assert [(x.name, x.size) for x in sizes.aggregates(example)] == [("Ring", 2)]
    assert [(x.name, x.size) for x in sizes.functions(example)] == [("kernel", 3), ("other", 1)]
    told = sizes.told("parameters", sizes.compiled(example), 2)
    assert told == ["parameters: 1; median 3, p90 3, most 3, 1 over 2", "    3  kernels/x.py: kernel"]


def test_no_compiled_function_has_too_many_parameters(sizes, sources):
    found = sizes.compiled(sources)
    assert len(found) > 300
    assert [str(x) for x in found if x.size > sizes.MOST_PARAMETERS] == []


def test_no_aggregate_has_too_many_fields(sizes, sources):
    found = sizes.aggregates(sources)
    assert len(found) > 15
    assert [str(x) for x in found if x.size > sizes.MOST_FIELDS] == []


def row(page, table, name):
    """The numbers of a table's row in the page."""
    rows = page[page.index(f"| {table} |") :].splitlines()
    return [int(x) for x in next(x for x in rows if x.startswith(f"| {name} |")).split("|")[2:-1]]


def test_the_page_says_how_large_functions_are(sizes, sources):
    """Within three in a hundred, so that not every function moves it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for table, found, what in (
        ("parameters of functions that Triton compiles", sizes.compiled(sources), "parameters"),
        ("lines of functions in `kernels/`", sizes.functions(sources), "lines"),
    ):
        now = sizes.shares(found, sizes.BANDS[what])
        assert row(page, table, "now") == pytest.approx(now, abs=3), "python docs/sizes.py"
    largest = sorted(sizes.functions(sources), key=lambda x: -x.size)[: sizes.NAMED]
    assert re.findall(r"^\| `(\w+)` in `(kernels/.*?)` \|", page, re.MULTILINE) == [
        (x.name, x.file) for x in largest
    ]


def test_shares_of_bands(sizes):
    sized = [sizes.Sized("x.py", "f", size) for size in (0, 5, 6, 31)]
    assert sizes.shares(sized, (5, 10, 30)) == [50, 25, 0, 25]
    assert sizes.shares([], (5,)) == [0, 0]


def test_each_warp_specialised_kernel_says_who_arrives_at_which_barrier(sources):
    specialised = {file: text for file, text in sources if "gl.warp_specialize(" in text}
    assert len(specialised) > 8
    without = [
        file for file, text in specialised.items() if "arrivals" not in (ast.get_docstring(ast.parse(text)) or "")
    ]
    assert without == []
