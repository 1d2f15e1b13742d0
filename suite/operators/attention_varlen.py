"""Attention over packed sequences of different lengths, as they are trained on and served without padding.

The interface is FlashAttention's (Dao, arXiv 2307.08691): tokens of all sequences one behind the other, and where
each sequence starts. With equal lengths it is the same work as a case of `attention` of the same axes, which
counts the same operations: the two can be divided.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, exponentials_of, grid, torch_dtype
from ._attention import attended, visible, with_cap, with_sinks

if TYPE_CHECKING:
    import torch

SHORTEST = {"uniform": 8, "long_tail": 64}
"""S by the shortest length that is drawn."""


def lengths_of(case: Case) -> list[int]:
    """Tokens by sequence, the same whenever a case of these axes is built.

    equal: all S. uniform: evenly from S/8 to S. long_tail: from S/64 to S, the density falling with the square of
    the length, so that few sequences have most of the tokens, as documents do. Each of the B equal parts of a
    distribution gives one length, in shuffled order: the sum hardly depends on luck.
    """
    B, S = case.axes["B"], case.axes["S"]
    kind = str(case.options["lengths"])
    if kind == "equal":
        return [S] * B
    drawn = random.Random(f"{kind} {B} {S}")
    low = S / SHORTEST[kind]
    lengths = []
    for part in range(B):
        share = (part + drawn.random()) / B
        length = low + share * (S - low) if kind == "uniform" else low / (1 - share * (1 - low / max(1, S)))
        lengths.append(min(S, max(min(1, S), round(length))))
    return sorted(lengths, key=lambda _: drawn.random())


def keys_of(case: Case) -> list[int]:
    """Keys by sequence. same: as many as queries. prefix: what came before the queries is there too, up to three
    times as long: a prompt that is taken in parts. other: those of another text, from S/8 to S, as of an encoder.
    """
    lengths, kind = lengths_of(case), str(case.options["keys"])
    if kind == "same":
        return lengths
    S = case.axes["S"]
    drawn = random.Random(f"{kind} {len(lengths)} {S}")
    if kind == "prefix":
        return [length + round(3 * drawn.random() * length) for length in lengths]
    return [max(min(1, S), round(S * drawn.uniform(1 / SHORTEST["uniform"], 1))) for _ in lengths]


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """q (T, H, D), k and v (Tk, Hkv, D) with T and Tk the sums of lengths; where sequences start, (B + 1,)
    int32, for queries and for keys; the longest of them, and the mask's name; where there is one the window.
    """
    import torch

    H, Hkv, D = (case.axes[axis] for axis in ("H", "Hkv", "D"))
    lengths, others = lengths_of(case), keys_of(case)
    dtype = torch_dtype(case.dtype)

    def draw(heads: int, lengths: list[int]) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, D, device=device, generator=generator, dtype=dtype)

    def starts(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], device=device).cumsum(0).int()

    given: Inputs = {
        "q": draw(H, lengths),
        "k": draw(Hkv, others),
        "v": draw(Hkv, others),
        "cu_seqlens_q": starts(lengths),
        "cu_seqlens_k": starts(others),
        "max_seqlen_q": max(lengths, default=0),
        "max_seqlen_k": max(others, default=0),
        "mask": case.options["mask"],
    }
    return given | ({"window": case.axes["W"]} if case.axes["W"] else {})


def packed(inputs: Inputs, case: Case) -> Inputs:
    """The same numbers as views of one projection (T, (H + 2 Hkv) · D); keys of other lengths are, with the
    values, views of one of their own.
    """
    import torch

    found = dict(inputs)
    for names in (("q", "k", "v"),) if case.options["keys"] == "same" else (("q",), ("k", "v")):
        whole = torch.cat([inputs[x] for x in names], 1)
        found |= dict(zip(names, whole.split([inputs[x].shape[1] for x in names], 1), strict=True))
    return found


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Literal["causal", "full"],
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """`attended` of one sequence after the other: softmax(q·kᵀ / √D)·v; query head h reads key head
    h // (H / Hkv).

    Masks are aligned to the end: of Lq queries and Lk keys, query i is in the place of key i + Lk − Lq. One that
    sees no key gives zeros.
    """
    import torch

    mine, others = (x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    outputs = []
    for part in zip(q.split(mine), k.split(others), v.split(others), strict=True):
        own, keys, values = (x.transpose(0, 1)[None] for x in part)
        outputs.append(attended(own, keys, values, mask, window, sinks, cap)[0].transpose(0, 1))
    return torch.cat(outputs) if outputs else torch.zeros_like(q)


def bytes_(case: Case) -> int:
    """Forward reads q, k, v and writes the output; backward reads q, k, v and the output's gradient and writes
    three gradients (the output itself can be computed again). Both read where sequences start.
    """
    B, H, Hkv, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "D"))
    queries, keys = {"forward": (2, 2), "backward": (3, 4), "forward_backward": (5, 6)}[case.pass_]
    passes = 2 if case.pass_ == "forward_backward" else 1
    elements = (queries * H * sum(lengths_of(case)) + keys * Hkv * sum(keys_of(case))) * D
    return elements * BYTES[case.dtype] + passes * 8 * (B + 1)


def flops(case: Case) -> int:
    """Two matmuls forward and five backward (the scores are computed again) of each sequence with its keys, over
    the pairs that are visible; of as many keys as queries, without a window, a causal mask leaves half.
    """
    H, D, W, mask = case.axes["H"], case.axes["D"], case.axes["W"], str(case.options["mask"])
    matmuls = {"forward": 2, "backward": 5, "forward_backward": 7}[case.pass_]
    if case.options["keys"] == "same" and not W:
        pairs = sum(length * length for length in lengths_of(case))
        return matmuls * 2 * H * D * pairs // (2 if mask == "causal" else 1)
    lengths = zip(lengths_of(case), keys_of(case), strict=True)
    return matmuls * 2 * H * D * sum(visible(*x, mask, W) for x in lengths)


MODELS = ((32, 64), (16, 128))
"""(H, D): a model dimension of 2048, as in the large cases of `attention`."""
EQUAL = ((8, 2048), (2, 8192))
"""(B, S) of equal lengths, which `attention` has too: 16384 tokens each."""
UNEVEN = (({"lengths": "uniform"}, 16, 2048), ({"lengths": "long_tail"}, 64, 8192))
"""Lengths, B and S: about 18000 tokens of sequences much alike, and 34000 of a few long ones and many short."""
MASKS: dict[str, Option | list[Option]] = {"mask": ["causal", "full"]}

# Not a function: plans are no part of what the operator's `spec` covers, functions are.
STANDARD = (
    *(
        x
        for H, D in MODELS
        for B, S in EQUAL
        for x in (
            grid("forward", options=MASKS, B=B, H=H, Hkv=H, S=S, D=D),
            grid("forward", B=B, H=H, Hkv=H // 4, S=S, D=D),
            grid("backward", B=B, H=H, Hkv=H, S=S, D=D),
        )
    ),
    *(grid("backward", B=2, H=H, Hkv=H // 4, S=8192, D=D) for H, D in MODELS),
    *(
        x
        for H, D in MODELS
        for options, B, S in UNEVEN
        for x in (
            grid("forward", options=dict(options), B=B, H=H, Hkv=[H, H // 4], S=S, D=D),
            grid("backward", options=dict(options), B=B, H=H, Hkv=H, S=S, D=D),
        )
    ),
)

OPERATOR = Operator(
    name="attention_varlen",
    summary="Attention over packed sequences of different lengths, causal or full, with grouped heads",
    axes={
        "B": "sequences",
        "H": "query heads",
        "Hkv": "key and value heads",
        "S": "tokens that the longest sequence may have",
        "D": "head dimension",
        "W": "window: a query sees itself and the W - 1 keys before it, under a full mask also as many after it, "
        "0 being none",
    },
    options={
        "mask": ("causal", "full"),
        "lengths": ("equal", "uniform", "long_tail"),
        # Packed: views of one projection.
        "storage": ("thd", "packed"),
        # As many keys as queries; with what came before the queries; those of another text.
        "keys": ("same", "prefix", "other"),
        # As of `attention`.
        "sinks": (False, True),
        "cap": (0, 30, 50),
    },
    later={"storage": "thd", "W": 0, "keys": "same", "sinks": False, "cap": 0},
    variations={
        ("cap", 30): with_cap,
        ("cap", 50): with_cap,
        ("sinks", True): with_sinks,
        ("storage", "packed"): packed,
    },
    stored_as="q",
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    exponentials=exponentials_of(flops),
    tokens=lambda case: sum(lengths_of(case)),
    gradients=("q", "k", "v", "sinks"),
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=8e-1, relative=5e-2),
        "fp16": Tolerance(norm=1.5e-3, absolute=1e-1, relative=8e-3),
        "fp32": Tolerance(norm=1e-5, absolute=1e-3, relative=1e-4),
    },
    fp32_reference=True,
    # Windows, sinks, caps and other keys came later; without them the reference computes the same.
    continues={
        "19df79e97c08": "f9a7341df019",
        "2769cbf4e57e": "e933c54d91b2",
        "40cf1f41fbea": "78f7d6cc4e1e",
        "52cf6812f652": "75bb4a6f7911",
        "74d0e7744876": "9efc446f4839",
        "9d2fe924cb56": "5b812a77c3c5",
        "b477c5f1330f": "4200cb507a2c",
        "ba477618ad35": "df6e663afb78",
        "be9bc4727ebe": "fd83a6b989f4",
        "c4a2340e41e5": "ca9f253c6615",
        "c5f96ae5948a": "b499aec585f7",
        "d6bc6fe0edf7": "2ed63beb416f",
    },
    plans={
        "quick": (
            grid("forward", "backward", options={"lengths": "uniform"}, B=8, H=16, Hkv=16, S=2048, D=128),
        ),
        "quick_cpu": (
            grid("forward", options={"lengths": "uniform"}, B=4, H=4, Hkv=4, S=256, D=64, dtypes="fp32"),
        ),
        "standard": STANDARD,
        "full": (
            grid(
                "forward", "backward", dtypes="fp16", options=MASKS | {"lengths": ["uniform", "long_tail"]},
                B=32, H=16, Hkv=[16, 4], S=4096, D=128,
            ),
            grid(
                "forward", "backward", options=MASKS | {"lengths": "uniform"}, B=16, H=16, Hkv=16, S=2048,
                D=[96, 256],
            ),
            grid("forward", options={"lengths": "long_tail"}, B=512, H=16, Hkv=4, S=4096, D=128),
            # Chunked prefill of gpt-oss and of Gemma 2, and an encoder's keys.
            grid(
                "forward", "backward", options={"lengths": "uniform", "keys": ["same", "prefix"], "sinks": True},
                B=8, H=64, Hkv=8, S=2048, D=64, W=[0, 128],
            ),
            grid(
                "forward", "backward", options={"lengths": "uniform", "keys": ["same", "prefix"], "cap": 50},
                B=8, H=32, Hkv=16, S=2048, D=128, W=[0, 4096],
            ),
            grid(
                "forward", "backward", options={"mask": "full", "lengths": "uniform", "keys": "other"},
                B=16, H=16, Hkv=16, S=2048, D=64,
            ),
        ),
    },
)  # fmt: skip
