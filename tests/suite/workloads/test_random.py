"""Random numbers of a workload: of seeds of any size, the same as ever."""

from __future__ import annotations

import torch
from kernelmark.suite.workloads._random import generator


def test_a_generator_is_of_seed_and_number() -> None:
    def drawn(seed: int, number: int = 0) -> list[int]:
        return torch.randint(0, 1 << 40, (3,), generator=generator(seed, "cpu", number)).tolist()

    expected = torch.randint(0, 1 << 40, (3,), generator=torch.Generator().manual_seed(12)).tolist()
    assert drawn(12) == drawn(10, 2) == drawn(13, -1) == drawn(12 + (1 << 62)) == expected
    assert drawn(12) != drawn(12, 1)
    assert drawn((1 << 62) - 1, 5)
