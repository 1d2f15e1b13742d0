"""Which schedule a product takes on Hopper: a pure function of its size, with what was tuned as data.

`TUNED` holds what was fastest of `candidates` at the shapes that were measured, `SOURCES` where; a product of
another size takes what `estimate` finds cheapest. Nothing is searched for at run time, so that two processes
compute alike. Those of a mixture of experts are chosen by how many rows an expert has on average: how many each
has, the device alone knows.

Tiles are shared out by steps only where the table says so. On an H200 that was slower nearly everywhere, also
where each tile was split evenly: the program that added up a tile waited for its parts one after the other. Since
then it loads several at a time, and keeps its own; that was not run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ._schedules import DualSchedule, GroupedSchedule, Schedule

SIXTEEN = "16"
FAST = "fp8"
PROMOTED = "fp8_block"
GROUPED = "fp8_group"
"""Kinds of products: of 16-bit numbers; of 8-bit ones with scales that the sum is multiplied by; with scales for
each 128 steps of K, of squares of b; and of single rows of both."""


SECTION = 16
"""Rows of tiles that are neighbours where nothing else was measured."""


@dataclass(frozen=True)
class Choice:
    """A schedule, how many of its tiles are dealt out whole, rows of tiles that are neighbours, and how many
    programs compute a tile if none is dealt out whole and all have as many.
    """

    schedule: Schedule
    dealt: int
    section: int
    split: int = 0


_BLOCK = Schedule(step=128, scales="block", staged=True)
_GROUP = replace(_BLOCK, scales="group")


def candidates(kind: str, gated: bool) -> tuple[Schedule, ...]:
    """What a product can be computed by, the largest tiles first."""
    if gated:
        return (
            Schedule(columns=128, stages=4, gated=True),
            Schedule(groups=1, columns=128, stages=5, gated=True),
            Schedule(groups=1, columns=64, stages=8, gated=True),
        )
    if kind == PROMOTED:
        return (
            replace(_BLOCK, rows=128, columns=128, stages=4, buffers=1),
            replace(_BLOCK, groups=3, columns=128, stages=4, registers=160),
            replace(_BLOCK, groups=1, columns=128, stages=8, ahead=4),
            replace(_BLOCK, groups=1, columns=64, stages=12, ahead=4),
            replace(_BLOCK, groups=1, columns=32, stages=16, ahead=4),
        )
    if kind == GROUPED:
        return (
            replace(_GROUP, columns=128, stages=6, ahead=4, buffers=1),
            replace(_GROUP, columns=64, stages=8, ahead=4, buffers=1, registers=232),
            replace(_GROUP, groups=1, columns=64, stages=12, ahead=4),
            replace(_GROUP, groups=1, columns=32, stages=16, ahead=4),
        )
    step = 64 if kind == SIXTEEN else 128
    return (
        Schedule(columns=256, step=step, stages=4),
        Schedule(columns=128, step=step, stages=6),
        Schedule(groups=1, columns=256, step=step, stages=5),
        Schedule(groups=1, columns=128, step=step, stages=8),
        Schedule(groups=1, columns=64, step=step, stages=12),
        Schedule(groups=1, columns=32, step=step, stages=16),
        Schedule(groups=3, columns=128, step=step, stages=4, registers=160),
    )


def unstaged(kind: str) -> tuple[Schedule, ...]:
    """What a product is computed by whose scales cannot be staged, as of rows that lie row by row."""
    if kind == GROUPED:  # b's scales, one a column, take the registers that more columns would
        return (Schedule(groups=1, columns=64, step=128, stages=12, scales="group"),)
    return (
        Schedule(rows=128, columns=128, step=128, stages=4, scales="block"),
        Schedule(columns=128, step=128, stages=6, scales="block"),
        Schedule(groups=1, columns=128, step=128, stages=8, scales="block"),
        Schedule(groups=1, columns=64, step=128, stages=12, scales="block"),
    )


COPIED = 16
"""Steps of the busiest program from which on scales that cannot be staged are copied to where they can. On an
H200 a step took .3 µs less with staged ones, where a tile has more rows than 16, and .04 µs with one row; a copy
is a launch, 3 to 4 µs."""
COPIED_FEW = 128
"""The same for up to 16 rows."""


def copied(M: int, N: int, K: int, programs: int) -> bool:
    """Whether a product is long enough to copy scales for, by its tiles of 128 × 128."""
    rounds = -(-(-(-M // 128) * -(-N // 128)) // programs)
    return rounds * -(-K // 128) >= (COPIED if M > 16 else COPIED_FEW)


def filled(schedule: Schedule, M: int) -> int:
    """Of 64 rows how many a product of few is loaded into, or 0 for all of them. What A does not have would be
    filled with zeros, in shared memory, at the rate of what it has.
    """
    if M > 32 or schedule.groups > 1 or schedule.rows > 64:
        return 0
    return 16 if M <= 16 else 32


def tiles(schedule: Schedule, M: int, N: int) -> int:
    """Tiles of a product."""
    return -(-M // (schedule.groups * schedule.rows)) * -(-N // schedule.width)


def dealt(count: int, programs: int) -> int:
    """Of `count` tiles, how many are dealt out whole where others are shared out: all rounds but the last full one
    and what follows it, so that a program's share is between one tile and two, or less than one of too few tiles.
    """
    return max(count // programs - 1, 0) * programs


def estimate(schedule: Schedule, M: int, N: int, K: int, programs: int) -> float:
    """About how many cycles a product takes whose tiles are dealt out whole: of the busiest program, steps times
    what each takes the matrix units or the loads, and what ends each tile. Its numbers fit what an H200 took at
    the shapes that `TUNED` is of, and at twelve random ones.
    """
    steps = -(-K // schedule.step)
    size = 2 if schedule.step == 64 else 1
    rows = schedule.groups * schedule.rows
    columns = schedule.columns * schedule.pieces
    products = rows * columns * schedule.step * size / 4096
    if schedule.groups == 1 and not schedule.ahead:
        products *= 1.25  # alone it leaves the matrix units idle between its products
    if schedule.promoted:  # three groups hide more of what adds up sums
        products *= 1.05 if schedule.groups == 3 else 1.1
    elif rows == columns == 128:
        products *= 1.22  # two groups that load as much as they multiply wait for each other's steps
    loads = (min(rows, M) + columns) * schedule.step * size / 70
    rounds = -(-tiles(schedule, M, N) // programs)
    return rounds * (steps * max(products, loads) + 300)


TUNED: dict[tuple[str, int, int, int], tuple[int, int, int]] = {
    ("16", 64, 2112, 7168): (5, 2, 8),
    ("16", 64, 24576, 1536): (4, 0, 8),
    ("16", 128, 24576, 1536): (3, 0, 8),
    ("16", 128, 32768, 512): (2, 0, 8),
    ("16", 1024, 2880, 2880): (3, 0, 8),
    ("fp8", 64, 2112, 7168): (4, 0, 8),
    ("fp8", 64, 2880, 2880): (4, 0, 8),
    ("fp8", 64, 7168, 2048): (3, 0, 8),
    ("fp8", 64, 24576, 1536): (4, 0, 8),
    ("fp8", 128, 24576, 1536): (3, 0, 8),
    ("16_gated", 64, 32768, 512): (2, 0, 8),
    ("16_gated", 128, 32768, 512): (2, 0, 8),
    ("16_gated", 1024, 7168, 2048): (1, 0, 8),
    ("16_gated", 1024, 7168, 16384): (1, 0, 8),
    ("16_gated", 4096, 2112, 7168): (2, 0, 8),
    ("fp8_block", 64, 2112, 7168): (4, 1, 8),
    ("fp8_block", 4096, 24576, 1536): (1, 0, 16),
    ("fp8_block", 4096, 32768, 512): (1, 0, 16),
    ("fp8_group", 64, 2112, 7168): (3, 1, 8),
}
"""By kind (`GATED` its own), `height` of M, N and K: which of `candidates`, how tiles are shared out by steps
(`shared`), the section."""


GATED = "16_gated"
"""Gated products of 16-bit numbers."""
FLUSHED = "tuning/matmul-h200-flushed.txt.gz"
TALL = "tuning/matmul-h200-192.txt.gz"
SOURCES: dict[str, str] = {GATED: FLUSHED, PROMOTED: FLUSHED, GROUPED: FLUSHED, SIXTEEN: TALL, FAST: TALL}
"""By kind, where the table was measured: a journal in `registry/reference/`, made by
`tests/kernels/tune_matmul.py`."""


def height(M: int) -> int:
    """The number of rows that a product is looked up by: few rows take as long as a few more."""
    return next((most for most in (64, 128) if most >= M), M)


@functools.lru_cache(4096)
def choose(kind: str, M: int, N: int, K: int, gated: bool, programs: int, stageable: bool = True) -> Choice:
    """The schedule of a product, before what its operands add: how they lie, scales, a bias. Scales that are not
    `stageable` take `unstaged` ones by the rule.
    """
    some = candidates(kind, gated) if stageable else unstaged(kind)
    known = TUNED.get((GATED if gated else kind, height(M), N, K)) if stageable else None
    if known is not None:
        nth, shares, section = known
        return shared(some[nth], shares, section, M, N, programs)
    best = min(some, key=lambda schedule: estimate(schedule, M, N, K, programs))
    count = tiles(best, M, N)
    return choice(best, count, count, SECTION)


def shared(schedule: Schedule, shares: int, section: int, M: int, N: int, programs: int) -> Choice:
    """With no tile shared out (0), as many as `dealt` says (1), or all by so many programs each."""
    count = tiles(schedule, M, N)
    if shares > 1:
        return Choice(replace(schedule, shared=True), 0, section, shares)
    return choice(schedule, dealt(count, programs) if shares else count, count, section)


def choice(schedule: Schedule, whole: int, count: int, section: int) -> Choice:
    """With tiles shared out if not all are dealt."""
    return Choice(replace(schedule, shared=whole < count), whole, section)


DUAL_SOURCE = "tuning/gate-up-h200.txt"
"""Where dual products were measured, in `registry/reference/`."""
DUAL = (
    DualSchedule(columns=128, stages=6),
    DualSchedule(groups=1, columns=256, stages=5),
    DualSchedule(groups=1, columns=128, stages=8),
)
"""What a dual product can be computed by, the largest tiles first. 64 columns of each factor were as fast as 128
or faster in seven of eight products, and 1.7 % slower in one.
"""


@functools.lru_cache(4096)
def dual(M: int, N: int, K: int, programs: int) -> DualSchedule:
    """The schedule of a dual product (M, N) of K, its tiles dealt out whole."""
    return min(DUAL, key=lambda schedule: estimate(schedule, M, N, K, programs))


GROUPED_SOURCE = "tuning/grouped-h200.txt.gz"
"""Where products of groups of many rows were measured, in `registry/reference/`; scales of rows not masked."""
FEW_SOURCE = "tuning/few-grouped-h200.txt.gz"
"""The same of few rows a group."""
_BLOCKS = GroupedSchedule(columns=128, step=128, scales="block")
_LOW = replace(_BLOCKS, groups=1, stages=8, ahead=4)
"""Tiles of 64 rows and 128 columns."""
_NARROW = replace(_BLOCKS, stages=6, buffers=1, ahead=2)
"""Tiles of 128 rows and 128 columns."""
GROUPED_FP8: dict[str, GroupedSchedule] = {
    "block": replace(_BLOCKS, paired=True, buffers=1),
    "row": GroupedSchedule(columns=256, step=128, scales="row"),
}
"""By recipe, what products of many groups of 8-bit rows take, in tiles of 128 rows."""


def grouped(recipe: str, groups: int, rows: int, N: int, programs: int) -> GroupedSchedule:
    """The schedule of a product of groups of about so many rows each: lower and narrower tiles where there are too
    few of the others to keep all programs busy, or where a group does not fill them.
    """
    schedule = GROUPED_FP8[recipe]
    if recipe != "block":
        return schedule
    if rows <= 64 or groups * tiles(schedule, rows, N) < 2 * programs:
        return _LOW
    return _NARROW if -(-N // 128) % 2 else schedule


@dataclass(frozen=True)
class Mixture:
    """Schedules of the two products of a mixture of experts, whose tiles are as high: gated and plain."""

    gated: GroupedSchedule
    plain: GroupedSchedule

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return self.plain.height

    def filled(self, rows: int) -> Mixture:
        """The same in tiles of so many rows."""
        return Mixture(replace(self.gated, filled=rows), replace(self.plain, filled=rows))


_LOW_16 = Mixture(
    GroupedSchedule(groups=1, columns=64, stages=7, gated=True), GroupedSchedule(groups=1, columns=128, stages=8)
)
_LOW_8 = Mixture(replace(_BLOCKS, groups=1, stages=5, gated=True), _LOW)
MIXTURES: dict[str, tuple[tuple[float, Mixture], ...]] = {
    SIXTEEN: (
        (128, Mixture(GroupedSchedule(columns=128, gated=True), GroupedSchedule(columns=256))),
        (20, _LOW_16),
        (8, _LOW_16.filled(32)),
        (0, _LOW_16.filled(16)),
    ),
    PROMOTED: (
        (64, Mixture(replace(_BLOCKS, gated=True), GROUPED_FP8["block"])),
        (20, _LOW_8),
        (8, _LOW_8.filled(32)),
        (0, _LOW_8.filled(16)),
    ),
}
"""By kind, from how many rows an expert on, on average, which schedules were fastest."""


def mixture(kind: str, each: float) -> Mixture:
    """The schedules of a mixture of about `each` rows an expert."""
    return next(schedules for least, schedules in MIXTURES[kind] if each >= least)
