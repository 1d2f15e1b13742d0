"""Writes the tables of `docs/serving.md` that say what was measured on a CPU, from records of
`registry/reference/serving/`; no figure there stands by hand.

    python docs/serving.py            prints them
    python docs/serving.py --write    writes them; a test holds the page to what this prints

The records are made by `make agreement` and `make serving`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _page import placed

HERE = Path(__file__).resolve().parent
PAGE = HERE / "serving.md"
RECORDS = HERE.parent / "registry" / "reference" / "serving"

TOOLS = {"guidellm": "guidellm", "aiperf": "AIPerf", "vllm": "vLLM's client"}
SERVERS = {"planted": "answers of planted times", "model": "a million parameters on a CPU"}
TIMES = ("first token", "time a token", "end to end", "last token")
CLOSE = 0.02
"""What two tools may differ by and still agree."""

Values = Mapping[tuple[str, str, int, str, str], float]
"""What a tool says over the server's own account of the same requests, medians of both, by server, load, round,
tool and time.
"""


def record(name: str) -> Any:
    """A record."""
    return json.loads((RECORDS / f"{name}.json").read_bytes())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(x)} |\n" for x in lines)


def agreement() -> str:
    """What each tool says over the server's own account of the same requests: the middle of the rounds, and the
    least and the most of them.
    """
    found = record("agreement")
    values, own = {}, {}
    for x in found["runs"]:
        for name, each in x["ms"].items():
            at = x["server"], x["load"], x["round"], x["tool"], name
            own[at] = median(x["server_ms"][name])
            values[at] = median(each) / own[at]
    rounds = sorted({x["round"] for x in found["runs"]})
    tools = ["kernelmark", *(x for x in TOOLS if x in found["versions"])]
    load, planted = found["load"], found["planted"]
    said = ", ".join(f"{TOOLS[x]} {found['versions'][x]}" for x in tools[1:])
    rows = []
    for server, shown in SERVERS.items():
        for kind in dict.fromkeys(x["load"] for x in found["runs"]):
            for name in TIMES:
                row = [ratio(values, rounds, (server, kind), name, tool) for tool in tools]
                if any(row[1:]):
                    truth = median(y for x, y in own.items() if x[:2] == (server, kind) and x[4] == name)
                    rows.append([shown, LOADS[kind](load), name, f"{truth:,.3g} ms", *row])
    several = ": the middle round, in brackets the least and the most" if len(rounds) > 1 else ""
    head = ("server", "load", "time", "by the server", *(TOOLS.get(x, "ours") for x in tools))
    return (
        f"{said}; {load['requests']} requests of {load['input']} tokens for {load['output']}, "
        f"{len(rounds)} round{'s' * (len(rounds) > 1)} in which all tools took turns, {found['cores']} cores for "
        f"the server and the tool. Planted: {planted['first_ms']:g} ms to the first token, "
        f"{planted['token_ms']:g} ms for each after it. A figure is the median of a load's requests as the tool "
        f"reports it, over the median that the server itself recorded for the same requests{several}. Bold: "
        f"within {CLOSE:.0%} of ours.\n\n" + table(head, rows)
    )


LOADS: Mapping[str, Callable[[Any], str]] = {
    "closed": lambda load: f"closed, {load['users']} users",
    "constant": lambda load: f"constant, {load['rate']}/s",
}


def ratio(values: Values, rounds: Sequence[int], of: tuple[str, str], name: str, tool: str) -> str:
    """A tool's time over the server's; empty where it has none."""

    def all_of(tool: str) -> list[float]:
        return sorted(y for x in rounds if (y := values.get((*of, x, tool, name))) is not None)

    found = all_of(tool)
    if not found:
        return ""
    middle = median(found)
    close = tool != "kernelmark" and abs(middle / median(all_of("kernelmark")) - 1) <= CLOSE
    mark = "**" if close else ""
    among = f" ({found[0]:.3f} to {found[-1]:.3f})" if len(rounds) > 1 else ""
    return f"{mark}{middle:.3f}{mark}{among}"


def faults() -> str:
    """What became of requests to servers with planted faults."""
    found = record("faults")
    rows = [
        [
            f"a server that {x['server']}" if x["server"] != "none" else "a server without faults",
            f"{x['asked']}",
            ", ".join(f"{n} `{how}`" for how, n in x["ended"].items()),
            f"{sum(x['ended'].values())} of {x['asked']}",
            f"{x['beyond_s']:.1f} s",
        ]
        for x in found["faults"]
    ]
    none, queue = found["malformed"], found["queueing"]
    ends = ", ".join(f"{n:,} {how}" for how, n in none["ended"].items())
    off = queue["found_ms"] / queue["server_ms"] - 1
    return (
        table(("planted", "requests", "how they ended", "accounted for", "after the last arrival"), rows)
        + f"\n{none['asked']:,} malformed requests to our server: {ends} (by HTTP status; `closed` had no "
        f"request in it). It printed {'nothing' if not none['printed'] else 'something'}, "
        f"{'still served' if none['after'] == {'ok': 2} else 'served no more'}, and listened on "
        f"{'the loopback alone' if not none['elsewhere'] else 'more than the loopback'}.\n"
        f"\nQueueing: {queue['requests']} requests, ten a second, to a server that takes "
        f"{queue['one_at_a_time_ms']:.0f} ms for each, one at a time. Mean end to end from the schedule "
        f"{queue['found_ms']:,.0f} ms, by the server's own account {queue['server_ms']:,.0f} ms: {off:+.2%}. Were "
        f"each to take what is planted, and nothing besides, it would be {queue['exact_ms']:,.0f} ms "
        f"({queue['found_ms'] / queue['exact_ms'] - 1:+.2%}); counted from when a place was free, "
        f"{queue['one_at_a_time_ms']:.0f} ms.\n"
    )


def capacity() -> str:
    """How far off the client's stamps are, and what a core could take, on each machine that has a record."""
    return "\n".join(capacity_of(record(x.stem)) for x in sorted(RECORDS.glob("capacity*.json")))


def capacity_of(found: Mapping[str, Any]) -> str:
    """The table of one machine."""
    rows = []
    for rate, clients in dict.fromkeys((x["asked"], x.get("clients", 1)) for x in found["runs"]):
        runs = [x for x in found["runs"] if (x["asked"], x.get("clients", 1)) == (rate, clients)]

        def of(name: str, runs: Sequence[Any] = runs) -> tuple[float, float]:
            values = [x[name] for x in runs]
            return min(values), median(values)

        came, p50, p99, core = (of(x) for x in ("came", "p50_ms", "p99_ms", "per_core"))
        off = [f"{x:.2f} ms" for x in (p50[1], p99[1], p99[0])]
        rows.append([f"{rate:,}", f"{clients}", f"{came[1]:,.0f}", *off, f"{core[1]:,.0f}"])
    errors = "error, median", "error, p99", "p99 of the quietest run"
    repeats = len({x["repeat"] for x in found["runs"]})
    return (
        f"{found['cores']} cores, on which the sources of the chunks ran too; {found['streams']} "
        f"streams a client over {found['seconds']:.0f} s, runs of each rate: {repeats}; the "
        f"middle one is shown.\n\n" + table(("chunks/s", "clients", "came", *errors, "chunks a CPU second"), rows)
    )


BLOCKS: Mapping[str, Callable[[], str]] = {"agreement": agreement, "faults": faults, "capacity": capacity}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(placed(PAGE.read_text(), BLOCKS))
    else:
        print("\n".join(block() for block in BLOCKS.values()))
