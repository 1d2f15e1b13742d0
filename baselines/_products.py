"""What the files of libraries share about matrix products: their demands on how 8-bit operands lie in memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ._terms import Call, forcing, keeping


def rows_of_k(a: Any, b: Any) -> tuple[Any, Any]:
    """a (M, K) and b (K, N) with K running fastest in memory; copies if need be."""
    return a.contiguous(), b.t().contiguous().t()


def by_rows_of_k(case: Any, call: Call) -> Call:
    """`call` of `fp8_matmul`, whose operands in layouts other than nt are copied before, within what is timed."""
    if case.options["layout"] == "nt":
        return call

    def laid(a: Any, b: Any, **rest: Any) -> Any:
        a, b = rows_of_k(a, b)
        return call(a=a, b=b, **rest)

    return forcing(laid, lambda a, b, **rest: rows_of_k(a, b))


def without_padding() -> Call:
    """The weight's scales of blocks, `scale_b` (⌈K / 128⌉, ⌈N / 128⌉), for libraries that take their address and
    count rows of ⌈K / 128⌉. Ours are padded to four, as cuBLAS takes them; made once, as a model's are.
    """
    return keeping(lambda scale_b: scale_b.t().contiguous().t(), "scale_b")


def has_recipe(case: Any, library: str, recipes: Collection[str]) -> None:
    """Raises NotImplementedError where the library has not the case's kind of scales."""
    recipe = case.options["recipe"]
    if recipe not in recipes:
        raise NotImplementedError(f"{library} has no scales of kind {recipe!r} here, only {', '.join(recipes)}")
