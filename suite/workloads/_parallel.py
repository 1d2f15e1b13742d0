"""How a trainer's module is spread over ranks: data parallel, whole (DDP) or sharded (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from . import _exchanges as exchanges

if TYPE_CHECKING:
    import torch

    from ..model import Chosen
    from ..system import Assembly

WAYS = ("single", "ddp", "fsdp2")
"""Of the option `parallel`."""


class Parallel(Protocol):
    """What a trainer needs to know of how it is spread. Every rank computes on its own sequences."""

    captured: bool
    """Whether forward and backward can be one CUDA graph."""
    divided: bool
    """Whether the ranks share one step's tokens; else each has as many of its own."""
    replicated: bool
    """Whether every rank has all of each gradient, as all others have it: an update may clip by their norm."""

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        """Of all ranks' tokens or targets (A, B, S) those of this one."""
        ...

    def parts(
        self, assembly: Assembly, chosen: Chosen, B: int, S: int, dtype: str, device: str
    ) -> Mapping[str, Callable[..., Any]]:
        """Parts of the model that ranks compute together, in place of the system's."""
        ...

    def spread(self, module: Any) -> Any:
        """The module that is called in place of this one, whose parameters are on the device."""
        ...

    def put(self, parameter: Any, whole: torch.Tensor) -> None:
        """Writes a whole tensor's values to a parameter."""
        ...

    def own(self, tensor: Any) -> Any:
        """A rank's own part of a parameter, gradient or state, as memory."""
        ...

    def whole(self, parameter: Any, tensor: Any) -> torch.Tensor:
        """All of a parameter's value or gradient; all ranks ask at once."""
        ...

    def local(self) -> contextlib.AbstractContextManager[None]:
        """Within it nothing is sent. Raises NotImplementedError where that cannot be."""
        ...

    def last(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around each micro-batch, of which only the last one's backward pass sends gradients."""
        ...

    def clip(self, params: Sequence[Any], most: float) -> None:
        """Once gradients are there: scales them so that their norm over all is at most that; 0: as they are."""
        ...

    gradients: Literal["as they are", "rounded", "approximated"]
    """How they are sent: rounded ones are held to the bound of bf16, and those approximated by design to none."""

    @property
    def ratio(self) -> float | None:
        """Bytes of gradients over the bytes that are sent of them; None where they are sent as they are."""
        ...

    def sent(self, passes: int = 1) -> tuple[float, ...]:
        """The all-reduces that the communication of a step of so many passes is like, in order, bytes of each."""
        ...

    def shared(self) -> int:
        """Bytes that peers can read and that no allocator counts, of what a step exchanges."""
        ...

    def forget(self) -> None:
        """Gives that memory up. No rank may have a step under way."""
        ...


class Single:
    """One process."""

    captured = True
    divided = False
    replicated = True
    gradients: Literal["as they are", "rounded", "approximated"] = "as they are"

    @property
    def ratio(self) -> float | None:
        return None

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def parts(
        self, assembly: Assembly, chosen: Chosen, B: int, S: int, dtype: str, device: str
    ) -> Mapping[str, Callable[..., Any]]:
        return {}

    def spread(self, module: Any) -> Any:
        return module

    def put(self, parameter: Any, whole: torch.Tensor) -> None:
        parameter.copy_(whole)

    def own(self, tensor: Any) -> Any:
        return tensor

    def whole(self, parameter: Any, tensor: Any) -> torch.Tensor:
        found: torch.Tensor = tensor
        return found

    def local(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError("one process sends nothing")

    def last(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def clip(self, params: Sequence[Any], most: float) -> None:
        import torch

        if most:
            torch.nn.utils.clip_grad_norm_(params, most, foreach=True)

    def sent(self, passes: int = 1) -> tuple[float, ...]:
        return ()

    def shared(self) -> int:
        return 0

    def forget(self) -> None:
        """There is none."""


def _own_batches(batch: torch.Tensor) -> torch.Tensor:
    """A rank's own micro-batches of all ranks'."""
    import torch.distributed as dist

    return batch.chunk(dist.get_world_size())[dist.get_rank()]


FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes from which on a bucket of DDP's is full, by default."""


class Ddp(Single):
    """torch's DistributedDataParallel: every rank has all weights, gradients are averaged while backward runs."""

    captured = False

    def __init__(self) -> None:
        self._module: Any = None

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return _own_batches(batch)

    def spread(self, module: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        self._module = DistributedDataParallel(module, gradient_as_bucket_view=True)
        return self._module

    def local(self) -> contextlib.AbstractContextManager[None]:
        found: contextlib.AbstractContextManager[None] = self._module.no_sync()
        return found

    def last(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self._module.no_sync()

    def sent(self, passes: int = 1) -> tuple[float, ...]:
        """Buckets of gradients as they come, the last layer's first."""
        buckets = [0.0]
        for x in reversed(list(self._module.parameters())):
            if buckets[-1] >= (BUCKET if len(buckets) > 1 else FIRST_BUCKET):
                buckets.append(0.0)
            buckets[-1] += x.numel() * x.element_size()
        return tuple(x / (self.ratio or 1.0) for x in buckets)


class Fsdp2(Single):
    """torch's fully_shard, layer by layer: every rank has a part of each matrix, its gradient and states.

    Vectors are whole in every rank: a model may hand a layer the next one's norm, which that has not gathered yet.
    """

    captured = False
    replicated = False

    def __init__(self) -> None:
        self._module: Any = None
        self._whole: list[tuple[Any, Any]] = []
        """Where nothing is sent, each parameter's own part and all of it."""
        self._calls: dict[str, Callable[..., Any]] = {}
        """What the system names for FSDP2's exchanges, by operator."""

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return _own_batches(batch)

    def parts(
        self, assembly: Assembly, chosen: Chosen, B: int, S: int, dtype: str, device: str
    ) -> Mapping[str, Callable[..., Any]]:
        """None of the model's; takes what the system names for the exchanges."""
        if exchanges.named(assembly.system.parts):
            import torch.distributed as dist

            self._calls = exchanges.calls(assembly, dist.get_world_size(), dtype, device)
        return {}

    def spread(self, module: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        for part in (*module.layers, module):
            fully_shard(part, ignored_params={x for x in part.parameters() if x.dim() < 2})
            exchanges.take(part, self._calls)
        self._module = module
        return module

    def put(self, parameter: Any, whole: torch.Tensor) -> None:
        from torch.distributed.tensor import distribute_tensor

        # From each rank's own copy: all draw the same.
        if self.own(parameter) is parameter:
            parameter.copy_(whole)
            return
        given = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(given.to_local())

    def own(self, tensor: Any) -> Any:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def whole(self, parameter: Any, tensor: Any) -> torch.Tensor:
        found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return found

    def local(self) -> contextlib.AbstractContextManager[None]:
        """With all weights in every rank, gathered once, of whose gradients each keeps its part."""
        self._fits()
        return self._gathered()

    def _fits(self) -> None:
        """Raises NotImplementedError in all ranks where any has no room for all weights and their gradients."""
        import torch
        import torch.distributed as dist

        params = list(self._module.parameters())
        device = params[0].device
        if device.type != "cuda":
            return
        needed = 2 * sum(x.numel() * x.element_size() for x in params)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = torch.tensor(int(free > 1.1 * needed), device=device)
        dist.all_reduce(room, dist.ReduceOp.MIN)
        if not room:
            raise NotImplementedError("all weights and gradients do not fit into one GPU")

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        parts = (*self._module.layers, self._module)
        sharded = dict(self._module.named_parameters())
        for x in parts:
            x.set_reshard_after_forward(False, recurse=False)
            x.set_reshard_after_backward(False, recurse=False)
            x.unshard()
        whole = dict(self._module.named_parameters())
        self._whole = [(x, whole[name]) for name, x in sharded.items() if whole[name] is not x]
        try:
            yield
        finally:
            self._whole = []
            for x in parts:
                x.set_reshard_after_forward(x is not self._module, recurse=False)
                x.set_reshard_after_backward(True, recurse=False)
                x.reshard()

    @contextlib.contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Around a step's last micro-batch: each parameter's own part of the gradient."""
        from torch.distributed.tensor import DTensor

        yield
        for own, whole in self._whole:
            grad, mesh = whole.grad, own.device_mesh
            chunks = grad.chunk(mesh.size())
            part = chunks[mesh.get_local_rank()] if mesh.get_local_rank() < len(chunks) else grad[:0]
            own.grad = DTensor.from_local(
                part, mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
            )
            whole.grad = None

    def sent(self, passes: int = 1) -> tuple[float, ...]:
        """Halves of all-reduces: of each layer's matrices two a pass, which gather them, and one for the gradient.
        What is in no layer is gathered once a pass, and vectors' gradients are added up.
        """

        def bytes_of(params: Iterable[Any]) -> int:
            return sum(x.numel() * x.element_size() for x in params)

        layers = [bytes_of(x for x in part.parameters() if x.dim() > 1) for part in self._module.layers]
        vectors = bytes_of(x for x in self._module.parameters() if x.dim() < 2)
        rest = bytes_of(self._module.parameters()) - sum(layers) - vectors
        return (*((passes + 0.5) * x for x in layers), (passes + 1) / 2 * rest + vectors)

    def shared(self) -> int:
        return exchanges.shared(self._calls)

    def forget(self) -> None:
        exchanges.forget(self._calls)

    def last(self, last: bool) -> contextlib.AbstractContextManager[None]:
        self._module.set_requires_gradient_sync(last and not self._whole)
        return self._own_gradients() if last and self._whole else contextlib.nullcontext()

    def clip(self, params: Sequence[Any], most: float) -> None:
        import torch
        import torch.distributed as dist

        grads = [self.own(x.grad) for x in params]
        vectors = [x.grad for x in params if self.own(x.grad) is x.grad]
        matrices = [x for x in grads if all(x is not y for y in vectors)]
        flat = torch.cat([x.reshape(-1) for x in vectors])
        flat.div_(dist.get_world_size())
        if not self._whole:
            dist.all_reduce(flat)
        for x, mean in zip(vectors, flat.split([x.numel() for x in vectors]), strict=True):
            x.copy_(mean.view_as(x))
        if most:
            squares = torch.stack([x.float().square().sum() for x in matrices]).sum()
            if not self._whole:
                dist.all_reduce(squares)
            norm = (squares + flat.float().square().sum()).sqrt()
            torch._foreach_mul_(grads, (most / (norm + 1e-6)).clamp(max=1.0))


def parallel(way: str, world: int) -> Parallel:
    """By the option's value. Raises NotImplementedError for several GPUs without a way, and one with one."""
    if way != "single" and world == 1:
        raise NotImplementedError(f"{way} is of several GPUs, and this case takes one")
    if way == "single" and world > 1:
        raise NotImplementedError(f"{world} GPUs need a way to be used: parallel = {' or '.join(WAYS[1:])}")
    return {"single": Single, "ddp": Ddp, "fsdp2": Fsdp2}[way]()
