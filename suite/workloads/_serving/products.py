"""Products of a decode step, which is bound by reading weights: few and large ones, by the system's `matmul`.

Weights that the same input is multiplied with are one matrix in memory. So a step multiplies with queries', keys'
and values' at once, and where one kernel does it, with gate and up and the activation behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....registry.store.record import EAGER, PROVIDER
from ...system import Assembly
from .. import _inference as inference

JOINED = (("query", "key", "value"), ("gate", "up"))
"""Names of matrices of a layer that the same input is multiplied with."""

FEW = 16
"""Rows of a step at the most whose products are the system's `matmul`. More are PyTorch's, as those of prompts
are: they are no longer bound by reading weights alone.
"""


class Products:
    """How a decode step of a system multiplies, in this dtype on a device of this kind."""

    def __init__(self, assembly: Assembly, dtype: str, device: str) -> None:
        self.assembly, self._dtype, self._device = assembly, dtype, device
        self._plain = assembly.linear(dtype, device)
        # In fp32 the operator's products are TF32. Others' than ours are asked for by name: some build a program
        # for each shape. PyTorch's are its own without an operator.
        multiplies = assembly.implementation("linear", "matmul", device)
        provider = multiplies.provider
        self.own = provider == PROVIDER and dtype != "fp32" and "cuda" in multiplies.devices
        """Whether products of few rows are our kernel's for GPUs."""
        named = provider != EAGER and bool({"linear", "matmul"} & assembly.system.parts.keys())
        self._few = FEW if (provider == PROVIDER or named) and dtype != "fp32" else 0
        self._calls: dict[tuple[int, int, int, str], Callable[..., Any]] = {}
        self._whole: dict[tuple[int, ...], Any] = {}

    def fused(self, operator: str, part: str, instead: str) -> bool:
        """Whether one operator may do what a part, which is operator `instead`, and others do: where a system's
        implementations of both come from one provider, and the system names none for the part. PyTorch's one is
        the several again, with what layers have in common computed in each.
        """
        system, device = self.assembly.system, self._device
        if part in system.parts or instead in system.parts:
            return False
        given = {self.assembly.implementation(part, x, device).provider for x in (operator, instead)}
        return len(given) == 1 and EAGER not in given

    def parts(self, gate: Callable[..., Any] | None) -> dict[str, Callable[..., Any]]:
        """`linear`, `several` and `gated` of a step, `gate` being the activation for those that are not in one."""
        fused = gate is not None and self._few > 0 and self.fused("matmul", "gate", "swiglu")

        def gated(x: Any, *weights: Any) -> Any:
            whole = self.joined(weights)
            if fused and whole is not None and len(x) <= self._few:
                return self._multiply(x, whole, None, gated=True)
            assert gate is not None, "a model without a gated feed-forward asked for one"
            first, second = (self.linear(x, weight) for weight in weights)
            return gate(gate=first, up=second)

        return {"linear": self.linear, "several": self.several, "gated": gated}

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """x (…, K) times weight (N, K) transposed, and a bias (N,)."""
        rows = x.flatten(0, -2)
        if len(rows) > self._few or weight.dim() != 2:
            return self._plain(x, weight, bias)
        return self._multiply(rows, weight, bias, gated=False).view(*x.shape[:-1], len(weight))

    def several(self, x: Any, *weights: Any) -> Sequence[Any]:
        """x times each of these: views of one product where they are one matrix in memory."""
        whole = self.joined(weights)
        if whole is None:
            return tuple(self.linear(x, weight) for weight in weights)
        found: Sequence[Any] = self.linear(x, whole).split([len(weight) for weight in weights], -1)
        return found

    def joined(self, weights: Sequence[Any]) -> Any:
        """The one matrix that these are in memory, or None."""
        key = tuple(map(id, weights))  # of the module's parameters, which stay; an address no compiler looks at
        if key not in self._whole:
            self._whole[key] = inference.whole(weights)
        return self._whole[key]

    def _multiply(self, x: Any, weight: Any, bias: Any, gated: bool) -> Any:
        width = len(weight) // (2 if gated else 1)
        key = len(x), width, x.shape[1], "swiglu" if gated else "none" if bias is None else "bias"
        if key not in self._calls:
            self._calls[key] = self._made(*key)
        return self._calls[key](a=x, b=weight.t(), bias=bias, gated=gated)

    def _made(self, M: int, N: int, K: int, epilogue: str) -> Callable[..., Any]:
        options = {"layout": "nt", "epilogue": epilogue}
        axes = {"M": M, "N": N, "K": K}
        return self.assembly.call("linear", "matmul", axes, options, self._dtype, self._device)
