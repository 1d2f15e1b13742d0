"""Training whose operations repeat bitwise: on a GPU the backward pass of attention adds up in an order that
changes, unless PyTorch is asked for deterministic algorithms.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ..measure.verify import Unavailable

OPTION = "deterministic"
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""PyTorch refuses products on CUDA under that switch where a process did not begin with this variable."""
WORKSPACES = (":4096:8", ":16:8")


@contextlib.contextmanager
def held(asked: bool, kind: str) -> Iterator[None]:
    """Inside, where `asked`, PyTorch's switch for deterministic algorithms holds on a device of that kind; our own
    kernels go by it, too. It is as before afterwards.

    Raises `Unavailable` where the process did not begin with the variable that PyTorch wants on CUDA, and
    NotImplementedError where something inside has no deterministic form.
    """
    import torch

    if not asked:
        yield
        return
    if kind == "cuda" and os.environ.get(CUBLAS) not in WORKSPACES:
        raise Unavailable(f"deterministic products need {CUBLAS}={WORKSPACES[0]} in the environment of the run")
    before = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    # With warnings alone PyTorch's own attention would add up in a changing order.
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # no bit of an answer is of such memory
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise NotImplementedError(str(error).partition(". ")[0]) from error
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = filled
