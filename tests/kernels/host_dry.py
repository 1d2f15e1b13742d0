"""What a call of ours costs the host without a GPU: `python tests/kernels/host_dry.py --json FILE`.

The calls, shapes and strides are those of `host_time.py`. Tensors are the CPU's, kernels are neither compiled nor
run: a launch goes through all of ours and of Triton's launcher in Python, and ends where that calls C. So what is
left out is the driver, the device's allocator and the thread in which autograd calls backward on a GPU. It is to
compare two commits, not with PyTorch's operators. Microseconds of the thread's own time a call, the lowest of all
rounds: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import importlib.util
import json
import pstats
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from kernelmark.kernels import _common, _hopper, _in_c, _launch
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

nothing: Any = "".format
"""A function in C that takes anything."""
nowhere: Any = partial({}.get, None)
"""What a CPU's tensors have for the number of their device, from C."""


def host_time() -> Any:
    """The module of that name beside this one."""
    spec = importlib.util.spec_from_file_location("host_time", Path(__file__).with_name("host_time.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["host_time"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Driver:
    """Of a Hopper GPU, as far as a launch asks."""

    utils = SimpleNamespace(
        launch=nothing,
        build_signature_metadata=lambda signature: b"",
        fill_tma_descriptor=nothing,
        fill_tma_descriptor_tiled=nothing,
    )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _type(x: Any) -> Any:
    """What Triton calls the type of an argument, as far as its launcher cares."""
    if isinstance(x, tuple):
        return tuple(map(_type, x))
    if isinstance(x, TensorDescriptor | _hopper.TensorMap):
        return f"tensordesc<bf16[{','.join(map(str, x.block_shape))}]>"
    if isinstance(x, torch.Tensor):
        return "*bf16"
    if isinstance(x, bool | str | None) or not isinstance(x, int | float):
        return "constexpr"
    return "i64" if isinstance(x, int) else "fp32"


def _launcher(kernel: Any, arguments: tuple[Any, ...]) -> Any:
    """Triton's own for a kernel of such arguments."""
    signature = dict(enumerate(map(_type, arguments)))
    maps = sum(str(x).startswith("tensordesc") for x in signature.values())
    says = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    metadata = SimpleNamespace(
        tensordesc_meta=[says] * maps,
        num_ctas=1,
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=False,
    )
    return nvidia.CudaLauncher(SimpleNamespace(constants={}, signature=signature, fn=kernel), metadata)


def dry() -> None:
    """From here on tensors of a CPU are launched as a Hopper GPU's would be."""
    driver.set_active(Driver())
    nvidia.PyKernelArg = nvidia.ARG_TUPLE = nvidia.ARG_KERNEL = nvidia.ARG_CONSTEXPR = dict
    nvidia.annotate_arguments = list

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        given = (*arguments, *(options[name] for name in self.arg_names[len(arguments) :]))
        return SimpleNamespace(function=1, packed_metadata=(4, 1, 0), run=_launcher(self, given))

    JITFunction.run = run
    torch.cuda.current_device = lambda: None  # where a CPU's tensors are
    torch.cuda.device = lambda device: contextlib.nullcontext()
    _launch._stream = _hopper.current_stream = {None: 0}.__getitem__
    for module in (_launch, _common, _hopper):
        name = "current_device" if module is _hopper else "_device"
        setattr(module, name, nowhere)
    _launch._DEVICES = ("cpu",)
    _launch._empty = torch._C._dynamo.guards._empty_strided_cpu
    _common.INTERPRETED = True  # only so that tensors of a CPU are taken


def lowest(call: Any, rounds: int, calls: int) -> float:
    """µs of this thread's time a call."""
    found = []
    for _ in range(rounds + 1):
        gc.disable()
        begin = time.thread_time_ns()
        for _ in range(calls):
            call()
        found.append((time.thread_time_ns() - begin) / calls / 1e3)
        gc.enable()
    return min(found[1:])


_common.multiprocessors = lambda tensor: 132
_common.capability = lambda device: (9, 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--only", action="append")
    parser.add_argument("--profile", action="store_true", help="where the time of each row goes")
    parser.add_argument("--without-c", action="store_true", help="as where there is no C compiler")
    given = parser.parse_args(arguments)
    if given.without_c:
        _in_c.compiled = lambda: None
    times = host_time()
    times.DTYPES["cpu"] = torch.bfloat16
    cpu, rows = torch.device("cpu"), []
    every = list(times.operators(width=16, vocabulary=64))  # products are the CPU's own
    adamw = times.ours("optimizer.adamw")
    dry()
    made: list[tuple[str, str, Any]] = []
    for one in every:
        for way in ("forward", "both", "views"):
            inputs = times.made(one, cpu, way == "views")
            made.append((one.name, way, lambda i=inputs, o=one, w=way: times.called(o, o.ours, i, w != "forward")))
    lists = [[torch.randn(512, dtype=torch.bfloat16) for _ in range(148)] for _ in range(3)]
    gradients = [[torch.randn_like(x) for x in lists[0]] for _ in range(2)]

    def step() -> None:
        gradients.reverse()
        # New objects at other addresses, as an eager step's are.
        adamw(lists[0], [x.detach() for x in gradients[0]], lists[1], lists[2], step=1)

    made.append(("adamw", "new gradients", step))
    made.append(("adamw", "their making", lambda: [x.detach() for x in gradients[0]]))
    for name, way, call in made:
        if given.only and name not in given.only:
            continue
        rows.append({"operator": name, "way": way, "ours": lowest(call, given.rounds, 10)})
        print(f"{name:28}{way:15}{rows[-1]['ours']:9.1f}", flush=True)
        if given.profile:
            seen = cProfile.Profile()
            seen.enable()
            for _ in range(300):
                call()
            seen.disable()
            pstats.Stats(seen).strip_dirs().sort_stats("tottime").print_stats(22)
    if given.json:
        about = {"torch": torch.__version__, "triton": triton.__version__, "unit": "µs", "python": sys.version}
        given.json.write_text(json.dumps({**about, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
