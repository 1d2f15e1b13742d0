"""Hashes of the machine code of operators' kernels, to see whether a change of their source changed it.

    python machine_code.py 9.0 standard,full ssd mamba3 > before.json
    python machine_code.py --compare before.json after.json

compiles the cases of these plans for NVIDIA GPUs, as `compiled.py` does, and compares kernels case by case, in
the order of their launches. Of the PTX what counts is the body of the function, its parameters numbered as they
are first read; of the SASS, the instructions as they lie in the cubin. Kernels are compiled without line numbers,
by which ptxas orders some instructions: the same PTX from other lines of the source can give another SASS. So it
can where a kernel has another name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from kernelmark.suite.measure.machine_code import sections


def ptx_body(text: str) -> str:
    """The lines of a function that become instructions; parameters are numbered as they are first read."""
    body = text[text.index("\n{") : text.rindex("\n}")]
    order: dict[str, str] = {}
    body = re.sub(r"\w+_param_\d+", lambda x: order.setdefault(x[0], f"param{len(order)}"), body)
    lines = (line.partition("//")[0].strip() for line in body.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith((".loc", "$L__tmp")))


def sass(cubin: bytes) -> bytes:
    """The sections with instructions of a cubin."""
    return b"".join(sections(cubin, [".text."]))


def hashes(kernel: Any) -> dict[str, str]:
    """Of a compiled kernel of Triton."""
    parts = {"ptx": ptx_body(kernel.asm["ptx"]).encode(), "sass": sass(kernel.asm["cubin"])}
    return {name: hashlib.sha256(part).hexdigest()[:16] for name, part in parts.items()}


def compare(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """One line a kernel: how many of its variants kept their PTX and their SASS, then those that did not."""
    cases: dict[str, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((before, after)):
        for row in rows:
            cases[row["case"]][side].append(row)
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    changed = []
    for case, (old, new) in cases.items():
        for was, now in itertools.zip_longest(old, new, fillvalue={"module": "", "kernel": "missing"}):
            same = [was.get(part) is not None and was.get(part) == now.get(part) for part in ("ptx", "sass")]
            count = counts[now["module"], f"{was['kernel']} → {now['kernel']}"]
            for place, value in enumerate((True, *same)):
                count[place] += value
            if not same[1]:
                changed.append(f"changed: {case}: {was['kernel']} → {now['kernel']} {now.get('error') or ''}")
    lines = [
        f"{module:28} {kernel:45} variants {total:3}  same PTX {ptx:3}  same SASS {code:3}"
        for (module, kernel), (total, ptx, code) in sorted(counts.items())
    ]
    return lines + changed


def main(arguments: list[str]) -> None:
    if arguments[0] == "--compare":
        print("\n".join(compare(*(json.loads(Path(name).read_text()) for name in arguments[1:3]))))
        return
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    spec = importlib.util.spec_from_file_location("compiled", Path(__file__).with_name("compiled.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(
        json.dumps(
            module.compiled(module.target_named(arguments[0]), arguments[2:], arguments[1].split(","), hashes)
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
