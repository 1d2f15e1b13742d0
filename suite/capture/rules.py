"""What a call of a public function is, or is a step of.

Some of our operators are one such function (`scaled_dot_product_attention`, `linear`), others are what programs
write by hand: `silu(gate) * up`, an RMS norm of `pow`, `mean` and `rsqrt`, rotary positions of halves. Those are
followed from result to result, by marks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..operator import Option

if TYPE_CHECKING:
    from .recorder import Capture, Shape

Rule: TypeAlias = Callable[["Capture", int, Any, Any, Any], None]


def rows(shape: Sequence[int]) -> dict[str, int]:
    """(…, D) as B, S, D."""
    lead = list(shape[:-1])
    first = lead[0] if len(lead) > 1 else 1
    return {"B": first, "S": math.prod(lead[1:]) if len(lead) > 1 else math.prod(lead), "D": shape[-1]}


def flat(shape: Sequence[int], last: str) -> dict[str, int]:
    """(…, N) as M, N."""
    return {"M": math.prod(shape[:-1]), last: shape[-1]}


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def storage(x: Shape) -> str:
    """How (B, H, S, D) lies in memory: by heads, by places, or by places with more than its own heads in each."""
    _, H, _, D = x.shape
    if x.strides[1] >= x.strides[2]:
        return "bhsd"
    return "bshd" if x.strides[2] == H * D else "packed"


def _attention(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    q, k, v = (_given(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    causal = bool(_given(args, kwargs, 5, "is_causal", False))
    mask = _given(args, kwargs, 3, "attn_mask")
    scale = kwargs.get("scale")
    if q.dim() != 4:
        self.remarks[f"attention of {q.dim()} dimensions"] += 1
        return
    if _given(args, kwargs, 4, "dropout_p", 0.0):
        self.remarks["attention with dropout, which a case does not have"] += 1
    if scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5, rel_tol=1e-3):
        # The same work with other numbers: a case, whose plan says so.
        self.remarks[f"attention with scores scaled by {scale:.4g}, where a case has 1/√D"] += 1
    S, Sk = q.shape[2], k.shape[2]
    seen: tuple[str, int] | None = ("causal" if causal else "full"), 0
    if mask is not None:
        seen = mask_of(mask, S, Sk)
    elif causal and Sk != S:  # PyTorch lets the first query see the first key; ours the last the last
        self.remarks[f"attention, causal from the first key on, of {S} queries on {Sk} keys"] += 1
        return
    if seen is None:
        self.remarks["attention with a mask of elements"] += 1
        return
    attended(self, at, (q, k, v), seen)


def attended(self: Capture, at: int, tensors: tuple[Any, Any, Any], seen: tuple[str, int]) -> None:
    """Records attention of q (B, H, S, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv); `seen` is mask and window."""
    q, k, v = tensors
    B, H, S, D = q.shape
    Hkv, Sk, Dv = k.shape[1], k.shape[2], v.shape[-1]
    if Dv != D and (Hkv != H or Sk != S or seen[1]):
        self.remarks["attention of values of another width, with fewer key heads, other keys or a window"] += 1
        return
    self.record([at], *_kind(self.itself(q, k, v), (B, H, Hkv, S, Sk, D, Dv), *seen))


def _kind(
    q: Shape, sizes: tuple[int, ...], mask: str, window: int
) -> tuple[str, Shape, dict[str, int], dict[str, Option]]:
    """Which of the attention operators it is: its name, shape, axes and options."""
    B, H, Hkv, S, Sk, D, Dv = sizes
    options: dict[str, Option] = {"mask": mask, "storage": storage(q)}
    if Dv != D:
        options["storage"] = "bhsd" if options["storage"] == "bhsd" else "bshd"
        return "attention_mla", q, {"B": B, "H": H, "S": S, "D": D, "Dv": Dv}, options
    if S == 1 < Sk and not window:  # under either mask one query sees all
        return "attention_decode", q, {"B": B, "Sq": 1, "H": H, "Hkv": Hkv, "S": Sk, "D": D}, {"page": 0}
    axes = {"B": B, "H": H, "Hkv": Hkv, "S": S, "D": D}
    if window:
        return "attention_window", q, {**axes, "W": window, **({} if Sk == S else {"Sk": Sk})}, options
    return "attention", q, axes if Sk == S else {**axes, "Sk": Sk}, options


def mask_of(mask: Any, S: int, Sk: int) -> tuple[str, int] | None:
    """("causal" or "full", window or 0) of a mask of elements that says no more than that, else None.

    True or 0 is seen, False or -inf (or a dtype's least number) not. The last query is in the last key's place.
    """
    import torch

    if not isinstance(mask, torch.Tensor) or mask.shape[-1] != Sk or mask.shape[-2] not in (1, S):
        return None
    if mask.dtype == torch.bool:
        seen = mask
    else:
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            return None
    seen = seen.flatten(0, -3) if seen.dim() > 2 else seen[None]
    first = seen[0].expand(S, Sk)
    if not bool((seen == seen[:1]).all()):
        return None
    if bool(first.all()):
        return "full", 0
    causal = torch.ones(S, Sk, dtype=torch.bool, device=mask.device).tril(Sk - S)
    if bool((first == causal).all()):
        return "causal", 0
    window = int(first[-1].sum())
    near = causal.triu(Sk - S - window + 1)
    return ("causal", window) if Sk == S and window and bool((first == near).all()) else None


def _linear(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, weight = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "weight")
    if weight.dim() == 2 and x.dim() > 0:
        rows, (N, K) = math.prod(x.shape[:-1]), weight.shape
        _matrix(self, at, (x, weight), "nt", (rows, N, K), _given(args, kwargs, 2, "bias") is not None, result)


def _addmm(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    bias, a, b = (_given(args, kwargs, i, name) for i, name in enumerate(("input", "mat1", "mat2")))
    if bias.dim() == 1 and all(kwargs.get(x, 1) == 1 for x in ("alpha", "beta")):
        _pair(self, at, a, b, True, result)


def _matmul(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    a, b = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "other", kwargs.get("mat2"))
    if hasattr(b, "shape") and b.dim() == 2 and a.dim() >= 2:
        _pair(self, at, a, b, False, result)


def _pair(self: Capture, at: int, a: Any, b: Any, bias: bool, result: Any) -> None:
    """(…, K) times (K, N); the layout is said by which numbers lie side by side."""
    turned = ["t" if x.stride()[-1] != 1 and x.stride()[-2] == 1 else "n" for x in (a, b)]
    sizes = math.prod(a.shape[:-1]), b.shape[1], b.shape[0]
    _matrix(self, at, (a, b), "".join(turned), sizes, bias, result)


def _matrix(
    self: Capture,
    at: int,
    pair: tuple[Any, Any],
    layout: str,
    sizes: tuple[int, int, int],
    bias: bool,
    result: Any,
) -> None:
    """A product of (M, K) and (K, N), and the two that its gradients are. Its dtype is the result's: autocast."""
    import torch

    M, N, K = sizes
    if not M * N * K:
        return
    shape = replace(self.itself(*pair), dtype=str(result.dtype))
    if shape.dtype == "torch.float32" and pair[0].is_cuda and torch.get_float32_matmul_precision() == "highest":
        self.remarks["matmul in torch.float32 without TF32, which is what our operator has"] += 1
        return
    if layout == "tt":
        self.remarks["matmul of two matrices that lie column by column"] += 1
        return
    forward = {"layout": layout, "epilogue": "bias" if bias else "none"}
    self.record([at], "matmul", shape, {"M": M, "N": N, "K": K}, forward)
    left, right = GRADIENTS[layout]
    for x, of, axes in ((pair[0], left, {"M": M, "N": K, "K": N}), (pair[1], right, {"M": K, "N": N, "K": M})):
        if shape.trained and x.requires_grad:
            swapped = of.endswith("'")
            given = {"M": axes["N"], "N": axes["M"], "K": axes["K"]} if swapped else axes
            options: dict[str, Option] = {"layout": of.strip("'"), "epilogue": "none"}
            self.implied("matmul", replace(shape, trained=False), given, options)


GRADIENTS = {"nt": ("nn", "tn'"), "nn": ("nt", "tn"), "tn": ("nt'", "nn")}
"""By layout of A·B with a gradient G, the layouts of A's gradient G·Bᵀ, (M, N)·(N, K), and of B's, Aᵀ·G,
(K, M)·(M, N). ': of its transpose, as a matrix that lies column by column is stored: B·Gᵀ of A's, Gᵀ·A of B's.
"""


def _rms_norm(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, shape = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "normalized_shape")
    weight = _given(args, kwargs, 2, "weight")
    if len(shape) == 1 and weight is not None:
        self.record([at], "rms_norm", self.itself(x, weight), rows(x.shape))


def _layer_norm(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, shape = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "normalized_shape")
    affine = [_given(args, kwargs, i, name) is not None for i, name in ((2, "weight"), (3, "bias"))]
    if len(shape) == 1 and all(affine):
        self.record([at], "layer_norm", self.itself(x), rows(x.shape))


def _softmax(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, dim = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "dim")
    if dim in (-1, x.dim() - 1):
        self.record([at], "softmax", self.itself(x), flat(x.shape, "D"))


def _cross_entropy(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, target = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "target")
    if _given(args, kwargs, 2, "weight") is not None or (target is not None and target.dim() == x.dim()):
        return  # classes have weights, or targets are probabilities
    if x.dim() == 2 and kwargs.get("reduction", "mean") in ("mean", 1) and not kwargs.get("label_smoothing"):
        self.record([at], "cross_entropy", self.itself(x), flat(x.shape, "V"))


def _gelu(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    source = self.itself(_given(args, kwargs, 0, "input"))
    form = kwargs.get("approximate", "none")
    self.record([at], "gelu", source, flat(source.shape, "N"), {"approximate": form})
    if form == "tanh":
        self.mark(result, "gelu", source, at)


def _silu(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    self.mark(result, "silu", self.source(_given(args, kwargs, 0, "input")), at)


def _cast(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    """A cast is still the same thing, and a step of what is made of it."""
    x = _given(args, kwargs, 0, "input")
    if result is x or not hasattr(result, "shape"):
        return
    self.same(result, self.source(x))
    found = self._marks.get(id(x))
    if found is not None and found[0]() is x:
        self.mark(result, found[1].kind, found[1].source, *found[1].steps, at)
    else:
        self.mark(result, "cast", self.source(x), at)


def _square(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, exponent = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "exponent", 2)
    if not isinstance(exponent, int | float) or exponent != 2:
        return
    cast = self.marked(x, "cast")
    self.mark(result, "square", self.source(x), *(cast.steps if cast else ()), at)


def _mean(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, dim = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "dim")
    over = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if over in ((-1,), (x.dim() - 1,)):  # of other dimensions it is another norm
        _next("mean square", "square")(self, at, args, kwargs, result)


def _next(kind: str, *before: str) -> Rule:
    """A rule: this function of what is one of `before` is `kind`."""

    def rule(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
        mark = self.marked(_given(args, kwargs, 0, "input"), *before)
        if mark is not None:
            self.mark(result, kind, mark.source, *mark.steps, at)

    return rule


def _slice(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x = args[0]
    if hasattr(result, "shape") and x.dim() == result.dim() == 4 and 2 * result.shape[-1] == x.shape[-1]:
        self.mark(result, "half", self.source(x), at)


def _cat(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    both = _given(args, kwargs, 0, "tensors")
    if len(both) != 2:
        return
    first, second = self.marked(both[0], "negated half"), self.marked(both[1], "half")
    if first is not None and second is not None and first.source == second.source:
        self.mark(result, "rotated", first.source, *first.steps, *second.steps, at)


def _mul(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, y = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "other")
    if not (hasattr(x, "dim") and hasattr(y, "dim")):  # NumPy's numbers have a shape too
        return
    if not any(_product(self, at, a, b, result) for a, b in ((x, y), (y, x))):
        # Any product of four dimensions may be that of queries with cosines; what is added to it decides.
        wide = x if x.dim() == 4 else y
        if wide.dim() == 4:
            self.mark(result, "times cos", self.source(wide), at)


def _product(self: Capture, at: int, x: Any, y: Any, result: Any) -> bool:
    """Whether x · y is a step of a pattern that x is in."""
    mark = self.marked(x, "silu", "gelu", "rsqrt", "normalized", "rotated")
    if mark is None:
        return False
    steps = (*mark.steps, at)
    if mark.kind in ("silu", "gelu") and x.shape == y.shape:
        kind = "swiglu" if mark.kind == "silu" else "geglu"
        self.record(steps, kind, mark.source, flat(mark.source.shape, "N"))
    elif mark.kind == "rsqrt" and self.source(y) == mark.source:
        self.mark(result, "normalized", mark.source, *steps)
    elif mark.kind == "normalized" and tuple(y.shape) == mark.source.shape[-1:]:
        self.record(steps, "rms_norm", mark.source, rows(mark.source.shape))
    elif mark.kind == "rotated":
        self.mark(result, "times sin", mark.source, *steps)
    else:
        return False
    return True


def _add(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, y = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "other")
    if not hasattr(y, "dim"):
        _next("mean square", "mean square")(self, at, args, kwargs, result)
        return
    for a, b in ((x, y), (y, x)):
        first, second = self.marked(a, "times cos"), self.marked(b, "times sin")
        if first is not None and second is not None and first.source == second.source:
            self.turned(first.source, *first.steps, *second.steps, at)
            return


RULES: Mapping[str, Rule] = {
    "scaled_dot_product_attention": _attention,
    "linear": _linear,
    "addmm": _addmm,
    "matmul": _matmul,
    "mm": _matmul,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "gelu": _gelu,
    "silu": _silu,
    "to": _cast,
    "float": _cast,
    "type_as": _cast,
    "type": _cast,
    "pow": _square,
    "square": _square,
    "mean": _mean,
    "rsqrt": _next("rsqrt", "mean square"),
    "neg": _next("negated half", "half"),
    "getitem": _slice,
    "cat": _cat,
    "mul": _mul,
    "rmul": _mul,
    "multiply": _mul,
    "add": _add,
    "radd": _add,
}
"""By name of a public function, underscores off."""
