"""Whether a kernel may be exchanged in a trained model: how far its answers move. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """What an exchange may cost, against the same weights in fp32: KL divergence in nats a byte, share of
    positions with the same most likely byte, ties left out, and relative change of bits a byte.
    """

    kl: float
    agreement: float
    bits: float


LIMITS: Mapping[str, Limits] = {
    "fp32": Limits(kl=1e-5, agreement=0.9995, bits=1e-4),
    "bf16": Limits(kl=2e-3, agreement=0.99, bits=0.0025),
    "e4m3": Limits(kl=2e-2, agreement=0.93, bits=0.01),
}
"""By the precision of products. bf16 rounds logits of 10 by 0.02 to 0.04: a divergence of 1e-3 at most."""

GOALS: Mapping[str, float] = {"bf16": 1e-4}
"""Relative change of bits a byte that an exchange should stay within, by precision. `LIMITS` say what is wrong."""


def of_goal(change: float, precision: str) -> float | None:
    """How many times the goal a change of bits a byte is; None for a precision that has none."""
    goal = GOALS.get(precision)
    return None if goal is None else abs(change) / goal


def exchanged(kl: float, agreement: float, change: float, precision: str) -> str | None:
    """What is wrong with an exchange; None where it costs no more than its precision does."""
    limits = LIMITS[precision]
    if not kl <= limits.kl:
        return f"KL divergence {kl:.3g} nats a byte, allowed {limits.kl:g}"
    if not agreement >= limits.agreement:
        return f"the most likely byte is the same in {agreement:.2%} of positions, below {limits.agreement:.2%}"
    if not abs(change) <= limits.bits:
        return f"bits a byte change by {change:+.3%}, allowed ±{limits.bits:.2%}"
    return None
