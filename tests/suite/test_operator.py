"""What says whether two journals' cases are the same."""

from __future__ import annotations

import pytest
from kernelmark.suite.operator import _spec

FILE = '''
"""A file."""
def reference(x, weight=None, *rest):
    """Twice."""
    # A remark.
    with x:
        return [y * 2 for y in x if y is not None] or 0.5

BYTES = lambda case: 8 * case.axes["N"]
PLANS = {"quick": (1, 2)}
'''


def spec(tmp_path, text):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
    path.write_text(text)
    return _spec(path, "tolerances")


def test_it_is_the_same_in_every_python(tmp_path):
    """The literal is what Python 3.11 to 3.13 give: a journal of one is gone on with by another."""
    assert spec(tmp_path, FILE) == "06a6b20cda6b"


@pytest.mark.parametrize(
    ("old", "new"), [("A remark", "Another"), ("Twice", "Two times"), ("A file", "The file"), ("(1, 2)", "(1, 3)")]
)
def test_comments_docstrings_and_plans_are_no_part_of_it(tmp_path, old, new):
    assert spec(tmp_path, FILE) == spec(tmp_path, FILE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("y * 2", "y * 3"), ("weight=None", "weight=0"), ("is not", "is"), ("8 *", "4 *"), ("or 0.5", "or None")],
)
def test_what_is_computed_is(tmp_path, old, new):
    assert spec(tmp_path, FILE) != spec(tmp_path, FILE.replace(old, new))
