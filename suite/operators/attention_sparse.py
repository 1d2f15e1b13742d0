"""Block-sparse attention: every block of 128 queries attends to some of the blocks of 128 keys.

Ways to the blocks: a fixed layout of a local band, a sink and strided blocks (Child et al., arXiv 1904.10509; Xiao
et al., arXiv 2309.17453), the largest products of mean query and mean key (as in MoBA, Lu et al., arXiv
2502.13189), the same through a small gate (SeerAttention, Gao et al., arXiv 2410.13276), which is known to be the
best one or was trained, and all products not too far below the row's largest. Beside them at the density of the
layout the nearest blocks, and any: what choosing is to be better than.

Choosing blocks is inside of the call and its time, in a forward pass. A backward pass is that of the blocks which
were chosen: the choice has no derivative. Every row says what share of dense attention's tiles the implementation
left out, counted in the blocks that it executed itself, beside that of the reference's choice, and how far its
output is from dense attention's. On drawn inputs that deviation ranks the patterns and says nothing of
models.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Literal

from ...registry.store.metric import Metric
from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, exponentials_of, grid, torch_dtype
from . import _gates
from ._gates import BLOCK, pooled

if TYPE_CHECKING:
    import torch

GATE = 64
"""Most features that the gate keeps of a pooled query or key; a head of fewer dimensions keeps them all."""

CODE = 2.0
"""Deviation of a block's mean, in tokens' own: scores of blocks then have a deviation of 4, so that a few blocks
have most of a query's weight and a choice matters, as it does in models."""

THRESHOLDS = {90: 5.0, 75: 7.3, 50: 10.0}
"""By how much a block's score, divided by √D, may lie below its row's largest: of scores with a deviation of 4,
128 in a row, that leaves out about so many hundredths. How many it were is a metric of the row.
"""

MARGIN = 1e-4
"""How far below the best one left out a chosen score may lie, in parts of the row's largest: the rounding of fp32
sums over 128 tokens and D features, in any order, is a hundredth of it."""


def visible(row: int, across: int, mask: str) -> int:
    """Blocks of keys that a block of queries may choose from."""
    return row + 1 if mask == "causal" else across


def kept(row: int, across: int, mask: str, sparsity: int) -> int:
    """Blocks of keys that a block of queries attends to: the share of the visible, rounded, at least one."""
    return max(1, (visible(row, across, mask) * (100 - sparsity) + 50) // 100)


def layout(across: int, mask: str, sparsity: int) -> list[list[int]]:
    """The fixed layout: each row's blocks in ascending order.

    Half of them, rounded up, are those nearest to the row's own (on both sides under a full mask); then the first
    block, the sink; the others lie evenly over what is left.
    """
    rows = []
    for row in range(across):
        count = kept(row, across, mask, sparsity)
        nearest = sorted(range(visible(row, across, mask)), key=lambda block: (abs(block - row), block))
        chosen = set(nearest[: (count + 1) // 2])
        if len(chosen) < count:
            chosen.add(0)
        rest = [block for block in range(len(nearest)) if block not in chosen]
        wanted = count - len(chosen)
        chosen.update(rest[(2 * i + 1) * len(rest) // (2 * wanted)] for i in range(wanted))
        rows.append(sorted(chosen))
    return rows


def fixed(pattern: str, across: int, mask: str, sparsity: int) -> list[list[int]]:
    """Each row's blocks of keys: the layout (`static`), or at its density the nearest (`window`) or any
    (`random`), the row's own always among them.
    """
    if pattern == "static":
        return layout(across, mask, sparsity)
    rows = []
    for row in range(across):
        count, seen = kept(row, across, mask, sparsity), visible(row, across, mask)
        others = [block for block in range(seen) if block != row]
        if pattern == "window":
            others.sort(key=lambda block: (abs(block - row), block))
            chosen = others[: count - 1]
        else:
            chosen = random.Random(f"{across}/{row}").sample(others, count - 1)
        rows.append(sorted((*chosen, row)))
    return rows


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (B, H, S, D), k and v (B, Hkv, S, D), and what the pattern needs, None where it does not.

    The mean of each block of q and k is drawn too. static: blocks (1, n, n) bool with n = ⌈S / 128⌉, the same for
    every head. learned: gate_q (H, D, G) and gate_k (Hkv, D, G), G = min(64, D). Block means have no preferred
    direction, so that orthonormal columns, the same for a key head and its queries, lose least of their products:
    those are what training would give.
    """
    import torch

    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    mask, pattern, sparsity = (case.options[x] for x in ("mask", "pattern", "sparsity"))
    dtype = torch_dtype(case.dtype)
    across = -(-S // BLOCK)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype)

    q, k, v = draw(B, H, S, D), draw(B, Hkv, S, D), draw(B, Hkv, S, D)
    for x in (q, k):
        coded(x, draw(B, x.shape[1], across, D))
    given: Inputs = {"q": q, "k": k, "v": v, "mask": mask, "sparsity": sparsity}
    given |= dict.fromkeys(("blocks", "gate_q", "gate_k"))
    if pattern == "static":
        blocks = torch.zeros(1, across, across, dtype=torch.bool)
        for row, chosen in enumerate(layout(across, str(mask), int(sparsity))):
            blocks[0, row, chosen] = True
        given["blocks"] = blocks.to(device)
        return given
    if pattern == "learned":
        bases = torch.linalg.qr(draw(Hkv, D, min(GATE, D), dtype=torch.float32)).Q.to(dtype)
        given["gate_k"] = bases.contiguous()
        given["gate_q"] = bases.repeat_interleave(H // max(1, Hkv), 0).contiguous()
    return given


def coded(x: torch.Tensor, codes: torch.Tensor) -> None:
    """Gives each block of tokens x (B, heads, S, D) a mean, of codes (B, heads, n, D)."""
    x += (CODE * codes).repeat_interleave(BLOCK, 2)[:, :, : x.shape[2]]


def with_training(inputs: Inputs, case: Case) -> Inputs:
    """With gates that were trained on other draws of what `inputs` draws, from a start that knows nothing."""
    import torch

    q = inputs["q"]
    H, Hkv, D = (case.axes[axis] for axis in ("H", "Hkv", "D"))
    generator = torch.Generator(q.device).manual_seed(case.axes["D"])

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=q.device, generator=generator)

    count, tokens = _gates.amount(D, q.device.type)

    def sequence() -> tuple[torch.Tensor, torch.Tensor]:
        drawn = draw(1, H, tokens, D), draw(1, Hkv, tokens, D)
        for x in drawn:
            coded(x, draw(1, x.shape[1], tokens // BLOCK, D))
        return drawn

    start = _gates.started(Hkv, D, min(GATE, D), draw)
    gate = _gates.trained(start, [sequence() for _ in range(count)], str(case.options["mask"]))
    gates = (x.to(q.dtype).contiguous() for x in _gates.both(gate, H))
    return inputs | dict(zip(("gate_q", "gate_k"), gates, strict=True))


def at_density(inputs: Inputs, case: Case) -> Inputs:
    """With the blocks of a pattern that knows nothing of the inputs."""
    import torch

    across = -(-case.axes["S"] // BLOCK)
    mask, pattern, sparsity = (case.options[x] for x in ("mask", "pattern", "sparsity"))
    blocks = torch.zeros(1, across, across, dtype=torch.bool)
    for row, chosen in enumerate(fixed(str(pattern), across, str(mask), int(sparsity))):
        blocks[0, row, chosen] = True
    return inputs | {"blocks": blocks.to(inputs["q"].device)}


def below_largest(inputs: Inputs, case: Case) -> Inputs:
    """With how far below the row's largest score one may be: in units of scores, which are not divided by √D."""
    return inputs | {"threshold": THRESHOLDS[int(case.options["sparsity"])] * case.axes["D"] ** 0.5}


def scores(
    q: torch.Tensor, k: torch.Tensor, mask: str, gate_q: torch.Tensor | None, gate_k: torch.Tensor | None
) -> torch.Tensor:
    """(B, H, n, n): the product of mean query and mean key, each through its gate if there is one.

    A row's own block has +inf, because it is always chosen, and what a causal mask hides -inf.
    """
    import torch

    a, b = pooled(q), pooled(k)
    if gate_q is not None and gate_k is not None:
        a, b = a @ gate_q, b @ gate_k
    result = a @ b.repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1).mT
    result.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    if mask == "causal":
        result.masked_fill_(torch.ones(result.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    return result


def choose(scores: torch.Tensor, mask: str, sparsity: int) -> torch.Tensor:
    """The `kept` largest scores of each row, of equal ones the first: a bool for each."""
    import torch

    across = scores.shape[-1]
    counts = torch.tensor([kept(row, across, mask, sparsity) for row in range(across)], device=scores.device)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    first = (torch.arange(across, device=scores.device) < counts[:, None]).expand(scores.shape)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, first)


def over(scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """A row's own block and those with a score at most `threshold` below the largest of the others'."""
    import torch

    finite = scores.masked_fill(scores.isinf(), -torch.inf)
    least = finite.amax(-1, keepdim=True) - threshold
    return (scores >= least) & (scores > -torch.inf)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, blocks: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v over the blocks given, of shape (…, n, n) to broadcast to (B, H, n, n), or over all.

    A block of queries at a time, whose scores are computed again for the backward pass. A query that sees nothing
    gives zeros.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    S = q.shape[2]
    groups = q.shape[1] // max(1, k.shape[1])
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))

    def piece(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        products = (q * q.shape[-1] ** -0.5) @ k.mT
        # Of a row that sees nothing softmax would be NaN, and so would every gradient.
        shown = products.masked_fill(hidden & ~hidden.all(-1, keepdim=True), -torch.inf)
        found: torch.Tensor = shown.softmax(-1).masked_fill(hidden, 0) @ v
        return found

    rows = []
    for row, low in enumerate(range(0, S, BLOCK)):
        high = min(S, low + BLOCK)
        end = high if mask == "causal" else S
        hidden = torch.zeros(high - low, end, dtype=torch.bool, device=q.device)
        if mask == "causal":
            hidden = torch.ones_like(hidden).triu_(low + 1)
        if blocks is not None:
            hidden = hidden | ~blocks[..., row, None, :].repeat_interleave(BLOCK, -1)[..., :end]
        own = q[:, :, low:high], k[:, :, :end], v[:, :, :end]
        rows.append(checkpoint(piece, *own, hidden, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(rows, 2) if rows else q + 0 * (k.sum() + v.sum())


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    sparsity: int,
    blocks: torch.Tensor | None,
    gate_q: torch.Tensor | None,
    gate_k: torch.Tensor | None,
    threshold: float | None = None,
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v over the blocks given, or over those that are chosen."""
    if blocks is None:
        blocks = chosen_of(q.detach(), k.detach(), mask, sparsity, gate_q, gate_k, threshold)
    return attended(q, k, v, mask, blocks)


def chosen_of(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: str,
    sparsity: int,
    gate_q: torch.Tensor | None,
    gate_k: torch.Tensor | None,
    threshold: float | None,
) -> torch.Tensor:
    """The blocks (B, H, n, n) that scores choose."""
    found = scores(q, k, mask, gate_q, gate_k)
    return choose(found, mask, sparsity) if threshold is None else over(found, threshold)


def results(result: Any, inputs: Inputs) -> torch.Tensor:
    """The output, and where blocks are chosen (output, blocks (B, H, n, n) bool): what the output would be for the
    reference's choice.

    Scores that differ by less than rounding can be chosen either way: rows of blocks with another choice than the
    reference's are moved by the difference of the two choices' answers. A choice that is not one of the best
    within `MARGIN` or, under a threshold, not as far from it, or of the wrong number or shape, gives NaN, which is
    wrong.
    """
    import torch

    if inputs["blocks"] is not None:
        output: torch.Tensor = result
        return output
    output, blocks = result
    q, k, v, mask, sparsity = (inputs[x] for x in ("q", "k", "v", "mask", "sparsity"))
    B, H, S, D = q.shape
    across = -(-S // BLOCK)
    if blocks.shape != (B, H, across, across) or blocks.dtype != torch.bool or output.shape != q.shape:
        return torch.full_like(q, torch.nan)
    gates = (None if inputs[x] is None else inputs[x].double() for x in ("gate_q", "gate_k"))
    exact = scores(q.double(), k.double(), mask, *gates)
    threshold = inputs.get("threshold")
    right = choose(exact, mask, sparsity) if threshold is None else over(exact, threshold)
    other = (blocks != right).any(-1)
    if not bool(other.any()):
        return output
    largest = exact.masked_fill(exact.isinf(), 0).abs().amax(-1)
    if threshold is None:
        # Of what was left out and what was taken instead, by row. No row chooses fewer than it may.
        left = exact.masked_fill(~right | blocks, -torch.inf).amax(-1)
        taken = exact.masked_fill(right | ~blocks, torch.inf).amin(-1)
        wrong = (blocks.sum(-1) != right.sum(-1)) | (other & (left - taken > MARGIN * largest))
    else:
        least = exact.masked_fill(exact.isinf(), -torch.inf).amax(-1, keepdim=True) - threshold
        near = (exact - least).abs() <= MARGIN * largest[..., None]
        wrong = ((blocks != right) & ~near).any(-1)
    if bool(wrong.any()):
        return torch.full_like(q, torch.nan)
    output = output.double()
    groups = H // k.shape[1]
    for b, h, row in other.nonzero().tolist():
        low, high = row * BLOCK, min(S, (row + 1) * BLOCK)
        keys, values = (x[b, h // groups].double() for x in (k, v))
        products = (q[b, h, low:high].double() * D**-0.5) @ keys.mT
        if mask == "causal":
            products = products.masked_fill(torch.ones_like(products, dtype=torch.bool).triu_(low + 1), -torch.inf)
        answers = [
            products.masked_fill(~x[b, h, row].repeat_interleave(BLOCK)[:S], -torch.inf).softmax(-1) @ values
            for x in (right, blocks)
        ]
        output[b, h, low:high] += answers[0] - answers[1]
    return output


def bytes_(case: Case) -> int:
    """Forward reads q, k, v and the gate and writes the output; backward reads q, k, v and the output's gradient
    and writes three gradients. Blocks, a byte each, are read or written once.
    """
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    pattern = case.options["pattern"]
    across = -(-S // BLOCK)
    of_q, of_k = {"forward": (2, 2), "backward": (3, 4), "forward_backward": (5, 6)}[case.pass_]
    elements = (of_q * H + of_k * Hkv) * B * S * D
    if pattern in ("learned", "trained") and case.pass_ != "backward":
        elements += (H + Hkv) * D * min(GATE, D)
    return elements * BYTES[case.dtype] + (1 if pattern == "static" else B * H) * across * across


def pairs(case: Case, sparsity: int) -> int:
    """Pairs of query and key in the kept blocks of one head; half of the block on a causal diagonal.

    The last block of keys counts as a whole one: whether a row chooses it is known at run time only.
    """
    S, mask = case.axes["S"], str(case.options["mask"])
    across = -(-S // BLOCK)
    total = 0
    for row in range(across):
        queries = min(BLOCK, S - row * BLOCK)
        total += queries * kept(row, across, mask, sparsity) * BLOCK
        if mask == "causal":
            total -= queries * (2 * BLOCK - queries) // 2
    return total


def flops(case: Case) -> int:
    """Two products forward and five backward (the scores are computed again) over the kept blocks. What choosing
    them takes is not counted: dense attention has no need.
    """
    B, H, D = (case.axes[axis] for axis in ("B", "H", "D"))
    matmuls = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    return matmuls * 2 * B * H * D * pairs(case, int(case.options["sparsity"]))


def saved(case: Case) -> float:
    """The fraction of dense attention's operations that the case does without."""
    dense = pairs(case, 0)
    return 1 - pairs(case, int(case.options["sparsity"])) / dense if dense else 0.0


def dense_error(output: torch.Tensor, inputs: Inputs) -> float:
    """‖output − dense‖ / ‖dense‖: how far block-sparse attention is from dense attention on the same inputs.

    Computed in fp32 from inputs of any dtype. On drawn inputs it ranks the patterns: a fixed layout knows nothing
    of them, and comes out above 1. What a trained model would lose is another number.
    """
    import torch

    q, k, v = (inputs[x].float() for x in "qkv")
    dense = attended(q, k, v, inputs["mask"], None)
    return float(torch.linalg.vector_norm(output.float() - dense) / torch.linalg.vector_norm(dense))


LEFT_OUT = Metric(
    "tiles_left_out",
    "1",
    better="neither",
    about="The share of dense attention's work, in tiles of 128 × 128, that the implementation did not execute: "
    "counted in its own blocks; below 0 where it computes what the mask hides.",
)
REFERENCE_LEFT_OUT = Metric(
    "tiles_left_out_reference",
    "1",
    better="neither",
    about="The share of dense attention's tiles of 128 × 128 that the reference's blocks leave out.",
)
DENSE_ERROR = Metric(
    "dense_error",
    "1",
    better="neither",
    about="How far the output is from dense attention's on drawn inputs, relative; it says nothing of models.",
)


def right_blocks(inputs: Inputs) -> torch.Tensor:
    """The blocks that are given, or the right choice: as many as a correct implementation's but for ties."""
    given = inputs["blocks"]
    if given is None:
        gate_q, gate_k = (None if inputs[x] is None else inputs[x].double() for x in ("gate_q", "gate_k"))
        q, k = (inputs[x].detach().double() for x in "qk")
        given = chosen_of(q, k, str(inputs["mask"]), inputs["sparsity"], gate_q, gate_k, inputs.get("threshold"))
    blocks: torch.Tensor = given
    return blocks


def left_out_by_reference(outputs: list[torch.Tensor], references: list[torch.Tensor], inputs: Inputs) -> float:
    """1 - tiles of the blocks / tiles that the mask lets see."""
    import torch

    blocks = right_blocks(inputs)
    across = int(blocks.shape[-1])
    seen = torch.ones(across, across, dtype=torch.bool, device=blocks.device)
    if inputs["mask"] == "causal":
        seen = seen.tril()
    executed, dense = (
        int((blocks & seen).sum()),
        int(seen.sum()) * (int(blocks.numel()) // max(1, across * across)),
    )
    return 1 - executed / max(1, dense)


def from_dense(outputs: list[torch.Tensor], references: list[torch.Tensor], inputs: Inputs) -> float:
    """`dense_error` of a call; of a backward pass, whose outputs are three gradients, that of its forward pass."""
    import torch

    with torch.no_grad():
        output = outputs[0]
        if len(outputs) == 3:
            q, k, v = (inputs[x].float() for x in "qkv")
            output = attended(q, k, v, inputs["mask"], right_blocks(inputs))
        return dense_error(output, inputs)


SPARSITY: dict[str, Option | list[Option]] = {"sparsity": [90, 75, 50]}
PATTERNS: dict[str, Option | list[Option]] = {"pattern": ["static", "dynamic", "learned"]}
BESIDE: dict[str, Option | list[Option]] = {"pattern": ["window", "random", "threshold", "trained"]}
MASKS: dict[str, Option | list[Option]] = {"mask": ["causal", "full"]}

OPERATOR = Operator(
    name="attention_sparse",
    summary="Block-sparse attention over fixed, scored or gated blocks of 128 by 128",
    axes={"B": "batch", "H": "query heads", "Hkv": "key and value heads", "S": "sequence", "D": "head dimension"},
    options={
        "mask": ("causal", "full"),
        "pattern": ("static", "dynamic", "learned", "window", "random", "threshold", "trained"),
        "sparsity": (90, 75, 50),
    },
    variations={
        ("pattern", "window"): at_density,
        ("pattern", "random"): at_density,
        ("pattern", "threshold"): below_largest,
        ("pattern", "trained"): with_training,
    },
    told=(LEFT_OUT,),
    measures={REFERENCE_LEFT_OUT: left_out_by_reference, DENSE_ERROR: from_dense},
    inputs=inputs,
    reference=reference,
    results=results,
    gradients=("q", "k", "v"),
    bytes=bytes_,
    flops=flops,
    exponentials=exponentials_of(flops),
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    # A threshold came later, blocks at the layout's density, and gradients of the reference.
    continues={
        "50a8748c605e": "0abfecd86b79",
        "ef8c1a3021a3": "fbc5356a16c3",
        "d6bb6d73aa97": "ccd5a40f7e98",
        "7fb08a0fe58f": "fe0673319fa1",
        "751c8229b488": "1ad8d193f2c9",
        "6a72d49035da": "33f4c7016d8e",
        "2442011b848b": "43461b6b2712",
        "f48f6ba97d0f": "fe45b0c60c0d",
        "1beb93130079": "fa8dc8a7211c",
    },
    plans={
        "quick": (grid("forward", B=1, H=16, Hkv=16, S=16384, D=128),),
        "quick_cpu": (grid("forward", B=1, H=2, Hkv=2, S=1024, D=64, dtypes="fp32"),),
        "standard": (
            grid("forward", options=SPARSITY | PATTERNS | MASKS, B=1, H=16, Hkv=16, S=16384, D=128),
            grid("forward", options=PATTERNS, B=1, H=16, Hkv=[16, 4], S=32768, D=128),
            grid("forward", options=PATTERNS, B=1, H=32, Hkv=32, S=16384, D=64),
            # What choosing is to be better than, at the same density; a choice by a threshold, and by a trained
            # gate.
            grid("forward", options=SPARSITY | BESIDE, B=1, H=16, Hkv=16, S=16384, D=128),
            grid("backward", options=SPARSITY | PATTERNS, B=1, H=16, Hkv=16, S=16384, D=128),
            grid("backward", options=PATTERNS, B=1, H=16, Hkv=4, S=16384, D=128),
            grid("forward_backward", options=PATTERNS, B=1, H=16, Hkv=16, S=16384, D=128),
        ),
        "full": (
            grid("forward", options=SPARSITY | PATTERNS, B=2, H=16, Hkv=16, S=[4096, 4000], D=128),
            grid("forward", options=PATTERNS | MASKS, B=1, H=16, Hkv=4, S=16384, D=128, dtypes="fp16"),
            grid("backward", options=PATTERNS | MASKS, B=2, H=16, Hkv=4, S=4000, D=[64, 128]),
        ),
    },
)
