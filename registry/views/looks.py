"""How implementations look: one colour and one shape a library, the same in every report.

What a library looks like follows from its name alone, never from who else is in the report: who knows one page
knows them all. Libraries that meet in one chart often have their looks chosen apart; any other's follow from a
checksum of its name. Implementations of one library share both, and differ in how the shape is filled and the
line dashed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..analysis.rows import Row
from ..store.record import EAGER, PROVIDER, YARDSTICK
from .canvas import DASHES, FILLS

COLOURS = 8
"""Colours of libraries that the style sheet has, as `--s1` to `--s8`; `--s0` is ours and `--s9` a yardstick's."""
SHAPES = ("s", "D", "^", "v", "P", "X", "p", "h")
"""Shapes of libraries, so that colour is never the only difference. Ours is the circle."""
LIBRARIES: Mapping[str, tuple[int, str]] = {
    "torch": (1, "s"),
    "torch_compile": (2, "D"),
    "sdpa": (6, "X"),
    "flex_attention": (8, "h"),
    "flash_attn": (3, "^"),
    "flash_attn_4": (4, "v"),
    "vllm": (5, "P"),
    "flashinfer": (7, "p"),
    "xformers": (2, "p"),
    "transformer_engine": (1, "P"),
    "transformers": (8, "v"),
    "liger": (4, "^"),
    "quack": (5, "s"),
    "fla": (7, "D"),
    "mamba_ssm": (6, "^"),
    "causal_conv1d": (4, "h"),
    "cut_cross_entropy": (3, "p"),
    "deepspeed": (3, "X"),
    "torchao": (6, "P"),
}
"""Colour and shape by provider."""
VARIANTS: Mapping[str, int] = {
    "sdpa_cudnn": 0,
    "sdpa_flash": 1,
    "sdpa_efficient": 2,
    "sdpa_math": 3,
    "flash_attn_2": 0,
    "torch_fused": 1,
    "torch_foreach": 2,
    "torch_varlen": 3,
    "vllm_fa3": 1,
    "vllm_unified": 2,
    "vllm_fast": 3,
    "specialised": 0,
    "tma": 1,
    "tiled": 2,
    "plain": 3,
}
"""Filling by implementation, where a library has many."""


HEXADECIMAL: Mapping[str, str] = {
    "--s0": "#d55e00",
    "--s1": "#0072b2",
    "--s2": "#009e73",
    "--s3": "#56b4e9",
    "--s4": "#aa4499",
    "--s5": "#c79600",
    "--s6": "#332288",
    "--s7": "#882255",
    "--s8": "#55606c",
    "--s9": "#8b95a0",
}
"""The colours on white paper as report.css has them, for where there is no style sheet."""


@dataclass(frozen=True)
class Series:
    """How an implementation looks, in every report."""

    name: str
    colour: str
    """A CSS variable."""
    shape: str
    """One of `canvas.MARKERS`."""
    fill: int = 0
    """How the shape is filled, below `canvas.FILLS`."""
    ours: bool = False

    @property
    def dash(self) -> str:
        """How its line is dashed."""
        return DASHES[self.fill]

    @property
    def hexadecimal(self) -> str:
        """The colour where no shape tells a library's implementations apart: some are lighter than others."""
        base = HEXADECIMAL[self.colour]
        parts = (int(base[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{round(x + (255 - x) * self.fill * 0.22):02x}" for x in parts)


def look(name: str, provider: str) -> Series:
    """That of an implementation."""
    if provider == PROVIDER:
        return Series(name, "--s0", "o", 0 if name == PROVIDER else _variant(name, provider), ours=True)
    if provider == YARDSTICK:
        return Series(name, "--s9", "|")
    if provider in LIBRARIES:
        colour, shape = LIBRARIES[provider]
    else:
        free = [x for x in itertools.product(range(1, COLOURS + 1), SHAPES) if x not in LIBRARIES.values()]
        colour, shape = free[zlib.crc32(provider.encode()) % len(free)]
    return Series(name, f"--s{colour}", shape, _variant(name, provider))


def apart(found: Iterable[Series]) -> dict[str, Series]:
    """Looks for one drawing in which each line is to be told from all others: as in every report where they differ
    by colour. Of several in one colour the one with its shape whole keeps it, the others get colours, shapes and
    dashes that are left, in turn.
    """
    known = tuple(found)
    keeps: dict[str, Series] = {}
    for x in sorted(known, key=lambda x: x.fill):
        keeps.setdefault(x.colour, x)
    left = (
        (colour, SHAPES[i % len(SHAPES)], i // COLOURS % FILLS)
        for i in itertools.count()
        if (colour := f"--s{i % COLOURS + 1}") not in keeps or i >= COLOURS
    )
    return {x.name: x if keeps[x.colour] is x else Series(x.name, *next(left)) for x in known}


def _variant(name: str, provider: str) -> int:
    if name == provider:
        return 0
    return VARIANTS.get(name, zlib.crc32(name.encode()) % (FILLS - 1) + 1)


def palette(rows: Iterable[Row]) -> dict[str, Series]:
    """The look of every implementation: ours first, PyTorch's own next, the others by name, yardsticks last."""
    providers: dict[str, str] = {}
    for row in rows:
        providers.setdefault(row.implementation, row.provider)

    def place(name: str) -> tuple[bool, bool, bool, str]:
        return (providers[name] == YARDSTICK, providers[name] != PROVIDER, not name.startswith(EAGER), name)

    return {x: look(x, providers[x]) for x in sorted(providers, key=place)}
