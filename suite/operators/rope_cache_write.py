"""What a decode step does with new queries, keys and values before it attends: rotary positions (Su et al., arXiv
2104.09864) of queries and keys, keys and values to their places in a paged cache (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, Sq, H, D), k and v (B, Sq, Hkv, D), views of one projection (B, Sq, (H + 2 Hkv) · D); cos and sin
    (S, D/2); k_cache and v_cache (pages, page, Hkv, D), block_table (B, ⌈S / page⌉) int32, its pages scattered;
    lengths (B,) int32, the new tokens included, evenly from S down to S / 2.
    """
    import torch

    B, Sq, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "Sq", "H", "Hkv", "S", "D"))
    page, dtype = int(case.options["page"]), torch_dtype(case.dtype)
    across = -(-S // page)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype)

    q, k, v = draw(B, Sq, H + 2 * Hkv, D).split((H, Hkv, Hkv), 2)
    frequency = 10000.0 ** -(torch.arange(0, D, 2, device=device, dtype=torch.float64) / D)
    angle = torch.arange(S, device=device, dtype=torch.float64)[:, None] * frequency
    places = torch.randperm(B * across, device=device, generator=generator, dtype=torch.int32)
    lengths = [max(Sq, S - b * S // (2 * max(1, B - 1))) for b in range(B)]
    return {
        "q": q,
        "k": k,
        "v": v,
        "cos": angle.cos().to(dtype),
        "sin": angle.sin().to(dtype),
        "k_cache": draw(B * across, page, Hkv, D),
        "v_cache": draw(B * across, page, Hkv, D),
        "block_table": places.view(B, across),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
        "layout": str(case.options["layout"]),
    }


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q turned, the caches), token by token: token i of Sq is at position length − Sq + i of its sequence."""
    import torch

    def turned(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if layout == "half":
            a, b = x.chunk(2, -1)
            return torch.cat((a * c - b * s, b * c + a * s), -1)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    found, k_cache, v_cache = torch.empty_like(q), k_cache.clone(), v_cache.clone()
    page = k_cache.shape[1]
    for b, length in enumerate(lengths.tolist()):
        for i in range(q.shape[1]):
            at = length - q.shape[1] + i
            place = int(block_table[b, at // page]), at % page
            found[b, i] = turned(q[b, i], cos[at], sin[at])
            k_cache[place] = turned(k[b, i], cos[at], sin[at])
            v_cache[place] = v[b, i]
    return found, k_cache, v_cache


def results(result: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a call returns, q, and what it leaves in the caches."""
    return result, inputs["k_cache"], inputs["v_cache"]


def bytes_(case: Case) -> int:
    """Reads q, k, v, a row of cos and sin a token, lengths and one place a sequence; writes all three."""
    B, Sq, H, Hkv, D = (case.axes[axis] for axis in ("B", "Sq", "H", "Hkv", "D"))
    return B * Sq * (2 * (H + 2 * Hkv) * D + D) * BYTES[case.dtype] + 8 * B


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="rope_cache_write",
    summary="rotary positions of new tokens, their keys and values written to a paged cache in place",
    axes={
        "B": "sequences",
        "Sq": "new tokens a sequence",
        "H": "query heads",
        "Hkv": "key and value heads",
        "S": "tokens of the longest sequence",
        "D": "head dimension",
    },
    options={"page": (64, 16, 32, 128, 256), "layout": ("half", "interleaved")},
    inputs=inputs,
    reference=reference,
    results=results,
    in_place=("k_cache", "v_cache"),
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["Sq"],
    plans={
        "quick": (grid("forward", B=64, Sq=1, H=32, Hkv=8, S=1024, D=128),),
        "quick_cpu": (grid("forward", B=4, Sq=1, H=8, Hkv=2, S=128, D=64, dtypes="fp32"),),
        "standard": (grid("forward", B=[1, 8, 256], Sq=1, H=32, Hkv=8, S=1024, D=128),),
        "full": (
            grid("forward", B=64, Sq=1, H=32, Hkv=8, S=1024, D=128, dtypes=["fp16", "fp32"]),
            grid("forward", B=7, Sq=3, H=6, Hkv=2, S=1000, D=96, options={"layout": "interleaved", "page": 16}),
        ),
    },
)
