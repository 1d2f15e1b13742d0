"""PyTorch's matrix products, eager: what `torch.py` says of them.

cuBLAS by `torch.matmul`, `_scaled_mm`, `scaled_mm`, `grouped_mm` and `scaled_grouped_mm`, cuSPARSELt, and loops
where PyTorch has no operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._products import by_rows_of_k
from ._terms import Call, keeping, refusing


def matmul(case: Any) -> Call:
    """`torch.matmul` or `addmm`; a gate by `silu` and a product after it. By cuBLAS, fp32 in TF32; on a CPU by MKL
    in fp32 and oneDNN in bf16, where PyTorch is built with them.
    """
    import torch

    def product(a: Any, b: Any, bias: Any, gated: bool) -> Any:
        if bias is not None:
            return torch.addmm(bias, a, b)
        y = torch.matmul(a, b)
        if gated:
            gate, up = y.chunk(2, 1)
            return torch.nn.functional.silu(gate) * up
        return y

    def in_tf32(**inputs: Any) -> Any:
        settings = torch.backends.cuda.matmul
        before, settings.allow_tf32 = settings.allow_tf32, True
        try:
            return product(**inputs)
        finally:
            settings.allow_tf32 = before

    return in_tf32 if case.dtype == "fp32" else product


def _widened(q: Any, scales: Any, format: str) -> Any:
    """A weight of a block format in bf16, by PyTorch's operations; a scale of the whole tensor is left out."""
    import torch

    if format == "mxfp8":
        numbers = q.bfloat16()
    else:
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16, device=q.device)
        codes = q.int()
        numbers = torch.cat((magnitudes, -magnitudes))[torch.stack((codes & 15, codes >> 4), -1)].flatten(1)
    factors = scales.bfloat16() if format == "nvfp4" else torch.exp2(scales.float() - 127).bfloat16()
    return numbers * factors.repeat_interleave(16 if format == "nvfp4" else 32, -1)[:, : numbers.shape[1]]


def _in_bf16(x: Any, scale_x: Any) -> Any:
    """x as it is, or widened from 8-bit floats with a scale for 128 columns."""
    if scale_x is None:
        return x
    return (x.float() * scale_x.repeat_interleave(128, 1)[:, : x.shape[1]]).bfloat16()


def mx_matmul(case: Any) -> Call:
    """The weight widened to bf16, then `torch.matmul`, both in the call: PyTorch has no product of these formats
    before Blackwell.
    """

    def call(x: Any, q: Any, scales: Any, format: str, scale: Any, scale_x: Any) -> Any:
        y = _in_bf16(x, scale_x) @ _widened(q, scales, format).t()
        return y if scale is None else y * scale

    return call


def mx_matmul_bf16(case: Any) -> Call:
    """`torch.matmul` with the weight in bf16, to which it is widened once as a model is loaded: the product that a
    smaller format is to beat.
    """
    if case.dtype != "bf16":
        raise NotImplementedError("inputs in E4M3 are not multiplied with a weight in bf16")
    kept = keeping(lambda q, scales: _widened(q, scales, case.options["format"]), "q", "scales")

    def call(x: Any, q: Any, scales: Any, format: str, scale: Any, scale_x: Any) -> Any:
        y = x @ kept(q=q, scales=scales).t()
        return y if scale is None else y * scale

    return call


def sparse24_matmul(case: Any) -> Call:
    """`torch.matmul` with the dense form of the weight: cuBLAS, which the sparse form is to beat. Backward the
    weight's gradient is masked after its product.
    """
    import torch

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            x, weight = ctx.saved_tensors
            return dy @ weight, (dy.t() @ x).masked_fill_(weight == 0, 0)

    masked: Any = Masked.apply

    def call(x: Any, values: Any, positions: Any, weight: Any) -> Any:
        return x @ weight.t() if case.pass_ == "forward" else masked(x, weight)

    return call


def sparse24_fp8_matmul(case: Any) -> Call:
    """`torch._scaled_mm` with the dense form of the weight: cuBLAS, which the sparse form is to beat."""
    import torch

    def call(x: Any, values: Any, positions: Any, weight: Any, scale_x: Any, scale_w: Any) -> Any:
        return torch._scaled_mm(x, weight.t(), scale_x, scale_w.t().contiguous(), out_dtype=torch.bfloat16)

    return call


def sparse24_fp8_matmul_cusparselt(case: Any) -> Call:
    """cuSPARSELt by `torch._cslt_sparse_mm`, which knows no scale a row: they are multiplied by after it. The
    weight is compressed once, as a model is loaded; its algorithm is searched for at the first call.
    """
    import torch

    return _cusparselt(
        case,
        lambda y, scale_x, scale_w: (y.float() * scale_x * scale_w.t()).to(torch.bfloat16),
        torch.bfloat16,
    )


def sparse24_matmul_cusparselt(case: Any) -> Call:
    """cuSPARSELt by `torch._cslt_sparse_mm`, with the algorithm that its search finds at the first call. The
    weight is compressed once, to cuSPARSELt's own form, which a model keeps.
    """
    if case.pass_ != "forward":
        raise NotImplementedError("cuSPARSELt's own form of the weight has no gradient by torch")
    return _cusparselt(case, None, None)


def _cusparselt(case: Any, scaled: Call | None, out_dtype: Any) -> Call:
    """Its product in `out_dtype`, or x's, then `scaled` by what else the case has."""
    import torch

    if not torch.backends.cusparselt.is_available():
        raise NotImplementedError("this PyTorch has no cuSPARSELt, or none for this GPU")
    M, N, K = (case.axes[axis] for axis in "MNK")
    if N % 32 or K % 32 or M % (16 if case.dtype == "e4m3" else 8):
        raise NotImplementedError("cuSPARSELt takes N and K in multiples of 32 and M in multiples of 16 bytes")
    found = None

    kept = keeping(lambda weight: torch._cslt_compress(weight), "weight")

    def call(x: Any, values: Any, positions: Any, weight: Any, **scales: Any) -> Any:
        nonlocal found
        compressed = kept(weight=weight)
        if found is None:
            found = torch._cslt_sparse_mm_search(compressed, x.t(), out_dtype=out_dtype)
        y = torch._cslt_sparse_mm(compressed, x.t(), out_dtype=out_dtype, alg_id=found).t()
        return scaled(y, **scales) if scaled is not None else y

    return call


REFUSALS = ("Invalid scaling configuration", "CUBLAS_STATUS_NOT_SUPPORTED", "Expected trailing dimension")
"""cuBLAS's of kinds of scales, of scales of blocks for M in no multiple of 4, and of rows at no multiple of 16
bytes."""


def _fp8_matmul(fast: bool) -> Callable[[Any], Call]:
    def factory(case: Any) -> Call:
        import torch
        from torch.nn import functional

        kinds = functional.ScalingType
        recipes = {
            "block": (kinds.BlockWise1x128, kinds.BlockWise128x128),
            "group": (kinds.BlockWise1x128, kinds.BlockWise1x128),
        }
        recipe = case.options["recipe"]
        if recipe == "tile":
            raise NotImplementedError("cuBLAS has no scales of 128x128 for both matrices")
        if recipe in recipes and fast:
            raise NotImplementedError("cuBLAS has no fast accumulation with scales of blocks")

        def call(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
            if recipe in recipes and a.device.type == "cpu":  # torch.compile would fail in words of its own
                raise NotImplementedError("PyTorch has no product with scales of blocks on a CPU")
            if recipe == "block":
                return _scaled_product(a, scale_a, b.t(), scale_b.t())
            if recipe in recipes:
                of_a, of_b = recipes[recipe]
                return functional.scaled_mm(a, b, scale_a, of_a, scale_b, of_b, output_dtype=torch.bfloat16)
            return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

        laid = by_rows_of_k(case, call)
        refused = recipe in recipes or case.axes["N"] % 16 or case.axes["K"] % 16
        return refusing(laid, ValueError, saying=REFUSALS) if refused else laid

    factory.__doc__ = (
        "`torch._scaled_mm` and, with scales of blocks, `torch.nn.functional.scaled_mm`: cuBLAS. Layouts other "
        "than nt are copied in the call." + (" Sums stay in the matrix units, with about 14 bits." if fast else "")
    )
    return factory


fp8_matmul = _fp8_matmul(fast=False)
fp8_matmul_fast = _fp8_matmul(fast=True)


def _quantized(y: Any) -> tuple[Any, Any]:
    """y (M, K) in E4M3 with a scale for 128 columns, which lie column by column, as cuBLAS wants them."""
    import torch

    M, K = y.shape
    wide = torch.nn.functional.pad(y, (0, -K % 128)).view(M, -1, 128).float()
    scale = wide.abs().amax(-1).clamp(min=1e-12) / 448.0
    q = (wide / scale[..., None]).view(M, -1)[:, :K].to(torch.float8_e4m3fn)
    return q.contiguous(), scale.t().contiguous().t()


def _activation(x: Any, norm_weight: Any, eps: float) -> Any:
    """RMSNorm by PyTorch's operator or, without a weight, `silu` and a product, in x's dtype."""
    from torch.nn import functional

    if norm_weight is not None:
        return functional.rms_norm(x, norm_weight.shape, norm_weight, eps)
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def quantized_activation(case: Any) -> Call:
    """`rms_norm`, or `silu` and a product, in 16 bits; then maximum, division and conversion."""
    return lambda x, norm_weight, eps: _quantized(_activation(x, norm_weight, eps))


def _scaled_product(q: Any, scale: Any, weight: Any, scale_weight: Any) -> Any:
    """cuBLAS's product with scales of 1×128 and 128×128. It wants those of a weight's rows in fours: where K is no
    multiple of 512, a copy of them with zeros behind.
    """
    import torch
    from torch.nn import functional

    kinds = functional.ScalingType
    missing = -scale_weight.shape[1] % 4
    fours = functional.pad(scale_weight, (0, missing)) if missing else scale_weight
    return functional.scaled_mm(
        q, weight.t(), scale, kinds.BlockWise1x128, fours.t(), kinds.BlockWise128x128, output_dtype=torch.bfloat16,
    )  # fmt: skip


def quantized_linear(case: Any) -> Call:
    """The activation in 16 bits, quantized by PyTorch's operations, then `scaled_mm` of 1×128 by 128×128:
    cuBLAS.
    """

    def call(x: Any, weight: Any, scale: Any, norm_weight: Any, eps: float) -> Any:
        return _scaled_product(*_quantized(_activation(x, norm_weight, eps)), weight, scale)

    return refusing(call, ValueError, saying="Invalid scaling configuration")


def quantized_linear_bf16(case: Any) -> Call:
    """The weight widened to bf16 and a product in bf16, all in the call: what who has no 8-bit products pays."""
    import torch

    def call(x: Any, weight: Any, scale: Any, norm_weight: Any, eps: float) -> Any:
        return _activation(x, norm_weight, eps) @ _wide(weight, scale).to(torch.bfloat16).t()

    return call


def _wide(weight: Any, scale: Any) -> Any:
    """A weight (N, K) times its scales of 128 × 128, in fp32."""
    N, K = weight.shape
    return weight.float() * scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]


def grouped_fp8_matmul(case: Any) -> Call:
    """A loop over groups of `scaled_mm` (1×128 by 128×128) or `_scaled_mm` (rows); how many rows each has is
    asked of the device, which the host waits for. Groups are multiplied with the rows that fill them up to
    sixteens: as long as they are, cuBLAS refused them on an H200.
    """
    import torch

    def one(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
        if recipe == "row":
            return torch._scaled_mm(
                a, b.t(), scale_a.contiguous(), scale_b.t().contiguous(), out_dtype=torch.bfloat16
            )
        return _scaled_product(a, scale_a.t().contiguous().t(), b, scale_b)

    def sixteens(count: int) -> int:
        return -(-count // 16) * 16

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, groups: Any, recipe: str) -> Any:
        out = torch.zeros(*a.shape[:-1], b.shape[1], dtype=torch.bfloat16, device=a.device)
        if a.dim() == 3:
            for e, count in enumerate(groups.tolist()):
                rows = slice(0, sixteens(count))
                if count:
                    out[e, rows] = one(a[e, rows], b[e], scale_a[e, rows], scale_b[e], recipe)
            return out
        begin = 0
        for e, count in torch.stack(groups.unique_consecutive(return_counts=True), 1).tolist():
            rows = slice(begin, begin + sixteens(count))
            if e >= 0:
                out[rows] = one(a[rows], b[e], scale_a[rows], scale_b[e], recipe)
            begin += count
        return out

    return refusing(call, ValueError, saying="Invalid scaling configuration")


def grouped_fp8_matmul_scaled_grouped_mm(case: Any) -> Call:
    """`torch.nn.functional.scaled_grouped_mm`, CUTLASS's on Hopper, which takes one scale a row there. Groups
    begin at multiples of 128 rows; those between are its groups' last rows. Where groups end does not depend on
    numbers and is made once.
    """
    import torch
    from torch.nn import functional

    if case.options["recipe"] != "row":
        raise NotImplementedError("scaled_grouped_mm takes one scale a row on Hopper, no blocks")
    if case.options["layout"] != "contiguous":
        raise NotImplementedError("scaled_grouped_mm takes groups that follow each other")
    if case.axes["N"] % 16 or case.axes["K"] % 16:
        raise NotImplementedError("scaled_grouped_mm takes N and K in multiples of 16 only")
    ends: Any = None
    row = functional.ScalingType.RowWise
    product: Any = functional.scaled_grouped_mm  # type: ignore[attr-defined]  # torch's types leave it out

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, groups: Any, recipe: str) -> Any:
        nonlocal ends
        if ends is None:
            counts = torch.bincount(groups[groups >= 0], minlength=b.shape[0])
            ends = ((counts + 127) // 128 * 128).cumsum(0).to(torch.int32)
        return product(a, b.mT, scale_a[:, 0], row, scale_b[..., 0], row, offs=ends, output_dtype=torch.bfloat16)

    return call


def _routed(x: Any, router: Any, top_k: int) -> tuple[Any, Any]:
    """(shares (M, k) in fp32, experts (M, k)) by softmax over the chosen; the logits in x's dtype, as models
    have.
    """
    logits, experts = (x @ router.t()).float().topk(top_k, -1)
    return logits.softmax(-1), experts


def _gated_product(gate: Any, up: Any, limit: float) -> Any:
    """silu(gate) · up, or gpt-oss's clamped product, as its own model has it."""
    from torch.nn import functional

    if not limit:
        return functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


def moe(case: Any) -> Call:
    """A loop over experts, as Transformers' Mixtral has it: the host waits for how many tokens each has. E4M3
    weights are widened to bf16 in the call.
    """
    import torch

    def weights(given: dict[str, Any], e: int) -> tuple[Any, Any, Any]:
        gate, up = given["gate_up"][e].chunk(2)
        down = given["down"][e]
        if given["scale_gate_up"] is not None:
            of_gate, of_up = given["scale_gate_up"][e].chunk(2)
            pairs = ((gate, of_gate), (up, of_up), (down, given["scale_down"][e]))
            gate, up, down = (_wide(q, scale).to(torch.bfloat16) for q, scale in pairs)
        return gate, up, down

    def call(x: Any, router: Any, top_k: int, limit: float = 0.0, **given: Any) -> Any:
        shares, experts = _routed(x, router, top_k)
        out = torch.zeros_like(x)
        for e in range(router.shape[0]):
            token, nth = torch.where(experts == e)
            gate, up, down = weights(given, e)
            rows = x[token]
            inner = _gated_product(rows @ gate.t(), rows @ up.t(), limit)
            out.index_add_(0, token, (inner @ down.t() * shares[token, nth, None]).to(x.dtype))
        return out, experts

    return call


def moe_grouped_mm(case: Any) -> Call:
    """Tokens sorted by expert and `torch.nn.functional.grouped_mm`, CUTLASS's: nothing waits."""
    import torch
    from torch.nn import functional

    if case.dtype != "bf16":
        raise NotImplementedError("grouped_mm takes bf16; scaled_grouped_mm takes no scales of blocks on Hopper")

    def call(x: Any, router: Any, gate_up: Any, down: Any, top_k: int, limit: float = 0.0, **scales: Any) -> Any:
        shares, experts = _routed(x, router, top_k)
        order = experts.flatten().argsort(stable=True)
        # How many tokens each expert and those before it have: by bincount the host would wait for its length.
        each = torch.arange(router.shape[0], device=x.device)
        ends = torch.searchsorted(experts.flatten()[order], each, right=True, out_int32=True)
        token = order // top_k
        gate, up = functional.grouped_mm(x[token], gate_up.mT, offs=ends).chunk(2, -1)
        parts = functional.grouped_mm(_gated_product(gate, up, limit), down.mT, offs=ends)
        parts = (parts * shares.flatten()[order, None]).to(x.dtype)
        return torch.zeros_like(x).index_add_(0, token, parts), experts

    return call


PRODUCTS: dict[str, dict[str, Callable[..., Any]]] = {
    "fp8_matmul": {"torch": fp8_matmul, "torch_fast_accum": fp8_matmul_fast},
    "grouped_fp8_matmul": {
        "torch": grouped_fp8_matmul,
        "torch_scaled_grouped_mm": grouped_fp8_matmul_scaled_grouped_mm,
    },
    "matmul": {"torch": matmul},
    "moe": {"torch": moe, "torch_grouped_mm": moe_grouped_mm},
    "mx_matmul": {"torch": mx_matmul, "torch_bf16": mx_matmul_bf16},
    "quantized_activation": {"torch": quantized_activation},
    "quantized_linear": {"torch": quantized_linear, "torch_bf16": quantized_linear_bf16},
    "sparse24_fp8_matmul": {"torch": sparse24_fp8_matmul, "torch_cusparselt": sparse24_fp8_matmul_cusparselt},
    "sparse24_matmul": {"torch": sparse24_matmul, "torch_cusparselt": sparse24_matmul_cusparselt},
}
"""The factories by operator and name; part of `torch.IMPLEMENTATIONS`."""
