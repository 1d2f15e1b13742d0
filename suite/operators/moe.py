"""A feed-forward of experts (Shazeer et al., arXiv 1701.06538) as models run it: router, top-k, gated products by
expert, combination. Shares are a softmax over the chosen, as in Mixtral (arXiv 2401.04088).

With dtype e4m3 the weights are 8-bit floats with a scale for 128 × 128 of them, quantized before; activations are
quantized within what is timed. `error` is against exact activations and the weights as they are given.

Activation `clamped` is gpt-oss's (openai/gpt-oss, `swiglu`): gate is at most 7, up between -7 and 7, and their
product gate · sigmoid(1.702 · gate) · (up + 1). Its experts' biases are left out.

Skew is how unevenly tokens are shared out: the standard deviation of the experts' mean logits, where a token's own
logits have 1. `imbalance` says what comes of it: the busiest expert's tokens beside the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from ...registry.store.metric import Metric
from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid
from ._accuracy import (
    SATURATED,
    UNDERFLOWED,
    WEIGHT_BYTES,
    Measure,
    saturated,
    underflowed,
    weight_bytes,
    with_outliers,
)
from .fp8_matmul import BLOCK, scaled, widened

if TYPE_CHECKING:
    import torch

TOLERANCES = {
    "bf16": Tolerance(norm=1.2e-2, absolute=0.16, relative=4e-2),
    "e4m3": Tolerance(norm=0.06, absolute=0.4, relative=0.2),
}
"""bf16: rounding of logits, gated products, parts and sum, which Transformers' loop takes in bf16 part by part.
e4m3: its rounding of x and of the gated products, 0.025 each, of which x's counts twice, in gate and up: 0.044 of
the output."""

LIMIT = 7.0
"""Of gate and up where they are clamped."""
SLOPE = 1.702
"""Of the sigmoid there."""
WIDER = 4.0
"""By how much weights of gate and up are larger there in bf16: beside a limit of 7 their deviation is 4, not 1."""

CLOSE = 2.0**-6
"""Of a token's largest logit: experts whose logits are as near as that may be taken for each other. Logits rounded
to bf16 are off by 2^-9 of their size each, and sums of bf16 numbers by some more."""


def original(
    case: Case, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (M, D), router (E, D), gate_up (E, 2F, D), the gate's rows first, down (E, D, F), all in bf16: what
    `inputs` quantizes when it gets the same generator.
    """
    import torch

    M, D, F, E = (case.axes[axis] for axis in "MDFE")
    skew = float(case.options["skew"])

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch.bfloat16).mul_(scale)

    x = drawn(M, D)
    router = drawn(E, D, scale=D**-0.5)
    if case.options["data"] == "outliers":
        with_outliers(x)
        router[:, ::100] /= 30
    # A channel that is the same for all tokens gives each expert's logits their mean.
    x[:, 0] = 1
    router[:, 0] = drawn(E, scale=skew)
    return x, router, drawn(E, 2 * F, D, scale=D**-0.5), drawn(E, D, F, scale=F**-0.5)


def _quantized(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (E, R, C) in E4M3 and scales (E, ⌈R / 128⌉, ⌈C / 128⌉) in fp32."""
    import torch

    pairs = [scaled(weight, BLOCK, BLOCK) for weight in weights]
    return torch.stack([q for q, _ in pairs]), torch.stack([scale for _, scale in pairs])


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, D) and router (E, D) in bf16; gate_up (E, 2F, D), the gate's rows first, and down (E, D, F) in bf16
    or, with scales (E, 2 · ⌈F / 128⌉, ⌈D / 128⌉) and (E, ⌈D / 128⌉, ⌈F / 128⌉) in fp32, in E4M3; and top_k.
    """
    import torch

    x, router, gate_up, down = original(case, device, generator)
    given = {"x": x, "router": router, "gate_up": gate_up, "down": down, "scale_gate_up": None, "scale_down": None}
    if case.dtype == "e4m3":
        halves = [_quantized(half) for half in gate_up.chunk(2, 1)]
        given["gate_up"], given["scale_gate_up"] = (torch.cat([half[i] for half in halves], 1) for i in (0, 1))
        given["down"], given["scale_down"] = _quantized(down)
    return given | {"top_k": case.axes["K"]}


def _expert(given: Inputs, e: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gate (F, D), up (F, D), down (D, F)) of one expert, times their scales."""
    gate, up = given["gate_up"][e].to(dtype).chunk(2)
    down = given["down"][e].to(dtype)
    if given["scale_gate_up"] is not None:
        scale_gate, scale_up = given["scale_gate_up"][e].to(dtype).chunk(2)
        gate = gate * widened(scale_gate, (gate.shape[0], gate.shape[1]), BLOCK, BLOCK)
        up = up * widened(scale_up, (up.shape[0], up.shape[1]), BLOCK, BLOCK)
        scale = given["scale_down"][e].to(dtype)
        down = down * widened(scale, (down.shape[0], down.shape[1]), BLOCK, BLOCK)
    return gate, up, down


def clamped(inputs: Inputs, case: Case) -> Inputs:
    """The same with the limit of gate and up, whose weights in bf16 are so large that one in twelve is beyond it.
    Those in E4M3 are not: of larger ones the rounding of x alone is more than the tolerance.
    """
    wide = {} if case.dtype == "e4m3" else {"gate_up": inputs["gate_up"] * WIDER}
    return {**inputs, **wide, "limit": LIMIT}


def product_of(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(gate) · up, or with a limit the clamped product."""
    import torch

    if not limit:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (SLOPE * gate).sigmoid() * (up + 1)


def by_experts(x: torch.Tensor, logits: torch.Tensor, experts: torch.Tensor, given: Inputs) -> torch.Tensor:
    """Tokens x (M, D) through these experts (M, k), shared by the softmax of their logits; weights are `given`."""
    import torch

    shares = logits.gather(1, experts).softmax(-1)
    out = torch.zeros_like(x)
    for e in experts.unique().tolist():
        token, nth = (experts == e).nonzero(as_tuple=True)
        gate, up, down = _expert(given, e, x.dtype)
        rows = x[token]
        inner = product_of(rows @ gate.T, rows @ up.T, given.get("limit", 0.0))
        out.index_add_(0, token, inner @ down.T * shares[token, nth, None])
    return out


def reference(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scale_gate_up: torch.Tensor | None,
    scale_down: torch.Tensor | None,
    top_k: int,
    limit: float = 0.0,
) -> torch.Tensor:
    """Σ over the `top_k` experts of the largest logits of share · down · (silu(gate · x) · (up · x)), or with a
    limit the clamped product of gate · x and up · x.
    """
    weights = {"gate_up": gate_up, "down": down, "scale_gate_up": scale_gate_up, "scale_down": scale_down}
    given = {**weights, "limit": limit}
    logits = x @ router.T
    return by_experts(x, logits, logits.topk(top_k, -1).indices, given)


def unquantized(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """The same with the weights before they were quantized."""
    x, router, gate_up, down = original(case, device, generator)
    limit = LIMIT if case.options["activation"] == "clamped" else 0.0
    gain = WIDER if limit and case.dtype != "e4m3" else 1.0
    return reference(x.double(), router.double(), gate_up * gain, down, None, None, case.axes["K"], limit)


def results(result: Any, inputs: Inputs) -> torch.Tensor:
    """(y (M, D), experts (M, k)) to y. Where a token has other experts than in fp64 and their logits are as good
    as `CLOSE` says, y's deviation from the answer with these experts is given from the one with the exact
    choice. Other choices, and the wrong dtype or shape, become NaN, which is wrong.
    """
    import torch

    y, chosen = result
    x, router, top_k = inputs["x"].double(), inputs["router"].double(), inputs["top_k"]
    M, E = x.shape[0], router.shape[0]
    out: torch.Tensor = y.double()
    if y.shape != x.shape or y.dtype != inputs["x"].dtype or chosen.shape != (M, top_k):
        return torch.full_like(x, torch.nan)
    chosen = chosen.long()
    ordered = chosen.sort(-1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    wrong = ((chosen < 0) | (chosen >= E)).any(-1) | repeated
    chosen = chosen.clamp(0, E - 1)
    logits = x @ router.T
    exact = logits.topk(top_k, -1)
    reached = logits.gather(1, chosen).amin(-1)
    wrong |= reached < exact.values[:, -1] - CLOSE * logits.abs().amax(-1)
    others = ((exact.indices.sort(-1).values != chosen.sort(-1).values).any(-1) & ~wrong).nonzero()[:, 0]
    if others.numel():
        wide, some = x[others], logits[others]
        own = by_experts(wide, some, chosen[others], inputs)
        out[others] += by_experts(wide, some, exact.indices[others], inputs) - own
    out[wrong] = torch.nan
    return out


IMBALANCE = Metric(
    "imbalance",
    "1",
    better="neither",
    about="Tokens of the busiest expert beside the mean over experts.",
)


def imbalance(outputs: list[Any], references: list[Any], inputs: Inputs) -> float:
    """Of the routing that the inputs give."""
    import torch

    logits = inputs["x"].float() @ inputs["router"].float().T
    counts = torch.bincount(logits.topk(inputs["top_k"], -1).indices.flatten(), minlength=logits.shape[1])
    return float(counts.max() / counts.double().mean())


def in_8_bits(measure: Measure) -> Callable[[list[Any], list[Any], Inputs], float | None]:
    """Of E4M3 weights; bf16's were not quantized."""

    def measured(outputs: list[Any], references: list[Any], inputs: Inputs) -> float | None:
        return None if inputs["scale_gate_up"] is None else measure(outputs, references, inputs)

    return measured


@functools.lru_cache(1024)
def expected_experts(M: int, E: int, K: int, skew: float) -> float:
    """About how many of E experts M tokens choose in all, K each. An expert's logits are normal around a mean of
    its own, and these means are normal, `skew` wide; a token takes what passes a threshold that K pass on average.
    """
    normal = NormalDist()
    means = [skew * normal.inv_cdf((e + 0.5) / E) for e in range(E)]
    low, high = min(means) - 10.0, max(means) + 10.0
    for _ in range(50):
        middle = (low + high) / 2
        passed = sum(normal.cdf(mean - middle) for mean in means)
        low, high = (middle, high) if passed > K else (low, middle)
    return sum(1 - (1 - normal.cdf(mean - low)) ** M for mean in means)


def bytes_(case: Case) -> int:
    """Reads x, the router, and the weights and scales of about as many experts as tokens choose; writes the
    output.
    """
    M, D, F, E, K = (case.axes[axis] for axis in "MDFEK")
    each = 3 * D * F * BYTES[case.dtype]
    if case.dtype == "e4m3":
        each += 3 * -(-D // BLOCK) * -(-F // BLOCK) * BYTES["fp32"]
    experts = expected_experts(M, E, K, float(case.options["skew"]))
    return (2 * M * D + E * D) * BYTES["bf16"] + round(experts * each)


def flops(case: Case) -> int:
    """Two a number of each product: the router's, and three of each of a token's experts."""
    M, D, F, E, K = (case.axes[axis] for axis in "MDFEK")
    return 2 * M * D * E + 2 * M * K * 3 * D * F


BOTH = ["bf16", "e4m3"]
SKEWS: dict[str, Option | list[Option]] = {"skew": [0, 1, 3]}
CLAMPED: dict[str, Option | list[Option]] = {"activation": "clamped"}

OPERATOR = Operator(
    name="moe",
    summary="feed-forward of experts: router, top-k, gated products by expert, combination",
    axes={
        "M": "tokens",
        "D": "width of the model",
        "F": "width of an expert",
        "E": "experts",
        "K": "experts of a token",
    },
    options={"skew": (0, 1, 3), "data": ("normal", "outliers"), "activation": ("swiglu", "clamped")},
    later={"activation": "swiglu"},
    variations={("activation", "clamped"): clamped},
    inputs=inputs,
    reference=reference,
    results=results,
    unquantized=unquantized,
    weights=("gate_up", "down", "scale_gate_up", "scale_down"),
    measures={
        IMBALANCE: imbalance,
        SATURATED: in_8_bits(saturated("gate_up", "down")),
        UNDERFLOWED: in_8_bits(underflowed("gate_up", "down")),
        WEIGHT_BYTES: weight_bytes("gate_up", "scale_gate_up"),
    },
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("bf16", "e4m3"),
    tolerances=TOLERANCES,
    # The product of gate and up became a choice, and computes the same by itself; then weights of a clamped one
    # became larger: nothing else is drawn.
    continues={
        "30008b460bbd": "49d86148f4c1",
        "27c9c924303b": "f1c9f6b32655",
        "8e4e7efbfe88": "13b0ca0d7c1d",
        "e3dc3583a12a": "b339e1ac0399",
    },
    plans={
        "quick": (grid("forward", M=1024, D=2048, F=768, E=128, K=8),),
        "quick_cpu": (grid("forward", M=16, D=128, F=96, E=4, K=2),),
        "standard": (
            # Mixtral 8x7B, Qwen3-30B-A3B, gpt-oss-20b, and an eighth of DeepSeek-V3's experts.
            grid("forward", M=[16, 4096], D=4096, F=14336, E=8, K=2, dtypes=BOTH),
            grid("forward", M=[16, 4096], D=2048, F=768, E=128, K=8, dtypes=BOTH),
            grid("forward", M=4096, D=2048, F=768, E=128, K=8, options=SKEWS, dtypes=BOTH),
            grid("forward", M=4096, D=2880, F=2880, E=32, K=4, dtypes=BOTH),
            grid("forward", M=4096, D=7168, F=2048, E=32, K=8, dtypes=BOTH),
        ),
        "full": (
            grid("forward", M=[1, 256, 4095], D=2880, F=2880, E=32, K=4, options=SKEWS, dtypes=BOTH),
            grid("forward", M=1000, D=2048, F=768, E=128, K=8, options={"data": "outliers"}, dtypes=BOTH),
            grid("forward", M=[16, 4096], D=2880, F=2880, E=32, K=4, options=CLAMPED, dtypes=BOTH),
        ),
    },
)
