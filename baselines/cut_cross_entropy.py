"""Apple's Cut Cross-Entropy (Wijmans et al., arXiv 2411.09009): the loss without the logits, in Triton.

By default it leaves out of the gradient what is too small to matter in training; `unfiltered` computes all
of it, as everyone else here does.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call, Factory, refusing

REQUIRES = ("cut-cross-entropy", "triton")
DEVICES = ("cuda",)


def _loss(**options: Any) -> Factory:
    def factory(case: Any) -> Call:
        from cut_cross_entropy import linear_cross_entropy

        def call(x: Any, weight: Any, target: Any) -> Any:
            return linear_cross_entropy(x, weight, target, impl="cce", **options)

        return refusing(call, AssertionError, ValueError)

    factory.__doc__ = f"`linear_cross_entropy`, options {options}."
    return factory


IMPLEMENTATIONS = {
    "fused_linear_cross_entropy": {
        "cut_cross_entropy": _loss(),
        "cut_cross_entropy_unfiltered": _loss(filter_eps=None),
    },
}
