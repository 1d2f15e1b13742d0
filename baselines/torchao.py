"""torchao's quantization kernels in Triton, and its block-scaled product.

What it offers beside them (row-wise scales, MXFP4, 8-bit optimizers) is elementwise code meant for
torch.compile, which `torch_compile.py` stands for, or another computation.
"""

from __future__ import annotations

from typing import Any

from ._products import by_rows_of_k
from ._terms import Call, keeping, refusing

REQUIRES = ("torchao", "triton")
DEVICES = ("cuda",)


def fp8_quant(case: Any) -> Call:
    """The kernels of its block-wise fp8 training: for activations 1×128, transposed too, for weights 128×128."""
    from torchao.prototype.blockwise_fp8_training import kernels

    if case.options["granularity"] == "row":
        raise NotImplementedError("torchao has no kernel for row-wise scales, only code meant for torch.compile")
    if case.options["format"] != "e4m3":
        raise NotImplementedError("torchao's block-wise kernels quantize to e4m3 only")
    if case.options["granularity"] == "block":
        function = kernels.triton_fp8_blockwise_act_quant_lhs
    elif case.options["granularity"] == "column":
        if case.axes["M"] % 128:
            raise NotImplementedError("torchao's transposing kernel takes rows in multiples of 128 only")
        function = kernels.triton_fp8_blockwise_act_quant_transposed_lhs
    elif case.options["granularity"] in ("both", "tile_both"):
        raise NotImplementedError("torchao has no kernel that quantizes both ways in one pass")
    else:  # transposed or not, the values are the same; this one writes them column by column
        function = kernels.triton_fp8_blockwise_weight_quant_rhs
    return refusing(lambda x, granularity, format: function(x, block_size=128), AssertionError)


def fp8_matmul(case: Any) -> Call:
    """The product of its block-wise fp8 training, in Triton; it masks no last part of a block along K."""
    import torch
    from torchao.prototype.blockwise_fp8_training.kernels import triton_fp8_gemm_1x128_128x128

    if case.options["recipe"] != "block":
        raise NotImplementedError("torchao's own product has scales of blocks; the others are torch._scaled_mm")
    if case.axes["K"] % 128:
        raise NotImplementedError("torchao's product takes K in multiples of 128 only")

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
        return triton_fp8_gemm_1x128_128x128(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)

    return refusing(by_rows_of_k(case, call), AssertionError)


def sparse24_fp8_matmul(case: Any) -> Call:
    """`rowwise_scaled_linear_sparse_cutlass_f8f8`, CUTLASS's for Hopper; the weight is compressed once by
    `to_sparse_semi_structured_cutlass_sm9x_f8`, which a model keeps.
    """
    import torch
    from torchao.ops import rowwise_scaled_linear_sparse_cutlass_f8f8 as function
    from torchao.ops import to_sparse_semi_structured_cutlass_sm9x_f8 as compress

    if torch.cuda.get_device_capability()[0] != 9:
        raise NotImplementedError("torchao has this product for compute capability 9 only")
    if case.axes["K"] % 128 or case.axes["N"] % 64:
        raise NotImplementedError("torchao's sparse product takes K in multiples of 128 and N in multiples of 64")

    kept = keeping(lambda weight: compress(weight), "weight")

    def call(x: Any, values: Any, positions: Any, weight: Any, scale_x: Any, scale_w: Any) -> Any:
        compressed, meta = kept(weight=weight)
        scales = scale_x[:, 0], scale_w[:, 0]
        return function(x, scales[0], compressed, meta, scales[1], out_dtype=torch.bfloat16)

    return refusing(call, AssertionError)


def mx_quant(case: Any) -> Call:
    """`triton_to_mxfp8_dim0` with the scale that the OCP specification gives, which exists for Blackwell only."""
    import torch
    from torchao.prototype.mx_formats.kernels import triton_to_mxfp8_dim0

    if case.options["format"] != "mxfp8":
        raise NotImplementedError(
            "torchao's kernel for rows makes mxfp8 only; mxfp4 is code meant for torch.compile"
        )
    if torch.cuda.get_device_capability() < (10, 0):
        raise NotImplementedError("torchao defines its MX kernels for compute capability 10 and newer only")
    return refusing(
        lambda x, format, scale: triton_to_mxfp8_dim0(x, inner_block_size=32, scaling_mode="floor"), AssertionError
    )


IMPLEMENTATIONS = {
    "fp8_matmul": {"torchao": fp8_matmul},
    "fp8_quant": {"torchao": fp8_quant},
    "mx_quant": {"torchao": mx_quant},
    "sparse24_fp8_matmul": {"torchao": sparse24_fp8_matmul},
}
