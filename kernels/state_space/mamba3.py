"""Mamba-3's recurrence of one input and one output a head (Lahoti et al., arXiv 2603.15569).

    h ← a h + (1 - λ) dt a x' ⊗ k' + λ dt x ⊗ k        y = (h q + D x) · silu(z)

with a = exp(adt), λ = sigmoid(trap), and x' and k' those of the position before; k and q are B and C with a bias
of the head, pairs of them rotated by an angle that grows by π tanh(angles) dt.

The second input at a position is the first of the one before: what enters the state is x ⊗ k with the sum of both
weights, except at its own position. So it is one scan, as in `ssd.py`, with the chunks' diagonals weighed apart.
Rotation, skip and gate happen inside it; nothing of the size of x is read or written but x, z and y.
"""

from __future__ import annotations

from typing import Any

import torch

from .._common import cdiv, check, lined, multiprocessors, on, operator
from ._mamba3_backward import Rotated, angle_gradients, correct_diagonal, reduce_gradients, rotate, rotate_back
from ._mamba3_forward import Ends, Weights, rotation_angles, scan, weights
from ._ssd_backward import chunk_backward, from_states
from ._ssd_backward import reduce_gradients as reduce_decay_gradients
from ._ssd_forward import block, scan_segments, y_from_states
from .ssd import CHUNK, RESIDENT, WIDEST, _all_states, _described, _shaped, narrow, segments, sizes


def mamba3(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    adt: torch.Tensor,
    trap: torch.Tensor,
    angles: torch.Tensor,
    B_bias: torch.Tensor,
    C_bias: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (B, S, H, P) in x's dtype.

    x and z (B, S, H, P), B and C (B, S, G, N) in one of bf16, fp16, fp32; G divides H, and head h reads group
    h // (H / G). Steps dt, logarithms of decays adt and trap, before its sigmoid, (B, S, H); angles (B, S, A),
    before their tanh, which all heads share; B_bias and C_bias (H, N), D (H,): each in any of the three. N from 1
    to 256, 2 A at most N: neighbours 2i and 2i + 1 of the first 2 A are rotated, from the first to the second. dt
    and adt want fp32, and adt should not be positive.

    Matrix products have operands of x's dtype and sums in fp32; fp32 inputs are multiplied as fp32, not TF32. Sums
    of angles are exact but for the rounding of each position's, at 2⁻³² of a revolution. Differentiable once in
    all tensors. Raises `TypeError` for a wrong dtype and `ValueError` for a wrong shape or device.
    """
    batch, S, H, P, N = sizes(x, B, C)
    for name, tensor in (("dt", dt), ("adt", adt), ("trap", trap)):
        check(name, tensor, shape=(batch, S, H), like=x)
    check("angles", angles, dim=3, like=x)
    check("angles", angles, shape=(batch, S, angles.shape[2]))
    if 2 * angles.shape[2] > N:
        raise ValueError(f"angles has {angles.shape[2]} angles, more than pairs in the state dimension {N}")
    check("B_bias", B_bias, shape=(H, N), like=x)
    check("C_bias", C_bias, shape=(H, N), like=x)
    if D is not None:
        check("D", D, shape=(H,), like=x)
    if z is not None:
        check("z", z, shape=x.shape, dtypes=(x.dtype,), like=x)
    call = _narrow if narrow(x.dtype, P, N) else _mamba3
    y: torch.Tensor = call(x, B, C, dt, adt, trap, angles, B_bias, C_bias, D, z)
    return y


def _narrow(x: Any, B: Any, C: Any, dt: Any, adt: Any, trap: Any, angles: Any, *rest: Any) -> torch.Tensor:
    """The same with heads of 64: the rows of a head's state depend on nothing of each other."""
    batch, S, H, P = x.shape
    width = WIDEST // 2
    pieces = cdiv(P, width)
    *biases, D, z = rest

    def cut(t: torch.Tensor) -> torch.Tensor:
        wide = torch.nn.functional.pad(t, (0, -P % width)) if P % width else t
        return wide.reshape(batch, S, H * pieces, width)

    # In fp32: a head's gradient is the sum of its pieces', which is rounded to 16 bits once, and not each of them.
    dt, adt, trap = (t.float().repeat_interleave(pieces, 2) for t in (dt, adt, trap))
    biases = [t.float().repeat_interleave(pieces, 0) for t in biases]
    D = None if D is None else D.float().repeat_interleave(pieces, 0)
    z = None if z is None else cut(z)
    y: torch.Tensor = _mamba3(cut(x), B, C, dt, adt, trap, angles, *biases, D, z)
    return y.view(batch, S, H, pieces * width)[..., :P]


# ---------------------------------------------------------------------------------------------------------
# Launches.


def _launch(
    x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, dt: torch.Tensor, adt: torch.Tensor, trap: torch.Tensor,
    angles: torch.Tensor, B_bias: torch.Tensor, C_bias: torch.Tensor, D: torch.Tensor | None,
    z: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, B, C = lined(x), lined(B), lined(C)
    z = None if z is None else lined(z)
    skip = None if D is None else D.contiguous()
    biases = (B_bias.contiguous(), C_bias.contiguous())
    with on(x):
        made = weights(dt, adt, trap, CHUNK)
        rotation = rotation_angles(angles, made.step, CHUNK)
        if x.dtype == torch.float32:
            k, q, product = rotate(B, C, made.step, rotation, *biases, chunk=CHUNK)
            h = _states(x, k, made)
            y = _ungated(x, k, q, made, product, skip, h)
            return y if z is None else y.mul_(torch.nn.functional.silu(z))
        of_all = (x, B, C, z, made, rotation, skip, *biases)
        common = _common(x, B, C, *(() if z is None else (z,)))
        entry = None
        if (count := common["segments"]) > 1:
            shape = (x.shape[0], x.shape[2], count, block(x.shape[3]), block(B.shape[3]))
            entry = torch.empty(shape, dtype=torch.float32, device=x.device)
            total = torch.empty(shape[:3], dtype=torch.float32, device=x.device)
            scan(*of_all, None, None, Ends(entry, total), **common)
            scan_segments(entry, total, None, reverse=False, last=False)
        scan(*of_all, entry, y, None, **common)
    return y


def _common(x: torch.Tensor, *others: torch.Tensor) -> dict[str, Any]:
    """What the launches of the scan share, which reads these."""
    return {"segments": _segments(x), "chunk": CHUNK, "described": _described(x, *others)}


def _segments(x: torch.Tensor) -> int:
    return segments(x.shape[0] * x.shape[2], cdiv(x.shape[1], CHUNK), RESIDENT * multiprocessors(x))


def _states(x: torch.Tensor, k: torch.Tensor, made: Weights, reverse: bool = False) -> torch.Tensor:
    """The state that each chunk starts from, (B, chunks, H, tile), or in reverse, of the gradient of y and q, the
    gradient of what each ends with.
    """
    each, _ = _all_states(x, k, made.recurrence, _segments(x), reverse, _described(x, k), False)
    return each


def _ungated(
    x: torch.Tensor, k: torch.Tensor, q: torch.Tensor, made: Weights, product: torch.Tensor,
    skip: torch.Tensor | None, h: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """y before its gate in fp32, whose products leave no room for what `scan` does at once."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y_from_states(x, k, q, made.recurrence._replace(skip=skip, entry=h), y, chunk=CHUNK)
    own = ((made.weight - made.present) * product)[..., : x.shape[1]]
    return y.sub_(own.transpose(1, 2)[..., None] * x)


def _launch_backward(
    grad: torch.Tensor, x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, dt: torch.Tensor, adt: torch.Tensor,
    trap: torch.Tensor, angles: torch.Tensor, B_bias: torch.Tensor, C_bias: torch.Tensor,
    D: torch.Tensor | None, z: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    if x.numel() == 0:
        return tuple(t.zero_() for t in _shaped(x, B, C, dt, adt, trap, angles, B_bias, C_bias, D, z))
    G = B.shape[2]
    x, B, C, grad = lined(x), lined(B), lined(C), lined(grad)
    skip = None if D is None else D.contiguous()
    biases = (B_bias.contiguous(), C_bias.contiguous())
    with on(x):
        made = weights(dt, adt, trap, CHUNK)
        rotation = rotation_angles(angles, made.step, CHUNK)
        k, q, product = rotate(B, C, made.step, rotation, *biases, chunk=CHUNK)
        h = _states(x, k, made)
        dz = product.new_empty(0)
        if z is not None:
            z = lined(z)
            if x.dtype == torch.float32:
                factor = torch.sigmoid(z)
                dz = _ungated(x, k, q, made, product, skip, h).mul_(grad)
                dz.mul_(factor * (1.0 + z * (1.0 - factor)))
                grad = grad * factor * z
            else:
                of_all = (x, B, C, z, made, rotation, skip, *biases)
                common = _common(x, B, C, z, grad)
                entry = None
                if (count := common["segments"]) > 1:
                    entry = h[:, :: cdiv(h.shape[1], count)].transpose(1, 2).float().contiguous()
                dz, dout = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
                scan(*of_all, entry, dz, None, grad, dout, **common)
                grad = dout
        g = _states(grad, q, made, reverse=True)
        tiles: dict[str, Any] = {"chunk": CHUNK, "described": _described(x, k, grad)}
        recurrence = made.recurrence
        dx, dscores, dskip, parts = chunk_backward(x, k, q, grad, recurrence._replace(skip=skip), h, g, **tiles)
        dk = from_states(x, q, recurrence, g, dscores, dC=False, **tiles)
        dq = from_states(grad, k, recurrence, h, dscores, dC=True, **tiles)
        dadt, _, _ = reduce_decay_gradients(parts, made.weight, None, adt, False, CHUNK)
        dproduct, dafter = correct_diagonal(x, grad, dx, made, product, chunk=CHUNK)
        behind = angle_gradients(h, g, angles.shape[2])
        back = rotate_back(Rotated(k, q, dk, dq), made.step, dproduct, rotation, behind, G, chunk=CHUNK)
        dB, dC, dB_bias, dC_bias, dstep, dangles = back
        ddt, dtrap = reduce_gradients(dt, trap, made.step, parts.direct, dafter, dstep, chunk=CHUNK)
    return (
        dx, dB.to(x.dtype), dC.to(x.dtype), ddt, dadt, dtrap, dangles.to(angles.dtype).contiguous(),
        dB_bias.to(B_bias.dtype), dC_bias.to(C_bias.dtype),
        dz.new_empty(0) if D is None else dskip.sum((0, 1)).to(D.dtype), dz,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------
# Autograd.


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    return tuple(None if t is None else g for t, g in zip(tensors, _gradients(grad, *tensors), strict=True))


_INPUTS = (
    "Tensor x, Tensor B, Tensor C, Tensor dt, Tensor adt, Tensor trap, Tensor angles, Tensor B_bias,"
    " Tensor C_bias, Tensor? D, Tensor? z"
)

_mamba3 = operator(
    f"mamba3({_INPUTS}) -> Tensor",
    _launch,
    lambda x, *rest: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    _save,
    _differentiate,
)

_gradients = operator(
    f"mamba3_backward(Tensor grad, {_INPUTS}) -> ({', '.join(['Tensor'] * 11)})",
    _launch_backward,
    lambda grad, *given: _shaped(*given),
)
