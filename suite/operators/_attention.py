"""What the operators of attention share: the reference with all of its options, and how q, k, v are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import Inputs, Option

if TYPE_CHECKING:
    import torch

SCORES = 1 << 28
"""Scores that the reference holds at once: one head at S = 16384, 2048 queries at S = 131072."""
QUERIES = 1024
"""Queries of one piece within a window, which reads no keys but those that some of them see."""

STORAGE = ("bhsd", "bshd", "packed")
"""How q, k, v (B, H, S, D) lie in memory: contiguous; (B, S, H, D), as a projection each leaves them; or as views
of one projection (B, S, (H + 2 Hkv) · D).
"""
VARIANTS: Mapping[str, tuple[Option, ...]] = {"storage": STORAGE, "sinks": (False, True), "cap": (0, 30, 50)}
"""Options that attention has with and without a window: storage; a sink, one more logit a head in the softmax's
denominator, which has no value (Xiao et al., arXiv 2309.17453; gpt-oss); and a cap c of scores, which makes them
c · tanh(score / c), 0 being none (Gemma 2, arXiv 2408.00118).
"""
PLAIN: Mapping[str, Option] = {"storage": "bhsd", "sinks": False, "cap": 0}
"""What they were before they were options."""


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v of q (B, H, S, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv): (B, H, S, Dv).

    Query head h reads key head h // (H / Hkv). The last query and the last key are in one place; a query sees the
    keys less than `window` places away, 0 being all, under a causal mask none after it. A cap comes before the
    mask; `sinks` (H,) are logits beside the scores. A query that sees nothing gives zeros.

    A piece of queries of a few heads at a time, whose scores are computed again for the backward pass and never
    kept: of one head at S = 16384 they are 1 GiB in fp32.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    S, Sk = q.shape[2], k.shape[2]
    if not q.numel() or not k.numel():
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    groups = q.shape[1] // k.shape[1]
    heads = [x.flatten(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))]
    logits = None if sinks is None else sinks.repeat(q.shape[0])[:, None, None]

    def piece(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, first: int, low: int):  # type: ignore[no-untyped-def]
        """Of queries from `first` on and keys from `low` on."""
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        if cap:
            scores = cap * (scores / cap).tanh()
        hidden = None
        if mask == "causal" or window:
            rows = torch.arange(first, first + q.shape[1], device=q.device)[:, None] + Sk - S
            apart = rows - torch.arange(low, low + k.shape[1], device=q.device)
            hidden = apart < 0 if mask == "causal" else apart > Sk + S
            if window:
                hidden |= apart.abs() >= window
            blind = hidden.all(-1, keepdim=True)
            # Of a row that sees nothing softmax would be NaN, and so would every gradient.
            scores = scores.masked_fill(hidden & ~blind, float("-inf"))
        if sink is not None:
            scores = torch.cat((scores, sink.expand(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        if hidden is not None:
            weights = weights.masked_fill(blind, 0)
        return weights @ v

    queries = min(QUERIES if window else max(1, SCORES // Sk), S)
    columns = []
    for first in range(0, S, queries):
        last = min(first + queries, S)
        low, high = 0, Sk
        if window:
            low, high = max(0, first + Sk - S - window + 1), min(Sk, last + Sk - S + window - 1)
        if mask == "causal":
            high = min(high, last + Sk - S)
        # A piece of queries that sees nothing has one key, which is hidden from it.
        low = min(low, Sk - 1)
        high = max(high, low + 1)
        chunk = max(1, SCORES // ((last - first) * (high - low)))
        split = [heads[0][:, first:last].split(chunk), *(x[:, low:high].split(chunk) for x in heads[1:])]
        sinks_of = [None] * len(split[0]) if logits is None else logits.split(chunk)
        columns.append(
            torch.cat(
                [
                    checkpoint(piece, *some, first, low, use_reentrant=False, preserve_rng_state=False)
                    for some in zip(*split, sinks_of, strict=True)
                ]
            )
        )
    return torch.cat(columns, 1).view(*q.shape[:3], v.shape[-1])


def visible(S: int, Sk: int, mask: str, window: int = 0) -> int:
    """Pairs of one of S queries and a key of Sk that it sees, the last of both in one place."""

    def upto(place: int) -> int:
        """Over the queries whose place is at most this, how many keys are at most in theirs."""
        inside = min(max(place + 1, 0), Sk)
        return inside * (inside + 1) // 2 + max(0, place + 1 - Sk) * Sk

    def before(apart: int) -> int:
        """Pairs whose key is at most so many places after the query."""
        return upto(Sk - 1 + apart) - upto(Sk - S - 1 + apart)

    reach = max(S, Sk)
    ahead = 0 if mask == "causal" else min(window or reach, reach) - 1
    return before(ahead) - (before(-window) if window else 0)


def relaid(inputs: Inputs, case: Case, names: tuple[str, ...], packed: bool) -> Inputs:
    """The same numbers (B, H, S, D) stored as (B, S, H, D), or as views of one projection.

    Those of another length than the first, as keys of an encoder have it, are views of one of their own.
    """
    import torch

    together: dict[object, list[str]] = {}
    for name in names:
        together.setdefault(inputs[name].shape[2] if packed else name, []).append(name)
    found = dict(inputs)
    for members in together.values():
        tensors = [inputs[x] for x in members]
        B, _, S, D = tensors[0].shape
        whole = torch.empty(
            B, S, sum(x.shape[1] for x in tensors), D, dtype=tensors[0].dtype, device=tensors[0].device
        )
        parts = whole.split([x.shape[1] for x in tensors], 2)
        for name, part, x in zip(members, parts, tensors, strict=True):
            found[name] = part.transpose(1, 2).copy_(x)
    return found


def with_sinks(inputs: Inputs, case: Case) -> Inputs:
    """sinks (H,) in the inputs' dtype, as large as scores are: some heads give them most of their weight."""
    import torch

    H, q = case.axes["H"], inputs["q"]
    drawn = torch.linspace(-2, 6, H, device=q.device, dtype=torch.float32)
    return inputs | {"sinks": drawn.to(q.dtype)}


def with_cap(inputs: Inputs, case: Case) -> Inputs:
    """The cap, and queries so large that it changes a row's largest scores, which have most of the weight."""
    cap = float(case.options["cap"])
    return inputs | {"q": inputs["q"].mul_(cap / 16), "cap": cap}


def newest(
    cache: torch.Tensor, block_table: torch.Tensor | None, lengths: torch.Tensor, new: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a cache (pages, page, …) or (B, S, …) holds each sequence's `new` last tokens, and the place behind
    them: two indices (B, new + 1), or of nothing.

    One key of many thousands is a share of the answer that rounding hides, so that who reads one too few, or one
    too many, would be right: what lies there is to be larger.
    """
    import torch

    at = lengths.long()[:, None] - new + torch.arange(new + 1, device=lengths.device)
    if not cache.numel():
        return at[:, :0], at[:, :0]
    page = cache.shape[1]
    at = at.clamp(0, (page if block_table is None else page * block_table.shape[1]) - 1)
    if block_table is None:
        return torch.arange(len(at), device=at.device)[:, None].expand_as(at), at
    return block_table.long().gather(1, at // page), at % page


def variations(names: tuple[str, ...] = ("q", "k", "v")) -> dict[tuple[str, Option], Callable[..., Inputs]]:
    """By option and value of `VARIANTS`, what makes inputs of it of plain ones."""
    return {
        ("cap", 30): with_cap,
        ("cap", 50): with_cap,
        ("sinks", True): with_sinks,
        ("storage", "bshd"): partial(relaid, names=names, packed=False),
        ("storage", "packed"): partial(relaid, names=names, packed=True),
    }
