"""What must hold of kernels compiled for GPUs that are not here, and how many of them it holds for.

    python gate.py [--record FILE] [TARGET...]

compiles every kernel of one device for each target (all, by default), as `compiled.py` does, and prints a line a
target: how many kernels compiled, the most shared memory of one, and how many ended otherwise. A time is never
given: nothing runs. What does not hold is an error unless `exceptions.toml` lists it with its reason; a listed
exception that no kernel needs any more is one too.

With `--record` what was found of a target takes its place in FILE, a JSON object by target, as soon as it is done.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
WHAT_COMPILES = ("kernels", "suite/operators")
"""The kernels, and their cases."""
KIB = {
    "7.5": 64,
    "8.0": 163,
    "8.6": 99,
    "8.9": 99,
    "9.0": 227,
    "10.0": 227,
    "12.0": 99,
    "gfx942": 64,
    "gfx950": 160,
    "gfx1100": 64,
    "gfx1201": 64,
}
"""Shared memory of a program, by compute capability: T4, A100, the other Ampere and Ada, Hopper, B200, and
Blackwell with displays (CUDA's programming guide, "Technical specifications per compute capability"). AMD's local
data share of a workgroup: MI300, MI355, RDNA 3 and RDNA 4."""

STATUSES = ("compiled", "unsupported", "failed", "shared memory", "no matrix unit", "spills")
"""How a kernel can end: the first two are no fault."""


@dataclass(frozen=True)
class Listed:
    """An exception: kernels whose full names this matches may end so on a target, for that reason."""

    target: str
    kernel: re.Pattern[str]
    status: str
    reason: str


def status(row: dict[str, Any], target: str) -> str:
    """How the compilation of one kernel ended, the gravest first."""
    if row["error"]:
        return "unsupported" if row["error"].startswith("NotImplementedError") else "failed"
    if row["shared"] > KIB[target] << 10:
        return "shared memory"
    if row["products"] and not row["matrix"]:
        return "no matrix unit"
    return "spills" if row["spilled"] else "compiled"


def name(row: dict[str, Any]) -> str:
    """A kernel by its operator, module and function."""
    return f"{row['case'].split()[0]}/{row['module']}/{row['kernel']}"


def exceptions(text: str) -> list[Listed]:
    """The tables of `exceptions.toml`; each stands for every target that it names."""
    return [
        Listed(target, re.compile(table["kernel"]), table["status"], table["reason"])
        for table in tomllib.loads(text)["exception"]
        for target in table["targets"]
    ]


def faults(rows: Iterable[dict[str, Any]], target: str, listed: Sequence[Listed]) -> list[str]:
    """What does not hold and is not listed, a line each."""
    return [
        f"{target}: {name(row)}: {status(row, target)}: "
        f"{row['error'] or '{shared} B shared, {spilled} B spilled'.format(**row)} ({row['case']})"
        for row in rows
        if status(row, target) not in STATUSES[:2] and not any(_matches(x, row, target) for x in listed)
    ]


def stale(rows: Sequence[dict[str, Any]], target: str, listed: Sequence[Listed]) -> list[str]:
    """Of all kernels of a target: what is listed and holds again, a line each."""
    return [
        f"{target}: {x.kernel.pattern} is listed and no longer ends as {x.status!r}"
        for x in listed
        if x.target == target and not any(_matches(x, row, target) for row in rows)
    ]


def _matches(listed: Listed, row: dict[str, Any], target: str) -> bool:
    same = (listed.target, listed.status) == (target, status(row, target))
    return same and listed.kernel.fullmatch(name(row)) is not None


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Counts of kernels by target and by how they ended, and the most shared memory of one that compiled."""
    lines = [f"{'target':8} {'KiB':>4} of {'limit':>5}  " + "  ".join(f"{x:>13}" for x in STATUSES)]
    for target, rows in found.items():
        counts = Counter(status(x, target) for x in rows)
        most = max((x["shared"] for x in rows), default=0)
        cells = "  ".join(f"{counts[x]:13}" for x in STATUSES)
        lines.append(f"{target:8} {most / 1024:4.0f} of {KIB[target]:5}  {cells}")
    return "\n".join(lines)


def compiled(target: str, operators: Sequence[str] = (), few: bool = False) -> list[dict[str, Any]]:
    """Every kernel of the operators, all by default, in a process and with a cache of its own; for a few cases."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, FOLDER / "compiled.py", *(["--few"] if few else []), target, *operators],
            env=environment | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def sources() -> str:
    """A hash of what compiles: a commit would not tell whether any of it changed since."""
    digest = hashlib.sha256()
    for path in sorted(y for x in WHAT_COMPILES for y in (ROOT / x).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def account(rows: Sequence[dict[str, Any]], target: str) -> dict[str, Any]:
    """What a record keeps of a target: counts of kernels by how they ended, the most shared memory of one in
    bytes, and the kernels that are neither compiled nor unsupported, with the range of the bytes that they spill.
    """
    others: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if (how := status(row, target)) not in STATUSES[:2]:
            others.setdefault((name(row), how), []).append(row["spilled"])
    return {
        "sources": sources(),
        "triton": version("triton"),
        "kernels": len(rows),
        "counts": {x: sum(status(row, target) == x for row in rows) for x in STATUSES},
        "shared": max((x["shared"] for x in rows), default=0),
        "others": [
            {"kernel": kernel, "status": how, "times": len(x), "spilled": [min(x), max(x)]}
            for (kernel, how), x in sorted(others.items())
        ],
    }


def keep(file: Path, target: str, rows: Sequence[dict[str, Any]]) -> None:
    """Puts a target's account into the record, in the order of KIB."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept[target] = account(rows, target)
    file.write_text(json.dumps({x: kept[x] for x in KIB if x in kept}, indent=1) + "\n")


def main(*words: str) -> int:
    """0 where all that does not hold is listed. Kernels are those of the quick plan's cases."""
    record = Path(words[1]) if words[:1] == ("--record",) and len(words) > 1 else None
    targets = words[2:] if record else words
    if strange := [x for x in targets if x not in KIB]:
        print(f"no target {', '.join(strange)}; known: {', '.join(KIB)}", file=sys.stderr)
        return 2
    listed = exceptions((FOLDER / "exceptions.toml").read_text())
    found: dict[str, list[dict[str, Any]]] = {}
    wrong: list[str] = []
    for target in targets or KIB:
        found[target] = compiled(target, few=True)
        if record:
            keep(record, target, found[target])
        wrong += faults(found[target], target, listed) + stale(found[target], target, listed)
        print(table({target: found[target]}).splitlines()[-1], file=sys.stderr, flush=True)
    print("\n".join([table(found), *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
