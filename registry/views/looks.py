"""How implementations look: one colour and one shape a library, the same in every report.

What a library looks like follows from its name alone, never from who else is in the report: who knows one page
knows them all. Libraries that meet in one chart often have their looks chosen apart; any other's follow from
checksums of its name. Implementations of one library share both, and differ in how the shape is filled and the
line dashed. Only where two would look alike, as systems may that plans name, does one take what nobody there has.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256

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
    "torch_distributed": (1, "D"),
    "torch_symmetric_memory": (2, "^"),
    "helion": (5, "D"),
    "onnxruntime_gpu": (7, "s"),
}
"""Colour and shape by provider."""
KIN: Mapping[str, str] = {
    "torch_compile": "torch_compile",
    "torch_compile_blocks": "torch_compile",
    "torch_compile_max_autotune": "torch_compile",
    "torch_compile_reduce_overhead": "torch_compile",
    "nccl_windows": "torch_distributed",
}
"""The library that an implementation looks like, where another one's file has it: systems of PyTorch's compiler,
and NCCL over symmetric memory.
"""
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
    "vllm_machete": 1,
    "vllm_marlin": 2,
    "torch_graph": 1,
    "torch_cudagraphs": 2,
    "torch_aot_eager": 3,
    "torch_compile_blocks": 1,
    "torch_compile_reduce_overhead": 2,
    "torch_compile_max_autotune": 3,
    "torch_expandable": 1,
    "torch_max_split_512": 2,
    "torch_rounded": 3,
    "torch_collecting": 0,
    "torch_cuda_malloc_async": 1,
    "kernelmark_compile": 1,
    "kernelmark_compile_blocks": 2,
    "kernelmark_graph": 3,
    "nccl_windows": 1,
    "symmetric_one_shot": 0,
    "symmetric_two_shot": 1,
    "transformers_model": 1,
    "transformers_model_compiled": 2,
    "transformers_model_liger": 3,
    "transformer_engine_layers": 1,
    "transformer_engine_layers_delayed": 2,
    "transformer_engine_layers_tensorwise": 3,
    "transformer_engine_layers_1x128": 0,
    "transformer_engine_cp_p2p": 0,
    "transformer_engine_cp_all_gather": 1,
    "transformer_engine_cp_a2a": 2,
    "openai_chat": 0,
    "openai_responses": 1,
    "fake_openai_chat": 0,
    "fake_openai_responses": 1,
    "fake_anthropic_messages": 2,
    "fake_bedrock_converse": 3,
    "specialised": 0,
    "tma": 1,
    "tiled": 2,
    "plain": 3,
}
"""Filling by implementation, where a library has many."""
RESHAPED: Mapping[str, str] = {
    "torch_collecting": "v",
    "torch_cuda_malloc_async": "v",
    "transformer_engine_layers_1x128": "v",
}
"""Shape by implementation, where a library has more of them than there are fillings."""


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
    provider = KIN.get(name, provider)
    if provider == PROVIDER:
        return Series(name, "--s0", "o", 0 if name == PROVIDER else _variant(name, provider), ours=True)
    if provider == YARDSTICK:
        return Series(name, "--s9", "|")
    if provider in LIBRARIES:
        colour, shape = LIBRARIES[provider]
    else:
        colour, shape = _left(provider, frozenset(LIBRARIES.values()))
    return Series(name, f"--s{colour}", RESHAPED.get(name, shape), _variant(name, provider))


@cache
def _left(provider: str, known: frozenset[tuple[int, str]]) -> tuple[int, str]:
    """Of the pairs that no library is known by, the one whose checksum beside the name is highest: where one more
    is taken, only those look otherwise who had it.
    """
    free = [x for x in itertools.product(range(1, COLOURS + 1), SHAPES) if x not in known]
    return max(free, key=lambda x: sha256(f"{provider} {x}".encode()).digest())


def apart(found: Iterable[Series]) -> dict[str, Series]:
    """Looks for one drawing in which each line is to be told from all others: as in every report where they differ
    by colour. Of several in one colour the one with its shape whole keeps it, the others get colours, shapes and
    dashes that are left, in turn.
    """
    known = tuple(found)
    keeps: dict[str, Series] = {}
    for x in sorted(known, key=lambda x: x.fill):
        keeps.setdefault(x.colour, x)
    kept = {(x.colour, x.shape, x.fill) for x in keeps.values()}
    left = (
        free
        for i in itertools.count()
        if (free := (f"--s{i % COLOURS + 1}", SHAPES[i % len(SHAPES)], i // COLOURS % FILLS)) not in kept
        and (free[0] not in keeps or i >= COLOURS)
    )
    return {x.name: x if keeps[x.colour] is x else Series(x.name, *next(left)) for x in known}


def _variant(name: str, provider: str) -> int:
    if name == provider:
        return 0
    return VARIANTS.get(name, zlib.crc32(name.encode()) % (FILLS - 1) + 1)


def palette(rows: Iterable[Row]) -> dict[str, Series]:
    """The look of every implementation, no two alike: ours first, PyTorch's own next, the others by name, and
    yardsticks last.
    """
    providers: dict[str, str] = {}
    for row in rows:
        providers.setdefault(row.implementation, row.provider)

    def place(name: str) -> tuple[bool, bool, bool, str]:
        return (providers[name] == YARDSTICK, providers[name] != PROVIDER, not name.startswith(EAGER), name)

    found = {x: look(x, providers[x]) for x in sorted(providers, key=place)}
    out: dict[str, Series] = {}
    # Whose look is known keeps it, whatever systems a plan has named.
    for name in sorted(found, key=lambda x: x not in VARIANTS and x != providers[x]):
        x = found[name]
        taken = {(y.shape, y.fill) for y in out.values() if y.colour == x.colour}
        others = itertools.product((x.shape, *SHAPES), range(FILLS))
        shape, fill = next((y for y in ((x.shape, x.fill), *others) if y not in taken), (x.shape, x.fill))
        out[name] = replace(x, shape=shape, fill=fill)
    return {x: out[x] for x in found}
