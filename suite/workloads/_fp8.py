"""Products with inputs rounded to E4M3, emulated on any device, and what rounding does to the tensors it meets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
"""The largest number of E4M3."""
LARGEST_E5M2 = 57344.0
"""The largest number of E5M2: a bit less of mantissa than E4M3, a bit more of exponent."""
GROUP = 128
LEAST = 1e-12
"""A tensor whose largest element is below is scaled as if that were it."""


def scale(x: torch.Tensor, kind: str, square: bool = False, largest: float = LARGEST) -> torch.Tensor:
    """What x (M, K) is divided by before it is rounded, to broadcast to it: one for the tensor (`tensorwise`), for
    a row (`rowwise`), for 128 elements of a row, or with `square` for 128 × 128 (`1x128`). `largest` is the
    format's largest number.
    """
    import torch
    from torch.nn.functional import pad

    size = x.abs().float()
    if kind == "tensorwise":
        return size.amax().clamp(min=LEAST) / largest
    if kind == "rowwise":
        return size.amax(-1, keepdim=True).clamp(min=LEAST) / largest
    M, K = size.shape
    tall = GROUP if square else 1
    blocks = pad(size, (0, -K % GROUP, 0, -M % tall)).unflatten(1, (-1, GROUP)).unflatten(0, (-1, tall))
    own = blocks.amax((1, 3)).clamp(min=LEAST) / largest
    return torch.repeat_interleave(own.repeat_interleave(GROUP, 1), tall, 0)[:M, :K]


def rounded(x: torch.Tensor, by: torch.Tensor | float, e5m2: bool = False) -> torch.Tensor:
    """x in x's dtype after a round trip through E4M3 or E5M2 at a scale; what is too large becomes the largest."""
    import torch

    largest, dtype = (LARGEST_E5M2, torch.float8_e5m2) if e5m2 else (LARGEST, torch.float8_e4m3fn)
    scaled = (x.float() / by).clamp(-largest, largest).to(dtype)
    return (scaled.float() * by).to(x.dtype)


@dataclass
class Probe:
    """Looks at what linear layers multiply in a pass.

    `seen` holds by place in the pass, for inputs, weights and gradients: the share of elements that are too large
    for the scale, the share that become 0, and the largest magnitude. `layers` holds the layer of each place.
    """

    kind: str
    stuck: bool = False
    e5m2: bool = False
    """Whether gradients are in E5M2."""
    layer: int = 0
    """Whose pass is under way; `enter` keeps it."""
    seen: dict[tuple[int, str], tuple[float, float, float]] = field(default_factory=dict)
    layers: dict[int, int] = field(default_factory=dict)

    def begin(self) -> None:
        """Forgets what was seen before a pass."""
        self.seen.clear()
        self.layers.clear()

    def enter(self, layer: int) -> None:
        """What follows is of this layer."""
        self.layer = layer

    def look(self, place: int, what: str, x: torch.Tensor, given: torch.Tensor | None = None) -> None:
        """Notes what rounding does to one tensor, at the scale given or at its own."""
        import torch

        x = x.detach().flatten(0, -2)
        wide = self.e5m2 and what == "gradient"
        # Half of the format's least number is the largest that becomes 0.
        largest, nothing = (LARGEST_E5M2, 2.0**-17) if wide else (LARGEST, 2.0**-10)
        own = given is None and not self.stuck
        by: torch.Tensor | float | None = given
        if own:
            by = scale(x, self.kind, square=what == "weight", largest=largest)
        by = 1.0 if by is None else by
        scaled = (x.float() / by).abs()
        lost = ((scaled <= nothing) & (x != 0)).float().mean()
        # Rounding may take the largest element a last place above.
        over = (scaled > largest * (1 + 2.0**-20)).float().mean()
        self.seen[place, what] = tuple(torch.stack([over, lost, x.abs().max().float()]).tolist())

    def around(
        self,
        linear: Callable[..., Any],
        remembered: Callable[[Any], Mapping[str, torch.Tensor]] | None = None,
    ) -> Callable[..., Any]:
        """The same products, looked at; `remembered(weight)` says by which scales inputs, weights and gradients
        are divided, where these are not their own.
        """

        def multiply(x: Any, weight: Any, bias: Any = None) -> Any:
            place = len(self.layers)
            self.layers[place] = self.layer
            by = {} if remembered is None else remembered(weight)
            self.look(place, "input", x, by.get("input"))
            self.look(place, "weight", weight, by.get("weight"))
            out = linear(x, weight, bias)
            if out.requires_grad:
                out.register_hook(lambda grad: self.look(place, "gradient", grad, by.get("gradient")))
            return out

        return multiply


def entered(layers: Any, enter: Callable[[int], None]) -> None:
    """Says of each pass of a model's layers which of them it is of."""
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=i: enter(index))


def counted(call: Callable[[], Any]) -> int:
    """Operations of the products of 8 bits that a call makes, as far as PyTorch's dispatcher sees them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    first: dict[Any, int] = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten._scaled_mm: 0}
    if hasattr(aten, "_scaled_mm_v2"):
        first[aten._scaled_mm_v2] = 0
    total = 0

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal total
            out = func(*args, **(kwargs or {}))
            at = first.get(getattr(func, "overloadpacket", None))
            if at is not None and all(map(_in_8_bits, args[at : at + 2])):
                total += 2 * out.numel() * args[at].shape[-1]
            return out

    with Products():  # type: ignore[no-untyped-call]  # torch does not annotate it
        call()
    return total


def _in_8_bits(x: torch.Tensor) -> bool:
    """Whether a tensor's elements are: its own, or those of the data that a library's tensor is around."""
    names = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else ()
    return any(str(y.dtype).startswith("torch.float8") for y in (x, *(getattr(x, name) for name in names)))


def emulated(kind: str, stuck: bool) -> Callable[..., Any]:
    """`linear(x, weight, bias=None)` whose three products have all inputs rounded to E4M3; of a kind that ends in
    `_e5m2`, gradients to E5M2. With `stuck`, a planted fault: the scale is 1 for ever.
    """
    import torch

    kind, _, of_gradients = kind.partition("_")

    def product(a: Any, b: Any, square: bool, wide: bool = False) -> Any:
        """a (M, K) times b (N, K) transposed; scales run along K, b's over 128 × 128 where it is a weight, and a
        with `wide` in E5M2.
        """
        most = LARGEST_E5M2 if wide else LARGEST
        scales = (1.0, 1.0) if stuck else (scale(a, kind, largest=most), scale(b, kind, square))
        return rounded(a, scales[0], wide) @ rounded(b, scales[1]).T

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return product(x, weight, True)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, weight = ctx.saved_tensors
            wide = of_gradients == "e5m2"
            return product(grad, weight.T, True, wide), product(grad.T, x.T, False, wide)

    def multiply(x: Any, weight: Any, bias: Any = None) -> Any:
        out = Products.apply(x.flatten(0, -2), weight)  # type: ignore[no-untyped-call]  # torch does not annotate it
        out = out.unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

    return multiply
