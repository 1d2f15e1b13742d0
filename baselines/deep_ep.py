"""DeepEP's exchange of tokens with experts within a host, as its first version is called. Not run yet."""

from __future__ import annotations

from typing import Any

from ._terms import Call, forward_only

REQUIRES = ("deep-ep",)
ENVIRONMENT = "deep_ep"
DEVICES = ("cuda",)
NO_ENVIRONMENT = (
    "DeepEP cannot be locked: what PyPI has is a source archive that needs torch and CUDA's compiler to say what "
    "it requires, and is compiled as it is installed; install it with kernelmark in .venv-deep_ep by hand"
)
BYTES = 1 << 30
"""Of its buffer; its own tests take as much within a host."""


@forward_only("DeepEP")
def expert_exchange(case: Any) -> Call:
    """`Buffer.dispatch` and `Buffer.combine`: a token goes once to each rank that has experts of it."""
    import deep_ep
    import torch
    import torch.distributed as dist

    if case.dtype != "bf16":
        raise NotImplementedError(f"DeepEP exchanges bf16 and E4M3, not {case.dtype}")
    buffer = deep_ep.Buffer(dist.group.WORLD, BYTES, 0)

    def call(x: Any, experts: Any, weights: Any, scale: Any) -> Any:
        by_rank, _, by_expert, within, _ = buffer.get_dispatch_layout(experts, case.axes["E"])
        rows, theirs, their_weights, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=experts,
            topk_weights=weights,
            num_tokens_per_rank=by_rank,
            is_token_in_rank=within,
            num_tokens_per_expert=by_expert,
        )
        # Of experts elsewhere it says -1 and the weight 0.
        factors = torch.einsum("nkd,nk->nd", scale[theirs.clamp(min=0)].float(), their_weights)
        return buffer.combine((rows * factors).to(x.dtype), handle)[0]

    return call


IMPLEMENTATIONS = {"expert_exchange": {"deep_ep": expert_exchange}}
