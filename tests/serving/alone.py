"""An answer of an engine by passes that are each read before the next is launched: any scheduler must give it."""

from __future__ import annotations

import torch
from kernelmark.suite.workloads._serving.engine import Engine
from kernelmark.suite.workloads._serving.protocol import Wanted
from kernelmark.suite.workloads._serving.scheduler import COLDEST


def alone(e: Engine, x: Wanted, end: int) -> list[int]:
    """The tokens of one request, which nothing runs beside; `end` is the token that ends an answer."""
    row = e.hold(len(x.prompt) + x.output)
    generator = torch.Generator().manual_seed(x.seed)
    given = e.prefill(torch.tensor([x.prompt], device=e.device), [row])
    found: list[int] = []
    while True:
        token = int(given.token[0])
        if x.temperature:
            shares = (given.logits[0].float().cpu() / max(x.temperature, COLDEST)).softmax(-1)
            token = int(torch.multinomial(shares, 1, generator=generator))
        found.append(token)
        if len(found) == x.output or (token == end and not x.ignore_eos):
            e.release(row)
            return found
        given = e.decode(torch.tensor([token], device=e.device), [row])
