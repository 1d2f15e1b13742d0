"""The gated delta rule, forward, by chunks of positions (Yang, Kautz and Hatamizadeh, arXiv 2412.06464).

    S_t = exp(g_t) (S_{t-1} - β_t k_t (k_tᵀ S_{t-1})) + β_t k_t v_tᵀ        o_t = q_t S_t

Within a chunk what the state takes of each position, U, solves (1 + A) U = β (V - exp(a) K S), with a the sum of g
up to a position and S the state that enters: A is what the keys before hold of a key, strictly lower triangular.
Three kernels:

* `_solve`, a chunk of a head: T = (1 + A)⁻¹ row by row, and with it T β V and T β exp(a) K;
* `_chain`, some columns of a head: chunk after chunk U = T β V - (T β exp(a) K) S, and the state behind it;
* `_read`, a chunk of a head: what q reads of the entering state and of U.

There is no backward pass yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, needs_gradient, on, operator, power_of_2
from .._pointwise import floored

CHUNK = 64
"""Positions of a chunk."""
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: key dimension, values' dimension, positions of a chunk, columns of a tile of keys
    and of values.
    """

    K: int
    D: int
    rows: int
    keys: int
    values: int


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """o (B, S, H, D) in v's dtype, and with `return_final_state` the last state (B, H, K, D) in fp32.

    q and k (B, S, H, K) and v (B, S, H, D) in one of bf16, fp16, fp32; g (B, S, H), the logarithms of the decays,
    beta (B, S, H) and initial_state (B, H, K, D), each in any of the three. K from 1 to 256. g should not be
    positive, and keys should have length 1, with beta from 0 to 1. Scores are not scaled: scale q.

    Matrix products have operands of v's dtype and sums in fp32; fp32 inputs are multiplied as fp32, not TF32. The
    triangular systems are solved in fp32.

    Raises `TypeError` for a wrong dtype, `ValueError` for a wrong shape or device, and `NotImplementedError` where
    a gradient is wanted.
    """
    check("v", v, dim=4)
    B, S, H, D = v.shape
    check("q", q, dim=4, dtypes=(v.dtype,), like=v)
    K = q.shape[3]
    if not 1 <= K <= 256:
        raise ValueError(f"q has key dimension {K}, expected 1 to 256")
    check("q", q, shape=(B, S, H, K))
    check("k", k, shape=(B, S, H, K), dtypes=(v.dtype,), like=v)
    check("g", g, shape=(B, S, H), like=v)
    check("beta", beta, shape=(B, S, H), like=v)
    given = () if initial_state is None else (initial_state,)
    if initial_state is not None:
        check("initial_state", initial_state, shape=(B, H, K, D), like=v)
    if needs_gradient(q, k, v, g, beta, *given):
        raise NotImplementedError("the gated delta rule has a forward pass only here")
    o, last = _gated_delta_rule(q, k, v, g, beta, initial_state)
    return (o, last) if return_final_state else o


def _empty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for o and the last state."""
    B, _, H, D = v.shape
    return v.new_empty(v.shape), v.new_empty(B, H, q.shape[3], D, dtype=torch.float32)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    o, last = _empty(q, k, v)
    if initial_state is None:
        last.zero_()
    else:
        last.copy_(initial_state)
    if o.numel():
        _launch(q, k, v, g, beta, last, o)
    return o, last


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    o: torch.Tensor,
) -> None:
    """Writes o, and to `state`, from which it starts, the state behind the last position."""
    B, S, H, D = v.shape
    K = q.shape[3]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    n = cdiv(S, CHUNK)
    sums = torch.empty(B, H, n * CHUNK, dtype=torch.float32, device=v.device)
    past = v.new_empty(B, H, n * CHUNK, K)
    taken = v.new_empty(B, H, n * CHUNK, D)
    entering = v.new_empty(B, H, n, K, D)
    wide = v.dtype == torch.float32
    keys = max(16, power_of_2(K))
    most = max(16, power_of_2(D))
    columns = min(most, 16 if keys > 128 or wide else 32)
    c = Config(K, D, CHUNK, keys, min(most, 32 if wide else 64))
    d = Config(K, D, CHUNK, keys, columns)
    with on(v):
        # All in the first dimension of a grid, whose others have 65,535 at most, and there may be more heads.
        _solve[(n * B * H,)](
            k, v, g, beta, sums, past, taken, k.stride()[:3], v.stride()[:3], g.stride(), beta.stride(), S, H, n,
            c, num_warps=4,
        )  # fmt: skip
        _chain[(cdiv(D, columns) * B * H,)](
            k, sums, past, taken, entering, state, k.stride()[:3], S, H, n, d, num_warps=4, num_stages=2
        )  # fmt: skip
        _read[(n * cdiv(D, c.values) * B * H,)](
            q, k, o, sums, taken, entering, q.stride()[:3], k.stride()[:3], o.stride()[:3], S, H, n, c,
            num_warps=4, num_stages=1,
        )  # fmt: skip


@triton.jit
def _tile(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, batch, head, row, first, strides, S, D, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """(ROWS, WIDTH) of a (B, S, H, D) tensor from position `row` and column `first` on, zeros beyond both."""
    rows = row + tl.arange(0, ROWS)
    columns = first + tl.arange(0, WIDTH)
    start = x + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    pointers = start + rows.to(tl.int64)[:, None] * strides[1] + columns[None, :]
    return tl.load(pointers, (rows < S)[:, None] & (columns < D)[None, :], 0.0)


@triton.jit
def _dense(x, place, row, first, rows, D, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """(pointers, mask) of (ROWS, WIDTH) of a contiguous (heads, rows, D) tensor; ROWS of it are there."""
    columns = first + tl.arange(0, WIDTH)
    at = place.to(tl.int64) * rows + row + tl.arange(0, ROWS)
    return x + at[:, None] * D + columns[None, :], (columns < D)[None, :] & (tl.arange(0, ROWS) >= 0)[:, None]


@triton.jit(do_not_specialize=["S", "H", "n"])
def _solve(  # type: ignore[no-untyped-def]  # Triton's types are its own
    k, v, g, beta, sums, past, taken, k_strides, v_strides, g_strides, beta_strides, S, H, n, c: tl.constexpr
):  # fmt: skip
    """Of one chunk of a head a, the sum of g · log₂e, T β exp(a) K and T β V."""
    LOG2: tl.constexpr = 1.4426950408889634
    chunk, place = tl.program_id(0) % n, tl.program_id(0) // n
    batch, head = place // H, place % H
    row = chunk * c.rows
    at = tl.arange(0, c.rows)
    inside = row + at < S
    position = (row + at).to(tl.int64)
    of_g = g + batch.to(tl.int64) * g_strides[0] + head.to(tl.int64) * g_strides[2] + position * g_strides[1]
    of_beta = (
        beta
        + batch.to(tl.int64) * beta_strides[0]
        + head.to(tl.int64) * beta_strides[2]
        + position * beta_strides[1]
    )
    a = tl.cumsum(floored(tl.load(of_g, inside, 0.0).to(tl.float32) * LOG2), 0)
    rate = tl.load(of_beta, inside, 0.0).to(tl.float32)
    tl.store(sums + place.to(tl.int64) * n * c.rows + position, a)
    keys = _tile(k, batch, head, row, 0, k_strides, S, c.K, c.rows, c.keys)
    before = at[:, None] > at[None, :]
    # A: what the keys before hold of a key.
    held = tl.dot(keys, tl.trans(keys), input_precision="ieee") * rate[:, None]
    held = tl.where(before, held * tl.exp2(tl.where(before, a[:, None] - a[None, :], 0.0)), 0.0)
    # T = (1 + A)⁻¹: row i is that of -A, times what the rows before are of T.
    inverse = -held
    for i in range(1, c.rows):
        own = (at == i)[:, None]
        line = tl.sum(tl.where(own, inverse, 0.0), 0)
        turned = tl.sum(tl.where(at[None, :] == i, tl.trans(inverse), 0.0), 1)
        line += tl.sum(turned[:, None] * tl.where((at < i)[:, None], inverse, 0.0), 0)
        inverse = tl.where(own, line[None, :], inverse)
    inverse = inverse + tl.where(at[:, None] == at[None, :], 1.0, 0.0)
    kind = keys.dtype
    weights = (inverse * (rate * tl.exp2(a))[None, :]).to(kind)
    pointers, mask = _dense(past, place, row, 0, n * c.rows, c.K, c.rows, c.keys)
    tl.store(pointers, tl.dot(weights, keys, input_precision="ieee").to(kind), mask)
    weights = (inverse * rate[None, :]).to(kind)
    for first in range(0, c.D, c.values):
        values = _tile(v, batch, head, row, first, v_strides, S, c.D, c.rows, c.values)
        to, wanted = _dense(taken, place, row, first, n * c.rows, c.D, c.rows, c.values)
        tl.store(to, tl.dot(weights, values, input_precision="ieee").to(kind), wanted)


@triton.jit(do_not_specialize=["S", "H", "n"])
def _chain(  # type: ignore[no-untyped-def]  # Triton's types are its own
    k, sums, past, taken, entering, last, k_strides, S, H, n, c: tl.constexpr
):  # fmt: skip
    """Some columns of a head: in place U of T β V, and the states that enter chunks; `last` is the one before all,
    and gets the one behind all.
    """
    blocks: tl.constexpr = tl.cdiv(c.D, c.values)
    first, place = tl.program_id(0) % blocks * c.values, tl.program_id(0) // blocks
    batch, head = place // H, place % H
    pointers, mask = _dense(last, place, 0, first, c.K, c.D, c.keys, c.values)
    mask = mask & (tl.arange(0, c.keys) < c.K)[:, None]
    state = tl.load(pointers, mask, 0.0)
    at = tl.arange(0, c.rows)
    for chunk in tl.range(0, n):
        row = chunk * c.rows
        to, there = _dense(entering, place * n + chunk, 0, first, c.K, c.D, c.keys, c.values)
        there = there & (tl.arange(0, c.keys) < c.K)[:, None]
        narrow = state.to(k.dtype.element_ty)
        tl.store(to, narrow, there)
        of_past, known = _dense(past, place, row, 0, n * c.rows, c.K, c.rows, c.keys)
        of_taken, wanted = _dense(taken, place, row, first, n * c.rows, c.D, c.rows, c.values)
        # U = T β V - (T β exp(a) K) S
        added = tl.load(of_taken, wanted, 0.0).to(tl.float32)
        added -= tl.dot(tl.load(of_past, known, 0.0), narrow, input_precision="ieee")
        tl.store(of_taken, added.to(k.dtype.element_ty), wanted)
        of_a = sums + place.to(tl.int64) * n * c.rows + row
        a = tl.load(of_a + at)
        whole = tl.load(of_a + c.rows - 1)
        keys = _tile(k, batch, head, row, 0, k_strides, S, c.K, c.rows, c.keys)
        # S ← exp(a_last) S + (exp(a_last - a) K)ᵀ U
        added = (added * tl.exp2(whole - a)[:, None]).to(keys.dtype)
        state = state * tl.exp2(whole) + tl.dot(tl.trans(keys), added, input_precision="ieee")
    tl.store(pointers, state, mask)


@triton.jit(do_not_specialize=["S", "H", "n"])
def _read(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, o, sums, taken, entering, q_strides, k_strides, o_strides, S, H, n, c: tl.constexpr
):  # fmt: skip
    """Some columns of a chunk of a head: exp(a) q S + (q kᵀ, decayed and causal) U."""
    blocks: tl.constexpr = tl.cdiv(c.D, c.values)
    chunk, left = tl.program_id(0) % n, tl.program_id(0) // n
    first, place = left % blocks * c.values, left // blocks
    batch, head = place // H, place % H
    row = chunk * c.rows
    at = tl.arange(0, c.rows)
    a = tl.load(sums + place.to(tl.int64) * n * c.rows + row + at)
    queries = _tile(q, batch, head, row, 0, q_strides, S, c.K, c.rows, c.keys)
    keys = _tile(k, batch, head, row, 0, k_strides, S, c.K, c.rows, c.keys)
    pointers, mask = _dense(entering, place * n + chunk, 0, first, c.K, c.D, c.keys, c.values)
    state = tl.load(pointers, mask & (tl.arange(0, c.keys) < c.K)[:, None], 0.0)
    found = tl.dot(queries, state, input_precision="ieee") * tl.exp2(a)[:, None]
    seen = at[:, None] >= at[None, :]
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    scores = tl.where(seen, scores * tl.exp2(tl.where(seen, a[:, None] - a[None, :], 0.0)), 0.0)
    pointers, mask = _dense(taken, place, row, first, n * c.rows, c.D, c.rows, c.values)
    found = tl.dot(scores.to(keys.dtype), tl.load(pointers, mask, 0.0), found, input_precision="ieee")
    columns = first + tl.arange(0, c.values)
    out = o + batch.to(tl.int64) * o_strides[0] + head.to(tl.int64) * o_strides[2]
    out += (row + at).to(tl.int64)[:, None] * o_strides[1] + columns[None, :]
    tl.store(out, found.to(o.dtype.element_ty), (row + at < S)[:, None] & (columns < c.D)[None, :])


_gated_delta_rule = operator(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state)"
    " -> (Tensor, Tensor)",
    _run,
    _empty,
)
