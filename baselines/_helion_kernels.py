"""A matrix product in Helion, as its documentation writes one. Imported only to be run."""

import helion
import helion.language as hl
import torch  # noqa: TID253  # this file is imported where the product is run, never by listing


@helion.kernel(static_shapes=True)  # type: ignore[untyped-decorator]  # Helion has no types
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) @ b (K, N) in a's dtype, summed in fp32."""
    M, K = a.size()
    _, N = b.size()
    out = torch.empty([M, N], dtype=a.dtype, device=a.device)
    for rows, columns in hl.tile([M, N]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for depth in hl.tile(K):
            acc = torch.addmm(acc, a[rows, depth], b[depth, columns])  # acc += A @ B
        out[rows, columns] = acc.to(a.dtype)
    return out
