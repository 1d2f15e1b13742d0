"""Kernels that we wrote in other languages: what of them can be seen without a GPU, where a language is installed.

An interpreter has to be chosen before Triton is imported, so this file is also a program.
"""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys

import pytest
from kernelmark.suite.catalog import Catalog

LANGUAGES = ("cutile", "helion", "tilelang")
NEEDED = {"cutile": "cuda.tile", "helion": "helion", "tilelang": "tilelang"}
CASES = {
    "attention": ({"B": 1, "H": 4, "Hkv": 2, "S": 200, "D": 64}, {"mask": "causal"}),
    "cross_entropy": ({"M": 4, "V": 100}, {}),
    "layer_norm": ({"B": 1, "S": 4, "D": 256}, {}),
    "matmul": ({"M": 100, "N": 200, "K": 120}, {}),
    "rms_norm": ({"B": 1, "S": 4, "D": 256}, {}),
    "softmax": ({"M": 4, "D": 100}, {}),
    "swiglu": ({"M": 4, "N": 100}, {}),
}


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that is not there
        return False


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_is_measured_where_it_is_named(language):
    """Nobody waits for its search, or its compiler, who did not ask for it."""
    mine = [x for x in Catalog.default().implementations if x.provider == language]
    assert mine
    assert all(x.on_request and x.environment == language and x.operator in CASES for x in mine)


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_a_kernel_lacks_is_said_before_its_language_is_loaded(language):
    operators = Catalog.default().operators
    for x in Catalog.default().implementations:
        if x.provider != language:
            continue
        axes, options = CASES[x.operator]
        for pass_ in set(operators[x.operator].passes) - {"forward"}:
            with pytest.raises(NotImplementedError, match="has no backward pass"):
                x.load()(operators[x.operator].case(axes, "bf16", pass_, **options))
    product = next(x for x in Catalog.default().implementations if (x.operator, x.name) == ("matmul", language))
    axes, _ = CASES["matmul"]
    wanted = {"takes bf16 and fp16": ("fp32", {}), "has no epilogue": ("bf16", {"epilogue": "swiglu"})}
    if language != "tilelang" or installed("tilelang"):  # its kernels are made with the case
        for said, (dtype, options) in wanted.items():
            with pytest.raises(NotImplementedError, match=said):
                product.load()(operators["matmul"].case(axes, dtype, "forward", **options))


@pytest.mark.parametrize("language", LANGUAGES)
def test_its_kernels_without_a_gpu(language):
    """Helion's are run in Triton's interpreter, cuTile's and TileLang's compiled for Hopper."""
    if not installed(NEEDED[language]):
        pytest.skip(f"{language} is not installed")
    environment = {x: y for x, y in os.environ.items() if not x.startswith("COV")}
    done = subprocess.run(
        [sys.executable, __file__, language],
        env=environment | {"TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    mine = [x.operator for x in Catalog.default().implementations if x.provider == language]
    assert done.stdout.split() == mine


def of_helion() -> None:
    """Runs what Helion makes of each kernel, at its default configuration, in fp32: the interpreter has no
    libdevice and no products in bf16.
    """
    import types

    import torch
    import triton.language as tl
    from kernelmark.baselines import _helion_kernels as kernels
    from torch.nn import functional

    device = types.SimpleNamespace(
        **{name: lambda x, name=name: getattr(tl, name)(x) for name in ("exp", "exp2", "log", "rsqrt")}
    )

    def launch(kernel, grid, *arguments, num_warps=4, num_stages=1, **more):
        kernel.fn.__globals__["libdevice"] = device
        kernel[grid](*arguments, **more)

    def run(function, *arguments):
        bound = kernels.searched(function).bind(arguments)
        return bound.compile_config(bound.config_spec.default_config())(*arguments, _launcher=launch)

    torch.manual_seed(1)
    x, y = torch.randn(2, 35, 96)
    weight, bias = torch.randn(2, 96)
    q, k, v = torch.randn(4, 70, 16), torch.randn(2, 70, 16), torch.randn(2, 70, 16)
    target = torch.randint(0, 96, (35,))
    a, b = torch.randn(40, 56), torch.randn(56, 48)
    for causal in (False, True):
        wanted = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=causal, enable_gqa=True
        )
        torch.testing.assert_close(run(kernels.attention, q, k, v, causal), wanted[0])
    for found, wanted in (
        (run(kernels.losses, x, target), functional.cross_entropy(x, target, reduction="none")),
        (run(kernels.layer_norm, x, weight, bias, 1e-5), functional.layer_norm(x, (96,), weight, bias, 1e-5)),
        (run(kernels.product, a, b), a @ b),
        (run(kernels.rms_norm, x, weight, 1e-6), functional.rms_norm(x, (96,), weight, 1e-6)),
        (run(kernels.softmax, x), x.softmax(-1)),
        (run(kernels.swiglu, x, y), functional.silu(x) * y),
    ):
        torch.testing.assert_close(found, wanted)
    from kernelmark.baselines.helion import IMPLEMENTATIONS

    print(*IMPLEMENTATIONS)


def of_cutile() -> None:
    """Compiles each kernel as it is launched for a case."""
    import cuda.tile as ct
    import torch
    from cuda.tile.compilation import (
        ArrayConstraint,
        CallingConvention,
        ConstantConstraint,
        KernelSignature,
        ScalarConstraint,
        export_kernel,
    )
    from kernelmark.baselines import cutile
    from kernelmark.suite.measure.workbench import Workbench

    def constraint(x):
        if isinstance(x, float):
            return ScalarConstraint(ct.float32)
        if isinstance(x, int):
            return ConstantConstraint(x)
        return ArrayConstraint(
            ct.bfloat16,
            x.dim(),
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=[1 if y == 1 else None for y in x.stride()],
            base_addr_divisible_by=16,
        )

    def compiled(kernel, grid, *arguments):
        out = io.BytesIO()
        signature = KernelSignature([*map(constraint, arguments)], CallingConvention.cutile_python_v1())
        export_kernel(kernel, [signature], out, gpu_code="sm_90", output_format="cubin")
        assert len(out.getvalue()) > 1000

    cutile._launched = compiled
    for name, kinds in cutile.IMPLEMENTATIONS.items():
        operator = Catalog.default().operators[name]
        axes, options = CASES[name]
        case = operator.case(axes, "bf16", "forward", **options)
        bench = Workbench.build(operator, case, torch.device("cpu"), seed=1)
        bench.call(kinds["cutile"](case))()
        print(name)


def of_tilelang() -> None:
    """Lowers each kernel to CUDA for Hopper: both with products take its matrix units and its tensor memory
    accelerator.
    """
    import tilelang
    from kernelmark.baselines.tilelang import IMPLEMENTATIONS
    from tilelang import tvm

    target = {"kind": "cuda", "arch": "sm_90a"}

    def lowered(kernel, **_):
        with tvm.target.Target(target):
            made.append(tilelang.lower(kernel, target=target, enable_device_compile=False).kernel_source)

    made: list[str] = []
    tilelang.compile = lowered
    for name, kinds in IMPLEMENTATIONS.items():
        axes, options = CASES[name]
        kinds["tilelang"](Catalog.default().operators[name].case(axes, "bf16", "forward", **options))
        if name != "rms_norm":
            assert "wgmma" in made[-1]
            assert "tma_load" in made[-1]
        print(name)


if __name__ == "__main__":
    globals()[f"of_{sys.argv[1]}"]()
