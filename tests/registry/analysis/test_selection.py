"""Which rows are asked for, and what is said where there are none."""

from __future__ import annotations

from typing import Any

import pytest
from kernelmark.registry.analysis.rows import Row, rows
from kernelmark.registry.analysis.selection import EVERYTHING, Selection
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.record import Key


@pytest.fixture(scope="module")
def found(literal: Any) -> tuple[Row, ...]:
    """Two operators, two lengths, two passes, three implementations."""
    lines = []
    for operator in ("attention", "gelu"):
        for size in (64, 4096):
            for pass_ in ("forward", "backward"):
                case = literal.case(
                    operator=operator, name=f"S{size}-causal-bf16-{pass_}", axes={"S": size, "Z": 1}, pass_=pass_
                )
                lines += [literal.record(x, case=case) for x in ("kernelmark", "torch")]
                lines.append(literal.record("fa", case=case, status="error", reason="x"))
    return rows(literal.journal(*lines))


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (EVERYTHING, 24),
        (Selection(operators=("gelu",)), 12),
        (Selection(operators=("gelu", "attention")), 24),
        (Selection(cases=("S64-causal-bf16-forward",)), 6),
        (Selection(cases=("bf16-S64",)), 12),
        (Selection(implementations=("torch",)), 8),
        (Selection(providers=("kernelmark",)), 8),
        (Selection(dtypes=("bf16", "fp8")), 24),
        (Selection(passes=("backward",)), 12),
        (Selection(axes={"S": (64,)}), 12),
        (Selection(axes={"S": (64, 128), "Z": (1,)}), 12),
        (Selection(statuses=("error",)), 8),
        (Selection(operators=("gelu",), axes={"S": (64,)}, passes=("forward",), statuses=("ok",)), 2),
    ],
)
def test_rows(found: tuple[Row, ...], selection: Selection, count: int) -> None:
    assert len(selection.rows(found)) == count


def test_keys_go_by_the_cases_name(found: tuple[Row, ...]) -> None:
    keys: dict[Key, str] = {x.identity: x.provider for x in found}
    assert len(Selection(axes={"S": (64,)}, passes=("forward",), providers=("torch",)).keys(keys)) == 2


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (Selection(operators=("glue",)), "unknown operator 'glue'. Did you mean 'gelu'? Known: attention, gelu."),
        (Selection(implementations=("x",)), "unknown implementation 'x'. Known: fa, kernelmark, torch."),
        (Selection(providers=("x",)), "unknown provider 'x'"),
        (Selection(statuses=("crashed",)), "unknown status 'crashed'. Known: error, ok."),
        (Selection(cases=("S65",)), "no row has case S65. There are 24 rows of attention, gelu"),
        (Selection(dtypes=("fp8",)), "no row has dtype fp8."),
        (Selection(axes={"S": (65, 66)}), "no row has S=65,66: S is 64, 4096."),
        (Selection(axes={"Q": (1,)}), "no row has Q=1: no row has an axis Q."),
        (Selection(implementations=("fa",), statuses=("ok",)), "no row has them together"),
    ],
)
def test_what_is_not_there_is_said(found: tuple[Row, ...], selection: Selection, said: str) -> None:
    with pytest.raises(InputError) as error:
        selection.rows(found)
    assert said in str(error.value)


def test_of_nothing_everything_is_nothing() -> None:
    assert EVERYTHING.rows([]) == ()
