"""Mamba-3's recurrence of one input and one output a head (Lahoti et al., arXiv 2603.15569).

    h ← a h + (1 - λ) dt a x' ⊗ k' + λ dt x ⊗ k        y = (h q + D x) · silu(z)

with a = exp(adt), λ = sigmoid(trap), and x' and k' those of the position before; k and q are B and C with a bias
of the head, pairs of them turned by an angle that grows by π tanh(angles) dt.

The second input at a position is the first of the one before: what enters the state is x ⊗ k with the sum of both
weights, except at its own position. So it is one scan, as in `ssd.py`, with the chunks' diagonals weighed apart.
Turning, skip and gate happen inside it; nothing of the size of x is read or written but x, z and y.
"""

from __future__ import annotations

from typing import Any

import torch

from .._common import cdiv, check, multiprocessors, on, operator
from ._mamba3_backward import last, lay, settle, torques, turn_back
from ._mamba3_forward import turns, walk, weights
from ._ssd_backward import finish, inner, outer
from ._ssd_forward import block, pass_on, read
from .ssd import CHUNK, RESIDENT, WIDEST, _all_states, _described, _plain, _shaped, narrow, segments, sizes


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
    to 256, 2 A at most N: neighbours 2i and 2i + 1 of the first 2 A are turned, from the first to the second. dt
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

    dt, adt, trap = (t.repeat_interleave(pieces, 2) for t in (dt, adt, trap))
    biases = [t.repeat_interleave(pieces, 0) for t in biases]
    D = None if D is None else D.repeat_interleave(pieces, 0)
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
    x, B, C = _plain(x), _plain(B), _plain(C)
    z = None if z is None else _plain(z)
    skip = None if D is None else D.contiguous()
    biases = (B_bias.contiguous(), C_bias.contiguous())
    with on(x):
        made = weights(dt, adt, trap, CHUNK)
        turned = turns(angles, made[0], CHUNK)
        if x.dtype == torch.float32:
            k, q, product = lay(B, C, made[0], *turned, *biases, chunk=CHUNK)
            h = _states(x, k, made)
            y = _ungated(x, k, q, made, product, skip, h)
            return y if z is None else y.mul_(torch.nn.functional.silu(z))
        of_all = (x, B, C, z, made, *turned, skip, *biases)
        common = _common(x, B, C, *(() if z is None else (z,)))
        entry = None
        if (count := common["segments"]) > 1:
            shape = (x.shape[0], x.shape[2], count, block(x.shape[3]), block(B.shape[3]))
            entry = torch.empty(shape, dtype=torch.float32, device=x.device)
            total = torch.empty(shape[:3], dtype=torch.float32, device=x.device)
            walk(*of_all, None, None, entry, total, **common)
            pass_on(entry, total, None, reverse=False, last=False)
        walk(*of_all, entry, y, None, None, **common)
    return y


def _common(x: torch.Tensor, *others: torch.Tensor) -> dict[str, Any]:
    """What the launches of the scan share, which reads these."""
    return {"segments": _segments(x), "chunk": CHUNK, "described": _described(x, *others)}


def _segments(x: torch.Tensor) -> int:
    return segments(x.shape[0] * x.shape[2], cdiv(x.shape[1], CHUNK), RESIDENT * multiprocessors(x))


def _states(x: torch.Tensor, k: torch.Tensor, made: torch.Tensor, reverse: bool = False) -> torch.Tensor:
    """The state that each chunk starts from, (B, chunks, H, tile), or in reverse, of the gradient of y and q, the
    gradient of what each ends with.
    """
    each, _ = _all_states(x, k, made[2], made[1], None, None, _segments(x), reverse, _described(x, k), False)
    return each


def _ungated(
    x: torch.Tensor, k: torch.Tensor, q: torch.Tensor, made: torch.Tensor, product: torch.Tensor,
    skip: torch.Tensor | None, h: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """y before its gate in fp32, whose products leave no room for what `walk` does at once."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    read(x, k, q, made[2], made[1], skip, None, h, y, chunk=CHUNK)
    own = ((made[2] - made[3]) * product)[..., : x.shape[1]]
    return y.sub_(own.transpose(1, 2)[..., None] * x)


def _launch_backward(
    grad: torch.Tensor, x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, dt: torch.Tensor, adt: torch.Tensor,
    trap: torch.Tensor, angles: torch.Tensor, B_bias: torch.Tensor, C_bias: torch.Tensor,
    D: torch.Tensor | None, z: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    if x.numel() == 0:
        return tuple(t.zero_() for t in _shaped(x, B, C, dt, adt, trap, angles, B_bias, C_bias, D, z))
    G = B.shape[2]
    x, B, C, grad = _plain(x), _plain(B), _plain(C), _plain(grad)
    skip = None if D is None else D.contiguous()
    biases = (B_bias.contiguous(), C_bias.contiguous())
    with on(x):
        made = weights(dt, adt, trap, CHUNK)
        size, decay, weight, _ = made
        turned = turns(angles, size, CHUNK)
        k, q, product = lay(B, C, size, *turned, *biases, chunk=CHUNK)
        h = _states(x, k, made)
        dz = size.new_empty(0)
        if z is not None:
            z = _plain(z)
            if x.dtype == torch.float32:
                factor = torch.sigmoid(z)
                dz = _ungated(x, k, q, made, product, skip, h).mul_(grad)
                dz.mul_(factor * (1.0 + z * (1.0 - factor)))
                grad = grad * factor * z
            else:
                of_all = (x, B, C, z, made, *turned, skip, *biases)
                common = _common(x, B, C, z, grad)
                entry = None
                if (count := common["segments"]) > 1:
                    entry = h[:, :: cdiv(h.shape[1], count)].transpose(1, 2).float().contiguous()
                dz, pushed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
                walk(*of_all, entry, dz, None, None, grad, pushed, **common)
                grad = pushed
        g = _states(grad, q, made, reverse=True)
        tiles: dict[str, Any] = {"chunk": CHUNK, "described": _described(x, k, grad)}
        dx, dscores, dskip, direct, *of_decays = inner(x, k, q, grad, weight, decay, skip, None, h, g, **tiles)
        dk = outer(x, q, weight, decay, None, g, dscores, read=False, **tiles)
        dq = outer(grad, k, weight, decay, None, h, dscores, read=True, **tiles)
        dadt, _, _ = finish(direct, *of_decays, weight, None, adt, False, CHUNK)
        push, dafter = settle(x, grad, dx, made, product, chunk=CHUNK)
        behind = torques(h, g, angles.shape[2])
        back = turn_back(k, q, dk, dq, size, push, *turned, behind, G, chunk=CHUNK)
        dB, dC, dB_bias, dC_bias, dsize, dangles = back
        ddt, dtrap = last(dt, trap, size, direct, dafter, dsize, chunk=CHUNK)
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
