"""The stages that attention went through, as implementations that the suite can measure beside what is shipped.

`docs/attention.md` says what each is. The last one, `kernelmark`, is the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REQUIRES = ("torch", "triton")
DEVICES = dict.fromkeys(("tiled", "tma", "specialised"), ("cuda",))
SCORES = 1 << 32
"""Scores (elements of B·H·S·S) that `plain` holds at most: 8 GiB in bf16, four times that backward."""


def _plain(case: Any) -> Callable[..., Any]:
    """softmax(q·kᵀ / √D)·v, its scores written to memory and read back at every step."""
    B, H, S, D = (case.axes[axis] for axis in ("B", "H", "S", "D"))
    if B * H * S * S > SCORES:
        raise NotImplementedError(f"{B * H * S * S:,} scores are more than the {SCORES:,} that this stage holds")
    groups = H // case.axes["Hkv"]

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        import torch

        scores = (q * D**-0.5) @ k.repeat_interleave(groups, 1).mT
        if mask == "causal":
            places = torch.arange(S, device=q.device)
            scores = scores.masked_fill_(places > places[:, None], float("-inf"))
        return scores.softmax(-1) @ v.repeat_interleave(groups, 1)

    return call


def _kernel(path: str) -> Callable[[Any], Callable[..., Any]]:
    """Our kernels by one path, as `kernels/attention/_dispatch.py` names it. The kernels for Hopper have two warp
    groups and hold their weights as single numbers here, and make gradients in two kernels.
    """

    def factory(case: Any) -> Callable[..., Any]:
        import torch
        from kernelmark.kernels.attention import _dispatch as kernels

        causal = case.options["mask"] == "causal"
        schedule = None
        if path == "hopper":
            from kernelmark.kernels._common import power_of_2
            from kernelmark.kernels.attention import _attention_hopper_forward_paired as hopper

            width = power_of_2(case.axes["D"])
            if (width, causal) not in hopper.SCHEDULES:
                raise NotImplementedError(f"no kernel for Hopper is {width} columns wide")
            schedule = hopper.SCHEDULES[width, causal]

        class Stage(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
                out, lse = kernels.launch_forward(q, k, v, causal, path=path, schedule=schedule)
                ctx.save_for_backward(q, k, v, out, lse)
                return out

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return kernels.launch_backward(grad, *ctx.saved_tensors, causal, path=path)[:3]

        def call(q: Any, k: Any, v: Any, mask: str) -> Any:
            return Stage.apply(q, k, v)

        return call

    return factory


IMPLEMENTATIONS = {
    "attention": {
        "plain": _plain,
        "tiled": _kernel("pointers"),
        "tma": _kernel("descriptors"),
        "specialised": _kernel("hopper"),
    },
}
