"""Plans that are drawn by a seeded rule before anything of them is timed, and then frozen. Pure.

    python -m kernelmark.suite.shapes shapes > suite/plans/shapes-2.toml
    python -m kernelmark.suite.shapes widths > suite/plans/widths-2.toml

`shapes`: calls that published models make. Models take turns; of each a phase (training, a prompt, decoding), a
length and a dtype are drawn, then one of the model's calls, weighted by its share of the time that a step's calls
need at the least. Twins that differ in storage or length alone come on top. (`shapes-1` has the backward pass
alone of losses whose gradients most programs compute in the forward pass, and energies.)

`widths`: operators on rows of any width, the width drawn evenly by its logarithm, against every peer but
max-autotune, which would take minutes of tuning for each size. (`widths-1` has the same cases and that peer too.)

Another rule, seed or model makes another plan: it gets another number and file, and the old file stays.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..registry.store.record import Case, Pass
from .catalog import Catalog
from .model import Architecture, Part
from .operator import Option

if TYPE_CHECKING:
    from .definition import Definition

SEED = 18
DRAWN = 112
"""Cases that are drawn by share of time alone."""
LEAST = 4
"""Cases that an operator which models call has at least: more are drawn for those that have fewer."""
MODELS = (
    "gpt2-124m", "gpt2-350m", "gpt2-1.5b", "bert-base", "bert-large", "llama-2-7b", "llama-2-13b",
    "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b",
    "mistral-7b-v0.3", "phi-4", "gemma-2-9b", "gemma-2-27b", "gemma-3-4b", "gemma-3-27b", "deepseek-v3",
    "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b", "olmoe-1b-7b", "olmo-2-7b", "olmo-2-13b", "granite-3-8b",
    "starcoder2-3b", "starcoder2-7b", "starcoder2-15b", "falcon-h1-7b", "mamba2-2.7b", "vit-l", "dit-xl",
    "whisper-large-v3",
)  # fmt: skip
LENGTHS = (128, 197, 512, 577, 1024, 1500, 2000, 2048, 4096, 5000, 8192, 10000, 16384, 32768, 131072)
TOKENS = 8192
"""Tokens of a micro-batch; a longer sequence is one alone."""
ROWS = 8192
"""Tokens whose logits are there at a time: more are taken in parts, as models with large vocabularies do."""
BATCHES = (1, 8, 32, 128, 256)
"""Sequences that are decoded at a time."""
CHUNKS = (512, 1024, 2048)
"""Queries of a part of a prompt, after as many keys as `PREFIXES` have."""
PREFIXES = (8192, 32768, 131072)
SPECULATED = (2, 4, 8)
"""Tokens that are decoded at a time where some are guessed."""

PEAK = 989e12
"""16-bit operations a second, and bytes a second, of an H200's data sheet: they weigh calls against each other."""
BANDWIDTH = 4.8e12
LAUNCH = 3e-6
"""Seconds that a call takes at the least."""
MOST_FLOPS = 2e14
"""A case of more takes its reference in fp32 a minute."""
MOST_BYTES = 16 << 30
ATTEMPTS = 20
"""Draws of phase and length until a model is passed over."""

PEERS: Mapping[str, tuple[str, ...]] = {
    "add_rms_norm": ("torch_compile", "liger", "quack", "flashinfer", "vllm"),
    "attention": ("sdpa_cudnn", "flash_attn_4", "flash_attn_2", "vllm_fa3", "flashinfer", "flex_attention"),
    "attention_decode": ("vllm_fa3", "flashinfer"),
    "attention_mla": ("sdpa_cudnn", "flash_attn_4", "flashinfer"),
    "attention_mla_decode": ("flash_mla", "flashinfer"),
    "attention_varlen": ("torch_varlen", "flash_attn_4", "vllm_fa3", "flashinfer"),
    "attention_window": ("flash_attn_4", "vllm_fa3", "flashinfer", "flex_attention"),
    "causal_conv1d": ("causal_conv1d", "vllm", "fla"),
    "causal_conv1d_update": ("causal_conv1d", "vllm"),
    "cross_entropy": ("torch_compile", "liger", "quack"),
    "fused_linear_cross_entropy": ("torch_compile", "liger", "quack", "cut_cross_entropy"),
    "gated_rms_norm": ("torch_compile", "mamba_ssm", "vllm"),
    "geglu": ("torch_compile", "liger", "vllm", "flashinfer"),
    "gelu": ("torch_compile", "vllm"),
    "layer_norm": ("torch_compile", "liger", "quack", "fla"),
    "rms_norm": ("torch_compile", "liger", "quack", "flashinfer", "vllm"),
    "rope": ("torch_compile", "liger", "quack", "vllm", "flashinfer"),
    "selective_state_update": ("mamba_ssm", "vllm"),
    "ssd": ("mamba_ssm", "vllm"),
    "swiglu": ("torch_compile", "liger", "vllm", "flashinfer"),
}
"""By operator, those that must have run for a goal of it to be shown."""

WHOLE = ("fused_linear_cross_entropy",)
"""Operators whose gradients most programs compute in the forward pass, and which are timed with it."""
STORED = ("attention", "attention_window", "rope", "attention_mla")
"""Operators that know of storage."""


@dataclass(frozen=True)
class Drawn:
    """A case, and the models whose call it is; none for a twin."""

    case: Case
    models: tuple[str, ...] = ()


def shapes(catalog: Catalog, seed: int = SEED) -> tuple[Drawn, ...]:
    """The cases of plan `shapes`, in the order in which they were drawn, the twins last."""
    chance = random.Random(f"shapes {seed}")
    found: dict[tuple[str, str], Drawn] = {}
    turns = list(MODELS)
    chance.shuffle(turns)
    turn = 0

    def draw(wanted: str = "") -> None:
        nonlocal turn
        name = turns[turn % len(turns)]
        turn += 1
        case = _drawn(name, catalog, chance, wanted)
        if case is not None:
            key = case.operator, case.name
            before = found[key].models if key in found else ()
            found[key] = Drawn(case, tuple(dict.fromkeys((*before, name))))

    while len(found) < DRAWN:
        draw()
    for operator in sorted(PEERS):
        while sum(x.case.operator == operator for x in found.values()) < LEAST:
            draw(operator)
    for case in _twins(catalog):
        found.setdefault((case.operator, case.name), Drawn(case))
    return tuple(found.values())


def _drawn(name: str, catalog: Catalog, chance: random.Random, wanted: str = "") -> Case | None:
    """One call of a model that a GPU can check in time, of the operator wanted if one is; None where a few
    attempts do not come to one.
    """
    architecture = _architecture(name, catalog)
    for _ in range(ATTEMPTS):
        phase = chance.choices(("training", "prompt", "decoding"), (6, 2, 2 if architecture.decodes else 0))[0]
        length = chance.choice(_lengths(architecture, name))
        dtype = chance.choices(("bf16", "fp16"), (3, 1))[0]
        if phase == "decoding":
            calls = tuple(decoded(architecture, name, chance.choice(BATCHES), length, chance))
        else:
            B = max(1, TOKENS // length)
            calls = architecture.parts(architecture.configurations[name], B, length)
            calls = tuple(_stored(_loss(x, chance), architecture, chance) for x in calls)
            if phase == "prompt":
                calls = tuple(_chunked(x, chance) for x in calls if "entropy" not in x.operator)
        calls = tuple(x for x in calls if wanted in ("", x.operator))
        if not calls:
            continue
        passes: tuple[Pass, ...] = ("forward", "backward") if phase == "training" else ("forward",)
        pass_ = chance.choice(passes)
        cases = [_case(x, catalog, dtype, pass_) for x in calls]
        weights = [x.calls * seconds(case) for x, case in zip(calls, cases, strict=True)]
        case = chance.choices(cases, weights)[0]
        if case.operator in WHOLE and case.pass_ == "backward":
            case = catalog.operator(case.operator).case(case.axes, case.dtype, "forward_backward", **case.options)
        if case.flops <= MOST_FLOPS and case.bytes <= MOST_BYTES:
            return case
    return None


def seconds(case: Case) -> float:
    """What a call takes at the least."""
    return max(LAUNCH, case.flops / PEAK, case.bytes / BANDWIDTH)


def _architecture(name: str, catalog: Catalog) -> Architecture:
    return next(x for x in catalog.architectures.values() if name in x.configurations)


def _lengths(architecture: Architecture, name: str) -> Sequence[int]:
    longest = architecture.longest(architecture.configurations[name]) or max(LENGTHS)
    return architecture.lengths or [x for x in LENGTHS if x <= longest]


def _case(part: Part, catalog: Catalog, dtype: str, pass_: Pass) -> Case:
    definition = catalog.operator(part.operator)
    dtype = dtype if dtype in definition.dtypes else definition.dtypes[0]
    pass_ = pass_ if pass_ in definition.passes else "forward"
    return definition.case(part.axes, dtype, pass_, **part.options)


def _loss(part: Part, chance: random.Random) -> Part:
    """A loss is of so many tokens at a time; half of the programs have the logits there, and take it of these."""
    if "entropy" not in part.operator:
        return part
    tokens = part.axes["M"]
    axes = dict(part.axes) | {"M": min(tokens, ROWS)}
    calls = part.calls * -(-tokens // ROWS)
    if part.operator == "fused_linear_cross_entropy" and chance.random() < 0.5:
        return Part(part.name, "cross_entropy", {"M": axes["M"], "V": axes["V"]}, calls)
    return Part(part.name, part.operator, axes, calls, part.options)


def _stored(part: Part, architecture: Architecture, chance: random.Random) -> Part:
    """As the model leaves it in memory; one time of six as a cache has it, and where sequences may be of different
    lengths, one of six with several documents behind each other.
    """
    if part.operator not in STORED:
        return part
    kind = chance.choices(("model", "cache", "documents"), (4, 1, 1))[0]
    plain = part.operator == "attention" and part.options.get("mask") == "causal" and "Sk" not in part.axes
    options = dict(part.options)
    if kind == "documents" and plain and not options.get("sinks") and not options.get("cap"):
        given: dict[str, Option] = {"mask": "causal", "lengths": "long_tail"}
        given["storage"] = "packed" if architecture.storage == "packed" else "thd"
        axes = dict(part.axes) | {"B": 4 * part.axes["B"]}
        return Part(part.name, "attention_varlen", axes, part.calls, given)
    if kind != "cache":
        options["storage"] = "bshd" if part.operator == "attention_mla" else architecture.storage
    return Part(part.name, part.operator, part.axes, part.calls, options)


def _chunked(part: Part, chance: random.Random) -> Part:
    """A call of a prompt; attention may be of a part of it, which sees all keys before."""
    options, axes = part.options, dict(part.axes)
    if part.operator != "attention" or options.get("mask") != "causal" or chance.random() < 0.5:
        return part
    axes |= {"B": 1, "S": chance.choice(CHUNKS), "Sk": chance.choice(PREFIXES)}
    return Part(part.name, part.operator, axes, part.calls, options)


def decoded(architecture: Architecture, name: str, B: int, S: int, chance: random.Random) -> Iterator[Part]:
    """The calls of a step that adds one token to each of B sequences of S, or a few that are guessed."""
    new = 1 if chance.random() < 0.75 else chance.choice(SPECULATED)
    for part in architecture.parts(architecture.configurations[name], B, S):
        a = dict(part.axes)
        match part.operator:
            case "attention" | "attention_window" if part.options.get("mask") == "causal" or "Sk" in a:
                if not part.options.get("sinks") and not part.options.get("cap"):
                    axes = {"B": B, "Sq": new, "H": a["H"], "Hkv": a["Hkv"], "D": a["D"]}
                    axes["S"] = max(new, a.get("Sk") or min(S, a.get("W", S)))
                    lengths = "equal" if "Sk" in a else "mixed"
                    yield Part(part.name, "attention_decode", axes, part.calls, {"page": 64, "lengths": lengths})
            case "attention_mla":
                axes = {"B": B, "Sq": new, "H": a["H"], "S": max(new, S), "C": 512, "R": 64}
                yield Part(part.name, "attention_mla_decode", axes, part.calls, {"page": 64, "lengths": "mixed"})
            # What is not of S tokens a sequence, as an encoder's calls are, is done before.
            case "rms_norm" | "add_rms_norm" | "layer_norm" | "gated_rms_norm" | "rope" if a["S"] % S == 0:
                yield Part(part.name, part.operator, a | {"S": a["S"] // S * new}, part.calls, part.options)
            case "swiglu" | "geglu" | "gelu" if a["M"] % (B * S) == 0:
                yield Part(part.name, part.operator, a | {"M": a["M"] // S * new}, part.calls, part.options)
            case "ssd":
                axes = {"B": B, "H": a["H"], "P": a["P"], "N": a["N"], "G": a["G"]}
                yield Part(part.name, "selective_state_update", axes, part.calls)
            case "causal_conv1d":
                axes = {"B": B, "D": a["D"], "W": a["W"]}
                yield Part(part.name, "causal_conv1d_update", axes, part.calls)


def _twins(catalog: Catalog) -> Iterator[Case]:
    """Of Llama 3.1 8B's attention: three orders in memory, and a length beside the next multiple of 128."""
    attention = catalog.operator("attention")
    axes = {"B": 2, "H": 32, "Hkv": 8, "S": 4096, "D": 128}
    for pass_ in ("forward", "backward"):
        for storage in ("bhsd", "bshd", "packed"):
            yield attention.case(axes, "bf16", pass_, mask="causal", storage=storage)
        for S in (5000, 5120):
            yield attention.case(axes | {"S": S}, "bf16", pass_, mask="causal", storage="bshd")


# --- widths ---------------------------------------------------------------------------------------------

WIDTHS = 200
WIDEST = 300_000
ELEMENTS = 1 << 28
"""Elements of a case at most."""
ROW_OPERATORS: Mapping[str, tuple[str, str | None, Mapping[str, int]]] = {
    "rms_norm": ("S", "D", {"B": 1}),
    "add_rms_norm": ("S", "D", {"B": 1}),
    "layer_norm": ("S", "D", {"B": 1}),
    "gated_rms_norm": ("S", "D", {"B": 1, "G": 1}),
    "softmax": ("M", "D", {}),
    "cross_entropy": ("M", "V", {}),
    "gelu": ("M", "N", {}),
    "swiglu": ("M", "N", {}),
    "geglu": ("M", "N", {}),
    "fp8_quant": ("M", "N", {}),
    "rope": ("S", "D", {"B": 1, "H": 8, "Hkv": 2}),
}
"""By operator the axes of rows and of width, and the others. A head of rope has an even number of dimensions, at
most 256.
"""


def widths(catalog: Catalog, seed: int = SEED) -> tuple[Drawn, ...]:
    """The cases of plan `widths`: operator, pass, rows and width at random."""
    chance = random.Random(f"widths {seed}")
    found: dict[tuple[str, str], Drawn] = {}
    while len(found) < WIDTHS:
        operator = chance.choice(sorted(ROW_OPERATORS))
        rows_axis, width_axis, others = ROW_OPERATORS[operator]
        definition = catalog.operator(operator)
        width = _log_uniform(chance, 1, WIDEST)
        if operator == "rope":
            width = 2 * _log_uniform(chance, 1, 128)
        rows = _log_uniform(chance, 1, max(1, min(65536, ELEMENTS // width)))
        pass_ = chance.choice([x for x in definition.passes if x != "forward_backward"])
        dtype = chance.choices(("bf16", "fp16", "fp32"), (4, 1, 1))[0]
        dtype = dtype if dtype in definition.dtypes else definition.dtypes[0]
        case = definition.case({**others, rows_axis: rows, str(width_axis): width}, dtype, pass_)
        found.setdefault((case.operator, case.name), Drawn(case))
    return tuple(found.values())


def _log_uniform(chance: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(chance.uniform(math.log(low), math.log(high + 1)))))


# --- plan files -----------------------------------------------------------------------------------------

HEADS: Mapping[str, str] = {
    "shapes": "Calls that published models make, and twins that differ in storage or length alone.",
    "widths": "Operators on rows of any width.",
}
WITHOUT: Mapping[str, tuple[str, ...]] = {"widths": ("torch_compile_max_autotune",)}
LIMITS = """\
replicates = 3
deadline_s = 180.0

[sampling]
min_samples = 10
max_samples = 300
min_seconds = 0.02
max_seconds = 0.2
warmup_s = 0.1
"""
SAMPLED: Mapping[str, str] = {"shapes": 'energy = "never"\n'}
"""What else is said of sampling. The energy of a call takes a second a row, here as long as all else together."""


def text(kind: str, catalog: Catalog, seed: int = SEED) -> str:
    """A plan file."""
    drawn = {"shapes": shapes, "widths": widths}[kind](catalog, seed)
    peers = "".join(
        f"{operator} = {listed(PEERS[operator])}\n"
        for operator in sorted({x.case.operator for x in drawn} & PEERS.keys())
    )
    head = f"# {HEADS[kind]}\n# Drawn by suite/shapes.py with seed {seed} and frozen: it is not to be edited.\n"
    tables = "".join(_table(x, catalog.operator(x.case.operator), WITHOUT.get(kind, ())) for x in drawn)
    return f"{head}{LIMITS}{SAMPLED.get(kind, '')}\n[peers]\n{peers}{tables}"


def _table(drawn: Drawn, definition: Definition, without: Sequence[str]) -> str:
    lines = [f"models = {listed(drawn.models)}"] if drawn.models else []
    lines += [f"without = {listed(without)}"] if without else []
    return table(drawn.case, definition, lines)


def table(case: Case, definition: Definition, more: Sequence[str]) -> str:
    """A case as a table of a plan file, which says no more than it must, with `more` lines."""
    axes = ", ".join(f"{x} = {y}" for x, y in case.axes.items() if definition.later.get(x) != y)
    defaults = {x: values[0] for x, values in definition.options.items()}
    options = ", ".join(f"{x} = {_value(y)}" for x, y in case.options.items() if defaults[x] != y)
    lines = ["", "[[cases]]", f'operator = "{case.operator}"', f"axes = {{ {axes} }}"]
    lines += [f"options = {{ {options} }}"] if options else []
    lines += [f'dtype = "{case.dtype}"', f'pass = "{case.pass_}"']
    return "\n".join([*lines, *more]) + "\n"


def listed(names: Sequence[str]) -> str:
    """Names as TOML has a list of them."""
    return "[" + ", ".join(f'"{x}"' for x in names) + "]"


def _value(option: Option) -> str:
    if isinstance(option, bool):
        return str(option).lower()
    return f'"{option}"' if isinstance(option, str) else str(option)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a plan file."""
    parser = argparse.ArgumentParser(
        prog="python -m kernelmark.suite.shapes", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("kind", choices=sorted(HEADS))
    sys.stdout.write(text(parser.parse_args(arguments).kind, Catalog.default()))


if __name__ == "__main__":
    main()
