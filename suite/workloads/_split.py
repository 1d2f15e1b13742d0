"""How ranks share one step's tokens: by heads and columns of matrices (tensor parallel), by parts of the sequence
beside that (sequence parallel), or by parts of the sequence alone (context parallel).

Tensor parallel is Megatron's (Shoeybi et al., arXiv 1909.08053): of each layer's matrices that read the stream a
rank has a share of the rows, of those that write to it a share of the columns, and what all write is added up.
Sequence parallel (Korthikanti et al., arXiv 2205.05198) cuts what is between these products by the sequence, so
that the sum is a reduce-scatter and an all-gather brings the rows back; embedding and loss are of a rank's own
tokens. Nothing overlaps here. Context parallel has all weights on every rank, DDP's gradients, and attention by
`attention_context_parallel`, whose chunks its ranks hold.

They know models whose layers have `attend` and `feed` with the matrices that COLUMNS and ROWS name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..model import Chosen
from ..operator import BYTES
from . import _exchanges as exchanges
from ._parallel import Ddp, Single

if TYPE_CHECKING:
    import torch

    from ..system import Assembly

COLUMNS = ("query", "key", "value", "gate", "up")
"""Matrices (out, in) that read the stream: a rank has some of what they give, of heads whole ones."""
ROWS = ("output", "down")
"""Matrices that write to it: a rank has the part of them that reads what it has."""
ATTENTION = "attention_context_parallel"


class TensorParallel(Single):
    """Every rank computes all tokens, of each layer with a share of its heads and hidden columns."""

    captured = False
    divided = True
    replicated = False

    def __init__(self, world: int) -> None:
        self._world = world
        self._cut: dict[int, int] = {}
        """The dimension that a parameter is cut in, by its identity."""
        self._silent = False
        self._sent: list[float] = []
        """What the first step sent, as bytes of all-reduces."""
        self._counted = False

    def spread(self, module: Any) -> Any:
        if not all(hasattr(x, "attend") and hasattr(x, "feed") for x in module.layers):
            raise NotImplementedError("tensor and sequence parallel know models whose layers have attend and feed")
        for layer in module.layers:
            for name, parameter in [*layer.named_parameters(recurse=False)]:
                if name in COLUMNS or name in ROWS:
                    unit = 2 * module.cos.shape[-1] if name in ("query", "key", "value") else 1
                    setattr(layer, name, self._share(name, parameter, int(name in ROWS), unit))
                elif parameter.dim() > 1 or name in ("query_norm", "key_norm"):
                    raise NotImplementedError(f"tensor and sequence parallel know no {name} in a layer")
            layer.attend, layer.feed = self._around(layer.attend), self._around(layer.feed)
        return module

    def _share(self, name: str, parameter: Any, dim: int, unit: int) -> Any:
        import torch

        size = parameter.shape[dim]
        if size % (self._world * unit):
            raise NotImplementedError(f"{name} has {size // unit} parts, which {self._world} ranks cannot share")
        shape = list(parameter.shape)
        shape[dim] //= self._world
        found = torch.nn.Parameter(parameter.new_empty(shape))
        self._cut[id(found)] = dim
        return found

    def _around(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """What reads the stream and gives a rank's part of what is added to it, over all ranks."""
        exchange = self._exchange()

        def whole(y: Any, *rest: Any) -> Any:
            return exchange.apply(block(exchange.apply(y, True), *rest), False)

        return whole

    def _exchange(self) -> Any:
        """An autograd function of (x, whether it is read): as it is where it is, and else added up."""
        import torch

        add = self._added

        class Exchange(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any, read: bool) -> Any:
                ctx.read = read
                return x.view_as(x) if read else add(x)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return add(grad) if ctx.read else grad, None

        return Exchange

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        found = x.clone(memory_format=torch.contiguous_format)
        if not self._silent:
            self._count(found, 1.0)
            dist.all_reduce(found)
        return found

    def _count(self, array: torch.Tensor, share: float) -> None:
        """An exchange that sends such a share of what an all-reduce of this array does."""
        if not self._counted:
            self._sent.append(share * array.numel() * array.element_size())

    def sent(self, passes: int = 1) -> tuple[float, ...]:
        """Of the first step that was made: around attention and feed-forward, both ways, of as many tokens."""
        return tuple(self._sent)

    def put(self, parameter: Any, whole: torch.Tensor) -> None:
        import torch.distributed as dist

        dim = self._cut.get(id(parameter))
        parameter.copy_(whole if dim is None else whole.chunk(self._world, dim)[dist.get_rank()])

    def whole(self, parameter: Any, tensor: Any) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        found: torch.Tensor = tensor
        if (dim := self._cut.get(id(parameter))) is not None:
            parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self._world)]
            dist.all_gather(parts, tensor.contiguous())
            found = torch.cat(parts, dim)
        return found

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def local(self) -> contextlib.AbstractContextManager[None]:
        """Of the same shapes, and another answer."""
        return self._still()

    def clip(self, params: Sequence[Any], most: float) -> None:
        import torch
        import torch.distributed as dist

        if not self._silent:
            self._settle(params)
        self._counted = True  # here a step's passes are over
        if most:
            squares = torch.zeros(2, device=params[0].device)
            for x in params:
                squares[int(id(x) in self._cut)] += x.grad.float().square().sum()
            if not self._silent:
                dist.all_reduce(squares[1])
            torch._foreach_mul_([x.grad for x in params], (most / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0))

    def _settle(self, params: Sequence[Any]) -> None:
        """Makes gradients those of the mean loss: every rank has the same loss here, and they are."""


class SequenceParallel(TensorParallel):
    """As `TensorParallel`, each rank with some of the rows of every sequence wherever it does not need all."""

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        return batch.chunk(self._world, -1)[dist.get_rank()]

    def _exchange(self) -> Any:
        import torch

        rows, gathered = self._rows, self._gathered

        class Exchange(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any, read: bool) -> Any:
                ctx.read = read
                return gathered(x) if read else rows(x)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return rows(grad) if ctx.read else gathered(grad), None

        return Exchange

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S/P, D) of all ranks as (B, S, D)."""
        import torch.distributed as dist

        parts = x.new_empty((self._world, *x.shape))
        if self._silent:
            parts[:] = x
        else:
            self._count(parts, 0.5)
            dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous())
        return parts.movedim(0, 1).flatten(1, 2)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """A rank's rows of the sum of all ranks' (B, S, D)."""
        import torch
        import torch.distributed as dist

        parts = x.unflatten(1, (self._world, -1)).movedim(1, 0).contiguous()
        found: torch.Tensor = parts[0]
        if not self._silent:
            found = torch.empty_like(found)
            self._count(parts, 0.5)
            dist.reduce_scatter_tensor(found, parts.flatten(0, 1))
        return found

    def _settle(self, params: Sequence[Any]) -> None:
        """Losses are of own tokens: gradients of shares are those of their sum, all else has a part of it."""
        import torch
        import torch.distributed as dist

        whole = [x.grad for x in params if id(x) not in self._cut]
        flat = torch.cat([x.reshape(-1) for x in whole])
        self._count(flat, 1.0)
        dist.all_reduce(flat)
        for x, total in zip(whole, flat.split([x.numel() for x in whole]), strict=True):
            x.copy_(total.view_as(x))
        torch._foreach_div_([x.grad for x in params], float(self._world))


class ContextParallel(Ddp):
    """Every rank computes two chunks of each sequence, with all weights."""

    divided = True

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world = world
        self._keys = 0
        """Bytes of all ranks' K and V of a layer."""
        self._attend: Callable[..., Any] | None = None
        self._still: Callable[..., Any] | None = None
        """Attention in place of that, which sends nothing."""

    def parts(
        self, assembly: Assembly, chosen: Chosen, B: int, S: int, dtype: str, device: str
    ) -> Mapping[str, Callable[..., Any]]:
        found = next(x for x in chosen.model.parts(chosen.configuration, B, S) if x.operator == "attention")
        axes = {**found.axes, "gpus": self._world}
        self._keys = 2 * B * S * axes["Hkv"] * axes["D"] * BYTES[dtype]
        self._attend = attend = assembly.call(ATTENTION, ATTENTION, axes, found.options, dtype, device)

        def attention(*given: Any, **named: Any) -> Any:
            return (self._still or attend)(*given, **named)

        return {found.name: attention}

    def spread(self, module: Any) -> Any:
        if not hasattr(module, "cos"):
            raise NotImplementedError("context parallel knows models with rotary positions")
        module.cos, module.sin = (self._chunks(x, 0) for x in (module.cos, module.sin))
        return super().spread(module)

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return self._chunks(batch, -1)

    def _chunks(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Chunks r and 2·P - 1 - r of 2·P, as `attention_context_parallel` has them."""
        import torch
        import torch.distributed as dist

        rank, chunks = dist.get_rank(), x.chunk(2 * self._world, dim)
        return torch.cat((chunks[rank], chunks[2 * self._world - 1 - rank]), dim)

    def local(self) -> contextlib.AbstractContextManager[None]:
        """With keys of the others that came once; gradients stay with their rank."""
        of = getattr(self._attend, "local", None)
        if of is None:
            raise NotImplementedError("this attention does not say how it computes without communication")
        return self._within(of())

    @contextlib.contextmanager
    def _within(self, still: Callable[..., Any]) -> Iterator[None]:
        self._still = still
        try:
            with super().local():
                yield
        finally:
            self._still = None

    def sent(self, passes: int = 1) -> tuple[float, ...]:
        """Gradients as DDP's; and of each layer and pass K and V, gathered forward, and their gradients, scattered
        backward: half an all-reduce each.
        """
        layers = len(self._module.module.layers)
        return (*super().sent(passes), *[float(self._keys)] * (layers * passes))

    def shared(self) -> int:
        """Of attention: K and V lie where peers pull them from."""
        return exchanges.shared({ATTENTION: self._attend})

    def forget(self) -> None:
        exchanges.forget({ATTENTION: self._attend})


DIVIDED: Mapping[str, Callable[[int], Single]] = {
    "tensor": TensorParallel,
    "sequence": SequenceParallel,
    "context": ContextParallel,
}
"""By the value of the option `parallel`."""
