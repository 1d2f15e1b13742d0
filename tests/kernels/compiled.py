"""Compiles kernels for a GPU that is not here: `python compiled.py 9.0 attention rms_norm` prints one JSON list.

Without operators it compiles all that run on one device; with `--few` before the target for the cases of the quick
plan alone. `gate.py` judges what it finds.

Targets are NVIDIA's compute capabilities (7.5, 9.0) and AMD's architectures (gfx942).

Triton asks a driver what to compile for; the one here says that and nothing else. Tensors are the CPU's, and a
launch ends where the compiled kernel would be loaded, so that all comes from the very calls that a user makes.
Results are whatever was in memory: nothing may depend on them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from kernelmark.kernels import _common
from kernelmark.registry.errors import InputError, unknown
from kernelmark.registry.store.record import Case
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.operator import Operator
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

OWN = Catalog.default().roots[0]
MULTIPROCESSORS = 132
SMALL = {"B": 1, "M": 64, "T": 2, "S": 2048}
"""Sizes that decide nothing of a kernel but how often it runs; the other ones stay as the plan has them."""
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": (
        *(
            {"B": 1, "H": 2, "Hkv": 1, "S": S, "D": D, "mask": mask}
            for S, D, mask in (
                (1024, 64, "full"), (1024, 256, "causal"), (1000, 128, "causal"), (2048, 128, "full")
            )
        ),
        {"B": 1, "H": 2, "Hkv": 1, "S": 2048, "D": 64, "sinks": True, "cap": 50, "storage": "bshd"},
        # As context parallel attention has them: a rank's queries and more keys.
        {"B": 1, "H": 2, "Hkv": 1, "S": 1024, "Sk": 2048, "D": 128, "mask": "full"},
    ),
    "attention_mla": (
        {"B": 1, "H": 2, "S": 2048, "D": 192, "Dv": 128, "mask": "full"},
        {"B": 1, "H": 2, "S": 1000, "D": 96, "Dv": 64},
        {"B": 1, "H": 2, "S": 2048, "D": 64, "Dv": 128},
    ),
    # Pages of fewer tokens than a block has are loaded to slices of a buffer.
    "attention_mla_decode": tuple(
        {"B": 1, "Sq": 2, "H": 16, "S": 2048, "C": 512, "R": 64, "page": page} for page in (64, 32)
    ),
    "attention_varlen": (
        *({"B": 2, "H": 2, "Hkv": Hkv, "S": 2048, "D": D} for Hkv, D in ((1, 64), (2, 256))),
        {"B": 2, "H": 2, "Hkv": 1, "S": 2048, "D": 64, "W": 128, "sinks": True, "keys": "prefix"},
        {"B": 2, "H": 2, "Hkv": 1, "S": 2048, "D": 128, "W": 300, "cap": 50, "mask": "full"},
        # Heads of other columns than a tile.
        {"B": 2, "H": 2, "Hkv": 1, "S": 2048, "D": 80, "sinks": True},
        {"B": 2, "H": 2, "Hkv": 1, "S": 2048, "D": 40, "W": 100, "cap": 50, "mask": "full", "storage": "packed"},
    ),
    "attention_sparse": tuple({"B": 1, "H": 2, "Hkv": 1, "S": 2048, "D": D} for D in (64, 256)),
    "attention_window": ({"B": 1, "H": 2, "Hkv": 1, "S": 2048, "D": 64, "W": 300},),
    "attention_decode": (
        *(
            {"B": 1, "Sq": Sq, "H": 8, "Hkv": Hkv, "S": 2048, "D": D, "page": page}
            for Sq, Hkv, D, page in (
                (1, 2, 128, 0), (4, 1, 128, 64), (1, 8, 64, 0), (1, 2, 256, 16), (1, 2, 256, 64),
            )
        ),
        {"B": 1, "Sq": 4, "H": 8, "Hkv": 1, "S": 2048, "D": 64, "page": 64, "sinks": True, "cap": 50},
    ),
    "matmul": (
        {"M": 1024, "N": 4096, "K": 1024, "layout": "tn", "epilogue": "bias"},
        {"M": 1024, "N": 2112, "K": 1024},  # tiles of 192 rows
        {"M": 512, "N": 4096, "K": 1024, "layout": "nt", "epilogue": "swiglu"},
        {"M": 1, "N": 4096, "K": 1024},
        {"M": 1, "N": 1024, "K": 999},
        {"M": 8, "N": 4096, "K": 1024, "epilogue": "swiglu"},
        {"M": 16, "N": 1001, "K": 999, "epilogue": "bias"},
    ),
    "linear": ({"M": 2048, "N": 1024, "K": 512, "bias": True},),
    "qkv_rope": ({"B": 2, "S": 1024, "K": 512, "H": 4, "Hkv": 2, "D": 64},),
    "gate_up_swiglu": (
        {"M": 2048, "N": 4096, "K": 512},
        {"M": 64, "N": 16384, "K": 1024},  # 64 rows and both factors' 256 columns
        {"M": 100, "N": 1001, "K": 999},
    ),
    "fp8_matmul": (
        {"M": 2048, "N": 4096, "K": 1024, "recipe": "tile"},
        {"M": 2048, "N": 4096, "K": 1024, "recipe": "group", "layout": "tn"},
    ),
    "fp8_quant": tuple(
        {"M": 2048, "N": 4096, "granularity": x} for x in ("block", "tile", "column", "both", "tile_both")
    ),
    "grouped_fp8_matmul": (
        {"E": 2, "M": 64, "N": 256, "K": 256, "layout": "masked", "recipe": "row"},
        {"E": 2, "M": 64, "N": 250, "K": 256, "layout": "masked", "recipe": "row"},
    ),
    "mx_matmul": (
        {"M": 64, "N": 16384, "K": 8192, "format": "mxfp8"},
        {"M": 16, "N": 2880, "K": 2880, "format": "nvfp4"},
        {"M": 64, "N": 2048, "K": 4096, "format": "nvfp4"},
    ),
    "moe": (
        *({"M": M, "D": 256, "F": 256, "E": 4, "K": 2, "dtype": "e4m3"} for M in (16, 64, 512)),
        {"M": 512, "D": 256, "F": 256, "E": 4, "K": 2, "dtype": "bf16"},
        *(
            {"M": M, "D": 256, "F": 256, "E": 4, "K": 2, "dtype": x, "activation": "clamped"}
            for M, x in ((16, "bf16"), (512, "bf16"), (512, "e4m3"))
        ),
    ),
    "quantized_activation": ({"M": 64, "K": 20000}, {"M": 64, "K": 4096, "activation": "swiglu"}),
    "gated_delta_rule": tuple({"B": 1, "S": 256, "H": 2, "K": K, "D": D} for K, D in ((64, 64), (256, 100))),
    "linear_attention": ({"B": 1, "S": 2048, "H": 2, "K": 256, "D": 256},),
    "rms_norm": tuple({"B": 1, "S": S, "D": D} for S, D in ((256, 5120), (256, 5001), (256, 1001), (64, 65536))),
    "gated_rms_norm": tuple({"B": 1, "S": 64, "D": D, "G": 1} for D in (100001, 65536)),
    "softmax": ({"M": 256, "D": 5001}, {"M": 256, "D": 50257}, {"M": 64, "D": 131072}),
    "cross_entropy": ({"M": 256, "V": 50257}, {"M": 256, "V": 1001}),
    "fused_linear_cross_entropy": ({"M": 256, "D": 64, "V": 50304}, {"M": 256, "D": 64, "V": 128256}),
}  # fmt: skip
"""Shapes beside the quick plan's, for which tiles are chosen otherwise; 16-bit numbers if none are named, both
passes."""


def beside_quantization(kernels: Any, given: Mapping[str, Any]) -> None:
    """What a layer in 8 bits has in the same launch as a matrix that is quantized both ways."""
    x = given["x"]
    if given["granularity"] != "both":
        return
    of_rows, of_columns = torch.ones(x.shape[0]), x[0]
    kernels.both_summed(x)
    kernels.rows_both(x)
    kernels.rows_both_summed(x)
    kernels.norm_both(x, of_rows, of_columns)
    kernels.layer_norm_both(x, of_rows, of_rows, of_columns, of_columns)
    kernels.swiglu_both(x, x)
    kernels.gelu_both(x)
    kernels.gelu_gradient_both_summed(x, x)


def beside_norms(kernels: Any, given: Mapping[str, Any]) -> None:
    """With an addition before, and without the norm itself."""
    x, weight, bias = (given[name].detach() for name in ("x", "weight", "bias"))
    kernels.add_layer_norm(x, x, weight, bias)
    h, *moments = kernels.add_moments(x, x)
    kernels.gradients(x, x, h, weight, *moments)


def beside_layers(kernels: Any, given: Mapping[str, Any]) -> None:
    """Gradients of a bias and of an embedding."""
    x = given["x"].detach()
    kernels.sums_of_columns(x)
    kernels.add_rows(torch.zeros_like(x), x, torch.zeros(len(x), dtype=torch.int64))


def beside_products(kernels: Any, given: Mapping[str, Any]) -> None:
    """Of few rows, with what a step of decoding has around it."""
    a, b = given["a"], given["b"]
    if len(a) > 16 or not kernels.rows_here(a.device):
        return
    M = len(a)
    squares = torch.ones(M, 512)
    weights: list[tuple[torch.Tensor, torch.Tensor | None]] = [(b, None)]
    if b.stride(0) == 1 and kernels.rows_here(a.device, True):
        weights.append((b.t().to(torch.float8_e4m3fn).t(), torch.ones(b.shape[1])))
    for weight, scale in weights:
        kernels.rows_added(a, weight, a.new_zeros(M, b.shape[1]), a.new_zeros(b.shape[1]), scale)
        for gated in (False, True)[: 2 - b.shape[1] % 2]:
            kernels.rows_normed(a, squares, weight, 1e-5, gated, scale)
        if b.shape[1] % 128 or b.shape[1] <= 4 * 128:  # heads of 128, of which two are keys' and two values'
            continue
        cache, turns = a.new_zeros(2, 64, 2, 128), a.new_zeros(64, 64)
        where = torch.zeros(M, 2, dtype=torch.int32), torch.ones(M, dtype=torch.int32)
        kernels.rows_turned(a, squares, weight, turns, turns, cache, cache.clone(), *where, 1e-6, scale)


def beside_decoding(kernels: Any, given: Mapping[str, Any]) -> None:
    """Decoding by shares, which the device takes of batches too large for here."""
    q, cache = given["q"], given["k_cache"]
    rows, page = q.shape[1] * q.shape[2] // cache.shape[2], 0 if given["block_table"] is None else cache.shape[1]
    if kernels.fit_for(rows, q.shape[3], q.element_size(), page, kernels.capability(q.device)) is not None:
        kernels.launch(**given, shares=2)


def beside_attention(kernels: Any, given: Mapping[str, Any]) -> None:
    """The same of two chunks of queries, to keys that come while it runs."""
    from kernelmark.kernels.attention._as_they_come import Chunks
    from kernelmark.kernels.attention._dispatch import hopper_modules

    q, k, v = (given[x] for x in "qkv")
    hopper, S = hopper_modules(q.device), q.shape[2]
    if hopper is None or k.shape[2] != S or S % 512 or not hopper.common.fits(q, k, v):
        return
    signals = Chunks(0, 2, given["mask"], S // 4, hopper.common.KEYS, q.device).begin()
    q = q[:, :, : S // 2]
    hopper.forward.forward_as_they_come(
        q, k, v, torch.empty_like(q), torch.empty(q.shape[:3]), given["mask"] == "causal", q.shape[1], *signals
    )


BESIDE: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "attention": beside_attention,
    "attention_decode": beside_decoding,
    "fp8_quant": beside_quantization,
    "layer_norm": beside_norms,
    "linear": beside_layers,
    "matmul": beside_products,
}
"""What a kernel's file has beside its operator."""

NOTHING: dict[str, Any] = dict.fromkeys(("shared", "wide", "narrow", "spilled", "matrix", "early"), 0) | {
    "module": "",
    "kernel": "",
    "products": False,
}
"""Of what did not compile."""


def everywhere() -> list[str]:
    """All operators of one device that have a kernel; those between ranks need their peers' memory."""
    catalog = Catalog.default()
    return [x for x in OWN.files("kernels") if not catalog.operator(x).distributed]


def target_named(name: str) -> GPUTarget:
    """Of a compute capability, "9.0", or an AMD architecture, "gfx942", of 64 threads a warp for gfx9."""
    if name.startswith("gfx"):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    major, minor = name.split(".")
    return GPUTarget("cuda", 10 * int(major) + int(minor), 32)


class Driver:
    """Of a device of that target, as far as compiling needs it."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Forgetful(dict):
    """Takes nothing in: what is kept would be launched past the just-in-time compiler."""

    def __setitem__(self, key: Any, value: Any) -> None: ...


STAGED = "_matmul_hopper", "_grouped_hopper", "_cross_entropy_hopper"
"""Modules whose consumers load from the stages that they give up."""
TARGET = re.compile(r"\d+\.\d|gfx[0-9a-f]+")
MATRIX = re.compile(r"\bwgmma\.mma_async|\btcgen05\.mma|\bmma\.sync|\bv_(?:s?mfma|smfmac|s?wmma|swmmac)_")
"""Instructions of the units that multiply matrices: Hopper's, Blackwell's, the older ones', and AMD's."""
PRODUCT = re.compile(r"(?:tt\.dot|tt\.dot_scaled|ttng\.\w*(?:dot|mma)) .*")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SPILLED_REGISTERS = re.compile(r"\.vgpr_spill_count:\s*(\d+)")


def products(kernel: Any, target: GPUTarget) -> bool:
    """Whether a compiled kernel has a product of matrices that its target has instructions for: of 16 and 8 bits,
    and of fp32 as TF32 from Ampere on.
    """
    text = kernel.asm.get("ttir") or kernel.asm.get("ttgir") or ""
    tf32 = target.backend == "cuda" and target.arch >= 80
    for line in PRODUCT.findall(text):
        kinds = re.findall(r"x(bf16|f16|f32|f8\w+|i8|ui8)[,>]", line)
        if kinds and (kinds[0] != "f32" or (tf32 and "inputPrecision = tf32" in line)):
            return True
    return False


def spilled(kernel: Any, log: str) -> int:
    """Bytes of registers that did not fit and went to memory and back, as ptxas says; of AMD's, 4 a register."""
    if (gcn := kernel.asm.get("amdgcn")) is not None:
        return 4 * sum(map(int, SPILLED_REGISTERS.findall(gcn)))
    return sum(int(x) + int(y) for x, y in SPILLED.findall(log))


INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/")
"""Of SASS: its words, and the upper half of its code, whose bits from 41 on say what it waits for."""


def early(cubin: bytes) -> int:
    """How often a thread of an NVIDIA kernel arrives at a barrier in shared memory while loads from there, of the
    warps that met for that, are still under way. What other threads store then comes after these loads, what the
    tensor memory accelerator copies need not.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = subprocess.run(
            [tool, "--dump-sass", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    under_way: set[int] = set()
    met, found = False, 0
    for words, code in INSTRUCTION.findall(sass):
        control = int(code, 16) >> 41
        written, waited = control >> 5 & 7, control >> 11 & 63
        under_way -= {x for x in range(6) if waited >> x & 1}
        if "MEMBAR" in words or "FENCE" in words:
            under_way.clear()
        if "LDS" in words and written < 6:
            under_way.add(written)
        if "BAR.SYNC" in words:
            met = bool(under_way)
        if "SYNCS.ARRIVE.TRANS64.A1T0" in words:
            found += met
    return found


def as_on(target: GPUTarget, operator: Operator, dtype: str) -> str:
    """A case's dtype on a target: before Ampere fp16 in place of bf16, which such GPUs do not multiply."""
    old = target.backend == "cuda" and target.arch < 80
    return "fp16" if old and dtype == "bf16" and "fp16" in operator.dtypes else dtype


def cases(
    operator: Operator, plans: Sequence[str], target: GPUTarget, besides: Sequence[dict[str, Any]]
) -> list[Case]:
    """The plans' and those besides, each forward and, with gradients, backward."""
    wanted = [
        ({axis: min(size, SMALL.get(axis, size)) for axis, size in x.axes.items()}, x.options, x.dtype)
        for plan in plans
        for grid in operator.plans[plan]
        for x in operator.expand(grid)
    ]
    for given in besides:
        axes = {name: given[name] for name in operator.axes if name in given}
        options = {name: value for name, value in given.items() if name in operator.options}
        wanted.append((axes, options, given.get("dtype", wanted[0][2])))
    once = {}
    for axes, options, dtype in wanted:
        for pass_ in ("forward", "backward")[: 1 + bool(operator.gradients)]:
            case = operator.case(axes, as_on(target, operator, dtype), pass_, **options)
            once[case.name] = case
    return list(once.values())


def call(operator: Operator, case: Case) -> None:
    """The kernel on the case's inputs, with what its file has beside it, and its gradients in a backward pass."""
    kernels = OWN.module("kernels", operator.name)
    kernel = getattr(kernels, operator.name)
    given = operator.built(case, torch.device("cpu"), torch.Generator().manual_seed(0))
    if case.pass_ == "forward":
        kernel(**given)
        if operator.name in BESIDE and case.dtype == "bf16":
            BESIDE[operator.name](kernels, given)
        return
    leaves = [given[name].requires_grad_() for name in operator.differentiated(given)]
    result = kernel(**given)
    results = [x for x in ((result,) if isinstance(result, torch.Tensor) else result) if x.requires_grad]
    torch.autograd.grad(results, leaves, [torch.zeros_like(x) for x in results], allow_unused=True)


def needs_e4m3(architecture: tuple[int, int] | str, name: str, tensor: torch.Tensor) -> None:
    """As the kernels ask it, but of the target: tensors here are the CPU's, of which nothing is asked."""
    if not _common.converts_to_e4m3(architecture):
        raise NotImplementedError(f"{name} needs a GPU that converts to E4M3")


def compiled(
    target: GPUTarget,
    names: list[str],
    plans: Sequence[str] = ("quick",),
    more: Callable[[Any], dict[str, Any]] = lambda kernel: {},
    few: bool = False,
) -> list[dict[str, Any]]:
    """A row for each kernel of each case, in the order of their launches, with what `more` says of the kernel.

    Of a few cases, the plans', without MORE.
    """
    driver.set_active(Driver(target))
    triton.knobs.nvidia.dump_ptxas_log = True
    logs: dict[str, str] = {}
    # Before the modules that take these from it.
    capability = divmod(target.arch, 10) if target.backend == "cuda" else (0, 0)
    _common.capability = lambda device: capability
    _common.multiprocessors = lambda tensor: MULTIPROCESSORS
    _common.needs_e4m3 = functools.partial(
        needs_e4m3, capability if target.backend == "cuda" else str(target.arch)
    )
    catalog = Catalog.default()
    for name in names:
        OWN.module("kernels", name)
    from kernelmark.kernels import _hopper

    _hopper.compiled = Forgetful()
    _common.INTERPRETED = True  # for tensors of a CPU to be taken; sizes of the interpreter were chosen above
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    run = JITFunction.run
    where = ""

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        # Said once, when it is compiled; other cases come to the same kernel.
        log = logs.setdefault(kernel.hash, said.getvalue())
        module = self.__module__.rpartition(".")[2]
        ptx = kernel.asm.get("ptx", "")  # of AMD's targets there is none
        about = {
            "module": module,
            "kernel": self.__name__,
            "shared": kernel.metadata.shared,
            # Accesses of 16 bytes, and loads of two.
            "wide": len(re.findall(r"(ld|st)\.global\S*\.v4\.b32|cp\.async\.cg", ptx)),
            "narrow": len(re.findall(r"ld\.global\S*\.b16", ptx)),
            "spilled": spilled(kernel, log),
            "products": products(kernel, target),
            "early": early(kernel.asm["cubin"]) if module in STAGED else 0,
            "matrix": len(MATRIX.findall(ptx or kernel.asm.get("amdgcn", ""))),
        }
        found[where, kernel.hash] = {**about, **more(kernel)}
        return kernel

    JITFunction.run = compile_only
    for operator in map(catalog.operator, names):
        for case in cases(operator, plans, target, () if few else MORE.get(operator.name, ())):
            where = f"{operator.name} {case.name}"
            try:
                call(operator, case)
                if case.pass_ == "backward" and operator.name.startswith("attention"):
                    torch.use_deterministic_algorithms(True)  # other kernels, on Hopper
                    call(operator, case)
            except Exception as error:
                found[where, "error"] = {**NOTHING, "error": repr(error)[-300:]}
            torch.use_deterministic_algorithms(False)
    JITFunction.run = run
    return [{"case": case, "error": None, **row} for (case, _), row in found.items()]


def asked(words: Sequence[str]) -> tuple[GPUTarget, list[str], bool]:
    """Target, operators and whether of a few cases. Raises `InputError` for what is none."""
    few = words[:1] == ["--few"]
    target, *operators = words[few:] or [""]
    if not TARGET.fullmatch(target):
        raise InputError(
            f"no target {target!r}. Targets are NVIDIA's compute capabilities (9.0) and AMD's architectures "
            f"(gfx942): python tests/kernels/compiled.py [--few] TARGET [OPERATOR ...]"
        )
    there = everywhere()
    if absent := [x for x in operators if x not in there]:
        raise unknown("operator", absent[0], there)
    return target_named(target), operators or there, few


if __name__ == "__main__":
    try:
        wanted, operators, few = asked(sys.argv[1:])
    except InputError as error:
        print(f"compiled.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps(compiled(wanted, operators, few=few)))
