"""torch.compile (Inductor, static shapes) of the eager implementation of each operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch import IMPLEMENTATIONS as EAGER

REQUIRES = ("torch",)


def _compiled(eager: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    def factory(case: Any) -> Callable[..., Any]:
        import torch

        return torch.compile(eager(case), dynamic=False)

    return factory


IMPLEMENTATIONS = {
    operator: {"torch_compile": _compiled(implementations["torch"])}
    for operator, implementations in EAGER.items()
    if "torch" in implementations
}
