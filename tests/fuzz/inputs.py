"""A fuzzer: inputs near valid ones, and none of them may end in anything but a message.

Seeded, so that a number names an input: `make fuzz FUZZ=10000 SEED=1` runs so many. Each has 20 s and the process
1 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from kernelmark.registry import escape
from kernelmark.registry.analysis.rows import rows, summarize
from kernelmark.registry.errors import KernelmarkError
from kernelmark.registry.importers.formats import FORMATS, made
from kernelmark.registry.store import record as types
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.index import Index
from kernelmark.registry.store.journal import Journal, parse
from kernelmark.registry.store.transfer import import_journal
from kernelmark.registry.tracking.entries import entries, summary
from kernelmark.registry.views import comparison_page, comparison_table, table, tables
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.memory import MemoryProfiler
from kernelmark.suite.run import repro, supervisor
from kernelmark.suite.run.conversation import Conversation, OutOfTurn
from kernelmark.suite.run.messages import Message, Task, TaskCell

SECONDS, BYTES = 20.0, 1 << 30
EXAMPLES = Path(__file__).parents[1] / "registry" / "importers" / "examples"
ODD: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1 << 31,
        10**12,
        10**40,
        0.5,
        -0.0,
        5e-324,
        1e300,
        "",
        "²",
        "x" * 3000,
        "../../x",
        "/etc/x",
    ),
    *(
        "[/red]",
        "\x1b[31m",
        "a\nb",
        "<script>",
        "=cmd()",
        "[x",
        ".",
        "\u202e",
        "|`$\\frac",
        [],
        {},
        [[]],
        {"": []},
    ),
    *("latest", "-x", "--help", "2026", "nan", "inf", "1e999", "sha256:" + "0" * 64, "\0"),
]
PLAN = """replicates = 3
cache = ["cold", "hot"]
deadline_s = 10.5

[sampling]
min_samples = 5
timer = "auto"

[[cases]]
operator = "gelu"
axes = { M = [3, 5], N = 64 }
options = {}
dtype = ["fp32"]
pass = "forward"
implementations = ["torch"]
"""
CATALOG = Catalog.default()


def journal_lines() -> list[Any]:
    """A small valid journal as builtins, with a line of each kind."""
    case = types.Case("gelu", "M3-N64", {"M": 3, "N": 64}, {"a": True}, "fp32", "forward", "5bec", 100, 10, 3)
    header = types.Header(
        *(2, "20260101-000000-aaaa", "2026-01-01T00:00:00Z", "0.1.0", "c" * 40, False, "mine", 1, 2, "cpu", "k"),
        {"device": "cpu", "cpu": "x", "image_digest": None},
        {"python": "3.11", "gpu/max_sm_mhz": 1980},
        types.Request((case,), ("torch",), ("cold",), msgspec.to_builtins(Sampling()), 10.0),
    )
    telemetry = types.Telemetry((1, 2), (3, 4), 5.0, 6, ("x",))
    seen = types.Measurement(
        {"latency": (1.0, 1.1), "error": (0.1,)}, "events", telemetry=telemetry, throttled=(1,)
    )
    out: list[Any] = [header, types.Ceiling("copy", 100, 0.1, 0)]
    for replicate in range(2):
        out += [
            types.Record(case, x, x, "1", replicate, 0, "cold", "ok", None, seen) for x in ("torch", "kernelmark")
        ]
        out.append(types.Record(case, "lost", "l", None, replicate, 1, "cold", "error", "no luck"))
    out.append(types.Footer("2026-01-01T00:01:00Z", 60.0, True, {"sample": 1.0}))
    return [msgspec.to_builtins(x) for x in out]


def altered(value: Any, chance: random.Random, many: int = 1) -> Any:
    """The same document with some places set to something odd, taken out, renamed or repeated."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.randint(1, many)):
        at, way = value, []
        while isinstance(at, dict | list) and at and (not way or chance.random() < 0.8):
            key = chance.choice(list(at)) if isinstance(at, dict) else chance.randrange(len(at))
            way.append((at, key))
            at = at[key]
        holder, key = way[-1]
        action = chance.randrange(5)
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[str(chance.choice(ODD))] = holder.pop(key)
        elif action == 2 and isinstance(holder, list):
            holder += [holder[key]] * chance.choice([1, 100])
        else:
            holder[key] = chance.choice(ODD)
        if not value:
            break
    return value


def garbled(raw: bytes, chance: random.Random) -> bytes:
    """The same bytes with a few of them changed, cut off or repeated."""
    out = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(out) + 1)
        match chance.randrange(4):
            case 0:
                out[place : place + chance.choice([1, 9])] = chance.randbytes(chance.choice([0, 1, 9]))
            case 1:
                del out[place:]
            case 2:
                out[place:place] = chance.choice([b"[", b'{"a":', b"9", b'"', b"\n"]) * chance.choice([1, 3000])
            case _:
                out[place:place] = out[:place][-50:]
    return bytes(out)


def shown(found: Journal) -> None:
    """All that is made of a journal for readers and for the registry."""
    rows(found)
    msgspec.json.encode(summarize(found))
    text = table.render(tables.run_table(found), 80)
    assert not escape.CONTROL.search(text), "control characters in a table"
    compared = comparison_table.compare(found, found)
    table.render(comparison_page.comparison_page(compared), 80)
    msgspec.json.encode(compared.to_builtins())
    entries(found)
    summary(found)


def journals(chance: random.Random, home: Home) -> None:
    """A journal with wrong fields or bytes, through every reader."""
    raw = b"".join(json.dumps(x).encode() + b"\n" for x in altered(journal_lines(), chance, 3))
    if chance.random() < 0.3:
        raw = garbled(raw, chance)
    path = home.folder / "given.jsonl"
    path.write_bytes(raw)
    with contextlib.suppress(KernelmarkError):
        import_journal(path, home)
        index = Index(home)
        for entry in index.runs():
            index.processes(entry)
    found = parse(raw)
    shown(found)
    made_of = repro.repeat(found.header, home, CATALOG)
    if made_of.plan_file is not None:
        assert made_of.plan_file.resolve().is_relative_to(home.folder.resolve())
    supervisor.resume(found.header.run, home, CATALOG, supervisor.Silent())


def plan_files(chance: random.Random, home: Home) -> None:
    """A plan file with other words and bytes."""
    text = PLAN
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.5:
            text = garbled(text.encode(), chance).decode(errors="replace")
        else:
            word = chance.choice(text.split() or [" "])
            text = text.replace(word, json.dumps(chance.choice(ODD)), 1)
    plans.parse(text, "fuzz", CATALOG)


def names(chance: random.Random, home: Home) -> None:
    """Names of runs, operators and implementations that are none."""
    name = str(chance.choice(ODD)) + chance.choice(["", ".jsonl", "/", "x" * chance.choice([1, 5_000_000])])
    action = chance.randrange(4)
    if action == 0:
        home.find(name)
    elif action == 1:
        CATALOG.operator(name)
    elif action == 2:
        plans.load(name, CATALOG, "cpu")
    else:
        plans.load("quick", CATALOG, "cpu").cells(CATALOG, "cpu", [name])


def files(chance: random.Random, home: Home) -> None:
    """Files of other tools."""
    form = chance.choice(list(FORMATS))
    example = next(x for x in EXAMPLES.iterdir() if x.is_file() and x.stem in (FORMATS[form], form))
    raw = example.read_bytes()
    if chance.random() < 0.6 and raw[:1] == b"{" and example.suffix == ".json":
        raw = json.dumps(altered(json.loads(raw), chance, 3)).encode()
    else:
        raw = garbled(raw, chance)
    path = home.folder / example.name
    path.write_bytes(raw)
    for found in made(form, [path]):
        shown(found)


def pipes(chance: random.Random, home: Home) -> None:
    """Messages on a worker's pipe, out of order and out of form."""
    case = types.Case("gelu", "M3", {"M": 3}, {}, "fp32", "forward", "5bec", 100, 10)
    task = Task("cpu", 1, 0, tuple(TaskCell(i, case, "torch", "cold") for i in range(2)), Sampling())
    seen = {"samples": {"latency": [1.0]}, "timer": "events"}
    said: list[Any] = [
        {"message": "stage", "name": "start"},
        {"message": "facts", "conditions": {"threads": 1}},
        {
            "message": "ceiling",
            "ceiling": {"kind": "ceiling", "what": "copy", "size": 1, "time_ms": 1, "replicate": 0},
        },
    ]
    for i in range(2):
        said.append({"message": "stage", "name": "sample", "index": i})
        said.append(
            {"message": "result", "index": i, "status": "ok", "reason": None, "measurement": seen, "spent_s": {}}
        )
    said.append({"message": "done", "spent_s": {"build": 0.1}})
    said = altered(said, chance, 2)
    chance.shuffle(said) if chance.random() < 0.3 else None
    conversation = Conversation(task, 0.0)
    decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
    for second, x in enumerate(said):
        raw = json.dumps(x).encode()
        message = decoder.decode(garbled(raw, chance) if chance.random() < 0.1 else raw)
        conversation.check(message, float(second))


KINDS: tuple[Callable[[random.Random, Home], None], ...] = (journals, plan_files, names, files, pipes)
EXPECTED = (KernelmarkError, OutOfTurn, msgspec.MsgspecError)
"""What may come of an input: our messages, and what the supervisor takes a worker's nonsense for."""


def one(number: int, seed: int) -> None:
    """The input of a number. Raises `AssertionError` where it ends as it must not."""
    chance = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, MemoryProfiler() as memory:
        home = Home(Path(folder))
        said = ""
        try:
            kind(chance, home)
        except EXPECTED as error:
            said = str(error)
        except (UnicodeDecodeError, RecursionError):
            if kind is not pipes:  # there a supervisor takes both for nonsense
                raise
    assert len(said) < 20_000, f"{kind.__name__} {number}: a message of {len(said)} characters"
    took = time.monotonic() - begin
    assert took < SECONDS, f"{kind.__name__} {number} took {took:.0f} s"
    peak = memory.host_peak_bytes or 0  # its own: the process may be one that held more before
    assert peak < BYTES, f"{kind.__name__} {number}: {peak >> 20} MiB"


def main() -> None:
    """Runs a number of inputs; says which one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--go-on", action="store_true", help="after a failure, to see them all")
    given = parser.parse_args()
    for number in range(given.first, given.first + given.count):
        try:
            one(number, given.seed)
        except BaseException:
            print(f"input {number} of seed {given.seed}: inputs.py 1 --first {number} --seed {given.seed}")
            if not given.go_on:
                raise
            traceback.print_exc(limit=-3)
        if number % 1000 == 999:
            print(f"{number + 1 - given.first} of {given.count}", flush=True)


if __name__ == "__main__":
    main()
