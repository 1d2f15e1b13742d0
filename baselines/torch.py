"""PyTorch, eager: its own fused operator where it has one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from . import _blocks
from ._terms import telling
from ._torch_products import PRODUCTS

REQUIRES = ("torch",)
DEVICES = {
    "torch_cusparselt": ("cuda",),
    "torch_dynamic_int8": ("cpu",),
    "torch_fast_accum": ("cuda",),
    "torch_grouped_mm": ("cuda",),
    "torch_scaled_grouped_mm": ("cuda",),
    "torch_varlen": ("cuda",),
}


def rms_norm(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.rms_norm`."""
    from torch.nn import functional

    return lambda x, weight, eps: functional.rms_norm(x, weight.shape, weight, eps)


def attention(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.scaled_dot_product_attention`, which chooses its backend itself; with sinks or a cap of
    scores, which it lacks, the formula.
    """
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    if case.options.get("sinks") or case.options.get("cap"):
        return attention_formula(case)
    groups = _blocks.grouped(case)
    causal = case.options["mask"] == "causal"
    S, Sk = case.axes["S"], _blocks.keys(case)
    masked: dict[str, Any] = {"is_causal": causal}
    if causal and Sk != S:  # its own causal mask is aligned to the first query and key
        masked = {"attn_mask": causal_lower_right(S, Sk)}

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        return scaled_dot_product_attention(q, k, v, **masked, enable_gqa=groups)

    return call


def attention_mla_decode(case: Any) -> Callable[..., Any]:
    """The formula over the longest sequence of all, pages gathered and what lies beyond a length hidden."""
    import torch

    S = case.axes["S"]

    def call(q: Any, cache: Any, block_table: Any, lengths: Any, latent: int, scale: float) -> Any:
        Sq = q.shape[1]
        seen = cache[block_table.long()].flatten(1, 2)[:, :S]
        last = lengths[:, None, None] - Sq + torch.arange(Sq, device=q.device)[:, None]
        hidden = torch.arange(seen.shape[1], device=q.device) > last
        scores = (q.flatten(1, 2) @ seen.mT * scale).unflatten(1, q.shape[1:3])
        scores = scores.masked_fill(hidden[:, :, None], float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return (weights.flatten(1, 2) @ seen[..., :latent]).unflatten(1, q.shape[1:3])

    return call


def attention_formula(case: Any) -> Callable[..., Any]:
    """Products, cap, mask, sinks and softmax one after the other, as Gemma 2's and gpt-oss's eager attention in
    Hugging Face transformers has them: scores in the inputs' dtype, softmax in fp32. The mask is made once.
    """
    import torch

    cap = _blocks.cap_of(case)
    S, Sk = case.axes["S"], _blocks.keys(case)
    before, after = _blocks.reach(case)
    if before < 0 and case.options["mask"] == "causal":
        before, after = max(S, Sk), 0
    masked = before >= 0
    hidden: Any = None
    blind: Any = None

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0, sinks: Any = None, cap: float = cap) -> Any:
        nonlocal hidden, blind
        if masked and hidden is None:
            seen = torch.ones(S, Sk, dtype=torch.bool, device=q.device)
            hidden = ~seen.tril_(Sk - S + after).triu_(Sk - S - before)
            if Sk < S:
                # Of a query that sees nothing softmax would be NaN: it sees all, and its answer is made 0.
                blind = hidden.all(-1, keepdim=True)
                hidden &= ~blind
        out = _eager_attention(q, k, v, hidden, sinks, cap)
        return out if blind is None else out.masked_fill(blind, 0)

    return call


def _eager_attention(q: Any, k: Any, v: Any, hidden: Any, sinks: Any, cap: float) -> Any:
    """q (B, H, Sq, D) over k and v (B, Hkv, Sk, D) as eager models have it: scores in the inputs' dtype, softmax
    in fp32. `hidden` and `sinks` (H,) may be None.
    """
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]] @ v


def attention_fp8(case: Any) -> Callable[..., Any]:
    """`scaled_dot_product_attention` in bf16, to which inputs are widened: PyTorch has none of 8-bit floats."""
    from torch.nn.functional import scaled_dot_product_attention

    groups = _blocks.grouped(case)
    causal = case.options["mask"] == "causal"

    def call(q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any, mask: str) -> Any:
        scaled = ((q, q_scale), (k, k_scale), (v, v_scale))
        q, k, v = ((x.float() * scale[..., None, None]).bfloat16() for x, scale in scaled)
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups)

    return call


def attention_window(case: Any) -> Callable[..., Any]:
    """`scaled_dot_product_attention`, which has no window, with a mask of elements in its place, made once; with
    sinks or a cap of scores the formula.
    """
    from torch.nn.functional import scaled_dot_product_attention

    if case.options.get("sinks") or case.options.get("cap"):
        return attention_formula(case)
    groups = _blocks.grouped(case)
    made = None

    def call(q: Any, k: Any, v: Any, mask: str, window: int) -> Any:
        nonlocal made
        if made is None:
            made = _blocks.window_mask(case, q.device)
        return scaled_dot_product_attention(q, k, v, attn_mask=made, enable_gqa=groups)

    return call


def attention_sparse(case: Any) -> Callable[..., Any]:
    """`scaled_dot_product_attention` with the blocks as a mask of elements: PyTorch computes all that it hides.

    The mask of given blocks, a fixed layout, is made once; chosen blocks and their mask are made inside the call.
    """
    from torch.nn.functional import scaled_dot_product_attention

    groups = _blocks.grouped(case)
    causal, S = case.options["mask"] == "causal", case.axes["S"]
    choose = _blocks.choice(case)
    made = None

    def given(q: Any, k: Any, v: Any, mask: str, sparsity: int, blocks: Any, gate_q: Any, gate_k: Any) -> Any:
        nonlocal made
        if made is None:
            made = _blocks.elements(blocks, causal, S)
        return scaled_dot_product_attention(q, k, v, attn_mask=made, enable_gqa=groups)

    def chosen(
        q: Any,
        k: Any,
        v: Any,
        mask: str,
        sparsity: int,
        blocks: Any,
        gate_q: Any,
        gate_k: Any,
        threshold: float | None = None,
    ) -> Any:
        blocks = choose(q, k, gate_q, gate_k, threshold)
        seen = _blocks.elements(blocks, causal, S)
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=groups), blocks

    def tiles_left_out(**inputs: Any) -> float:
        """Of a mask of elements no backend knows which tiles it hides: all are computed, those after the diagonal
        among them.
        """
        return _blocks.left_out(case, (-(-S // _blocks.BLOCK)) ** 2)

    return telling(given if _blocks.given(case) else chosen, tiles_left_out=tiles_left_out)


def attention_varlen(case: Any) -> Callable[..., Any]:
    """`scaled_dot_product_attention` of one sequence after the other; the host waits for their lengths. Windows,
    and causal masks over other keys, are masks of elements, made once; with sinks or a cap of scores it is the
    formula.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    groups = _blocks.grouped(case)
    causal = case.options["mask"] == "causal"
    formula = bool(case.options["sinks"] or case.options["cap"])
    before, after = _blocks.reach(case)
    if before < 0:
        after = 0 if causal else 1 << 30
    plain = not formula and not case.axes["W"] and (case.options["keys"] == "same" or not causal)
    masks: dict[tuple[int, int], tuple[Any, Any]] = {}

    def mask_of(S: int, Sk: int, device: Any) -> tuple[Any, Any]:
        """(what is seen, the queries that see nothing), of which the first says that they see all: no NaN."""
        if (S, Sk) not in masks:
            seen = _blocks.lower_right(S, Sk, (before, after), device)
            blind = ~seen.any(-1, keepdim=True)
            masks[S, Sk] = seen | blind, blind
        return masks[S, Sk]

    def attended(q: Any, k: Any, v: Any, sinks: Any, cap: float) -> Any:
        if not k.shape[2]:
            return torch.zeros_like(q)
        if plain:
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups)
        seen, blind = mask_of(q.shape[2], k.shape[2], q.device)
        if formula:
            return _eager_attention(q, k, v, ~seen, sinks, cap).masked_fill(blind, 0)
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=groups).masked_fill(blind, 0)

    def call(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        sinks: Any = None,
        cap: float = 0.0,
        **rest: Any,
    ) -> Any:
        lengths = cu_seqlens_q.diff().tolist()
        others = lengths if case.options["keys"] == "same" else cu_seqlens_k.diff().tolist()
        sizes = ((q, lengths), (k, others), (v, others))
        parts = (x.transpose(0, 1)[None].split(size, 2) for x, size in sizes)
        outputs = [attended(q, k, v, sinks, cap) for q, k, v in zip(*parts, strict=True)]
        return torch.cat(outputs, 2)[0].transpose(0, 1)

    return call


def attention_varlen_flash(case: Any) -> Callable[..., Any]:
    """`torch.nn.attention.varlen.varlen_attn`, the FlashAttention 2 that PyTorch ships."""
    from torch.nn.attention.varlen import varlen_attn

    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("varlen_attn takes fp16 and bf16 only")
    _blocks.takes(case, "varlen_attn", "Sk")
    window = _blocks.reach(case)
    if case.options["mask"] == "causal":
        window = window[0], 0
    # Of grouped heads some versions want to be told, others do not know the word.
    told = "enable_gqa" in inspect.signature(varlen_attn).parameters and case.axes["H"] != case.axes["Hkv"]
    grouped: dict[str, Any] = {"enable_gqa": True} if told else {}

    def call(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        mask: str,
        **rest: Any,
    ) -> Any:
        starts = cu_seqlens_q, cu_seqlens_k
        return varlen_attn(q, k, v, *starts, max_seqlen_q, max_seqlen_k, window_size=window, **grouped)

    return call


def layer_norm(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.layer_norm`."""
    from torch.nn import functional

    return lambda x, weight, bias, eps: functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_rms_norm(case: Any) -> Callable[..., Any]:
    """An addition and `torch.nn.functional.rms_norm`."""
    from torch.nn import functional

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        h = x + residual
        return functional.rms_norm(h, weight.shape, weight, eps), h

    return call


def gelu(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.gelu`."""
    from torch.nn import functional

    return lambda x, approximate: functional.gelu(x, approximate=approximate)


def swiglu(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.silu` and a multiplication."""
    from torch.nn import functional

    return lambda gate, up: functional.silu(gate) * up


def geglu(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.gelu` and a multiplication."""
    from torch.nn import functional

    return lambda gate, up: functional.gelu(gate, approximate="tanh") * up


def rope(case: Any) -> Callable[..., Any]:
    """Elementwise operations: PyTorch has no operator for it."""
    import torch

    def half(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def interleaved(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    turn = half if case.options["layout"] == "half" else interleaved
    return lambda q, k, cos, sin, layout: (turn(q, cos, sin), turn(k, cos, sin))


def linear(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.linear`."""
    from torch.nn import functional

    return lambda x, weight, bias: functional.linear(x, weight, bias)


def qkv_rope(case: Any) -> Callable[..., Any]:
    """Three times `torch.nn.functional.linear`, and what `rope` takes."""
    from torch.nn import functional

    D = case.axes["D"]

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        import torch

        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def call(x: Any, query: Any, key: Any, value: Any, cos: Any, sin: Any) -> Any:
        several = (functional.linear(x, weight) for weight in (query, key, value))
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in several)
        return turned(q, cos, sin), turned(k, cos, sin), v

    return call


def gate_up_swiglu(case: Any) -> Callable[..., Any]:
    """Twice `torch.nn.functional.linear`, and what `swiglu` takes."""
    from torch.nn import functional

    return lambda x, gate, up: functional.silu(functional.linear(x, gate)) * functional.linear(x, up)


def rope_cache_write(case: Any) -> Callable[..., Any]:
    """`rope` at each token's position, and `index_copy_` into the caches: PyTorch has no operator for it."""
    import torch

    turn = rope(case)

    def call(
        q: Any, k: Any, v: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any,
        layout: str,
    ) -> Any:  # fmt: skip
        page = k_cache.shape[1]
        at = lengths.long()[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
        places = (block_table.long().gather(1, at // page) * page + at % page).flatten()
        q, k = turn(q, k, cos[at][:, :, None], sin[at][:, :, None], layout)
        for cache, x in ((k_cache, k), (v_cache, v)):
            cache.flatten(0, 1).index_copy_(0, places, x.flatten(0, 1))
        return q

    return call


def cross_entropy(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.cross_entropy`, and operations for the z-loss that it lacks."""
    from torch.nn import functional

    def regularized(logits: Any, target: Any, label_smoothing: float, z_loss: float) -> Any:
        counts = target != -100
        squares = logits.float().logsumexp(-1).square().where(counts, 0).sum() / counts.sum()
        loss = functional.cross_entropy(logits, target, label_smoothing=label_smoothing)
        return loss + (z_loss * squares).to(loss.dtype)

    if case.options["regularized"]:
        return regularized
    return lambda logits, target: functional.cross_entropy(logits, target)


def fp8_quant(case: Any) -> Callable[..., Any]:
    """Maximum, division and conversion: PyTorch has no operator for it."""
    import torch

    dtype = torch.float8_e4m3fn if case.options["format"] == "e4m3" else torch.float8_e5m2
    largest = torch.finfo(dtype).max

    def row(x: Any, granularity: str, format: str) -> Any:
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
        return (wide / scale).to(dtype), scale

    def block(x: Any, granularity: str, format: str) -> Any:
        M, N = x.shape
        q, scale = row(torch.nn.functional.pad(x, (0, -N % 128)).view(M, -1, 128), granularity, format)
        return q.view(M, -1)[:, :N], scale.squeeze(-1)

    def tile(x: Any, granularity: str, format: str) -> Any:
        M, N = x.shape
        down, across = -(-M // 128), -(-N // 128)
        wide = torch.nn.functional.pad(x, (0, -N % 128, 0, -M % 128)).view(down, 128, across, 128).float()
        scale = wide.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / largest
        return (wide / scale).to(dtype).view(down * 128, across * 128)[:M, :N], scale.squeeze((1, 3))

    def column(x: Any, granularity: str, format: str) -> Any:
        return block(x.t().contiguous(), granularity, format)

    def both(x: Any, granularity: str, format: str) -> Any:
        return *block(x, granularity, format), *column(x, granularity, format)

    def tile_both(x: Any, granularity: str, format: str) -> Any:
        q, scale = tile(x, granularity, format)
        return q, scale, q.t().contiguous(), scale.t()

    ways = {"row": row, "block": block, "tile": tile, "column": column, "both": both, "tile_both": tile_both}
    return ways[case.options["granularity"]]


def int8_linear(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.linear` in fp32: what a model computes before anything is quantized."""
    from torch.nn import functional

    return lambda x, layer: functional.linear(x, layer.weight)


def int8_linear_dynamic(case: Any) -> Callable[..., Any]:
    """`torch.ao.quantization.quantize_dynamic` of the layer, made at the first call: fbgemm or oneDNN, as PyTorch
    chooses on this processor.
    """
    import torch

    made: Any = None

    def call(x: Any, layer: Any) -> Any:
        nonlocal made
        if made is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is deprecated for torchao's, which has none for such a layer
                quantized = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(layer), {torch.nn.Linear})
            made = quantized[0]
        return made(x)

    return call


def fused_linear_cross_entropy(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.linear` and `cross_entropy`, with the logits in memory."""
    from torch.nn import functional

    return lambda x, weight, target: functional.cross_entropy(functional.linear(x, weight), target)


def mx_quant(case: Any) -> Callable[..., Any]:
    """Maximum, scale, rounding and packing: PyTorch has no operator for it."""
    import torch

    format = case.options["format"]
    group = 16 if format == "nvfp4" else 32

    def powers(largest: Any, exponent: int) -> Any:
        """E8M0 of floor(log2(largest)) - exponent, and 1 / its value, from the bits of fp32."""
        power = ((largest.view(torch.int32) >> 23) - exponent).clamp(min=0)
        return power.to(torch.uint8), ((254 - power) << 23).view(torch.float32)

    def packed(y: Any) -> Any:
        """E2M1 codes, two a byte: the rounded minimum of three lines is the code of a magnitude."""
        y = y.float()
        a = y.abs()
        code = torch.minimum(torch.minimum(2 * a, a + 2), (0.5 * a + 4).clamp(max=7)).round().to(torch.uint8)
        code = code | (torch.signbit(y).to(torch.uint8) << 3)
        return code[..., ::2] | (code[..., 1::2] << 4)

    def call(x: Any, format: str, scale: Any) -> Any:
        M, N = x.shape
        wide = torch.nn.functional.pad(x, (0, -N % group)).view(M, -1, group).float()
        largest = wide.abs().amax(-1, keepdim=True)
        if format == "nvfp4":
            scales = (largest / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn)
            part = scales.float() * scale
            factor = torch.where(part == 0, 0, 1 / part)
        else:
            scales, factor = powers(largest, 8 if format == "mxfp8" else 2)
        y = wide * factor
        if format == "mxfp8":
            q = y.clamp(-448, 448).to(torch.float8_e4m3fn).view(M, -1)[:, :N]
        else:
            q = packed(y).view(M, -1)[:, : -(-N // 2)]
        return q, scales.squeeze(-1)

    return call


def attention_decode(case: Any) -> Callable[..., Any]:
    """The pages gathered to one piece a sequence, and `scaled_dot_product_attention` with a mask of lengths; with
    sinks or a cap of scores the formula.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    formula = bool(case.options.get("sinks") or case.options.get("cap"))

    def call(
        q: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any, sinks: Any = None, cap: float = 0.0
    ) -> Any:
        if block_table is not None:
            k_cache, v_cache = (x[block_table.long()].flatten(1, 2) for x in (k_cache, v_cache))
        Sq, S = q.shape[1], k_cache.shape[1]
        last = lengths[:, None] - Sq + torch.arange(Sq, device=q.device)
        seen = torch.arange(S, device=q.device) <= last[:, :, None]
        q, k, v = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
        if formula:
            return _eager_attention(q, k, v, ~seen[:, None], sinks, cap).transpose(1, 2)
        return scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True).transpose(1, 2)

    return call


def newton_schulz(case: Any) -> Callable[..., Any]:
    """The iterations of `torch.optim.Muon` over all matrices at once, by `baddbmm`."""
    import torch

    def call(grads: Any, steps: int) -> Any:
        turned = grads.shape[1] > grads.shape[2]
        x = grads.mT if turned else grads
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        for _ in range(steps):
            gram = x @ x.mT
            factor = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, factor, x, beta=3.4445)
        return x.mT if turned else x

    return call


def newton_schulz_muon(case: Any) -> Callable[..., Any]:
    """What `torch.optim.Muon` calls for each of its parameters; in bf16, whatever the gradient."""
    try:
        from torch.optim import _muon
    except ImportError:
        raise NotImplementedError("this PyTorch has no torch.optim.Muon") from None
    import torch

    if case.dtype != "bf16":
        raise NotImplementedError("torch.optim.Muon computes in bf16")

    def call(grads: Any, steps: int) -> Any:
        each = _muon._zeropower_via_newtonschulz
        # It divides a bf16 gradient in place, which a step may not.
        return torch.stack([each(x.clone(), (3.4445, -4.7750, 2.0315), steps, 1e-7) for x in grads])

    return call


def _with_masters(case: Any, step: Callable[..., None]) -> Callable[..., Any]:
    """`step(params, grads, exp_avgs, exp_avg_sqs, **hyperparameters)` as it is used with masters or without.

    PyTorch's optimizers know no masters: users step on these with gradients raised to fp32, and copy the result
    to the parameters.
    """
    import torch

    if case.options["state"] == "master16":
        raise NotImplementedError(
            "PyTorch's AdamW has no moments of another dtype than the parameters it steps on"
        )

    def call(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, masters: Any, **rest: Any) -> None:
        with torch.no_grad():
            if masters is None:
                step(params, grads, exp_avgs, exp_avg_sqs, **rest)
                return
            step(masters, [x.float() for x in grads], exp_avgs, exp_avg_sqs, **rest)
            torch._foreach_copy_(params, masters)

    return call


def adamw_fused(case: Any) -> Callable[..., Any]:
    """The kernel of `torch.optim.AdamW(fused=True)`, without the optimizer's own work around it on the host.

    Its steps are numbers on the device, here one for all tensors, which the caller has counted up; it is written
    where the caller's count has changed.
    """
    import torch

    count: list[Any] = []
    last = 0

    def step(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, *, step: int, **rest: Any) -> None:
        nonlocal last
        if not count:
            count.append(torch.tensor(float(step), device=params[0].device))
        elif step != last:
            count[0].fill_(step)
        last = step
        steps = count * len(params)
        torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **rest)

    return _with_masters(case, step)


def adamw_foreach(case: Any) -> Callable[..., Any]:
    """`torch.optim.adamw.adamw(foreach=True)`, what `torch.optim.AdamW` does by default on a GPU."""
    import torch
    from torch.optim.adamw import adamw

    def step(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, *, step: int, **rest: Any) -> None:
        # On the host, where it costs the device nothing; the function counts it up itself.
        steps = [torch.tensor(step - 1.0) for _ in params]
        adamw(params, grads, exp_avgs, exp_avg_sqs, [], steps, foreach=True, amsgrad=False, maximize=False, **rest)

    return _with_masters(case, step)


def adamw(case: Any, compiled: Callable[..., Any] = lambda update: update) -> Callable[..., Any]:
    """The formula in PyTorch's operations, tensor by tensor, computed in fp32; `compiled` takes one update."""

    def update(
        p: Any,
        grad: Any,
        m: Any,
        v: Any,
        master: Any,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        g = grad.float()
        first = m.float().lerp(g, 1 - beta1)
        second = beta2 * v.float() + (1 - beta2) * g * g
        root = (second / (1 - beta2**step)).sqrt() + eps
        value = p.float() if master is None else master
        value = value * (1 - lr * weight_decay) - lr / (1 - beta1**step) * first / root
        m.copy_(first)
        v.copy_(second)
        p.copy_(value)
        if master is not None:
            master.copy_(value)

    one = compiled(update)

    def call(
        params: Any,
        grads: Any,
        exp_avgs: Any,
        exp_avg_sqs: Any,
        masters: Any,
        **rest: Any,
    ) -> None:
        for place, tensors in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
            one(*tensors, masters[place] if masters else None, **rest)

    return call


def softmax(case: Any) -> Callable[..., Any]:
    """`torch.softmax`."""
    import torch

    return lambda x: torch.softmax(x, -1)


def gradient_compression(case: Any) -> Callable[..., Any]:
    """Sum, scale and rounding or `torch.topk`, and the payload put together: PyTorch has no operator for it."""
    import torch
    from torch.nn.functional import pad

    def quantized(gradient: Any, residual: Any, scheme: str, keep: int) -> Any:
        N = gradient.numel()
        total = gradient.float() + residual.float()
        groups = pad(total, (0, -N % 128)).view(-1, 128)
        largest, dtype = (127.0, torch.int8) if scheme == "int8" else (448.0, torch.float8_e4m3fn)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
        scaled = groups / scale
        sent = (scaled.round() if scheme == "int8" else scaled).to(dtype)
        rest = (groups - sent.float() * scale).view(-1)[:N].to(residual.dtype)
        return torch.cat([sent.view(-1).view(torch.uint8), scale.view(-1).view(torch.uint8)]), rest

    def chosen(gradient: Any, residual: Any, scheme: str, keep: int) -> Any:
        N = gradient.numel()
        total = pad((gradient + residual).to(gradient.dtype), (0, -N % 1024)).view(-1, 1024)
        magnitude = total.abs()
        if N % 1024:
            magnitude.view(-1)[N:] = -1
        places = magnitude.topk(keep, -1).indices
        sent = total.gather(-1, places)
        rest = total.scatter(-1, places, 0).view(-1)[:N].to(residual.dtype)
        parts = (sent.view(-1).view(torch.uint8), places.to(torch.int16).view(-1).view(torch.uint8))
        return torch.cat(parts), rest

    return chosen if case.options["scheme"] == "topk" else quantized


def gradient_decompression(case: Any) -> Callable[..., Any]:
    """The payload taken apart: values times scales, or scattered to their places."""
    import torch

    def quantized(payload: Any, size: int, dtype: Any, scheme: str, keep: int) -> Any:
        middle = -(-size // 128) * 128
        kind = torch.int8 if scheme == "int8" else torch.float8_e4m3fn
        sent = payload[:middle].view(kind).view(-1, 128).float()
        return (sent * payload[middle:].view(torch.float32)[:, None]).view(-1)[:size].to(dtype)

    def chosen(payload: Any, size: int, dtype: Any, scheme: str, keep: int) -> Any:
        chunks = -(-size // 1024)
        middle = chunks * keep * dtype.itemsize
        sent = payload[:middle].view(dtype).view(chunks, keep)
        places = payload[middle:].view(torch.int16).view(chunks, keep).long()
        dense = torch.zeros(chunks, 1024, dtype=dtype, device=payload.device)
        return dense.scatter_(-1, places, sent).view(-1)[:size]

    return chosen if case.options["scheme"] == "topk" else quantized


def _decays(logs: Any) -> Any:
    """exp of the sum of logs (…, L) after j, to i, for j ≤ i, else 0: (…, L, L)."""
    import torch

    total = logs.cumsum(-1)
    later = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device).tril()
    return (total[..., :, None] - total[..., None, :]).masked_fill(~later, float("-inf")).exp()


def ssd(case: Any) -> Callable[..., Any]:
    """Chunks of 256 as matrix products, and one over chunks that passes their states on, all by `einsum`.

    The form that the paper prints as its minimal implementation (arXiv 2405.21060, listing 1). The decays of
    all pairs of a chunk are in memory, in fp32; products have operands of x's dtype.
    """
    import torch
    from torch.nn import functional

    if case.options["packed"]:
        raise NotImplementedError("the minimal form has one sequence in a row")
    length = 256

    def call(
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        dt_bias: Any,
        initial_state: Any,
        seq_idx: Any,
        dt_softplus: bool,
        return_final_state: bool,
    ) -> Any:
        S, groups = x.shape[1], x.shape[2] // B.shape[2]
        step = dt.float() + dt_bias
        step = functional.softplus(step) if dt_softplus else step
        chunk = min(length, S)

        def cut(t: Any) -> Any:
            return functional.pad(t, (0, 0) * (t.dim() - 2) + (0, -S % chunk)).unflatten(1, (-1, chunk))

        logs = cut(step * A).movedim(3, 1)
        scaled = cut((x * step[..., None]).to(x.dtype))
        written, read = (cut(t).repeat_interleave(groups, 3) for t in (B, C))
        scores = torch.einsum("bcihn,bcjhn->bhcij", read, written)
        y = torch.einsum("bhcij,bcjhp->bcihp", (scores * _decays(logs)).to(x.dtype), scaled)
        total = logs.cumsum(-1)
        rest = (total[..., -1:] - total).exp().to(x.dtype)
        states = torch.einsum("bcjhn,bhcj,bcjhp->bchpn", written, rest, scaled)
        first = torch.zeros_like(states[:, 0]) if initial_state is None else initial_state
        states = torch.cat([first[:, None].float(), states.float()], 1)
        across = _decays(functional.pad(total[..., -1], (1, 0)))
        states = torch.einsum("bhzc,bchpn->bzhpn", across, states)
        carried = total.exp().to(x.dtype)
        y = y + torch.einsum("bcihn,bchpn,bhci->bcihp", read, states[:, :-1].to(x.dtype), carried)
        y = (y.flatten(1, 2)[:, :S] + x * D[:, None]).to(x.dtype)
        return (y, states[:, -1]) if return_final_state else y

    return call


def mamba3(case: Any) -> Callable[..., Any]:
    """B and C turned in memory for every head, then chunks of 64 as matrix products, one over chunks that passes
    their states on, and the gate, all by `einsum` and elementwise operations: as in `ssd`.

    What two positions share of the trapezoidal rule is one weight, but on the diagonal. The decays of all pairs of
    a chunk are in memory, in fp32; products have operands of x's dtype.
    """
    import torch
    from torch.nn import functional

    turning = 2 * case.axes["A"]

    def turned(t: Any, bias: Any, groups: int, cos: Any, sin: Any) -> Any:
        wide = t.repeat_interleave(groups, 2) + bias
        a, b = wide[..., :turning].unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return torch.cat((pairs, wide[..., turning:]), -1).to(t.dtype)

    def call(
        x: Any,
        B: Any,
        C: Any,
        dt: Any,
        adt: Any,
        trap: Any,
        angles: Any,
        B_bias: Any,
        C_bias: Any,
        D: Any,
        z: Any,
    ) -> Any:
        S, groups = x.shape[1], x.shape[2] // B.shape[2]
        chunk = min(64, S)

        def cut(t: Any) -> Any:
            return functional.pad(t, (0, 0) * (t.dim() - 2) + (0, -S % chunk)).unflatten(1, (-1, chunk))

        turns = (torch.pi * torch.tanh(angles.float())[:, :, None] * dt[..., None]).cumsum(1)
        cos, sin = turns.cos(), turns.sin()
        written, read = (cut(turned(t, bias, groups, cos, sin)) for t, bias in ((B, B_bias), (C, C_bias)))
        share = torch.sigmoid(trap.float())
        now = share * dt
        weight = now + functional.pad(((1 - share) * dt)[:, 1:], (0, 0, 0, 1))
        own, weight, logs = (cut(t).movedim(3, 1) for t in (now, weight, adt))
        given = cut(x)
        scores = torch.einsum("bcihn,bcjhn->bhcij", read, written)
        factor = (_decays(logs) * weight[..., None, :]).tril(-1) + torch.diag_embed(own)
        y = torch.einsum("bhcij,bcjhp->bcihp", (scores * factor).to(x.dtype), given)
        total = logs.cumsum(-1)
        rest = ((total[..., -1:] - total).exp() * weight).to(x.dtype)
        states = torch.einsum("bcjhn,bhcj,bcjhp->bchpn", written, rest, given).float()
        states = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        across = _decays(functional.pad(total[..., :-1, -1], (1, 0)))
        states = torch.einsum("bhzc,bchpn->bzhpn", across, states)
        y = y + torch.einsum("bcihn,bchpn,bhci->bcihp", read, states.to(x.dtype), total.exp().to(x.dtype))
        y = (y.flatten(1, 2)[:, :S] + x * D[:, None]) * functional.silu(z.float())
        return y.to(x.dtype)

    return call


def linear_attention(case: Any) -> Callable[..., Any]:
    """Chunks of 256 as matrix products, and one over chunks that passes their states on, as in `ssd`.

    The decays of all pairs of a chunk are in memory, in fp32; products have operands of v's dtype.
    """
    import torch
    from torch.nn import functional

    def call(q: Any, k: Any, v: Any, g: Any, initial_state: Any, return_final_state: bool) -> Any:
        S, dtype = v.shape[1], v.dtype
        chunk = min(256, S)

        def cut(t: Any) -> Any:
            """(B, S, H, …) to (B, H, chunks, chunk, …)."""
            return (
                functional.pad(t, (0, 0) * (t.dim() - 2) + (0, -S % chunk)).unflatten(1, (-1, chunk)).movedim(3, 1)
            )

        queries, keys, values, logs = cut(q), cut(k), cut(v), cut(g.float())
        o = (queries @ keys.mT * _decays(logs)).to(dtype) @ values
        total = logs.cumsum(-1)
        added = (keys * (total[..., -1:] - total).exp()[..., None]).to(dtype).mT @ values
        first = torch.zeros_like(added[:, :, 0]) if initial_state is None else initial_state
        states = torch.cat([first[:, :, None].float(), added.float()], 2)
        states = torch.einsum("bhzc,bhckd->bhzkd", _decays(functional.pad(total[..., -1], (1, 0))), states)
        past = (queries @ states[:, :, :-1].to(dtype)) * total.exp()[..., None]
        o = (o + past).to(dtype).movedim(1, 3).flatten(1, 2)[:, :S]
        return (o, states[:, :, -1]) if return_final_state else o

    return call


def gated_delta_rule(case: Any) -> Callable[..., Any]:
    """Chunks of 64: triangular systems solved in fp32 for all at once, and a loop over chunks that passes their
    states on. Products have operands of v's dtype.
    """
    import torch
    from torch.nn import functional

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, return_final_state: bool) -> Any:
        S, dtype = v.shape[1], v.dtype
        chunk = 64

        def cut(t: Any) -> Any:
            """(B, S, H, …) to (B, H, chunks, chunk, …)."""
            return (
                functional.pad(t, (0, 0) * (t.dim() - 2) + (0, -S % chunk)).unflatten(1, (-1, chunk)).movedim(3, 1)
            )

        queries, keys, values, logs, rates = cut(q), cut(k), cut(v), cut(g.float()), cut(beta.float())[..., None]
        decays, total = _decays(logs), logs.cumsum(-1)
        carried = total.exp()[..., None]
        system = ((keys @ keys.mT) * decays * rates).float().tril(-1)
        both = torch.cat((rates * values, rates * carried * keys), -1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).to(dtype)
        own, past = solved.split((values.shape[-1], keys.shape[-1]), -1)
        rest = (keys * (total[..., -1:] - total).exp()[..., None]).to(dtype).mT
        state = initial_state
        if state is None:
            state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        state = state.float()
        entering, taken = [], []
        for i in range(logs.shape[2]):
            entering.append(state.to(dtype))
            taken.append(own[:, :, i] - past[:, :, i] @ entering[-1])
            state = state * carried[:, :, i, -1:] + rest[:, :, i] @ taken[-1]
        o = (queries @ keys.mT * decays).to(dtype) @ torch.stack(taken, 2)
        o = o + (queries @ torch.stack(entering, 2)) * carried
        o = o.to(dtype).movedim(1, 3).flatten(1, 2)[:, :S]
        return (o, state) if return_final_state else o

    return call


def selective_state_update(case: Any) -> Callable[..., Any]:
    """Elementwise operations in fp32, the state updated in place: PyTorch has no operator for it."""
    from torch.nn import functional

    def call(
        state: Any,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        z: Any,
        dt_bias: Any,
        dt_softplus: bool,
    ) -> Any:
        heads = state.shape[1]
        step = dt.float() + dt_bias
        step = functional.softplus(step) if dt_softplus else step
        if A.dim() == 1:
            step, A, D = step[..., None], A[:, None, None], D[:, None]
        written, read = (t.float().repeat_interleave(heads // t.shape[1], 1)[:, :, None] for t in (B, C))
        after = state.float() * (step[..., None] * A).exp() + (step * x)[..., None] * written
        state.copy_(after)
        y = (after * read).sum(-1) + D * x
        return (y if z is None else y * functional.silu(z.float())).to(x.dtype)

    return call


def causal_conv1d(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.conv1d` with one group a channel, and `silu`."""
    import torch
    from torch.nn import functional

    def call(x: Any, weight: Any, bias: Any, initial_state: Any, activation: str, layout: str) -> Any:
        W, dim = weight.shape[1], 1 if layout == "bsd" else 2
        longer = x if initial_state is None else torch.cat((initial_state, x), dim)
        longer = longer.transpose(1, 2) if layout == "bsd" else longer
        padding = W - 1 if initial_state is None else 0
        y = functional.conv1d(longer, weight[:, None], bias, padding=padding, groups=weight.shape[0])
        y = y[..., : x.shape[dim]]
        y = functional.silu(y) if activation == "silu" else y
        return y.transpose(1, 2) if layout == "bsd" else y

    return call


def causal_conv1d_update(case: Any) -> Callable[..., Any]:
    """Elementwise operations, the state updated in place: PyTorch has no operator for it."""
    from torch.nn import functional

    def call(x: Any, conv_state: Any, weight: Any, bias: Any, activation: str) -> Any:
        conv_state.copy_(conv_state.roll(-1, -1))
        conv_state[..., -1] = x
        y = (conv_state * weight).sum(-1) + bias
        return functional.silu(y) if activation == "silu" else y

    return call


def selective_scan(case: Any) -> Callable[..., Any]:
    """Token by token in fp32, a few operations each: PyTorch has no operator for it."""
    import torch
    from torch.nn import functional

    if case.axes["S"] > 8192:
        raise NotImplementedError("token by token: beyond 8192 of them a call takes seconds")

    def call(
        u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, delta_softplus: bool
    ) -> Any:
        step = delta.float() + delta_bias[:, None]
        step = functional.softplus(step) if delta_softplus else step
        given, written, read = step * u, B.float(), C.float()
        h = torch.zeros((*u.shape[:2], A.shape[1]), dtype=torch.float32, device=u.device)
        values = []
        for s in range(u.shape[2]):
            h = (step[:, :, s, None] * A).exp() * h + given[:, :, s, None] * written[:, None, :, s]
            values.append((h * read[:, None, :, s]).sum(-1))
        y = torch.stack(values, -1) + D[:, None] * u
        return (y * functional.silu(z.float())).to(u.dtype)

    return call


def gated_rms_norm(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.silu`, a multiplication and `rms_norm`, in groups of the width."""
    from torch.nn import functional

    first = case.options["order"] == "gate_first"

    def call(x: Any, z: Any, weight: Any, eps: float, group: int, order: str) -> Any:
        def norm(t: Any) -> Any:
            y = functional.rms_norm(t.unflatten(-1, (-1, group)), (group,), None, eps).flatten(-2)
            return y * weight

        return norm(x * functional.silu(z)) if first else norm(x) * functional.silu(z)

    return call


def _allocator(settings: str) -> Callable[[Any], Any]:
    """A value of `PYTORCH_ALLOC_CONF`, which the workload `memory_pool` starts a process with."""
    return lambda case: settings


IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    **PRODUCTS,
    "adamw": {"torch": adamw, "torch_foreach": adamw_foreach, "torch_fused": adamw_fused},
    "newton_schulz": {"torch": newton_schulz, "torch_muon": newton_schulz_muon},
    "gradient_compression": {"torch": gradient_compression},
    "gradient_decompression": {"torch": gradient_decompression},
    "softmax": {"torch": softmax},
    "add_rms_norm": {"torch": add_rms_norm},
    "attention": {"torch": attention},
    "attention_decode": {"torch": attention_decode},
    "attention_fp8": {"torch": attention_fp8},
    "attention_mla": {"torch": attention},
    "attention_mla_decode": {"torch": attention_mla_decode},
    "attention_sparse": {"torch": attention_sparse},
    "attention_window": {"torch": attention_window},
    "attention_varlen": {"torch": attention_varlen, "torch_varlen": attention_varlen_flash},
    "causal_conv1d": {"torch": causal_conv1d},
    "causal_conv1d_update": {"torch": causal_conv1d_update},
    "cross_entropy": {"torch": cross_entropy},
    "fp8_quant": {"torch": fp8_quant},
    "fused_linear_cross_entropy": {"torch": fused_linear_cross_entropy},
    "gated_rms_norm": {"torch": gated_rms_norm},
    "gated_delta_rule": {"torch": gated_delta_rule},
    "geglu": {"torch": geglu},
    "gelu": {"torch": gelu},
    "int8_linear": {"torch": int8_linear, "torch_dynamic_int8": int8_linear_dynamic},
    "layer_norm": {"torch": layer_norm},
    "memory_pool": {
        "torch": _allocator(""),
        "torch_expandable": _allocator("expandable_segments:True"),
        "torch_max_split_512": _allocator("max_split_size_mb:512"),
        "torch_rounded": _allocator("roundup_power2_divisions:8"),
        "torch_collecting": _allocator("garbage_collection_threshold:0.8"),
        "torch_cuda_malloc_async": _allocator("backend:cudaMallocAsync"),
    },
    "mx_quant": {"torch": mx_quant},
    "rms_norm": {"torch": rms_norm},
    "gate_up_swiglu": {"torch": gate_up_swiglu},
    "qkv_rope": {"torch": qkv_rope},
    "rope": {"torch": rope},
    "rope_cache_write": {"torch": rope_cache_write},
    "linear": {"torch": linear},
    "linear_attention": {"torch": linear_attention},
    "mamba3": {"torch": mamba3},
    "selective_scan": {"torch": selective_scan},
    "selective_state_update": {"torch": selective_state_update},
    "ssd": {"torch": ssd},
    "swiglu": {"torch": swiglu},
}
