"""What an operator is: everything about a computation except who does it.

An operator's file builds one `Operator`. Its functions receive a `Case` (axes, options, dtype, pass) and
torch tensors; they import torch themselves, so that reading the file needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from ..registry.store.metric import (
    BOARD_METRICS,
    EACH_METRICS,
    ERROR_UNQUANTIZED,
    OPERATOR_METRICS,
    RANK_METRICS,
    Metric,
)
from ..registry.store.record import Case, Pass
from .definition import Definition, Grid, Option, grid

if TYPE_CHECKING:
    import torch

__all__ = ["BYTES", "DTYPES", "Definition", "Grid", "Inputs", "Operator", "Option", "Tolerance", "grid"]

Inputs: TypeAlias = "dict[str, Any]"
Result: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
Gather: TypeAlias = "Callable[[torch.Tensor], list[torch.Tensor]]"

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "int8": "int8",
}
"""Our dtype names, each with torch's."""

BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1, "int8": 1}
"""Bytes of one element."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of our names."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


@contextlib.contextmanager
def in_tf32() -> Iterator[None]:
    """Products of fp32 in TF32, for all that is asked for within."""
    import torch

    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)


def exponentials_of(flops: Callable[[Case], int]) -> Callable[[Case], int]:
    """The exponentials of attention over head dimension D: one a score forward, where it has two products, and one
    again backward, where it has five.
    """
    of_a_score = {"forward": 2, "backward": 5, "forward_backward": 3.5}  # products for each exponential

    def exponentials(case: Case) -> int:
        return int(flops(case) / (of_a_score[case.pass_] * 2 * case.axes["D"]))

    return exponentials


class Tolerance(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """What still counts as the same answer, against a reference in higher precision.

    `norm` bounds ‖out − ref‖ / ‖ref‖ of each output; `absolute` and `relative` bound every element:
    |out − ref| ≤ absolute · s + relative · |ref|, with s the root mean square of the reference, so that the
    bound means the same at every scale of the inputs. Of outputs of ten million elements and more a few may pass
    that bound, by no more than tenfold (`measure/verify.py`). Where the tolerance is `bounded`, the reference
    gives behind its outputs as many of the same shapes: what each element may be off beyond that.
    """

    norm: float
    absolute: float
    relative: float
    bounded: bool = False


TOLERANCES: Mapping[str, Tolerance] = {
    "bf16": Tolerance(norm=8e-3, absolute=5e-2, relative=3e-2),
    "fp16": Tolerance(norm=1e-3, absolute=8e-3, relative=4e-3),
    "fp32": Tolerance(norm=1e-5, absolute=1e-4, relative=1e-4),
}
"""Rounding of the output dtype with head-room for another order of summation; an operator may differ."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How whole inputs and answers lie over the ranks of a case.

    * `split(whole, case, rank)` gives a rank's part of an input, in memory of its own, and `join(parts, case)`
      makes the whole of all ranks' parts again.
    * `part(answer, case, rank)` gives what a rank's call must return of an output of the reference; where it is
      left out, outputs lie as inputs do. Gradients lie as their inputs, gradients of outputs as the outputs.
    * `across(outputs, gathered)` makes of a rank's outputs, as `results` gives them, what only all ranks' together
      can be held against the reference; `gathered(tensor)` gives every rank's, by rank, and is called in step.
    """

    split: Callable[[torch.Tensor, Case, int], torch.Tensor]
    join: Callable[[list[torch.Tensor], Case], torch.Tensor]
    part: Callable[[torch.Tensor, Case, int], torch.Tensor] | None = None
    across: Callable[[list[torch.Tensor], Gather], list[torch.Tensor]] | None = None

    def of_output(self, answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
        """What a rank must return of an output."""
        return (self.part or self.split)(answer, case, rank)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Of cases `of` which only a sample of the answer is known, rows of outputs, how gradients are checked.

    The gradient of an output is zero but for these rows while the answer is checked, and random in all rows while
    calls are timed.
    * `lay(gradient, case, rank)` makes a rank's gradient of an output of one of the sampled rows.
    * `rows(part, case, rank)` gives the sampled rows of a rank's output, or of its gradient in an input that is
      `like_output`; gradients in others are known in whole.
    """

    of: Callable[[Case], bool]
    lay: Callable[[torch.Tensor, Case, int], torch.Tensor]
    rows: Callable[[torch.Tensor, Case, int], torch.Tensor]
    like_output: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Operator(Definition):
    """A computation with its inputs, its reference and its cost, for the pass of a case.

    * `inputs(case, device, generator)` gives keyword arguments; every implementation gets the same.
    * `reference(**inputs)` computes in the precision of its inputs, which the harness has raised to fp64
      (fp32 for `fp32_reference`); differentiable when `gradients` are asked for.
    * `variations` realise options: by (option, value) a function `(inputs, case) -> inputs` that is applied to
      what `inputs` gave, such as another layout. Only cases with that value depend on it.
    * `tolerances` say by dtype how far an answer may be off (`Tolerance`); every dtype of its cases has one. Those
      of `tolerances_of` take their place in cases with an (option, value).
    * `results(result, inputs)` turns an implementation's result into what the reference gives, for
      outputs that have more than one right form (a quantized tensor and its scales).
    * `gradients` names the inputs that the backward pass differentiates, those of them that a case has.
    * `stored_as` names an input whose order in memory the gradient of an output of its shape has, as it comes in a
      model; without it gradients of outputs are contiguous.
    * `in_place` names inputs that the forward pass may write its results to, as an optimizer's step does. What
      a call changed must be among its results (`results` can give the inputs themselves), and no other input
      may change. Inputs are laid anew before each checked call; timing repeats the call on what it left, which
      must stay finite.
    * `weights` names inputs that a model keeps from call to call, in a format that libraries lay out anew when
      they load a model. In forward passes they stay as they are while calls are timed; checks change them too.
    * An input is a tensor, a list of tensors, or anything else, which is passed on as it is.
    * `unquantized(case, device, generator)` gives, in fp64, the right answer for the numbers that `inputs`
      quantizes (or prunes) when it gets a generator in the same state. With it each forward row has
      `error_unquantized`.
    * `measures` are metrics beside those that every operator has: each takes (outputs, references, inputs) and
      gives a number, once a process, or None where a case has none.
    * `told` are metrics that only an implementation knows, what it executed for one: its call has a function by
      the metric's name, which takes the operator's inputs by keyword and gives a number, or raises
      `NotImplementedError` with why it cannot say. A row without the number says why.
    * `rates` are metrics that follow from the time of a call: each takes the case and milliseconds.
    * `yardsticks`: calls on the same inputs that give a scale and are not implementations.
    * `forms`: other ways in which our own kernel computes it. For each its file has a function by the operator's
      name with `_` and the form's behind it, which is an implementation `kernelmark_FORM`.
    * `sharding` makes it an operator over ranks (axis `gpus`): inputs and reference are those of the whole, each
      rank's implementation is called on its part within torch's default process group.
    * `each` says of an operator without sharding that its cases may have the axis `gpus` too: each of so many GPUs
      then computes the whole, at once with the others, and the slowest counts. So the one-GPU time of an operator
      over ranks is taken on every GPU that these have.
    * `sampled`: of an operator over ranks, how gradients are checked where the reference gives some rows only.
    """

    inputs: Callable[[Case, torch.device, torch.Generator], Inputs]
    reference: Callable[..., Result]
    gradients: tuple[str, ...] = ()
    stored_as: str | None = None
    in_place: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: TOLERANCES)
    tolerances_of: Mapping[tuple[str, Option], Mapping[str, Tolerance]] = field(default_factory=dict)
    results: Callable[[Any, Inputs], Result] | None = None
    fp32_reference: bool = False
    variations: Mapping[tuple[str, Option], Callable[[Inputs, Case], Inputs]] = field(default_factory=dict)
    unquantized: Callable[[Case, torch.device, torch.Generator], Result] | None = None
    measures: Mapping[Metric, Callable[[list[Any], list[Any], Inputs], float | None]] = field(default_factory=dict)
    told: tuple[Metric, ...] = ()
    rates: Mapping[Metric, Callable[[Case, float], float]] = field(default_factory=dict)
    yardsticks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    forms: tuple[str, ...] = ()
    sharding: Sharding | None = None
    each: bool = False
    sampled: Sampled | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes this operator has."""
        return ("forward", "backward", "forward_backward") if self.gradients else ("forward",)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Those of every operator, its own, and of one over ranks what is seen of these."""
        ranks = RANK_METRICS if self.distributed else EACH_METRICS if self.each else ()
        unquantized = () if self.unquantized is None else (ERROR_UNQUANTIZED,)
        return (*OPERATOR_METRICS, *BOARD_METRICS, *unquantized, *ranks, *self.rates, *self.told, *self.measures)

    @property
    def distributed(self) -> bool:
        """Whether it says how it lies over ranks."""
        return self.sharding is not None

    @property
    def several_gpus(self) -> bool:
        """Whether they share the work, or each may do all of it."""
        return self.distributed or self.each

    def in_part(self, case: Case) -> Sampled | None:
        """How the gradients of a case are sampled, if they are."""
        return (
            self.sampled
            if self.sampled is not None and case.pass_ != "forward" and self.sampled.of(case)
            else None
        )

    def differentiated(self, inputs: Inputs) -> tuple[str, ...]:
        """The inputs that the backward pass differentiates, of those given."""
        return tuple(x for x in self.gradients if inputs.get(x) is not None)

    def built(self, case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        """The inputs of a case, in its variations."""
        inputs = self.inputs(case, device, generator)
        for variation in self._varied(case):
            inputs = variation(inputs, case)
        return inputs

    def tolerance(self, case: Case) -> Tolerance | None:
        """How far an answer of the case may be off; None for a dtype without a bound."""
        own = (x for (name, value), x in self.tolerances_of.items() if case.options.get(name) == value)
        return next(own, self.tolerances).get(case.dtype)

    def _varied(self, case: Case) -> list[Callable[[Inputs, Case], Inputs]]:
        return [call for (name, value), call in self.variations.items() if case.options.get(name) == value]

    def computes(self, case: Case) -> tuple[object, ...]:
        """Inputs, reference and the form of results, and the tolerance that holds for the case."""
        functions = (self.inputs, self.reference, self.results, *self._varied(case))
        gradients = () if case.pass_ == "forward" else self.gradients
        if self.sharding is not None:
            across = () if self.sharding.across is None else (self.sharding.across,)
            functions = (*functions, self.sharding.split, self.sharding.join, self.sharding.part, *across)
        if (sampled := self.in_part(case)) is not None:
            functions = (*functions, sampled.lay, sampled.rows)
        return (*functions, self.tolerance(case), gradients, self.in_place, self.fp32_reference)
