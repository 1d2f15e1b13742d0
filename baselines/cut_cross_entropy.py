"""Cut Cross-Entropy (Wijmans et al., arXiv 2411.09009): the loss without the logits, in Triton.

By default it leaves out of the gradient the blocks of 128 x 128 whose entries are all below 2.4e-4 in bf16;
`unfiltered` computes all of it, as everyone else here does. Neither is within the tolerance of bf16 for both
gradients: 25.1.1, the last on PyPI, adds the products of one block after the other to gradients in memory that
are bf16 themselves. That of a token takes V / 128 additions, and after the target's block, which is nearly all of
its norm, most of the others are below half a unit of the last place. The same arithmetic repeated on a CPU leaves
an error of 0.008 to 0.012 of the norm unfiltered, 0.014 filtered at V = 128256, and 0.002 with an fp32 sum. That
is an option of Apple's repository (`accum_e_fp32`, `accum_c_fp32`), but of no release: here no setting gives it.
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
