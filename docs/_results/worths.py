"""What kernels are worth in a step, and whether that is right."""

from __future__ import annotations

from collections.abc import Mapping

from kernelmark.registry import figures
from kernelmark.registry.analysis.worth import Worth, worths
from kernelmark.registry.views import worth_table

from .runs import TRUTHS, WORTH_STORED, WORTHS, journal, origin, record
from .tables import markdown

WORTH_SEEN, WORTH_NEAR = 0.02, 0.2
"""From which expected change of a step on worth is held to it, and how closely."""


def worth_of_parts() -> list[str]:
    """What exchanges of a part are worth."""
    found = [x for run in WORTHS for x in worths(journal(run)) if x.status == "ok"]
    nulls = [x for x in found if x.exchange.implementation == x.exchange.instead]
    moved = [x for x in found if x.expected is not None and abs(x.expected - 1) >= WORTH_SEEN]
    near = [x for x in moved if x.agreement == "as expected" or abs(_gained(x) - 1) <= WORTH_NEAR]
    signs = sum(_gained(x) > 0 for x in moved)
    beyond = ", ".join(
        f"{x.exchange.part} by `{x.exchange.implementation}` {figures.percent(_gained(x))}"
        for x in moved
        if x not in near
    )
    parts = [
        "## What kernels are worth in a step",
        "PyTorch's step in a CUDA graph, one part of it exchanged at a time. *Alone ×* is the call by itself, "
        "*expected ×* what the step would gain if nothing else changed, *measured ×* what it gains, with its "
        f"interval over processes. {len(moved)} exchanges are expected to move a step by "
        f"{figures.percent(WORTH_SEEN)} or more: the sign is right in {signs}, the size within "
        f"{figures.percent(WORTH_NEAR)} or the interval in {len(near)}. The others gain more than is expected of "
        f"their calls ({beyond} of it); the lines below the table say what else went. Of {len(nulls)} exchanges "
        f"of a part for itself the interval holds 1 in {sum(x.null for x in nulls)}.",
    ]
    for run in WORTHS:
        own = worths(journal(run))
        base = next(x.base_ms for x in own if x.base_ms is not None)
        parts += [
            f"{origin(journal(run))} {own[0].exchange.step}, a step of {figures.number(base, 4)} ms.",
            markdown(list(worth_table.HEADINGS), [worth_table.cells(x) for x in own if x.status == "ok"]),
            "\n".join(
                f"* {x.exchange.part} by `{x.exchange.implementation}`: {x.differs}" for x in own if x.differs
            ),
        ]
    parts.append(
        "A norm without an addition has no isolated row in the first run: its case and `add_rms_norm`'s have one "
        "name, and the plan kept one of the two; since then it keeps both. Liger's loss waits for the device, "
        "which a graph cannot hold: its row is `error` there and `unsupported` since."
    )
    return [*parts, *_as_stored()]


def _as_stored() -> list[str]:
    """Of which two are of other inputs in the first run than the model's."""
    own = [x for x in worths(journal(WORTH_STORED)) if x.status == "ok"]
    (rope,) = (x for x in own if x.expected is not None and x.exchange.part == "rope")
    return [
        "### Calls alone, of what the model stores",
        "In the runs above attention and RoPE were timed alone on contiguous (B, H, S, D), which no Llama hands "
        f"over. On what it stores, RoPE by `{rope.exchange.implementation}` gains "
        f"{figures.percent(_gained(rope))} of what is expected. Liger's RoPE writes into its inputs, which alone "
        f"is `incorrect`. {origin(journal(WORTH_STORED))}",
        markdown(list(worth_table.HEADINGS), [worth_table.cells(x) for x in own]),
    ]


def _gained(x: Worth) -> float:
    """What was gained of what was expected; below 0 where the sign is wrong."""
    assert x.gained_ms is not None
    assert x.expected_ms is not None
    return x.gained_ms / x.expected_ms


def truth_of_worth() -> list[str]:
    """Delays that were planted, and what worth finds of them."""
    own = {f"planted_{us}us": ms / 1e3 for us, ms in record("truth/delays-h200.json").items()}
    lines = []
    for run in TRUTHS:
        for x in worths(journal(run)):
            if x.status == "ok" and x.base_ms is not None and x.measured is not None:
                lines.append([str(TRUTHS.index(run) + 1), *_recovered(x, own)])
    head = ["host", "put in", "processes", "planted ms", "lost ms", "recovered", "95 %"]
    return [
        "## Is worth right?",
        "In GPT-2 124M's step in a CUDA graph (B 1, S 128) PyTorch's norm is exchanged for the same one behind a "
        "kernel that waits 50, 200 or 1,000 µs, called 25 times. What such a kernel takes was measured by itself "
        "(`truth/delays-h200.json`); *planted* is that times the calls, and what is lost should be as much. "
        "`planted_null` is the same norm without a delay; without a name an exchange is for itself. "
        "`tests/calibration/delays.py` has the program. A single process has no interval: what the first host "
        "shows where nothing was planted is not told from noise. "
        + " ".join(f"{origin(journal(x))}" for x in TRUTHS),
        markdown(head, lines),
    ]


def _recovered(x: Worth, own: Mapping[str, float]) -> list[str]:
    """What was planted in a step by an exchange, and what was found."""
    assert x.base_ms is not None
    assert x.measured is not None
    _, _, put = x.exchange.system.rpartition(".")
    planted = own.get(put, 0.0) * x.exchange.calls
    lost = x.base_ms / x.measured - x.base_ms
    several = x.processes > 1 and x.low is not None and x.high is not None
    if not planted:
        interval = f"{x.low:.4f} – {x.high:.4f} of the step" if several else figures.DASH
        name = f"`{put}`" if put == "planted_null" else x.exchange.part
        return [name, str(x.processes), "0", f"{lost:.3f}", figures.DASH, interval]
    found = [x.base_ms / y - x.base_ms for y in (x.high, x.low) if several and y]
    interval = " – ".join(figures.percent(y / planted, 1) for y in found) if several else figures.DASH
    recovered = figures.percent(lost / planted, 1)
    return [f"`{put}`", str(x.processes), f"{planted:.3f}", f"{lost:.3f}", recovered, interval]
