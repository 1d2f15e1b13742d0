"""A few of the fuzzer's inputs in every test run; `make fuzz` has many more."""

from __future__ import annotations

import pytest

from .inputs import KINDS, one


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[x.__name__ for x in KINDS])
def test_no_input_ends_in_anything_but_a_message(kind):
    for number in range(kind, 60 * len(KINDS), len(KINDS)):
        one(number, seed=19)
