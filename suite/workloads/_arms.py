"""A trainer of an arm: a model's parts, with what the arm changes of the recipe (`suite/system.py`, `Changes`)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...registry.store.record import EAGER, PROVIDER
from .._transformer_engine import Linears
from ..model import chosen
from ..operator import in_tf32, torch_dtype
from ..operators.gradient_compression import KEEP
from ..system import OPTIMIZER, Assembly, Changes
from ._coarse_states import Twin
from ._fp8 import Probe, counted, emulated, entered, rounded
from ._gated import Gates
from ._muon import library
from ._recipe import HYPERPARAMETERS, Recipe
from ._sparse import Chosen, blocks, causal, left_out, masked, over_chosen, over_given, sparse
from ._trainer import PartsTrainer, within

if TYPE_CHECKING:
    import torch

    from ..measure.telemetry import Watch

LARGEST_FIRST_SCALE = 2.0**16
"""Of the loss in fp16: with this PyTorch's own scaler begins."""
GROWN = 2000
"""Steps without overflow after which it is doubled."""
SENT_EVERY = 100
"""Steps between two looks at what compression loses, which take a pass over all gradients."""
LATE = 1_000_000
"""A step so late that AdamW corrects no bias any more: what a program that forgets to does."""
TWIN = "twin_adamw_8bit"
"""AdamW whose moments are rounded as those of 8 bits, by us."""
OFFLOADING = "CPUOffloadOptimizer."
"""How names of what torchao's offloading hooks on parameters begin."""
MUON = "torch_muon"
"""The optimizer of PyTorch, by the name that a system gives it."""
WIDE = ("_e5m2", "te_tensorwise", "te_delayed")
"""Ends of the precisions whose gradients are in E5M2; Transformer Engine's recipes of one scale have them so."""
WIDEST = 256
"""Dimensions of a head that `attention_sparse` takes at most."""
ALIKE = 0.05
"""By how much models of equal parameters may differ in them."""


STORED: Mapping[str, dict[str, Any]] = {
    "fp16": {"dtype": "fp16", "products": "bf16", "state": "master32"},
    "bf16": {"dtype": "bf16", "products": "bf16", "state": "master32"},
    "fp32": {"dtype": "fp32", "products": "fp32", "state": "plain"},
    "tf32": {"dtype": "fp32", "products": "bf16", "state": "plain"},
}
"""A recipe's fields by the dtype that weights and activations are changed to. fp16 and TF32 products have more
digits than bf16's and are held to its bounds.
"""


def recipe_of(given: Recipe, assembly: Assembly) -> Recipe:
    """A case's recipe as an arm has it. Raises `InputError` for an unknown model, NotImplementedError for one of
    another size or vocabulary.
    """
    system = assembly.system
    changes = system.changes
    found = given
    if system.precision != "case" or changes.products:
        found = dataclasses.replace(found, products="e4m3")
    if changes.dtype:
        found = dataclasses.replace(found, **STORED[changes.dtype])
    if changes.model:
        other = chosen(assembly.catalog.models, changes.model)
        sizes = [x.model.parameters(x.configuration) for x in (given.chosen, other)]
        if abs(sizes[1] / sizes[0] - 1) > ALIKE:
            raise NotImplementedError(f"{other.name} has {sizes[1]} parameters, {given.chosen.name} {sizes[0]}")
        if other.configuration.vocabulary != given.chosen.configuration.vocabulary:
            raise NotImplementedError(f"{other.name} has another vocabulary than {given.chosen.name}")
        found = dataclasses.replace(found, chosen=other)
    return found


def low_share(r: Recipe) -> float:
    """The share of a step's product operations that run in 8 bits where those of the layers' linears do: the
    output projection and attention do not.
    """
    own = sum(
        x.size * x.share for name, x in r.chosen.model.weights(r.chosen.configuration).items() if "layers." in name
    )
    return 6 * own * r.tokens / r.flops


def first_scale(r: Recipe) -> float:
    """Of the loss in fp16; halved where gradients overflow. Gradients of logits are at most one over the tokens of
    a step. These become 1, and that of an even guess among 65,536 words loses 1 in 500 in fp16.
    """
    return min(LARGEST_FIRST_SCALE, 2.0 ** math.ceil(math.log2(r.tokens)))


class ArmTrainer(PartsTrainer):
    """A trainer that changes what its system says."""

    board: Watch | None = None
    """What the board said beside the steps of this process; here, as the text of `measure` is part of what cases
    of `converge` are known by.
    """

    def __init__(self, recipe: Recipe, assembly: Assembly) -> None:
        if (assembly.system.changes.optimizer == MUON) != bool(recipe.hidden):
            own = "Muon" if recipe.hidden else "AdamW"
            raise NotImplementedError(f"the optimizer of this case is {own}; {assembly.system.name} has another")
        super().__init__(recipe_of(recipe, assembly), assembly)
        if assembly.system.states != "device":
            raise NotImplementedError("a recipe that is changed keeps its states on the device")
        if assembly.system.precision == "parts_1x128_fused":
            raise NotImplementedError("what 8 bits lose is seen at single products; here norms are one with them")
        self.changes: Changes = assembly.system.changes
        if self.scaled and self.execution == "graph":
            raise NotImplementedError(
                "a loss is scaled anew from step to step, and a graph keeps what it captured"
            )
        pattern, _, percent = self.changes.attention.partition("-")
        self.gates = Gates(int(percent)) if pattern == "learned" else None
        """Of an arm whose gates learn which blocks are seen."""
        if self.gates is not None and (self.execution != "eager" or assembly.system.recompute != "none"):
            raise NotImplementedError("gates learn in eager passes, each made once")
        kinds = {
            "float8_tensorwise": "tensorwise",
            "float8_tensorwise_e5m2": "tensorwise",
            "float8_rowwise": "rowwise",
            "float8_1x128": "1x128",
            "parts_rowwise": "rowwise",
            "parts_1x128": "1x128",
            "te_tensorwise": "tensorwise",
            "te_delayed": "tensorwise",
            "te_1x128": "1x128",
        }
        emulates = self.changes.products.removeprefix("e4m3_").removesuffix("_e5m2")
        kind = emulates or kinds.get(assembly.system.precision)
        wide = (self.changes.products or assembly.system.precision).endswith(WIDE)
        self.probe = Probe(kind, self.changes.fault == "scale_stuck", wide) if kind else None
        self.norm: Any = None
        """Of the last step's gradients before clipping, on the device."""
        self.counts: dict[str, Any] = {}
        """Steps whose gradients were clipped, were not finite, and fp16 steps that were left out."""
        self.first_scale = first_scale(self.recipe)
        """Of the loss, where it is scaled; a check lowers it."""
        self._scale, self._since = self.first_scale, 0
        self._residual: Any = None
        self._library: Any = None
        self._grads: list[Any] = []
        self._compress: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self.ratio: float | None = None
        """Bytes of the gradients over those that are sent; None where they are not compressed."""
        self.sent: list[Any] = []
        """Each hundredth step's cosine between what was to be sent and what arrived, on the device."""
        self._twin: Any = None
        self._tiles: list[Any] | None = None
        """Shares of tiles that calls of attention leave out, while somebody asks."""

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, because gradients would underflow."""
        return self.changes.dtype == "fp16"

    @property
    def coarse_states(self) -> bool:
        """Whether moments are in 8 bits."""
        return self.changes.optimizer.endswith("_8bit")

    @property
    def products(self) -> str:
        return self.recipe.products if self.changes.dtype or self.changes.products else super().products

    # How it is built.

    def parts(self, device: torch.device) -> dict[str, Callable[..., Any]]:
        changes = self.changes
        if changes.dtype == "tf32" and device.type != "cuda":
            raise NotImplementedError("TF32 is of CUDA devices")
        found = self._in_fp16(device) if self.scaled else super().parts(device)
        if changes.attention or changes.fault == "mask_off_by_one":
            if "attention" not in found:
                raise NotImplementedError(f"{self.recipe.chosen.name} has no attention")
            found["attention"] = self._attention(device)
        if changes.products:
            found["linear"] = emulated(changes.products.removeprefix("e4m3_"), changes.fault == "scale_stuck")
        if changes.weights:
            found["linear"] = _two_of_four(found["linear"])
        return found

    def _in_fp16(self, device: torch.device) -> dict[str, Callable[..., Any]]:
        """All parts in fp16. What no operator has in fp16 is in fp32, as under autocast; PyTorch's loss is of
        logits in fp16, likewise.
        """
        r, system = self.recipe, self.assembly.system
        products = r.chosen.model.products(r.chosen.configuration, r.B, r.S)
        found = {"linear": self.assembly.linear(r.dtype, device.type, products)}
        for x in r.chosen.model.parts(r.chosen.configuration, r.B, r.S):
            by_pytorch = system.base == EAGER and not {x.name, x.operator} & system.parts.keys()
            if x.operator == "fused_linear_cross_entropy" and by_pytorch:
                found[x.name] = _loss_of_narrow_logits
                continue
            dtype = r.dtype if r.dtype in self.assembly.catalog.operator(x.operator).dtypes else "fp32"
            call = self.assembly.call(x.name, x.operator, x.axes, x.options, dtype, device.type)
            found[x.name] = call if dtype == r.dtype else _widened(call)
        return found

    def _attention(self, device: torch.device) -> Callable[..., Any]:
        r, what = self.recipe, self.changes.attention
        if what == "linear":
            c = r.chosen.configuration
            axes = {"B": r.B, "S": r.S, "H": c.heads, "K": c.head, "D": c.head}
            call = self.assembly.call("attention", "linear_attention", axes, {}, r.dtype, device.type)
            return _linear_attention(call)
        if not what:
            return masked(lambda q, k: causal(q.shape[2], q.device, ahead=1))
        pattern, _, percent = what.partition("-")
        if self.assembly.system.base == PROVIDER:
            return self._by_kernel(pattern, int(percent), device)
        return sparse(self._counted(self.gates or blocks(pattern, int(percent))), r.S, device.type)

    def _by_kernel(self, pattern: str, percent: int, device: torch.device) -> Callable[..., Any]:
        """By our own `attention_sparse`: what is shown to be as good is the program whose speed is claimed."""
        r = self.recipe
        of = next(x for x in r.chosen.model.parts(r.chosen.configuration, r.B, r.S) if x.name == "attention")
        if of.operator != "attention":
            raise NotImplementedError(f"attention: attention_sparse is not of what {of.operator} computes")
        if of.axes["D"] > WIDEST:
            raise NotImplementedError(
                f"attention: attention_sparse is of heads of up to {WIDEST} dimensions, not {of.axes['D']}"
            )
        options = {"mask": "causal", "pattern": pattern, "sparsity": percent}
        axes = {x: of.axes[x] for x in ("B", "H", "Hkv", "S", "D")}
        # Under the operator's name: a system may name another implementation of it, beside one of dense attention.
        call = self.assembly.call("attention_sparse", "attention_sparse", axes, options, r.dtype, device.type)
        if pattern in ("dynamic", "learned"):
            return over_chosen(call, percent, self.gates, self._hear)
        return over_given(call, self._counted(blocks(pattern, percent)))

    def _counted(self, chosen: Chosen) -> Chosen:
        def counted(q: Any, k: Any) -> Any:
            found = chosen(q, k)
            self._hear(found)
            return found

        return counted

    def _hear(self, seen: Any) -> None:
        """Blocks (…, n, n) of a call of attention."""
        if self._tiles is not None:
            self._tiles.append(left_out(seen))

    def left_out(self, tokens: torch.Tensor) -> float | None:
        """The share of tiles of 128 × 128 that attention leaves out in a pass of tokens (B, S), counted;
        None where the arm leaves out none.
        """
        if self.changes.left_out is None:
            return None
        self._tiles = []
        try:
            self.logits(tokens)
            return sum(map(float, self._tiles)) / len(self._tiles)
        finally:
            self._tiles = None

    def _build(self, device: torch.device) -> None:
        super()._build(device)
        if self.gates is not None:
            self.gates.around(self._module.layers)

    def states(self) -> dict[str, torch.dtype]:
        """A library's optimizer has states of its own."""
        found = super().states()
        return {name: x for name, x in found.items() if name == "masters"} if self.changes.optimizer else found

    def optimizer(self, device: torch.device) -> Callable[..., Any]:
        if not self.scaled:
            return super().optimizer(device)
        r = self.recipe  # the masters are what is updated
        sizes = {"T": len(r.chosen.model.weights(r.chosen.configuration)), "D": r.chosen.configuration.width}
        return self.assembly.call(OPTIMIZER, "adamw", sizes, {"sizes": "llama"}, "fp32", device.type)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load(weights)
        self._fresh()

    def _fresh(self) -> None:
        """An optimizer and counts that have seen no step."""
        import torch

        device = self._params[0].device
        self.counts = {
            x: torch.zeros((), dtype=torch.int64, device=device) for x in ("clipped", "nonfinite", "skipped")
        }
        self._scale, self._since = self.first_scale, 0
        self.sent = []
        if self.gates is not None:
            self.gates.held.clear()
        if self.changes.gradients:
            r, options = self.recipe, {"scheme": self.changes.gradients}
            size = sum(x.numel() for x in self._params)
            self._residual = torch.zeros(size, dtype=torch_dtype(r.dtype), device=device)
            self._compress = tuple(  # type: ignore[assignment]  # two of them
                self.assembly.call("gradients", x, {"N": size}, options, r.dtype, device.type)
                for x in ("gradient_compression", "gradient_decompression")
            )
        if self.changes.optimizer:
            held = self._states["masters"] or self._params
            if self.changes.optimizer == MUON:
                self._library = library(held, self._matrices)
            else:
                if self._library is None:
                    weakref.finalize(self, _unhook, held)
                _unhook(held)
                self._library = self.library(held)

    def library(self, held: list[Any]) -> Any:
        """The optimizer of masters, or of weights that have none, that is in the part's place."""
        if self.changes.optimizer == TWIN:
            return Twin(held, self.assembly.catalog.operator("adamw").reference)
        return _library(self.changes.optimizer, held)

    # A step.

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with in_tf32() if self.changes.dtype == "tf32" else contextlib.nullcontext():
            return super().step(tokens, targets)

    def backward(self, loss: Any) -> None:
        (loss * self._scale if self.scaled else loss).backward()

    def clip(self) -> None:
        import torch

        self._grads = [p.grad for p in self._params]
        if self.scaled:  # in fp16 what is scaled back would be lost
            self._grads = [x.float() / self._scale for x in self._grads]
        if self._compress is not None:
            self._compressed(*self._compress)
        clip = self.recipe.clip or float("inf")
        self.norm = torch.nn.utils.get_total_norm(self._grads, foreach=True)
        # As clip_grad_norm_ does, without waiting for the norm.
        torch._foreach_mul_(self._grads, (clip / (self.norm + 1e-6)).clamp(max=1.0))
        self.counts["clipped"] += self.norm > clip
        self.counts["nonfinite"] += ~torch.isfinite(self.norm)

    def _compressed(self, compress: Callable[..., Any], decompress: Callable[..., Any]) -> None:
        """Puts in place of gradients what is left of them after they were sent; the rest goes into the next."""
        import torch

        scheme, dtype = self.changes.gradients, self._residual.dtype
        whole = torch.cat([x.flatten() for x in self._grads]).to(dtype)
        wanted = whole.float() + self._residual.float() if self._steps % SENT_EVERY == 0 else None
        before = self._residual
        payload, self._residual = compress(gradient=whole, residual=before, scheme=scheme, keep=KEEP)
        if self.scaled:  # a step that overflows is left out, and leaves nothing to those after it
            self._residual = torch.where(whole.isfinite().all(), self._residual, before)
        sent = decompress(payload=payload, size=len(whole), dtype=dtype, scheme=scheme, keep=KEEP)
        self.ratio = whole.nbytes / payload.nbytes
        if wanted is not None:
            self.sent.append(torch.cosine_similarity(wanted, sent.float(), dim=0))
        for x, some in zip(self._grads, sent.split([x.numel() for x in self._grads]), strict=True):
            x.copy_(some.view_as(x))

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return dict(zip(self._names, self._grads, strict=True))

    def update(self) -> None:
        import torch

        if self.scaled:
            if not torch.isfinite(self.norm):
                self._scale, self._since = self._scale / 2, 0
                self.counts["skipped"] += 1
                return
            self._since += 1
            if self._since >= GROWN:
                self._scale, self._since = self._scale * 2, 0
        with torch.no_grad():
            if self._library is not None:
                self._by_library()
            else:
                self._by_part()

    def _by_part(self) -> None:
        assert self._update is not None
        self._steps += 1
        wide = self.scaled
        masters = self._states["masters"]
        self._update(
            params=masters if wide else [x.detach() for x in self._params],
            grads=self._grads,
            exp_avgs=self._states["exp_avgs"],
            exp_avg_sqs=self._states["exp_avg_sqs"],
            masters=None if wide else masters or None,
            step=LATE if self.changes.fault == "no_bias_correction" else self._steps,
            **self.hyperparameters,
        )
        if wide:
            for own, master in zip(self._params, masters, strict=True):
                own.copy_(master)
        if self.changes.fault == "unscaled_momentum":
            for x in self._states["exp_avgs"]:
                x.copy_(rounded(x, 1.0))

    def _by_library(self) -> None:
        self._steps += 1
        masters = self._states["masters"]
        for group in self._library.param_groups:
            if hasattr(group["lr"], "fill_"):  # torchao keeps it in a tensor, which its compiled step reads
                group["lr"].fill_(self.hyperparameters["lr"])
            else:
                group["lr"] = self.hyperparameters["lr"]
        for master, grad in zip(masters, self._grads, strict=False):
            master.grad = grad.float()
        self._library.step()
        for master, own in zip(masters, self._params, strict=False):
            own.copy_(master)
            master.grad = None

    # What is asked of it between steps.

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S, V) in fp32 by the arm's own parts, its loss apart; the same weights. Shorter windows than the
        case's are filled up, as tables of positions are of its length.
        """
        import torch

        S = tokens.shape[-1]
        if S < self.recipe.S:
            tokens = torch.nn.functional.pad(tokens, (0, self.recipe.S - S))
        if self._twin is None:
            device = self._params[0].device
            parts = self.parts(device) | {"loss": lambda x, weight, target: x @ weight.mT}
            self._twin = self._beside(parts)
        with torch.no_grad():
            found: torch.Tensor = self._twin(tokens, tokens)
        return found.float().view(*tokens.shape, -1)[:, :S]

    def _beside(self, parts: dict[str, Callable[..., Any]]) -> Any:
        """A module of these parts, executed eagerly, whose weights are the arm's."""
        import torch

        r = self.recipe
        device = self._params[0].device
        with torch.device("meta"):
            made: Any = r.chosen.model.module(r.chosen.configuration, parts).to(torch_dtype(r.dtype))
        made.load_state_dict(self._module.state_dict(), assign=True)
        made.prepare(r.S, device, torch_dtype(r.dtype))
        if self.gates is not None:
            self.gates.around(made.layers)
        return made

    def watch(self, tokens: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Lets the probe see a pass of a micro-batch (B, S), both ways, at the weights as they are; nothing of the
        arm changes. Executed eagerly, as within a compiled pass nobody can look.

        Gives the share of a step's product operations that ran in 8 bits, counted; None where they cannot be.
        """
        assert self.probe is not None
        operations = 0

        def heard(more: int) -> None:
            nonlocal operations
            operations += more

        given = self.assembly
        self.assembly = dataclasses.replace(given, heard=heard)
        try:
            parts = self.parts(self._params[0].device)
        finally:
            self.assembly = given
        # By delayed scaling the arm's own scales say what is lost, not those of a linear that saw nothing yet.
        own = self.linear if isinstance(self.linear, Linears) else None
        multiply = self.probe.around(own or parts["linear"], own.scales if own is not None else None)
        module = self._beside(parts | {"linear": multiply})
        run = module if own is None else within(own.forward, module)
        lent = (
            contextlib.nullcontext()
            if own is None
            else own.lent(zip(module.parameters(), self._params, strict=True))
        )
        entered(module.layers, self.probe.enter)
        self.probe.begin()
        # Gradients as small as those of a step.
        learns = self.gates.learns if self.gates is not None else False
        if self.gates is not None:
            self.gates.learns = False
        try:
            with lent:
                seen = counted(lambda: self.backward(run(tokens, targets) / self.recipe.accumulation))
        finally:
            if self.gates is not None:
                self.gates.learns = learns
        operations = max(operations, seen)
        return operations * self.recipe.accumulation / self.recipe.flops if operations else None

    def state(self) -> dict[str, Any]:
        """All that the next step depends on but its batch and its rate."""
        return {
            "weights": self.weights(),
            "states": self._states,
            "steps": self._steps,
            "scale": (self._scale, self._since),
            "residual": self._residual,
            "counts": self.counts,
            "sent": self.sent,
            "library": None if self._library is None else self._library.state_dict(),
            "gates": None if self.gates is None else self.gates.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. The trainer has been loaded before, with any weights."""
        import torch

        own = self.weights()
        with torch.no_grad():
            for name, x in state["weights"].items():
                own[name].copy_(x)
            for name, tensors in state["states"].items():
                for x, kept in zip(self._states[name], tensors, strict=True):
                    x.copy_(kept)
            for name, x in state["counts"].items():
                self.counts[name].copy_(x)
            if self._residual is not None:
                self._residual.copy_(state["residual"])
        self._steps = state["steps"]
        self._scale, self._since = state["scale"]
        self.sent = list(state["sent"])
        if self._library is not None:
            self._library.load_state_dict(state["library"])
        if self.gates is not None:
            self.gates.restore(state["gates"])


def _unhook(params: Iterable[Any]) -> None:
    """Lets go of torchao's offloading optimizers of these, which would copy gradients as long as parameters live:
    what they hook on a parameter holds them and all parameters, in a circle that Python does not see.
    """
    for x in params:
        hooks = x._post_accumulate_grad_hooks or {}
        for key in [
            key for key, hook in hooks.items() if getattr(hook, "__qualname__", "").startswith(OFFLOADING)
        ]:
            del hooks[key]


def _library(name: str, params: list[Any]) -> Any:
    """A library's optimizer of masters, or of weights that have none. Raises ImportError where it is missing."""
    h = HYPERPARAMETERS
    given: dict[str, Any] = {"lr": h["lr"], "betas": (h["beta1"], h["beta2"])}
    given |= {"eps": h["eps"], "weight_decay": h["weight_decay"]}
    if name == "torchao_adamw_8bit":
        from torchao import optim as torchao

        return torchao.AdamW8bit(params, **given)
    if name == "torchao_cpu_offload":
        import torch
        from torchao import optim as torchao

        return torchao.CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True, **given)
    from bitsandbytes import optim as bitsandbytes

    return bitsandbytes.AdamW8bit(params, **given)


def _loss_of_narrow_logits(x: Any, weight: Any, target: Any) -> Any:
    """`fused_linear_cross_entropy` under autocast: the product in fp16, its loss in fp32."""
    from torch.nn import functional

    return functional.cross_entropy(functional.linear(x, weight).float(), target)


def _widened(call: Callable[..., Any]) -> Callable[..., Any]:
    """A part whose fp16 inputs are taken to fp32."""
    import torch

    def widened(**inputs: Any) -> Any:
        return call(
            **{
                name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                for name, x in inputs.items()
            }
        )

    return widened


def _two_of_four(linear: Callable[..., Any]) -> Callable[..., Any]:
    """Products with the two largest of four weights along K; the gradient goes to all (Zhou et al., arXiv
    2102.04010, without its decay).
    """

    def multiply(x: Any, weight: Any, bias: Any = None) -> Any:
        return linear(x, weight + (two_of_four(weight.detach()) - weight.detach()), bias)

    return multiply


def two_of_four(weight: torch.Tensor) -> torch.Tensor:
    """weight (N, K) with the two smaller of each four magnitudes at 0; of equal ones the later."""
    import torch

    fours = weight.unflatten(-1, (-1, 4))
    order = fours.abs().sort(dim=-1, descending=True, stable=True).indices[..., :2]
    keep = torch.zeros_like(fours, dtype=torch.bool).scatter_(-1, order, True)
    found: torch.Tensor = (fours * keep).flatten(-2)
    return found


def _linear_attention(call: Callable[..., Any]) -> Callable[..., Any]:
    """Linear attention where attention was: unit queries and keys, and of each head a decay of its own (as in
    RetNet, arXiv 2307.08621).
    """

    def attention(q: Any, k: Any, v: Any, mask: str) -> Any:
        import torch
        from torch.nn.functional import normalize

        B, H, S, _ = q.shape
        if (shared := H // k.shape[1]) > 1:  # heads of a group see the same keys and values
            k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        decays = torch.log1p(-(2.0 ** -(3 + 5 * torch.arange(H, device=q.device) / max(H - 1, 1))))
        g = decays.to(q.dtype).expand(B, S, H).contiguous()
        q, k = (normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return call(q=q, k=k, v=v, g=g, initial_state=None, return_final_state=False).transpose(1, 2)

    return attention
