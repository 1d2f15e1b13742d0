"""PyTorch's own context parallel attention over cuDNN, in its two ways of bringing keys and values.

Its ranks hold chunks r and 2·P - 1 - r as ours do. Tensors are given as DTensors, which is how its dispatcher
knows them: as a bare context manager around calls on plain tensors it shards and does not communicate, a wrong
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REQUIRES = ("torch",)
DEVICES = ("cuda",)


def _rotating(how: str) -> Callable[[Any], Callable[..., Any]]:
    """A factory for one way, which PyTorch holds in a variable of its own."""

    def factory(case: Any) -> Callable[..., Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.experimental._context_parallel import _attention
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        if case.world == 1:
            raise NotImplementedError("one rank has nothing to bring: `attention` is that case")
        mesh = init_device_mesh("cuda", (case.world,))
        causal, groups = case.options["mask"] == "causal", case.axes["H"] != case.axes["Hkv"]
        _attention._enable_context_parallel_dispatcher()

        def call(q: Any, k: Any, v: Any, mask: str) -> Any:
            _attention.set_rotate_method(how)
            _attention._cp_options.enable_load_balance = causal  # with a full mask it refuses
            q, k, v = (DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out: Any = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups)
            return out.to_local()

        return call

    return factory


IMPLEMENTATIONS = {
    "attention_context_parallel": {
        "context_parallel_allgather": _rotating("allgather"),
        "context_parallel_alltoall": _rotating("alltoall"),
    }
}
