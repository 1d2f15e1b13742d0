"""What inference workloads share: a model that gives logits, their answer in fp32, and how far off one may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..catalog import Catalog
from ..measure.verify import Incorrect
from ..model import Chosen, chosen, draw
from ..operator import torch_dtype
from ..system import NO_CHANGES
from ._expected import reference_module

if TYPE_CHECKING:
    import torch

    from ...registry.store.record import Case
    from ..system import Assembly

    Weights = Iterable[tuple[str, torch.Tensor]]

LOGITS: Mapping[str, float] = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 6e-2}
"""By dtype, how far logits may be from the model's in fp32: relative norm over all that are compared. Skipping one
layer of 32 is off by about 0.12, a broken mask by more.
"""

COMPARED = 16
"""Positions of a sequence whose logits are compared, its last among them."""

LONG = 4096
"""Tokens beyond which the reference's attention is PyTorch's in fp32: the operator's own holds all scores."""

SLICES = ("whole", "first1", "first2", "first4", "first8")


PRODUCTS = ("dtype", "e4m3")
"""What products inside layers may have at the least: what the floor counts."""


def allowed(assembly: Assembly, products: str) -> None:
    """Raises `NotImplementedError` for a system that changes what training computes, or whose products are below
    what the case allows.
    """
    if assembly.system.changes != NO_CHANGES:
        raise NotImplementedError(
            f"{assembly.system.name} changes how a model trains, which is no part of inference; `converge` and "
            "`quality` compare such systems"
        )
    if assembly.system.precision != "case" and products == "dtype":
        raise NotImplementedError(
            "this case's products are in its dtype; 8 bits are another case's: products = e4m3"
        )


def read(case: Case, catalog: Catalog) -> Chosen:
    """The case's model or slice. Raises `InputError` for an unknown one."""
    found = chosen(catalog.models, str(case.options["model"]))
    cut = str(case.options["slice"])
    return found if cut == "whole" else found.first(int(cut.removeprefix("first")))


def initial(chosen: Chosen, dtype: str, seed: int, device: torch.device) -> Weights:
    """The model's weights, from the seed of a case."""
    return draw(chosen.model.weights(chosen.configuration), seed, torch_dtype(dtype), device)


def build(
    chosen: Chosen,
    parts: Mapping[str, Callable[..., Any]],
    dtype: str,
    S: int,
    device: torch.device,
    joined: Sequence[Sequence[str]] = (),
) -> Any:
    """A model's module of these parts, its weights not yet written. In each layer that has matrices of the names
    in one of `joined`, they are rows of one matrix, one behind the other; their names stay.
    """
    import torch

    with torch.device("meta"):
        module: Any = chosen.model.module(chosen.configuration, parts)
    module = module.to(torch_dtype(dtype))
    apart = [(owner, x) for owner in module.modules() for names in joined if (x := _taken(owner, names))]
    module = module.to_empty(device=device).eval()
    for owner, weights in apart:
        sizes = [len(x) for x in weights.values()]
        matrix = torch.empty(
            sum(sizes), next(iter(weights.values())).shape[1], dtype=torch_dtype(dtype), device=device
        )
        for name, rows in zip(weights, matrix.split(sizes), strict=True):
            owner.register_parameter(name, torch.nn.Parameter(rows))
    for x in module.parameters():
        x.requires_grad_(False)
    module.prepare(S, device, torch_dtype(dtype))
    return module


def _taken(owner: Any, names: Sequence[str]) -> dict[str, Any]:
    """A module's own parameters of these names, taken out of it; none where they are not matrices of one width."""
    own = dict(owner.named_parameters(recurse=False))
    found = {name: own[name] for name in names if name in own and own[name].dim() == 2}
    if len(found) < len(names) or len({x.shape[1] for x in found.values()}) > 1:
        return {}
    for name in found:
        delattr(owner, name)
    return found


def whole(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one matrix whose rows these are, one behind the other, as `build` joined them; None if it did not."""
    first, end = weights[0], weights[0].storage_offset()
    for x in weights:
        same = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or x.storage_offset() != end or x.shape[1:] != first.shape[1:] or not x.is_contiguous():
            return None
        end += x.numel()
    return first.as_strided((sum(len(x) for x in weights), first.shape[1]), first.stride())


def fill(module: Any, weights: Weights) -> None:
    """Writes a module's weights. Raises `ValueError` where some are missing."""
    left = dict(module.named_parameters())
    for name, values in weights:
        left.pop(name).copy_(values)
    if left:
        raise ValueError(f"no values for {', '.join(left)}")


def positions(S: int, seed: int) -> list[int]:
    """The positions of a sequence that are compared, in order: random ones, and the last."""
    import random

    return sorted({S - 1, *random.Random(f"{seed}/positions").sample(range(S), min(COMPARED - 1, S))})


def answer(
    chosen: Chosen, dtype: str, seed: int, tokens: torch.Tensor, at: Sequence[int], catalog: Catalog
) -> torch.Tensor:
    """The logits (B, len(at), V) of the model in fp32 for tokens (B, S), weights as the case stores them."""
    import torch

    with _in_fp32(chosen, dtype, seed, tokens, at, catalog) as module:
        return torch.stack([module(row[None], row[None]) for row in tokens])


def without(
    chosen: Chosen,
    dtype: str,
    seed: int,
    tokens: torch.Tensor,
    at: Sequence[int],
    catalog: Catalog,
    layers: Sequence[int],
) -> torch.Tensor:
    """What each of these layers adds to `answer`: its change (len(layers), B, len(at), V) where the layer is
    skipped, on the host.
    """
    import torch

    with _in_fp32(chosen, dtype, seed, tokens, at, catalog) as module:

        def logits() -> torch.Tensor:
            return torch.stack([module(row[None], row[None]) for row in tokens]).cpu()

        whole, found = logits(), []
        for layer in layers:
            # A layer whose last matrices are 0 adds nothing to the stream.
            last = [x for name, x in module.layers[layer].named_parameters() if name.startswith(LAST)]
            kept = [x.clone() for x in last]
            for x in last:
                x.zero_()
            found.append(logits() - whole)
            for x, values in zip(last, kept, strict=True):
                x.copy_(values)
        return torch.stack(found)


@contextmanager
def _in_fp32(
    chosen: Chosen, dtype: str, seed: int, tokens: torch.Tensor, at: Sequence[int], catalog: Catalog
) -> Iterator[Any]:
    """The model in fp32, which gives logits at these positions, products in fp32 while it is held."""
    import torch
    from torch.nn import functional

    rows = torch.tensor(list(at), device=tokens.device)
    instead: dict[str, Callable[..., Any]] = {"loss": lambda x, weight, target: functional.linear(x[rows], weight)}
    S = tokens.shape[1]
    if S > LONG and any(x.name == "attention" for x in chosen.model.parts(chosen.configuration, 1, 1)):
        instead["attention"] = _attention
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            module = reference_module(chosen, S, catalog, tokens.device, instead)
            fill(module, initial(chosen, dtype, seed, tokens.device))
            yield module
    finally:
        torch.set_float32_matmul_precision(kept)


def _attention(q: Any, k: Any, v: Any, mask: str) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    # Key heads are repeated: only for as many as queries has PyTorch a kernel in fp32 that holds no scores.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")


def deviation(what: str, got: torch.Tensor, wanted: torch.Tensor, dtype: str) -> float:
    """The relative norm of the deviation of logits. Raises `Incorrect` beyond the dtype's bound."""
    import torch

    if got.shape != wanted.shape:
        raise Incorrect(f"{what}: logits of shape {tuple(got.shape)}, expected {tuple(wanted.shape)}")
    wide = got.detach().float()
    off = float(torch.linalg.vector_norm(wide - wanted) / torch.linalg.vector_norm(wanted))
    if not off <= LOGITS[dtype]:  # NaN is never within a bound
        raise Incorrect(f"{what}: logits are off by {off:.3g} of their norm, allowed {LOGITS[dtype]:.3g}")
    return off


E4M3_LOGITS = 0.25
"""The same of logits whose products inside layers have inputs in E4M3. Rounding alone is off by 0.08 to 0.15 at 2
to 4 layers and by 0.20 at 32 of a narrow Llama: a wrong scale is seen. A skipped layer, which may change less, is
seen by `missing`.
"""
LAST = ("output", "down")
"""How names begin of what a layer adds to the stream by."""
MISSING = 0.3
"""What share of a layer may be missing in logits by E4M3. At 32 layers of a narrow Llama rounding looked like 0.08
of one at the most, a skipped one like 0.96 at the least: `tests/calibration/skipped.py`.
"""
SKIPPED = 1 << 15
"""Tokens at the most that layers' shares are taken of, in all: of long prompts, of fewer layers."""
E4M3_GAP = 1.0
"""And how far below the largest logit a token that these chose may be, as `GAPS`; 0.66 was seen at 32 layers."""


def deviation_in_8_bits(what: str, got: torch.Tensor, wanted: torch.Tensor) -> float:
    """`deviation` of a system whose products are in E4M3."""
    import torch

    off = float(torch.linalg.vector_norm(got.detach().float() - wanted) / torch.linalg.vector_norm(wanted))
    if not off <= E4M3_LOGITS:
        raise Incorrect(f"{what}: logits are off by {off:.3g} of their norm, allowed {E4M3_LOGITS:.3g} in E4M3")
    return off


def skippable(layers: int, tokens: int, seed: int) -> list[int]:
    """The layers whose shares are looked at where each takes a pass of so many tokens, in order: all, or random
    ones.
    """
    import random

    count = max(1, min(layers, SKIPPED // tokens))
    return sorted(random.Random(f"{seed}/skipped").sample(range(layers), count))


def shares(got: torch.Tensor, wanted: torch.Tensor, changes: torch.Tensor) -> list[float]:
    """Which share of each layer is missing in logits (B, n, V), by what skipping it `changes` (layers, B, n, V).

    Rounding to E4M3 moves logits about as far as a skipped layer among many does, but not in that layer's
    direction: the deviation is taken apart by least squares.
    """
    import torch

    off = (got.detach().cpu().float() - wanted.cpu().float()).flatten().double()
    towards = changes.flatten(1).double()
    found = torch.linalg.lstsq(towards @ towards.T, (towards @ off)[:, None]).solution[:, 0]
    return [float(x) for x in found]


def missing(what: str, got: torch.Tensor, wanted: torch.Tensor, changes: torch.Tensor, layers: list[int]) -> float:
    """The largest share of one of these layers that is missing, or too much; `Incorrect` above `MISSING`."""
    found = [abs(x) for x in shares(got, wanted, changes)]
    share, layer = max(zip(found, layers, strict=True))
    if not share <= MISSING:
        raise Incorrect(
            f"{what}: logits are as if {share:.0%} of layer {layer} were missing, allowed {MISSING:.0%}"
        )
    return share


def chosen_well_in_8_bits(what: str, tokens: torch.Tensor, wanted: torch.Tensor) -> None:
    """`chosen_well` of a system whose products are in E4M3."""
    if not bool(((tokens >= 0) & (tokens < wanted.shape[-1])).all()):
        raise Incorrect(f"{what}: a token is not of the vocabulary")
    below = wanted.amax(-1) - wanted.gather(-1, tokens[..., None])[..., 0]
    if not (gap := float((below / wanted.std(-1)).max())) <= E4M3_GAP:
        raise Incorrect(
            f"{what}: the logit of a chosen token is {gap:.3g} standard deviations below the largest, allowed "
            f"{E4M3_GAP:.3g} in E4M3"
        )


GAPS: Mapping[str, float] = {"fp32": 1e-2, "fp16": 0.1, "bf16": 0.4}
"""By dtype, how far the reference's logit of a token that a greedy system chose may be below the largest one, in
standard deviations of the logits. A token of chance is about four below it.
"""


def chosen_well(what: str, tokens: torch.Tensor, wanted: torch.Tensor, dtype: str) -> None:
    """Holds greedily chosen tokens (B, n) to the model's logits (B, n, V) in fp32. Raises `Incorrect`."""
    if not bool(((tokens >= 0) & (tokens < wanted.shape[-1])).all()):
        raise Incorrect(f"{what}: a token is not of the vocabulary")
    below = wanted.amax(-1) - wanted.gather(-1, tokens[..., None])[..., 0]
    gap = float((below / wanted.std(-1)).max())
    if not gap <= GAPS[dtype]:
        raise Incorrect(
            f"{what}: the logit of a chosen token is {gap:.3g} standard deviations below the largest, "
            f"allowed {GAPS[dtype]:.3g}"
        )
