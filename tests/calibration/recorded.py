"""What the detector says of A/B comparisons that were measured once, by the decision code as it is now.

    python tests/calibration/recorded.py [FOLDER]

Each folder of `registry/reference/detector/` holds one comparison, as STAGE-SIDE.jsonl.gz. Those named `planted-…`
come from `planted.py`, those named `unchanged-…` from two commits with the same kernels. Printed are the Markdown
tables that `docs/calibration.md` shows.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from kernelmark.registry.detection.comparison import Comparison, Key
from kernelmark.registry.detection.decision import DEFAULTS, Progress, decide
from kernelmark.registry.detection.pairing import key_of
from kernelmark.registry.detection.verdict import Verdict, exit_code
from kernelmark.registry.journal import Journal, read
from kernelmark.suite.ab import paired

HERE = Path(__file__).parent
RECORDED = HERE.parents[1] / "registry" / "reference" / "detector"


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
        there = {key_of(x) for x in sides[0].records}  # what is asked for today may not have been then
        wanted = {key: number for key, number in wanted.items() if key in there}
        whole = min(_whole(side, wanted) for side in sides)
        return paired(*sides, wanted, whole, 0 if at == 1 else DEFAULTS.pairs)

    first = read(folder / "1-base.jsonl.gz")
    wanted = dict.fromkeys(map(key_of, first.records), first.header.replicates)
    return decide(measured(wanted), measured), _whole(first, wanted)


def _whole(journal: Journal, wanted: Mapping[Key, int]) -> int:
    """Rounds of which every row that was wanted in it has a record."""
    seen = Counter(x.replicate for x in journal.records if key_of(x) in wanted)
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


def tables(root: Path = RECORDED) -> dict[str, str]:
    """By what was compared, "planted" and "unchanged", the table."""
    sys.path.insert(0, str(HERE))
    from planted import table

    named = [(folder.name, *decided(folder)) for folder in sorted(root.iterdir()) if folder.is_dir()]
    planted: list[Verdict] = [x for name, y, _ in named if name.startswith("planted") for x in y.verdicts]
    rows = [{**msgspec.to_builtins(x), **msgspec.to_builtins(x.key)} for x in planted]
    return {
        "planted": table({"verdicts": rows}),
        "unchanged": unchanged([x for x in named if x[0].startswith("unchanged")]),
    }


if __name__ == "__main__":
    for text in tables(Path(sys.argv[1]) if sys.argv[1:] else RECORDED).values():
        print(text, end="\n\n")
