"""Writes the tables of what was compiled and built for devices that are not here, from records of
`registry/reference/`; no figure there stands by hand.

    python docs/devices.py            prints them
    python docs/devices.py --write    writes them; a test holds the pages to what this prints

`python tests/kernels/gate.py --record registry/reference/compiled.json` makes the one record; what `kernelmark
image build NAME` and `kernelmark image sbom NAME` print is that of an image, `images/NAME.txt` and
`images/NAME.json.gz`.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from _page import placed
from kernelmark.registry import figures

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "registry" / "reference"
NAMES = {
    "7.5": "T4",
    "8.0": "A100",
    "8.6": "RTX 30",
    "8.9": "L4, RTX 40",
    "9.0": "H100, H200",
    "10.0": "B200",
    "12.0": "RTX 50",
    "gfx942": "MI300X",
    "gfx950": "MI355X",
    "gfx1100": "RX 7900",
    "gfx1201": "RX 9070",
}
BUILT = re.compile(r"^built in ([^:]+):|^real\t(\d+)m(\d+)", re.MULTILINE)
"""How long a build took, as `kernelmark image build` says it, or a shell's `time` where it did not say it yet."""
SIZE = "io.kernelmark.size"
"""The property of a bill of materials that has the image's bytes; older bills have none."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(x)} |\n" for x in (head, ["---"] * len(head), *rows))


def compiled() -> str:
    """By target: how many kernels ended how."""
    found = json.loads((RECORDS / "compiled.json").read_bytes())
    ends = list(next(iter(found.values()))["counts"])
    rows = []
    for target, x in found.items():
        counts = [f"{x['counts'][end]}" for end in ends]
        most = f"{x['shared'] / 1024:.0f} KiB"
        rows.append([f"{target} ({NAMES[target]})", f"{x['kernels']}", *counts, most])
    head = ["target", "kernels", *ends, "most shared memory"]
    versions = ", ".join(sorted({x["triton"] for x in found.values()}))
    said = f"Triton {versions}. A kernel counts once for each case and machine code."
    if absent := [x for x in NAMES if x not in found]:
        said += f" Not in the record yet: {', '.join(absent)}."
    return f"{said}\n\n" + table(head, rows)


def images() -> str:
    """By image: size, time, and what its bill of materials counts."""
    rows = []
    for path in sorted((RECORDS / "images").glob("*.json.gz")):
        name = path.name.removesuffix(".json.gz")
        found = json.loads(gzip.decompress(path.read_bytes()))
        told = BUILT.search((path.parent / f"{name}.txt").read_text(encoding="utf-8"))
        if told is None:
            raise SystemExit(f"{name}.txt does not say how long it took to build")
        took = told[1] or figures.seconds(60 * int(told[2]) + int(told[3]))
        held = {x["name"]: x["value"] for x in found["metadata"]["component"]["properties"]}
        counts = []
        for kind in ("pypi", "deb"):
            those = [x for x in found["components"] if x["purl"].startswith(f"pkg:{kind}/")]
            counts.append(f"{len(those)} ({sum('licenses' in x for x in those)})")
        rows.append(
            [f"`{name}`", figures.size(float(held[SIZE])) if SIZE in held else figures.DASH, took, *counts]
        )
    head = ("image", "size", "built in", "Python packages (licence stated)", "system packages (licence stated)")
    return table(head, rows)


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "measuring.md": {"compiled": compiled},
    "images.md": {"built": images},
}


def main(*words: str) -> None:
    """Prints the blocks, or writes them."""
    for name, blocks in PAGES.items():
        if words == ("--write",):
            path = HERE / name
            path.write_text(placed(path.read_text(encoding="utf-8"), blocks), encoding="utf-8")
        else:
            print("\n".join(block() for block in blocks.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
