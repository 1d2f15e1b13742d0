"""TileLang (tile-ai/tilelang): a product written in it with the tiles of its examples for Hopper. Not run on a GPU
yet.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call, forcing

REQUIRES = ("tilelang",)
DEVICES = ("cuda",)

TILE = (128, 256, 64)
"""Rows, columns, and steps of K."""


def matmul(case: Any) -> Call:
    """`T.gemm` in a pipeline of three stages, of operands with K running fastest."""
    import tilelang
    import tilelang.language as T

    if case.dtype == "fp32":
        raise NotImplementedError("this product in TileLang takes bf16 and fp16")
    if case.options["epilogue"] != "none":
        raise NotImplementedError("this product in TileLang has no epilogue")
    M, N, K = (case.axes[axis] for axis in "MNK")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[case.dtype]
    rows, columns, step = TILE

    @T.prim_func  # type: ignore[untyped-decorator]  # TileLang has no types
    def product(
        A: T.Tensor((M, K), dtype),  # type: ignore[valid-type]  # a shape is a part of its types
        B: T.Tensor((N, K), dtype),  # type: ignore[valid-type]  # as above
        C: T.Tensor((M, N), dtype),  # type: ignore[valid-type]  # as above
    ) -> None:
        with T.Kernel(T.ceildiv(N, columns), T.ceildiv(M, rows), threads=256) as (x, y):
            a = T.alloc_shared((rows, step), dtype)
            b = T.alloc_shared((columns, step), dtype)
            acc = T.alloc_fragment((rows, columns), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, step), num_stages=3):
                T.copy(A[y * rows, k * step], a)
                T.copy(B[x * columns, k * step], b)
                T.gemm(a, b, acc, transpose_B=True)  # acc += A @ B.T
            T.copy(acc, C[y * rows, x * columns])

    compiled = tilelang.compile(product, out_idx=[2], target="cuda")

    def conversion(a: Any, b: Any, bias: Any, gated: bool) -> Any:
        return a.contiguous(), b.t().contiguous()

    def call(a: Any, b: Any, bias: Any, gated: bool) -> Any:
        return compiled(*conversion(a, b, bias, gated))

    return call if case.options["layout"] == "nt" else forcing(call, conversion)


IMPLEMENTATIONS = {"matmul": {"tilelang": matmul}}
