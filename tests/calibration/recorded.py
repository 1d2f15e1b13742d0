"""What the detector says of A/B comparisons that were measured once, by the decision code as it is now.

    python tests/calibration/recorded.py [FOLDER]

Each folder of `registry/reference/detector/` holds one comparison, as STAGE-SIDE.jsonl.gz. Those named `planted-…`
come from `planted.py`, those named `unchanged-…` from two commits with the same kernels, those named
`environment-…` from two environments, with the arms of the attribution (`arm-…`) beside them, those named
`server-…` from starts of a server on a CPU, `said.txt` being what the command said. Printed are the Markdown
tables that `docs/calibration.md` shows, which are without the last.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from kernelmark.registry.detection.attribution import Arm, Attribution, attribute
from kernelmark.registry.detection.comparison import Comparison
from kernelmark.registry.detection.decision import DEFAULTS, Progress, decide
from kernelmark.registry.detection.pairing import side
from kernelmark.registry.detection.verdict import Verdict, exit_code
from kernelmark.registry.store.journal import Journal, read
from kernelmark.registry.store.record import Key
from kernelmark.suite.compare.interleaved import paired

HERE = Path(__file__).parent
RECORDED = HERE.parents[1] / "registry" / "reference" / "detector"
ARM = re.compile(r"\b(?:old|new)\b")
"""The words of a header's request that say which arm of an attribution its run is, in the order of `Arm`."""


@functools.cache
def decided(folder: Path) -> tuple[Progress, int]:
    """The verdicts of the comparison in a folder, and how many whole pairs its first stage has."""
    at = 0

    def measured(wanted: Mapping[Key, int]) -> list[Comparison]:
        nonlocal at
        at += 1
        paths = [folder / f"{at}-{side}.jsonl.gz" for side in ("base", "current")]
        if not all(x.exists() for x in paths):
            return []
        sides = read(paths[0]), read(paths[1])
        there = {x.identity for x in sides[0].records}  # what is asked for today may not have been then
        wanted = {key: number for key, number in wanted.items() if key in there}
        whole = min(_whole(side, wanted) for side in sides)
        allowed = frozenset(sides[0].header.conditions) if _apart(folder) else frozenset()
        return paired(*sides, wanted, whole, 0 if at == 1 else DEFAULTS.rerun_pairs // 2, allowed=allowed)

    first = read(folder / "1-base.jsonl.gz")
    wanted = dict.fromkeys((x.identity for x in first.records), first.header.replicates)
    # As the command: another environment may well move every row, and is no sign of another machine. Nor is what
    # moves a comparison's only row, which is a baseline whose file differs.
    moves = _apart(folder) or folder.name.startswith("server")
    options = msgspec.structs.replace(DEFAULTS, shift_above=math.inf) if moves else DEFAULTS
    return decide(measured(wanted), measured, options), _whole(first, wanted)


def _apart(folder: Path) -> bool:
    """Whether the two sides ran in environments of their own."""
    return folder.name.startswith("environment")


def attributed(folder: Path) -> list[Attribution]:
    """What the rows of the comparison in a folder that got slower come from, by the arms beside it."""
    slower = [x for x in decided(folder)[0].verdicts if x.kind in ("regression", "warning")]
    measured = {
        Arm(*(word == "new" for word in ARM.findall(journal.header.request.arm))): journal
        for journal in map(read, sorted(folder.glob("arm-*.jsonl.gz")))
    }
    out = []
    for verdict in slower:
        rows = {arm: [x for x in y.records if x.identity == verdict.key] for arm, y in measured.items()}
        whole = min(_whole(journal, {verdict.key: journal.header.replicates}) for journal in measured.values())
        medians = {arm: side(records, whole).medians for arm, records in rows.items()}
        out.append(attribute(verdict.key, medians, DEFAULTS, verdict.noise))
    return out


def _whole(journal: Journal, wanted: Mapping[Key, int]) -> int:
    """Rounds of which every row that was wanted in it has a record."""
    seen = Counter(x.replicate for x in journal.records if x.identity in wanted)
    made = 0
    while seen[made] and seen[made] >= sum(number > made for number in wanted.values()):
        made += 1
    return made


def unchanged(found: Sequence[tuple[str, Progress, int]]) -> str:
    """A comparison of unchanged code a line."""
    out = [
        "| comparison | rows | pairs | verdicts | exit code | apart, median | 90 % | most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, progress, pairs in found:
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(x.kind for x in progress.verdicts).most_common())
        apart = sorted(abs(x.change) for x in progress.verdicts if x.change is not None)
        rank = apart[round(0.9 * (len(apart) - 1))]
        far = f"{statistics.median(apart):.2%} | {rank:.2%} | {apart[-1]:.2%}"
        code = exit_code(progress.verdicts)
        out.append(f"| {name} | {len(progress.verdicts)} | {pairs} | {kinds} | {code} | {far} |")
    return "\n".join(out)


def causes(found: Sequence[tuple[str, Attribution]]) -> str:
    """A part of a slowdown a line."""
    out = ["| comparison | row | part | slower by | share of the whole | called |", "|---|---|---|---|---|---|"]
    for name, row in found:
        for part in row.parts:
            low, high = part.share_low, part.share_high
            share = "–" if None in (part.share, low, high) else f"{part.share:.0%} [{low:.0%}, {high:.0%}]"
            slower = f"{part.change:+.2%} [{part.low:+.2%}, {part.high:+.2%}]"
            called = "the cause" if part.cause in row.causes else ""
            out.append(f"| {name} | {row.key.operator} | {part.cause} | {slower} | {share} | {called} |")
    return "\n".join(out)


def tables(root: Path = RECORDED) -> dict[str, str]:
    """By what was compared, "planted", "unchanged" and "environment", the table."""
    sys.path.insert(0, str(HERE))
    from planted import table

    folders = sorted((x for x in root.iterdir() if x.is_dir()), key=lambda x: (len(x.name), x.name))
    named = [(folder.name, *decided(folder)) for folder in folders]
    planted: list[Verdict] = [x for name, y, _ in named if name.startswith("planted") for x in y.verdicts]
    rows = [{**msgspec.to_builtins(x), **msgspec.to_builtins(x.key)} for x in planted]
    return {
        "planted": table({"verdicts": rows}),
        "unchanged": unchanged([x for x in named if x[0].startswith("unchanged")]),
        "environment": causes([(x.name, y) for x in folders if _apart(x) for y in attributed(x)]),
    }


if __name__ == "__main__":
    for text in tables(Path(sys.argv[1]) if sys.argv[1:] else RECORDED).values():
        print(text, end="\n\n")
