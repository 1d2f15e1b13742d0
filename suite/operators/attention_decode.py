"""Attention of one to a few new tokens a sequence to the keys and values of all before them, which a server
keeps in a cache: contiguous, or in pages of a block table (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, exponentials_of, grid, torch_dtype
from ._attention import newest, with_cap, with_sinks

if TYPE_CHECKING:
    import torch


def lengths_of(case: Case) -> list[int]:
    """Tokens in the cache by sequence, the new ones included: all S, or evenly from S / 2 up to S."""
    B, S = case.axes["B"], case.axes["S"]
    if case.options["lengths"] == "equal":
        return [S] * B
    return [max(case.axes["Sq"], S - b * S // (2 * max(1, B - 1))) for b in range(B)]


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, Sq, H, D) and the cache.

    In pages of `page` tokens: k_cache and v_cache (pages, page, Hkv, D), block_table (B, ⌈S / page⌉) int32,
    which gives each sequence its pages, scattered over the cache. Contiguous (`page` 0): (B, S, Hkv, D) and
    no block_table. lengths (B,) int32; what lies beyond a sequence's length is random too. Values of the newest
    tokens, and in the place behind them, are the larger ones.
    """
    import torch

    B, Sq, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "Sq", "H", "Hkv", "S", "D"))
    page = int(case.options["page"])
    dtype = torch_dtype(case.dtype)
    table = None
    shape: tuple[int, ...] = (B, S, Hkv, D)
    if page:
        across = -(-S // page)
        shape = (B * across, page, Hkv, D)
        places = torch.randperm(B * across, device=device, generator=generator, dtype=torch.int32)
        table = places.view(B, across)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype)

    q, k_cache, v_cache = draw(B, Sq, H, D), draw(*shape), draw(*shape)
    lengths = torch.tensor(lengths_of(case), dtype=torch.int32, device=device)
    # An answer over n keys is about 1/√n of a value large: so the newest token is an eighth of it.
    at = newest(v_cache, table, lengths, Sq)
    v_cache[at] *= (lengths.float().sqrt() / 8).clamp(min=1).to(dtype)[:, None, None, None]
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": table, "lengths": lengths}


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v, one sequence at a time: (B, Sq, H, D).

    The new tokens are the last of their sequence: token i of Sq sees the first length − Sq + i + 1. A cap comes
    before the mask; `sinks` (H,) are logits beside the scores.
    """
    import torch

    _, Sq, H, D = q.shape
    groups = H // k_cache.shape[2]
    outputs = []
    for b, length in enumerate(lengths.tolist()):
        pages = [x[b] if block_table is None else x[block_table[b].long()] for x in (k_cache, v_cache)]
        k, v = (x.reshape(-1, *x.shape[-2:])[:length].repeat_interleave(groups, 1) for x in pages)
        scores = torch.einsum("qhd,khd->hqk", q[b] * D**-0.5, k)
        if cap:
            scores = cap * (scores / cap).tanh()
        hidden = torch.ones(Sq, length, dtype=torch.bool, device=q.device).triu(length - Sq + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(H, Sq, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.stack(outputs) if outputs else torch.zeros_like(q)


def bytes_(case: Case) -> int:
    """Reads the queries, every key and value in the cache once and the tables; writes the output."""
    B, Sq, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "Sq", "H", "Hkv", "S", "D"))
    page = int(case.options["page"])
    elements = 2 * B * Sq * H * D + 2 * sum(lengths_of(case)) * Hkv * D
    return elements * BYTES[case.dtype] + 4 * B * (1 + (-(-S // page) if page else 0))


def flops(case: Case) -> int:
    """Two products of every query with every key; the few that the last tokens hide are counted."""
    Sq, H, D = (case.axes[axis] for axis in ("Sq", "H", "D"))
    return 4 * Sq * H * D * sum(lengths_of(case))


PAGED: dict[str, Option | list[Option]] = {"page": 64}

# Not a function: plans are no part of what the operator's `spec` covers, functions are.
STANDARD = (
    # A server's batch: 1 GiB of keys and values, grouped heads as in Llama 3 (8B and 70B).
    grid("forward", options={"page": [0, 16, 64, 256]}, B=64, Sq=1, H=32, Hkv=8, S=4096, D=128),
    grid("forward", options={"page": 64, "lengths": "mixed"}, B=64, Sq=1, H=32, Hkv=8, S=4096, D=128),
    grid("forward", options=PAGED, B=64, Sq=4, H=64, Hkv=8, S=4096, D=128),
    # One sequence: long, and short, where the launch is all there is.
    grid("forward", options=PAGED, B=1, Sq=1, H=64, Hkv=8, S=[1024, 131072], D=128),
    # Every head its own keys.
    grid("forward", options=PAGED, B=16, Sq=1, H=32, Hkv=32, S=4096, D=128),
    # Tokens that are guessed and checked together.
    grid("forward", options=PAGED, B=16, Sq=[2, 8], H=32, Hkv=8, S=4096, D=128),
    # As gpt-oss (20B) and Gemma 2 (27B) decode.
    grid("forward", options=PAGED | {"sinks": True}, B=64, Sq=[1, 4], H=64, Hkv=8, S=4096, D=64),
    grid("forward", options=PAGED | {"cap": 50}, B=64, Sq=1, H=32, Hkv=16, S=4096, D=128),
)

OPERATOR = Operator(
    name="attention_decode",
    summary="Attention of new tokens to a contiguous or paged cache of keys and values",
    axes={
        "B": "sequences",
        "Sq": "new tokens a sequence",
        "H": "query heads",
        "Hkv": "key and value heads",
        "S": "tokens of the longest sequence",
        "D": "head dimension",
    },
    options={
        "page": (64, 0, 16, 32, 128, 256),
        "lengths": ("equal", "mixed"),
        "sinks": (False, True),
        "cap": (0, 30, 50),
    },
    later={"sinks": False, "cap": 0},
    variations={("cap", 30): with_cap, ("cap", 50): with_cap, ("sinks", True): with_sinks},
    dtypes=("bf16", "fp16", "fp32"),
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    exponentials=exponentials_of(flops),
    tokens=lambda case: case.axes["B"] * case.axes["Sq"],
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    # Sinks and caps of scores came later, then larger values of the newest tokens: nothing else is drawn.
    continues={
        "1af6007be04e": "a95fe6ae4725",
        "4e2a3daa925a": "204fdf8567bd",
        "700f2a4217b3": "795c2929189c",
        "e29bb90f72fe": "2e10db4d079e",
        "1fc0ec64d469": "c3d8255b5936",
        "d7b9105aeeaf": "1cdbd082265b",
        "bfe26362988d": "5b2f1a335d83",
        "10d22aa9bc01": "3e733d52aa5c",
        "136cdf913784": "a7149fe9950b",
        "c06ad67e72fe": "eae42bba705a",
        "ac5cfb5e5e61": "59d68a6bef9a",
        "dd5a0aeac17a": "062d4ef9b138",
        "89d9be9ff41c": "a95fe6ae4725",
        "a3a59e5a19cf": "204fdf8567bd",
        "f95417cd6b31": "795c2929189c",
    },
    plans={
        "quick": (grid("forward", options=PAGED, B=16, Sq=1, H=32, Hkv=8, S=4096, D=128),),
        "quick_cpu": (grid("forward", options=PAGED, B=2, Sq=1, H=8, Hkv=2, S=512, D=64, dtypes="fp32"),),
        "standard": STANDARD,
        "full": (
            grid("forward", options=PAGED, B=64, Sq=1, H=32, Hkv=8, S=4096, D=[64, 128, 256], dtypes="fp16"),
            grid("forward", options={"page": [0, 64]}, B=[8, 128], Sq=[1, 8], H=32, Hkv=8, S=[1000, 8192], D=128),
            grid("forward", options=PAGED, B=32, Sq=1, H=16, Hkv=1, S=8192, D=128),
        ),
    },
)
