"""What attention leaves out, for the libraries: blocks of block-sparse attention in PyTorch's operations, for the
libraries that take masks but choose none, and windows in the field's terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BLOCK = 128


def reach(case: Any) -> tuple[int, int]:
    """How many keys before and after its own a query sees, -1 for all: FlashAttention's `window_size`.

    A case without a window has (-1, -1): what is causal is said beside it.
    """
    if not case.axes.get("W"):
        return -1, -1
    width = case.axes["W"] - 1
    return width, 0 if case.options["mask"] == "causal" else width


LACKS = {
    "sinks": "has no sinks in its softmax",
    "cap": "has no cap of scores",
    "Sk": "aligns masks to the first query and key, not to the last",
}
"""What is said of a library that lacks one of attention's options."""


def takes(case: Any, library: str, *known: str) -> None:
    """Raises `NotImplementedError` for a case of attention with an option that a library lacks: of `sinks`, `cap`
    and `Sk` (a causal mask, or a window, over another number of keys than of queries) it has those that are named.
    """
    asked = {"sinks": case.options.get("sinks"), "cap": case.options.get("cap")}
    placed = case.options.get("mask") == "causal" or bool(case.axes.get("W"))
    asked["Sk"] = placed and (keys(case) != case.axes["S"] or case.options.get("keys", "same") != "same")
    for option, wanted in asked.items():
        if wanted and option not in known:
            raise NotImplementedError(f"{library} {LACKS[option]}")


def grouped(case: Any) -> bool:
    """Whether query heads share key heads; where a case says nothing of key heads each has its own."""
    return bool(case.axes["H"] != case.axes.get("Hkv", case.axes["H"]))


def keys(case: Any) -> int:
    """Keys of a sequence."""
    return int(case.axes.get("Sk") or case.axes["S"])


def cap_of(case: Any) -> float:
    """The cap of scores, 0 for none."""
    return float(case.options.get("cap", 0))


def window_mask(case: Any, device: Any) -> Any:
    """The mask (S, Sk) bool of queries and keys that a case's window stands for, True where a key is seen."""
    return lower_right(case.axes["S"], keys(case), reach(case), device)


def lower_right(S: int, Sk: int, reach: tuple[int, int], device: Any) -> Any:
    """The mask (S, Sk) bool of the keys so many before and after a query's own, the last of both in one place; a
    negative number before is all.
    """
    import torch

    before, after = reach
    seen = torch.ones(S, Sk, dtype=torch.bool, device=device).tril_(Sk - S + after)
    return seen if before < 0 else seen.triu_(Sk - S - before)


def given(case: Any) -> bool:
    """Whether a case's blocks are given, and not chosen at run time."""
    return case.options["pattern"] in ("static", "window", "random")


def choice(case: Any) -> Callable[..., Any]:
    """`choose(q, k, gate_q, gate_k)`: the blocks (B, H, n, n) bool of a case that chooses them at run time.

    Of the mean of each block of queries and of keys, in fp32 and through the gates if there are any; how many of a
    row depends on its length alone and is computed once. With a `threshold` those at most so far below the
    largest.
    """
    import torch

    H, Hkv, S = (case.axes[axis] for axis in ("H", "Hkv", "S"))
    causal, sparsity = case.options["mask"] == "causal", int(case.options["sparsity"])
    across = -(-S // BLOCK)
    fixed: tuple[Any, Any] | None = None

    def pooled(x: Any) -> Any:
        if S % BLOCK == 0:
            return x.view(*x.shape[:2], across, BLOCK, -1).mean(3, dtype=torch.float32)
        parts = x.split(BLOCK, 2)
        return torch.stack([part.mean(2, dtype=torch.float32) for part in parts], 2)

    def prepared(device: Any) -> tuple[Any, Any]:
        place = torch.arange(across, device=device)
        seen = place + 1 if causal else torch.full_like(place, across)
        counts = ((seen * (100 - sparsity) + 50) // 100).clamp(min=1)
        hidden = torch.ones(across, across, dtype=torch.bool, device=device).triu_(1) if causal else None
        return place < counts[:, None], hidden

    @torch.no_grad()
    def choose(q: Any, k: Any, gate_q: Any, gate_k: Any, threshold: float | None = None) -> Any:
        nonlocal fixed
        if fixed is None:
            fixed = prepared(q.device)
        first, hidden = fixed
        a, b = pooled(q), pooled(k)
        if gate_q is not None:
            a, b = a @ gate_q.float(), b @ gate_k.float()
        scores = a @ b.repeat_interleave(H // Hkv, 1).mT
        scores.diagonal(dim1=-2, dim2=-1).fill_(float("inf"))
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        if threshold is not None:
            others = scores.masked_fill(scores.isinf(), float("-inf")).amax(-1, keepdim=True)
            return (scores >= others - threshold) & (scores > float("-inf"))
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, first.expand_as(order))

    return choose


def left_out(case: Any, executed: Any) -> float:
    """The share of dense attention's tiles of 128 by 128 that a library leaves out, of the number that it executes
    in one head, on average: a tensor of counts (…, n) of blocks by row, or that number.
    """
    across = -(-case.axes["S"] // BLOCK)
    dense = across * (across + 1) // 2 if case.options["mask"] == "causal" else across * across
    tiles = executed if isinstance(executed, int) else float(executed.sum()) / executed[..., 0].numel()
    return float(1 - tiles / max(1, dense))


def elements(blocks: Any, causal: bool, S: int) -> Any:
    """The mask (…, S, S) of queries and keys that a mask (…, n, n) of blocks stands for."""
    mask = blocks.repeat_interleave(BLOCK, -2)[..., :S, :].repeat_interleave(BLOCK, -1)[..., :S]
    return mask.tril_() if causal else mask


def lists(blocks: Any) -> tuple[Any, Any]:
    """(counts (…, n), indices (…, n, n)) int32 of a mask of blocks, what is not in use at the end."""
    import torch

    order = blocks.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)
