"""What a change comes from: a factorial over code, environment and tuned configuration. Pure.

Each cell of the factorial is an *arm*: old or new code in the old or new environment, with the old tuned
configuration or free to tune anew. All arms are measured once a round, in random order, in fresh processes.
With y the mean log time of an arm, new or old (1, 0) in code and environment, and p for "pinned to the old
configuration":

    code = y10p - y00        interaction = y11p - y10p - y01p + y00
    environment = y01p - y00 tuning      = y11 - y11p              total = y11 - y00

so the parts add up to the total. A part's interval is Student's t; a part's share of the total is a ratio of
two contrasts, with Fieller's interval (J. R. Stat. Soc. B 16 (1954) 175).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np
from scipy import special

from ..store.record import Key
from .comparison import Noise, Options
from .eligibility import MINIMUM_PAIRS, usable
from .noise import Estimate, Floats, history_prior, shrink, trimmed
from .verdict import Verdict

Cause: TypeAlias = Literal["code", "environment", "tuning", "interaction"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Arm(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A cell of the factorial; each factor is the baseline's (False) or the current one.

    `tuning` True lets the arm tune for itself; False pins it to the configuration that the baseline chose.
    """

    code: bool
    environment: bool
    tuning: bool

    def __str__(self) -> str:
        words = {False: "old", True: "new"}
        parts = (("code", self.code), ("environment", self.environment), ("tuning", self.tuning))
        return ", ".join(f"{words[value]} {name}" for name, value in parts)


OLD = Arm(False, False, False)


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cause's part. `change`, `low` and `high` are current / base - 1 of the time; shares are of the total's
    logarithm and add up to 1. A share's bounds are None where the total is too uncertain to be shared out."""

    cause: Cause
    change: float
    low: float
    high: float
    share: float | None
    share_low: float | None
    share_high: float | None


class Attribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one row's change comes from. `causes` are the parts that are slower by more than is tolerated, beyond
    doubt and largest first; none means undecided, and `reason` says why."""

    key: Key
    reason: str
    causes: tuple[Cause, ...] = ()
    parts: tuple[Part, ...] = ()
    change: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    notes: tuple[str, ...] = ()


def arms(code: bool, environment: bool, tuning: bool) -> list[Arm]:
    """The arms that tell these factors apart; the others are left at the baseline's."""
    out = [
        Arm(c, e, False) for c in ((False, True) if code else (False,)) for e in (False, True)[: 1 + environment]
    ]
    return [*out, Arm(code, environment, True)] if tuning else out


def whole(verdict: Verdict, cause: Cause) -> Attribution:
    """The attribution of a row for which nothing but one cause differs between the sides: it is all of it."""
    assert verdict.change is not None
    low, high = (verdict.change if x is None else x for x in (verdict.low, verdict.high))
    part = Part(cause, verdict.change, low, high, 1.0, 1.0, 1.0)
    reason = f"{cause}: nothing else differs"
    return Attribution(verdict.key, reason, (cause,), (part,), verdict.change, low, high)


def attribute(
    key: Key,
    medians: Mapping[Arm, Sequence[float]],
    options: Options,
    noise: Noise | None = None,
    notes: tuple[str, ...] = (),
) -> Attribution:
    """Shares a change out. `medians` holds for each arm its process medians by round, NaN where there is none.

    `noise` is what is known of the spread of one pair's log ratio (`Verdict.noise`). Rounds in which any arm
    lacks a usable time are left out.
    """
    names = sorted(medians)
    width = min((len(medians[arm]) for arm in names), default=0)
    whole = [j for j in range(width) if all(usable(medians[arm][j]) for arm in names)]
    if len(names) < 2 or OLD not in medians or len(whole) < MINIMUM_PAIRS:
        least = f"at least {MINIMUM_PAIRS} needed"
        return Attribution(key, f"{len(whole)} of {width} rounds usable, {least}", rounds=len(whole), notes=notes)
    logs = np.log([[medians[arm][j] for j in whole] for arm in names])
    means, variance, df = _locations(logs, noise)
    weights = _contrasts(names)
    total = sum(weights.values(), np.zeros(len(names)))
    error = variance / len(whole)
    t = float(special.stdtrit(df, 1 - options.level / 2))
    parts = []
    for cause, weight in weights.items():
        change = float(weight @ means)
        half = t * math.sqrt(error * float(weight @ weight))
        share = _share(weight, total, means, error, t)
        parts.append(Part(cause, *_ratios(change, half), *share))
    whole_change = float(total @ means)
    half = t * math.sqrt(error * float(total @ total))
    change, low, high = _ratios(whole_change, half)
    # A cause is named like a regression is: beyond what is tolerated, with all of its interval.
    found = sorted((x for x in parts if x.low > options.tolerated), key=lambda x: -x.change)
    causes = tuple(x.cause for x in found)
    return Attribution(key, _reason(causes, low), causes, tuple(parts), change, low, high, len(whole), notes)


def _locations(logs: Floats, noise: Noise | None) -> tuple[Floats, float, float]:
    """Trimmed mean of each arm, and variance and degrees of freedom of one process's log median.

    The mean of a round over its arms is the state of the machine in that round, and is taken out first. That
    leaves (k - 1) / k of the variance, and k - 1 degrees of freedom for every k.
    """
    count = len(logs)
    centred = logs - np.median(logs, axis=1, keepdims=True)
    each = trimmed(logs - centred.mean(axis=0))
    own = float(each.variance.mean()) * count / (count - 1)
    df = float(each.df.sum()) * (count - 1) / count
    # The prior speaks of pairs, whose log ratio has twice the variance of a process.
    known = [] if noise is None else [Noise(noise.variance / 2, noise.df)]
    estimate = Estimate(np.zeros(1), np.array([own]), np.array([df]), np.ones(1))
    variance, total_df = shrink(estimate, history_prior([known]))
    return each.mean, float(variance[0]), float(total_df[0])


def _contrasts(names: Sequence[Arm]) -> dict[Cause, Floats]:
    """Per cause that the arms can tell apart, the weights of the arms' means."""
    place = {arm: i for i, arm in enumerate(names)}

    def weights(**signs: int) -> Floats:
        out = np.zeros(len(names))
        for name, sign in signs.items():
            out[place[Arm(name[1] == "1", name[2] == "1", len(name) > 3)]] += sign
        return out

    code, environment = (Arm(True, False, False) in place, Arm(False, True, False) in place)
    out: dict[Cause, Floats] = {}
    if code:
        out["code"] = weights(y10=1, y00=-1)
    if environment:
        out["environment"] = weights(y01=1, y00=-1)
    if any(arm.tuning for arm in names):
        end = f"y{code:d}{environment:d}"
        out["tuning"] = weights(**{f"{end}t": 1, end: -1})
    if code and environment:
        out["interaction"] = weights(y11=1, y10=-1, y01=-1, y00=1)
    return out


def _share(
    part: Floats, total: Floats, means: Floats, error: float, t: float
) -> tuple[float | None, float | None, float | None]:
    """A part over the total, with Fieller's interval: all ratios r for which part - r total may be 0."""
    a, b = float(part @ means), float(total @ means)
    scale = t * t * error
    aa, ab, bb = (
        a * a - scale * float(part @ part),
        a * b - scale * float(part @ total),
        b * b - scale * float(total @ total),
    )
    if b == 0:
        return None, None, None
    if bb <= 0:  # the total may be 0: no ratio can be ruled out
        return a / b, None, None
    root = math.sqrt(max(ab * ab - aa * bb, 0.0))
    return a / b, (ab - root) / bb, (ab + root) / bb


def _ratios(change: float, half: float) -> tuple[float, float, float]:
    middle, low, high = (math.expm1(min(max(x, -700.0), 700.0)) for x in (change, change - half, change + half))
    return middle, low, high


def _reason(causes: Sequence[Cause], low: float) -> str:
    if causes:
        return " and ".join(causes)
    if low <= 0:
        return "undecided: measured again, the row is not slower beyond doubt"
    return "undecided: no part is slower beyond doubt by more than is tolerated"
