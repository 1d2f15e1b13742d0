"""How DDP sends gradients in fewer bytes: PyTorch's own communication hooks, and ours over `all_reduce_quantized`.

A bucket's hook is called in the backward pass as soon as its gradients are there, and gives their mean later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...registry.store.record import PROVIDER
from ..operator import torch_dtype
from ..system import Stock
from ._parallel import Ddp, Parallel, parallel
from ._split import DIVIDED

if TYPE_CHECKING:
    import torch

GROUP = 128
"""Elements that share a scale (`all_reduce_quantized`)."""
OPERATOR = "all_reduce_quantized"


class Narrower(Ddp):
    """Gradients rounded to 16 bits to be sent, by PyTorch's hook."""

    gradients = "rounded"

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = dtype

    def spread(self, module: Any) -> Any:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        dtype = getattr(torch, self._dtype)
        if all(x.dtype == dtype for x in module.parameters()):
            raise NotImplementedError(f"gradients are {self._dtype} already")
        if dtype == torch.bfloat16 and next(module.parameters()).device.type == "cpu":
            raise NotImplementedError("PyTorch's hook for bf16 is NCCL's")
        spread = super().spread(module)
        hook = default_hooks.bf16_compress_hook if self._dtype == "bfloat16" else default_hooks.fp16_compress_hook
        spread.register_comm_hook(None, hook)
        return spread

    @property
    def ratio(self) -> float:
        return float(next(self._module.parameters()).element_size() / 2)


class PowerSgd(Ddp):
    """PowerSGD (Vogels et al., arXiv 1905.13727) by PyTorch's hook, with its defaults: rank 1, error feedback."""

    gradients = "approximated"

    def __init__(self) -> None:
        super().__init__()
        self._state: Any = None

    def spread(self, module: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        spread = super().spread(module)
        # It begins at once: what the first thousand steps of a training are sent as is not what is asked.
        self._state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2)
        spread.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)
        return spread

    @property
    def ratio(self) -> float:
        """Of the steps that it compressed."""
        return float(self._state.compression_stats()[0])


class Int8(Ddp):
    """8 bits and error feedback by our `all_reduce_quantized`."""

    gradients = "rounded"

    def __init__(self, catalog: Stock, world: int) -> None:
        super().__init__()
        self._catalog = catalog
        self._world = world
        self._reduce: Any = None
        self._residuals: dict[int, torch.Tensor] = {}
        self._stream: Any = None

    def spread(self, module: Any) -> Any:
        first = next(module.parameters())
        dtype = next(name for name in ("bf16", "fp16", "fp32") if torch_dtype(name) == first.dtype)
        own = self._catalog.of_operator(OPERATOR)
        ours = next(x for x in own if x.provider == PROVIDER and x.unavailable(first.device.type) is None)
        axes = {"N": GROUP * self._world, "gpus": self._world}
        self._reduce = ours.load()(self._catalog.operator(OPERATOR).case(axes, dtype, "forward"))
        spread = super().spread(module)
        spread.register_comm_hook(None, self._hook)
        return spread

    def _hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP takes classes there, and no names
        import torch

        gradients = bucket.buffer()
        done: Any
        if not gradients.is_cuda:
            done = torch.futures.Future()
            done.set_result(self._mean(bucket.index(), gradients))
            return done
        # On a stream of its own, as backward goes on beside it; DDP waits for what is queued there by then.
        self._stream = self._stream or torch.cuda.Stream(gradients.device)
        self._stream.wait_stream(torch.cuda.current_stream(gradients.device))
        done = torch.futures.Future(devices=[gradients.device])
        with torch.cuda.stream(self._stream):
            done.set_result(self._mean(bucket.index(), gradients))
        return done

    def _mean(self, index: int, gradients: torch.Tensor) -> torch.Tensor:
        """Over ranks, of a bucket that has a residual of its own; with zeros up to whole groups for each rank."""
        import torch

        N, unit = gradients.numel(), GROUP * self._world
        size = -(-N // unit) * unit
        residual = self._residuals.get(index)
        if residual is None or residual.numel() != size:  # buckets are made anew after the first step
            residual = torch.zeros(size, dtype=torch.float32, device=gradients.device)
        padded = gradients if size == N else torch.nn.functional.pad(gradients, (0, size - N))
        total: torch.Tensor
        total, self._residuals[index] = self._reduce(padded, residual)
        return total[:N].div_(self._world)

    @property
    def ratio(self) -> float:
        return float(next(self._module.parameters()).element_size() / (1 + 4 / GROUP))


HOOKS: Mapping[str, Callable[[Stock, int], Ddp]] = {
    "ddp_bf16": lambda catalog, world: Narrower("bfloat16"),
    "ddp_fp16": lambda catalog, world: Narrower("float16"),
    "ddp_powersgd": lambda catalog, world: PowerSgd(),
    "ddp_int8": Int8,
}
"""By the value of the option `parallel`."""


def way(name: str, world: int, catalog: Stock) -> Parallel:
    """By that value, of all ways. Raises NotImplementedError for several GPUs without a way, and one with one."""
    if name in HOOKS and world > 1:
        return HOOKS[name](catalog, world)
    if name in DIVIDED and world > 1:
        return DIVIDED[name](world)
    return parallel(name, world)
