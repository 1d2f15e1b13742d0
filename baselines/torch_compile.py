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


def adamw(case: Any) -> Callable[..., Any]:
    """The update of one tensor, compiled once for each shape: a graph of hundreds takes minutes to compile."""
    import torch

    from .torch import adamw as eager

    return eager(case, torch.compile(dynamic=False))


def selective_scan(case: Any) -> Callable[..., Any]:
    """The loop over tokens, unrolled in one graph; a long one would take longer to compile than to run."""
    from .torch import selective_scan as eager

    if case.axes["S"] > 256:
        raise NotImplementedError("torch.compile unrolls the loop over tokens: at most 256 of them")
    return _compiled(eager)(case)


IMPLEMENTATIONS = {
    operator: {"torch_compile": _compiled(implementations["torch"])}
    for operator, implementations in EAGER.items()
    if "torch" in implementations
} | {"adamw": {"torch_compile": adamw}, "selective_scan": {"torch_compile": selective_scan}}
