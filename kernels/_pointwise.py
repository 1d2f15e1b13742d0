"""What the operators of state-space models share: their nonlinearities, accurate where steps are small."""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import assembles


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """1 / (1 + exp(-x)) in fp32, 0 below -87, with the exponential and the reciprocal as the hardware has them.

    Both are as accurate as `tl.exp` and `/`, which take four times the instructions to be right also where
    numbers are subnormal; at two bytes read and two written a number, that is more than the memory's time.
    """
    if not assembles():
        return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1; add.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
            "=f,f",
            [-1.4426950408889634 * x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def floored(log):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """log₂ of decays, none below -150, which is a factor of 0 in fp32: sums of them have differences. One of -inf,
    with which a state begins anew, would have none, and one of -1e9 would leave the others no digits. NaN stays.
    """
    return tl.where(log < -150.0, -150.0, log)


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """log(1 + exp(x)) in fp32, without overflow, and with full relative accuracy where it is small.

    log(1 + e), e = exp(-|x|), is e times a polynomial that interpolates log(1 + e) / e on [0, 1] at Chebyshev
    nodes, to 1e-7. Steps below 2⁻²⁴ stay what they are, and of the exponential unit, which scans are bound by,
    it takes one operation where a logarithm of 1 + e, corrected, would take three.
    """
    e = tl.exp2(-1.4426950408889634 * tl.abs(x))
    p = -0.0031760570527694654 * e + 0.01954252743780671
    p = p * e - 0.056373613209643736
    p = p * e + 0.10543623839523661
    p = p * e - 0.15269667104466478
    p = p * e + 0.19663274269437397
    p = p * e - 0.2495161626572586
    p = p * e + 0.33329710499262943
    p = p * e - 0.49999892648080163
    p = p * e + 0.9999999946562934
    return tl.maximum(x, 0.0) + e * p


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """x · sigmoid(x) in fp32."""
    return x * sigmoid(x)


@triton.jit
def silu_slope(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(silu(x), its derivative) in fp32."""
    s = sigmoid(x)
    rest = x - x * s
    return x * s, s + s * rest
