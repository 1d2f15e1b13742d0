"""Matrices of layers that are held in E4M3, and multiplied so: by a system's `fp8_quant` and `fp8_matmul`.

A weight is quantized once, when it is loaded, and its 16-bit values are given up; an input is quantized in each
product, but for few rows by our kernels (`few_rows.py`). A scale is of a row (`parts_rowwise`), or of 128 elements
of an input's row and 128 × 128 of a weight (`parts_1x128`). Embeddings and logits stay in the case's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....registry.store.record import PROVIDER
from ...system import Assembly
from .. import _inference as inference

OPERATORS = ("fp8_quant", "fp8_matmul")
PRECISIONS = ("parts_rowwise", "parts_1x128")
FAMILIES = ("llama", "gpt2")
"""Models whose layers multiply with matrices alone: no experts, no scans."""
TILE = 128
"""Rows of a weight that have a scale in common by `parts_1x128`."""


class Quantized:
    """The matrices of a module's layers in E4M3. Their parameters stay, and hold the values."""

    def __init__(self, assembly: Assembly, dtype: str, device: str) -> None:
        self._quantize, self._product = assembly.eight_bits(dtype, device)
        self._rows = assembly.system.precision == "parts_rowwise"
        given = {assembly.implementation("linear", x, device).provider for x in OPERATORS}
        named = {"linear", *OPERATORS} & assembly.system.parts.keys()
        self.own = self._rows and given == {PROVIDER} and not named
        """Whether a scale is of a row, and our kernels quantize and multiply: others' are called."""
        self._held: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def take(self, layers: Any, joined: Sequence[Sequence[str]]) -> None:
        """Quantizes all matrices of these layers, those that are one in memory as one."""
        for owner in layers.modules():
            own = {name: x for name, x in owner.named_parameters(recurse=False) if x.dim() == 2}
            for names in [x for x in joined if set(x) <= own.keys()]:
                weights = [own[name] for name in names]
                if (self._rows or all(len(x) % TILE == 0 for x in weights)) and (
                    whole := inference.whole(weights)
                ) is not None:
                    self._hold(weights, whole)
                    for name in names:
                        del own[name]
            for weight in own.values():
                self._hold([weight], weight)

    def _hold(self, weights: Sequence[Any], whole: Any) -> None:
        values, scale = self._quantize(whole.detach().contiguous(), "row" if self._rows else "tile")
        self._held[tuple(map(id, weights))] = values, scale
        at = 0
        for weight in weights:
            rows = slice(at, at + len(weight))
            of_rows = rows if self._rows else slice(at // TILE, -(-rows.stop // TILE))
            self._held[(id(weight),)] = values[rows], scale[of_rows]
            weight.data = values[rows]
            at = rows.stop

    @property
    def bytes(self) -> int:
        """Bytes of all scales."""
        return sum(scale.numel() * scale.element_size() for key, (_, scale) in self._held.items() if len(key) == 1)

    def held(self, weights: Sequence[Any]) -> tuple[Any, Any] | None:
        """Values and scales of the one matrix that these were quantized as, if they were."""
        return self._held.get(tuple(map(id, weights)))

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """x (…, K) times weight (N, K) transposed, and a bias (N,)."""
        return self._multiply(x, self._held[(id(weight),)], bias)

    def several(self, x: Any, *weights: Any) -> Sequence[Any]:
        """x times each of these: views of one product where they were quantized as one."""
        held = self.held(weights)
        if held is None:
            return tuple(self.linear(x, weight) for weight in weights)
        found: Sequence[Any] = self._multiply(x, held, None).split([len(weight) for weight in weights], -1)
        return found

    def parts(self, gate: Callable[..., Any] | None) -> dict[str, Callable[..., Any]]:
        """`linear`, `several` and `gated` of a pass, `gate` being the activation."""

        def gated(x: Any, *weights: Any) -> Any:
            assert gate is not None, "a model without a gated feed-forward asked for one"
            first, second = (y.contiguous() for y in self.several(x, *weights))
            return gate(gate=first, up=second)

        return {"linear": self.linear, "several": self.several, "gated": gated}

    def _multiply(self, x: Any, held: tuple[Any, Any], bias: Any) -> Any:
        values, of_weight = held
        rows = x.flatten(0, -2).contiguous()
        a, scale = self._quantize(rows, "row" if self._rows else "block")
        if self._rows:
            out = self._product(a, values.t(), scale.reshape(-1, 1), of_weight.reshape(1, -1), "row", bias)
        else:
            out = self._product(a, values.t(), scale, of_weight.t(), "block", bias)
        return out.view(*x.shape[:-1], len(values))


def quantized(assembly: Assembly, family: str, dtype: str, device: str) -> Quantized | None:
    """How a system holds matrices, if in 8 bits. Raises `NotImplementedError` for what is of training."""
    system = assembly.system
    if not system.trains:
        return None
    if system.precision not in PRECISIONS or system.recompute != "none" or system.states != "device":
        raise NotImplementedError(
            f"recomputing, optimizer states and float8 but {' and '.join(PRECISIONS)} are of training; the engine "
            "computes in the case's dtype, or with these"
        )
    if family not in FAMILIES:
        raise NotImplementedError(
            f"the engine holds weights in 8 bits of {' and '.join(FAMILIES)}, not of {family}"
        )
    return Quantized(assembly, dtype, device)
