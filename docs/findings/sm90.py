"""Compiles kernels for Hopper on a machine without a GPU, and reads what came out: what the findings share.

Everything is Triton's own: the compiler, and beside it NVIDIA's `ptxas`, `cuobjdump` and `nvdisasm`, which its
wheel carries.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGET = GPUTarget("cuda", 90, 32)


def compiled(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """A kernel of Triton or Gluon for compute capability 9.0; arguments in `aligned` are multiples of 16."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        Source = ASTSource
    places = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    full = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = Source(fn=kernel, signature=full, constexprs=dict(constants), attrs=places)
    return triton.compile(source, target=TARGET, options=options)


def _run(tool: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / tool), *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def machine_code(kernel: Any) -> list[str]:
    """The instructions of a compiled kernel, in order, without addresses."""
    text = _run("cuobjdump", "-sass", cubin=kernel.asm["cubin"])
    return [x.strip() for x in re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", text)]


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread, and bytes of stack, to which registers are spilled."""
    text = _run("cuobjdump", "--dump-resource-usage", cubin=kernel.asm["cubin"])
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}


def ptxas_says(kernel: Any) -> str:
    """What ptxas remarks when it compiles the kernel's PTX again: spills, and products that it serializes."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [str(TOOLS / "ptxas"), "-v", "--gpu-name=sm_90a", str(source), "-o", str(Path(folder) / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def versions() -> str:
    """Of Triton and its ptxas, for the first line of what a finding prints."""
    text = subprocess.run([TOOLS / "ptxas", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", text)
    return f"Triton {triton.__version__}, ptxas {found[1] if found else '?'}, sm_90"
