"""Every fault that is planted into a training step is found, and nothing is found in a step that is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.system import System
from kernelmark.suite.workloads._trainer import PartsTrainer


class NoOptimizer(PartsTrainer):
    """Never updates."""

    def update(self) -> None: ...


class LazyOptimizer(PartsTrainer):
    """Makes no step but the first."""

    def update(self) -> None:
        if self._steps == 0:
            super().update()


class NoClipping(PartsTrainer):
    """Leaves gradients as long as they are."""

    def clip(self) -> None: ...


class ByAddress(PartsTrainer):
    """Takes tokens that lie where others lay for those."""

    kept: dict[int, tuple[Any, list[Any]]]

    def step(self, tokens: Any, targets: Any) -> Any:
        self.kept = getattr(self, "kept", {})
        if tokens.data_ptr() in self.kept and self._steps:
            loss, gradients = self.kept[tokens.data_ptr()]
            for p, gradient in zip(self._params, gradients, strict=True):
                p.grad = gradient.clone()
            self.update()
            return loss
        loss = super().step(tokens, targets)
        self.kept[tokens.data_ptr()] = loss, [x.grad.clone() for x in self._params]
        return loss


class OneBatch(ByAddress):
    """The same from its first step on, whatever was loaded since."""

    def load(self, weights: Any) -> None:
        super().load(weights)
        self._steps = 1 if getattr(self, "kept", None) else 0


class DroppedGradient(PartsTrainer):
    """One small gradient is zero."""

    def clip(self) -> None:
        self._params[self._names.index("layers.1.feed_norm")].grad.zero_()
        super().clip()


class MissingGradient(PartsTrainer):
    """One parameter is left out, of the gradients and of the update."""

    def gradients(self) -> Any:
        return {name: x for name, x in super().gradients().items() if name != "layers.0.key"}


class SkippedLayer(PartsTrainer):
    """The last layer is not run; its parameters get no gradient but zeros."""

    def _executed(self) -> Any:
        module: Any = self._module

        class Skipped(torch.nn.Module):
            def forward(self, y: Any, h: Any, cos: Any, sin: Any, following: Any) -> Any:
                unused = sum(x.sum() for x in layer.parameters()) * 0
                return self_parts["add_norm"](
                    x=torch.zeros_like(h) + unused, residual=h, weight=following, eps=1e-5
                )

        layer = module.layers[-1]
        self_parts = self.assembly.parts(
            self.recipe.chosen, self.recipe.B, self.recipe.S, self.recipe.dtype, "cpu"
        )
        stand_in = Skipped()
        stand_in.attention_norm = layer.attention_norm
        module.layers[-1] = stand_in
        return super()._executed()


class Rescaled(PartsTrainer):
    """The loss of a micro-batch counts twice where there are two."""

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for x in self._params:
                x.add_(1e-3 * torch.sign(x))


class NotFinite(PartsTrainer):
    """One element of one gradient."""

    def clip(self) -> None:
        super().clip()
        self._params[0].grad.view(-1)[7] = math.nan


class Projected(PartsTrainer):
    """Queries, keys and values are one part, whose rotation is at other positions."""

    shift = 1

    def parts(self, device: Any) -> Any:
        found = super().parts(device)
        own = found["qkv_rope"]

        def shifted(cos: Any, sin: Any, **inputs: Any) -> Any:
            _, k, v = own(cos=cos, sin=sin, **inputs)
            # Of all positions by as much no answer depends on.
            return own(cos=cos.roll(self.shift, 0), sin=sin.roll(self.shift, 0), **inputs)[0], k, v

        return found | {"qkv_rope": shifted}


class Backwards(Projected):
    """Positions run the other way, for queries."""

    shift = 9


class Gated(PartsTrainer):
    """Gate and up are one part with what gates them, whose weights are taken for each other's."""

    def wrong(self, own: Any, x: Any, gate: Any, up: Any) -> Any:
        return own(x=x, gate=up, up=gate)

    def parts(self, device: Any) -> Any:
        found = super().parts(device)
        own = found["gate_up_swiglu"]
        return found | {"gate_up_swiglu": lambda **inputs: self.wrong(own, **inputs)}


class Ungated(Gated):
    """Up has no gradient."""

    def wrong(self, own: Any, x: Any, gate: Any, up: Any) -> Any:
        return own(x=x, gate=gate, up=up.detach()) + 0 * up.sum()


class Added(torch.autograd.Function):
    """A product whose weight's gradient is added where it lies, or takes the place of what is there."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, adds: bool) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.into, ctx.adds = getattr(weight, "main_grad", None), adds
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        dweight = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        dbias = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if ctx.into is None:
            return dy @ weight, dweight, dbias, None
        (ctx.into.add_ if ctx.adds else ctx.into.copy_)(dweight)
        return dy @ weight, None, dbias, None


class AddedInPlace(PartsTrainer):
    """Gradients of micro-batches are added by their products."""

    adds = True

    def parts(self, device: Any) -> Any:
        return super().parts(device) | {
            "linear": lambda x, weight, bias=None: Added.apply(x, weight, bias, self.adds)
        }


class Overwritten(AddedInPlace):
    """They take each other's place."""

    adds = False


TRAINERS = {
    NoOptimizer: "change of",
    LazyOptimizer: "change of",
    NoClipping: "gradient of",
    ByAddress: "change of|loss|gradient",
    OneBatch: "change of|loss|gradient",
    DroppedGradient: "gradient of layers.1.feed_norm",
    MissingGradient: "layers.0.key has no gradient",
    SkippedLayer: "loss is|gradient of",
    Rescaled: "change of",
    NotFinite: "is not finite",
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
def test_a_right_step_is_found_right(bench: Any, model: str, dtype: str) -> None:
    here = bench(model, dtype=dtype)
    found = here.measure(here.trainer()).samples
    assert found["gradient_error"][0] < (1e-4 if dtype == "fp32" else 0.1)
    assert found["change_error"][0] < (1e-2 if dtype == "fp32" else 0.2)
    assert len(found["step"]) == len(found["tokens_per_s"]) == 4
    assert here.prepared.expected.first.norm > 1.5  # else a step that does not clip could not be told


@pytest.mark.parametrize(("dtype", "products"), [("fp32", "dtype"), ("bf16", "dtype"), ("bf16", "e4m3")])
@pytest.mark.parametrize("kind", TRAINERS, ids=lambda x: x.__name__)
def test_a_faulty_trainer_is_found(bench: Any, kind: type[PartsTrainer], dtype: str, products: str) -> None:
    """Whatever it multiplies in: those whose bound is of 8 bits are held to the widest."""
    here = bench("llama-tiny", dtype=dtype, products=products)
    with pytest.raises(Incorrect, match=TRAINERS[kind]):
        here.measure(here.trainer(kind))


def _wrong_part(name: str, wrong: Callable[..., Any]) -> type[PartsTrainer]:
    class Wrong(PartsTrainer):
        def __init__(self, recipe: Any, assembly: Any) -> None:
            super().__init__(recipe, assembly)
            outer = assembly

            class Other:
                system = outer.system
                call = staticmethod(outer.call)
                beside = staticmethod(outer.beside)

                @staticmethod
                def parts(*given: Any) -> dict[str, Callable[..., Any]]:
                    found = outer.parts(*given)
                    return found | {name: lambda **inputs: wrong(found[name], **inputs)}

            self.assembly = Other()  # type: ignore[assignment]  # all that a trainer asks of it

    return Wrong


def _rotated() -> Callable[..., Any]:
    def wrong(right: Any, q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        def turn(x: Any) -> Any:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

        return turn(q), turn(k)

    return wrong


PARTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a mask that hides nothing": (
        "attention",
        lambda right, q, k, v, mask: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    ),
    "a mask that hides the query itself but for the first": (
        "attention",
        lambda right, q, k, v, mask: torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
            .tril_(-1)
            .index_fill_(0, torch.tensor(0), True),
            enable_gqa=True,
        ),
    ),
    "pairs of neighbours in place of halves": ("rope", _rotated()),
    "keys that are not turned": (
        "rope",
        lambda right, q, k, cos, sin, layout: (right(q=q, k=k, cos=cos, sin=sin, layout=layout)[0], k),
    ),
    "positions that are one on": (
        "rope",
        lambda right, q, k, cos, sin, layout: (
            right(q=q, k=k, cos=cos, sin=sin, layout=layout)[0],
            right(q=q, k=k, cos=cos.roll(1, 0), sin=sin.roll(1, 0), layout=layout)[1],
        ),
    ),
    "a norm that forgets its weight": (
        "norm",
        lambda right, x, weight, eps: right(x=x, weight=torch.ones_like(weight) + 0 * weight, eps=eps),
    ),
    "a gate whose backward pass is cut": ("gate", lambda right, gate, up: right(gate=gate.detach(), up=up)),
    "a loss of the tokens themselves": (
        "loss",
        lambda right, x, weight, target: right(x=x, weight=weight, target=target.roll(1)),
    ),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("what", PARTS)
def test_a_faulty_part_is_found(bench: Any, what: str, dtype: str) -> None:
    here = bench("llama-tiny", dtype=dtype)
    name, wrong = PARTS[what]
    with pytest.raises(Incorrect):
        here.measure(here.trainer(_wrong_part(name, wrong)))


def test_a_fault_that_begins_after_the_first_steps_is_found_in_the_window(bench: Any) -> None:
    class Later(PartsTrainer):
        loads = 0

        def load(self, weights: Any) -> None:
            super().load(weights)
            self.loads += 1

        def clip(self) -> None:
            if self.loads > 1:
                self._params[3].grad.zero_()
            super().clip()

    here = bench("llama-tiny")
    with pytest.raises(Incorrect, match="random step of the timed window: the gradient of"):
        here.measure(here.trainer(Later))


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bf16"}, {"state": "master32", "dtype": "bf16"}, {"state": "muon"}]
)
def test_an_update_that_is_left_out_after_the_first_steps_is_found_in_the_window(
    bench: Any, options: dict[str, str]
) -> None:
    class Later(PartsTrainer):
        made = 0

        def update(self) -> None:
            self.made += 1
            if self.made <= 3:
                super().update()

    here = bench("llama-tiny", **options)
    with pytest.raises(Incorrect, match="random step of the timed window: along AdamW's update"):
        here.measure(here.trainer(Later))


class NoBiasCorrection(PartsTrainer):
    """Each step is one so late that no bias is left."""

    def _updated(self, step: int, **tensors: Any) -> None:
        super()._updated(1_000_000, **tensors)


class TenfoldDecay(PartsTrainer):
    """Weights decay ten times as fast."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.hyperparameters["weight_decay"] *= 10


class EverySecond(PartsTrainer):
    """Makes every second step alone, and counts them all."""

    def update(self) -> None:
        if self._steps % 2 == 0:
            super().update()
        else:
            self._steps += 1


class Faster(PartsTrainer):
    """A third more than the rate."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.hyperparameters["lr"] *= 4 / 3


@pytest.mark.parametrize("state", ["plain", "master32"])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("kind", [NoBiasCorrection, EverySecond, Faster])
def test_what_rounding_to_16_bits_leaves_room_for_is_found(
    bench: Any, kind: type[PartsTrainer], model: str, state: str
) -> None:
    """Each is off by less than one parameter may be, where weights are rounded in each step."""
    here = bench(model, dtype="bf16", state=state)
    with pytest.raises(Incorrect, match="after 3 steps: (along the model's, the changes of all|the change of)"):
        here.measure(here.trainer(kind))


@pytest.mark.parametrize("kind", [NoBiasCorrection, TenfoldDecay])
def test_masters_are_rounded_once_and_hide_no_wrong_update(bench: Any, kind: type[PartsTrainer]) -> None:
    here = bench("llama-tiny", dtype="bf16", state="master32")
    assert here.measure(here.trainer()).samples["change_error"][0] < 0.1
    with pytest.raises(Incorrect, match="change of"):
        here.measure(here.trainer(kind))


@pytest.mark.parametrize("execution", ["eager", "aot_eager"])
def test_micro_batches_masters_and_executions_give_the_same_answer(bench: Any, execution: Any) -> None:
    here = bench("llama-tiny", A=2, dtype="bf16", state="master32", slice="first1")
    found = here.measure(here.trainer(system=System("x", execution=execution))).samples
    assert found["gradient_error"][0] < 0.1


def test_all_systems_of_a_case_have_one_limit(bench: Any) -> None:
    """The floor is the model's, and its rates are measured once in a process."""
    here = bench("gpt2-tiny")
    found = [here.measure(here.trainer()).samples for _ in range(2)]
    limits = [x["limit_fraction"][0] * median(x["step"]) for x in found]
    assert limits[0] == pytest.approx(limits[1], rel=1e-5)


def test_products_that_add_to_gradients(bench: Any) -> None:
    """Autograd is given the first micro-batch's gradients alone; a product that forgets what is there is found."""
    here = bench("gpt2-tiny", dtype="bf16", A=3)
    here.measure(here.trainer(AddedInPlace))
    with pytest.raises(Incorrect, match="gradient of|change of"):
        here.measure(here.trainer(Overwritten))


def test_projections_turned_by_other_positions(bench: Any) -> None:
    here, system = bench("llama-tiny", dtype="bf16"), System("x", parts={"qkv_rope": "torch"})
    here.measure(here.trainer(system=system))
    for kind in (Projected, Backwards):
        with pytest.raises(Incorrect, match="loss is|gradient of|change of"):
            here.measure(here.trainer(kind, system))


def test_a_feed_forward_gated_otherwise(bench: Any) -> None:
    here, system = bench("llama-tiny", dtype="bf16"), System("x", parts={"gate_up_swiglu": "torch"})
    here.measure(here.trainer(system=system))
    for kind, said in ((Gated, "loss is|gradient of|change of"), (Ungated, "gradient of|change of")):
        with pytest.raises(Incorrect, match=said):
            here.measure(here.trainer(kind, system))
