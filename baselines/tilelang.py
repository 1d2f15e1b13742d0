"""TileLang (tile-ai/tilelang): kernels written in it after its documents, compiled with nvcc at the first call.

Its package ships a compiler and no kernels: its examples stand in its repository. So it is measured on request, as
plan `languages` does. Its kernels compile for Hopper. On an H200 three products and two norms ran and were right
(`20261127-123247-ebce`); its other kernels were not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from . import _blocks
from ._terms import DTYPES, Call, forcing, forward_only

REQUIRES = ("tilelang", "nvidia-cuda-nvcc")
ENVIRONMENT = "tilelang"
DEVICES = ("cuda",)
ON_REQUEST = ("tilelang",)

TILE = (128, 256, 64)
"""Rows, columns, and steps of K."""


@forward_only("this product in TileLang")
def matmul(case: Any) -> Call:
    """`T.gemm` in a pipeline of three stages, of operands with K running fastest."""
    import tilelang
    import tilelang.language as T

    if case.dtype == "fp32":
        raise NotImplementedError("this product in TileLang takes bf16 and fp16")
    if case.options["epilogue"] != "none":
        raise NotImplementedError("this product in TileLang has no epilogue")
    M, N, K = (case.axes[axis] for axis in "MNK")
    dtype = DTYPES[case.dtype]
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


@forward_only("this kernel in TileLang")
def rms_norm(case: Any) -> Call:
    """A row a block, which its threads hold in fp32."""
    import tilelang
    import tilelang.language as T

    D = case.axes["D"]
    if D % 128 or D > 32768:
        raise NotImplementedError("this kernel in TileLang takes rows of multiples of 128 up to 32768 columns")
    M, dtype = case.axes["B"] * case.axes["S"], DTYPES[case.dtype]

    @T.prim_func  # type: ignore[untyped-decorator]  # TileLang has no types
    def norm(
        X: T.Tensor((M, D), dtype),  # type: ignore[valid-type]  # a shape is a part of its types
        W: T.Tensor((D,), dtype),  # type: ignore[valid-type]  # as above
        eps: T.float32,
        Y: T.Tensor((M, D), dtype),  # type: ignore[valid-type]  # as above
    ) -> None:
        with T.Kernel(M, threads=128) as row:
            x = T.alloc_fragment((1, D), "float32")
            squares = T.alloc_fragment((1, D), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(X[row, 0], x)
            for i, j in T.Parallel(1, D):
                squares[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(squares, total, dim=1)
            for i, j in T.Parallel(1, D):
                y = x[i, j] * T.rsqrt(total[i] / D + eps) * T.cast(W[j], "float32")
                Y[row + i, j] = T.cast(y, dtype)

    compiled = tilelang.compile(norm, out_idx=[3], target="cuda")
    return lambda x, weight, eps: compiled(x.view(M, D), weight, eps).view(x.shape)


@forward_only("this attention in TileLang")
def attention(case: Any) -> Call:
    """Attention with running maximum and sum (Dao et al., arXiv 2205.14135): 128 queries of a head a block."""
    import tilelang
    import tilelang.language as T

    if case.dtype == "fp32":
        raise NotImplementedError("this attention in TileLang takes bf16 and fp16")
    _blocks.takes(case, "this attention in TileLang")
    B, H, Hkv, S, D = (case.axes[axis] for axis in ("B", "H", "Hkv", "S", "D"))
    Sk, dtype, causal = _blocks.keys(case), DTYPES[case.dtype], case.options["mask"] == "causal"
    if D not in (64, 128):
        raise NotImplementedError("this attention in TileLang takes head dimensions of 64 and 128")
    scale = 1.4426950408889634 / D**0.5
    rows = columns = 128

    @T.prim_func  # type: ignore[untyped-decorator]  # as above
    def attended(
        Q: T.Tensor((B, H, S, D), dtype),  # type: ignore[valid-type]  # as above
        K: T.Tensor((B, Hkv, Sk, D), dtype),  # type: ignore[valid-type]  # as above
        V: T.Tensor((B, Hkv, Sk, D), dtype),  # type: ignore[valid-type]  # as above
        O: T.Tensor((B, H, S, D), dtype),  # type: ignore[valid-type]  # noqa: E741  # attention's letters
    ) -> None:
        with T.Kernel(T.ceildiv(S, rows), H, B, threads=256) as (x, y, z):
            q = T.alloc_shared((rows, D), dtype)
            k = T.alloc_shared((columns, D), dtype)
            v = T.alloc_shared((columns, D), dtype)
            scores = T.alloc_fragment((rows, columns), "float32")
            p = T.alloc_fragment((rows, columns), dtype)
            acc = T.alloc_fragment((rows, D), "float32")
            largest = T.alloc_fragment((rows,), "float32")
            before = T.alloc_fragment((rows,), "float32")
            shrunk = T.alloc_fragment((rows,), "float32")
            some = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.copy(Q[z, y, x * rows, 0], q)
            T.clear(acc)
            T.clear(total)
            T.fill(largest, -T.infinity("float32"))
            # A tile of queries sees no key behind its last one.
            end = (
                T.min(T.ceildiv(Sk, columns), T.ceildiv((x + 1) * rows, columns))
                if causal
                else T.ceildiv(Sk, columns)
            )
            for step in T.Pipelined(end, num_stages=2):
                T.copy(K[z, y // (H // Hkv), step * columns, 0], k)
                for i, j in T.Parallel(rows, columns):
                    seen = step * columns + j < Sk
                    if causal:
                        seen = T.And(seen, x * rows + i >= step * columns + j)
                    scores[i, j] = T.if_then_else(seen, 0, -T.infinity("float32"))
                T.gemm(q, k, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)  # scores += Q @ K.T
                T.copy(largest, before)
                T.reduce_max(scores, largest, dim=1, clear=False)
                for i in T.Parallel(rows):
                    shrunk[i] = T.exp2((before[i] - largest[i]) * scale)
                for i, j in T.Parallel(rows, columns):
                    scores[i, j] = T.exp2((scores[i, j] - largest[i]) * scale)
                T.reduce_sum(scores, some, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * shrunk[i] + some[i]
                T.copy(scores, p)
                for i, j in T.Parallel(rows, D):
                    acc[i, j] *= shrunk[i]
                T.copy(V[z, y // (H // Hkv), step * columns, 0], v)
                T.gemm(p, v, acc, policy=T.GemmWarpPolicy.FullRow)  # acc += P @ V
            for i, j in T.Parallel(rows, D):
                acc[i, j] /= total[i]
            T.copy(acc, O[z, y, x * rows, 0])

    compiled = tilelang.compile(attended, out_idx=[3], target="cuda")

    def heads(q: Any, k: Any, v: Any, mask: str) -> Any:
        return [x.contiguous() for x in (q, k, v)]

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        return compiled(*heads(q, k, v, mask))

    return call if case.options.get("storage", "bhsd") == "bhsd" else forcing(call, heads)


IMPLEMENTATIONS = {
    "attention": {"tilelang": attention},
    "matmul": {"tilelang": matmul},
    "rms_norm": {"tilelang": rms_norm},
}
