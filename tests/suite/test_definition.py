"""Whether two journals' cases are the same, and which growth of a definition leaves old rows comparable."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from kernelmark.registry.errors import InputError

FILE = '''
"""A file."""
from kernelmark.suite.operator import Operator, grid

SCALE = 2.0


def inputs(case, device, generator):
    return {"x": _drawn(case)}


def _drawn(case):
    return [case.axes["N"]] * 3


def reference(x, weight=None, *rest):
    """Twice."""
    # A remark.
    with x:
        return [y * SCALE for y in x if y is not None] or 0.5


def turned(inputs, case):
    return inputs


def unused(x):
    return x


OPERATOR = Operator(
    name="double",
    summary="Twice",
    axes={"N": "elements"},
    options={"layout": ("plain", "turned")},
    inputs=inputs,
    reference=reference,
    bytes=lambda case: 8 * case.axes["N"],
    flops=lambda case: 0,
    plans={"quick": (grid(N=1),)},
)
'''
GROWN = (
    FILE.replace('axes={"N": "elements"},', 'axes={"N": "elements", "depth": "GPUs"},')
    .replace('options={"layout"', 'options={"sink": (False, True), "layout"')
    .replace(
        "    plans=",
        '    later={"depth": 1, "sink": False},\n    variations={("layout", "turned"): turned},\n    plans=',
    )
)


@pytest.fixture
def case(tmp_path):
    """The case of an operator's file, as `change` has it."""

    def make(text=FILE, dtype="fp32", pass_="forward", axes=None, **options):
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        loaded = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(loaded)
        loaded.loader.exec_module(module)
        return module.OPERATOR.case(axes or {"N": 4}, dtype, pass_, **options)

    return make


def test_it_is_the_same_in_every_python(case):
    """The literal is what Python 3.11 to 3.13 give: a journal of one is gone on with by another."""
    assert case().spec == "d82dc09fd73c"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A remark", "Another"),
        ("Twice", "Two times"),
        ("A file", "The file"),
        ("grid(N=1)", "grid(N=2)"),
        ("8 *", "4 *"),
        ("return x\n", "return x + 1\n"),
        ("fp32", "fp32"),
    ],
)
def test_comments_docstrings_plans_costs_and_what_is_not_used_are_no_part_of_it(case, old, new):
    assert case().spec == case(FILE.replace(old, new)).spec


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y * SCALE", "y * 3"),
        ("weight=None", "weight=0"),
        ("is not", "is"),
        ("= 2.0", "= 3.0"),
        ("* 3\n", "* 4\n"),
    ],
)
def test_what_is_computed_is(case, old, new):
    assert case().spec != case(FILE.replace(old, new)).spec


def test_the_tolerance_that_holds_is_and_another_dtypes_is_not(case):
    assert case().spec != case(dtype="bf16").spec
    looser = "    tolerances={**TOLERANCES, 'bf16': Tolerance(norm=1.0, absolute=1.0, relative=1.0)},\n    plans="
    text = FILE.replace("    plans=", looser).replace("import Operator", "import TOLERANCES, Operator, Tolerance")
    assert case().spec == case(text).spec
    assert case(dtype="bf16").spec != case(text, dtype="bf16").spec


def test_what_came_later_leaves_old_cases_as_they_were(case):
    before, after = case(), case(GROWN)
    assert (before.name, before.spec) == (after.name, after.spec) == ("N4-plain-fp32-forward", before.spec)
    assert after.axes == {"N": 4, "depth": 1}
    assert case(GROWN, axes={"N": 4, "depth": 2}).name == "N4-depth2-plain-fp32-forward"
    assert case(GROWN, sink=True).name == "N4-sink-plain-fp32-forward"


def test_only_the_cases_of_a_variation_depend_on_it(case):
    other = GROWN.replace("    return inputs\n", "    return dict(inputs)\n")
    assert case(GROWN).spec == case(other).spec
    assert case(GROWN, layout="turned").spec != case(other, layout="turned").spec


def test_an_edit_may_be_said_to_change_nothing(case):
    edited = FILE.replace("weight=None", "weight=None, scale=None")
    before, after = case().spec, case(edited).spec
    told = edited.replace("    plans=", f"    continues={{'{after}': '{before}'}},\n    plans=")
    assert case(told).spec == before
    assert case(told.replace("y * SCALE", "y * 3")).spec not in (before, after)


def test_a_case_may_be_judged_by_another_metric_and_is_another_then(case):
    judged = FILE.replace(
        "    plans=", "    primary=lambda case: 'memory' if case.axes['N'] > 4 else 'latency',\n    plans="
    )
    assert case(judged) == case()
    assert (case().primary, case(judged, axes={"N": 5}).primary) == ("latency", "memory")
    assert case(judged, axes={"N": 5}).spec != case().spec
    with pytest.raises(InputError, match="metric of double 'none'"):
        case(FILE.replace("    plans=", "    primary=lambda case: 'none',\n    plans="))
    with pytest.raises(InputError, match="function for primary failed"):
        case(FILE.replace("    plans=", "    primary=lambda case: 1 // 0,\n    plans="))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("8 * case.axes", "-8 * case.axes", "double: bytes of N4-plain-fp32-forward is -32; its function gives"),
        ("8 * case.axes", "10**40 * case.axes", "double: bytes of N4-plain-fp32-forward is 4000000"),
        ("8 * case.axes", "0.3 * case.axes", "double: bytes of N4-plain-fp32-forward is 1.2;"),
        (
            "flops=lambda case: 0",
            "flops=lambda case: case.axes['K']",
            "double: its function for flops failed for N4-plain-fp32-forward: KeyError: 'K'",
        ),
        ("flops=lambda case: 0", "flops=lambda case: None", "double: flops of N4-plain-fp32-forward is None;"),
        ("flops=lambda case: 0", "flops=lambda case: 'x'", "double: flops of N4-plain-fp32-forward is 'x';"),
        ("flops=lambda case: 0", "flops=lambda case: float('nan')", "is nan; its function gives a whole number"),
        (
            "    plans=",
            "    tokens=lambda case: -1,\n    plans=",
            "double: tokens of N4-plain-fp32-forward is -1;",
        ),
        ('axes={"N": "elements"}', 'axes={"N": "elements", "row-width": "x"}', "double: an axis: 'row-width' has"),
    ],
)
def test_a_case_that_no_journal_may_hold_is_refused_by_the_operators_name(case, old, new, said):
    assert old in FILE
    with pytest.raises(InputError) as error:
        case(FILE.replace(old, new), axes={"N": 4, "row-width": 2} if "row-width" in new else None)
    assert said in str(error.value)
    assert len(str(error.value)) < 300


def test_a_number_in_quotes_is_no_number(case):
    """As a plan file may have it."""
    numbered = GROWN.replace('"layout": ("plain", "turned")', '"layout": ("plain", "turned"), "page": (0, 16)')
    assert numbered != GROWN
    with pytest.raises(InputError, match="double: page is the text '16'; write 16 without quotes"):
        case(numbered, page="16")


def test_a_file_may_begin_with_a_mark(case):
    assert case("\ufeff" + FILE).spec == case(FILE).spec


def test_a_whole_number_may_be_written_as_a_float(case):
    found = case(FILE.replace("8 * case.axes", "8.0 * case.axes"))
    assert found.bytes == 32
    assert isinstance(found.bytes, int)
