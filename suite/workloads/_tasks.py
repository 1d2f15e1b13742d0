"""What is asked of a trained model beside its loss: the end of its window, copying, finding what was planted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ...registry.store.metric import Equivalence, Metric
from ._random import generator
from ._text import BITS

if TYPE_CHECKING:
    import torch

Batch: TypeAlias = tuple[Any, Any]
"""Tokens and targets (B, S); targets that do not count are -1."""
BATCHES = 4
"""Batches of text that tasks are made of."""
KEY = 8
"""Bytes of what is planted."""
SHORTEST = 4
"""Bytes of a window that each task has a target in."""
APART = 0.05
"""Bits a byte by which arms may differ in a task: of what is repeated a good model needs next to none, so that
there is nothing to be a fraction of.
"""

LAST_QUARTER = Metric(
    "last_quarter_bits",
    "bit",
    summary="last",
    judged=Equivalence(0.0025),
    label="bits/byte, last quarter",
    about="Of the last quarter of each window of the validation text: what a long context is for.",
)
COPYING = Metric(
    "copying_bits",
    "bit",
    summary="last",
    judged=Equivalence(APART, relative=False),
    about="Of text that stands in the window a second time.",
)
NEEDLE = Metric(
    "needle_bits",
    "bit",
    summary="last",
    judged=Equivalence(APART, relative=False),
    about="Of eight bytes that were planted in the window and are asked for at its end.",
)
TASKS = (LAST_QUARTER, COPYING, NEEDLE)


def asked(text: Sequence[Batch], seed: int) -> dict[str, list[Batch]]:
    """Batches of all tasks by metric, made of batches of text."""
    return {
        LAST_QUARTER.name: [_last_quarter(x, y) for x, y in text],
        COPYING.name: [_copied(x) for x, _ in text],
        NEEDLE.name: [_planted(x, seed) for x, _ in text],
    }


def bits(logits: Callable[[Any], Any], batches: Iterable[Batch]) -> float:
    """Bits a byte over the targets that count."""
    total, count = 0.0, 0
    for tokens, targets in batches:
        likely = logits(tokens).log_softmax(-1)
        counts = targets >= 0
        own = likely.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        total -= float(own[counts].double().sum())
        count += int(counts.sum())
    return total / count / BITS


def _last_quarter(tokens: torch.Tensor, targets: torch.Tensor) -> Batch:
    late = targets.clone()
    late[:, : targets.shape[1] - max(1, targets.shape[1] // 4)] = -1
    return tokens, late


def _copied(tokens: torch.Tensor) -> Batch:
    """The first half twice; only the second time counts."""
    import torch

    half = tokens.shape[1] // 2
    twice = torch.cat([tokens[:, :half], tokens[:, :half]], 1)
    targets = torch.full_like(twice, -1)
    targets[:, half:-1] = twice[:, half + 1 :]
    return twice, targets


def _planted(tokens: torch.Tensor, seed: int) -> Batch:
    """Letters planted after a mark at some place of the first half, and the mark again before the end."""
    import torch

    S = tokens.shape[1]
    chance = generator(seed, "cpu")
    found, targets = tokens.clone(), torch.full_like(tokens, -1)
    size = min(KEY, S // 4)
    mark = torch.tensor(list(b"\n#"), device=tokens.device)
    for row in range(len(tokens)):
        key = torch.randint(97, 123, (size,), generator=chance).to(tokens.device)
        planted = torch.cat([mark, key])
        at = int(torch.randint(0, max(1, S // 2 - len(planted)), (), generator=chance))
        found[row, at : at + len(planted)] = planted
        found[row, S - len(planted) :] = planted
        targets[row, S - size - 1 : S - 1] = key
    return found, targets
