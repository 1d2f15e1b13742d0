"""How products for Hopper are divided, apart from their kernels: what chooses among schedules needs no Gluon."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
"""Columns that are written at a time: 128 bytes, which one swizzled row of shared memory holds."""
LINE = 32
"""Numbers in 128 bytes: at multiples of so many lies in shared memory what is copied there."""


@dataclass(frozen=True)
class Schedule:
    """How a product is divided: all that the compiled code depends on beside dtypes.

    A tile has `groups` · `rows` rows and `width` columns of the output, a stage `step` of K. `gated`: B has the
    gate's columns and then as many of the other factor. `paired`: a tile has two pieces of B of `columns` side by
    side. `a_turned`, `b_turned`: the operand lies in memory with K as its rows. `scales`: "" for none, "tensor",
    "row" (of A and of B), or for each 128 steps of K "block" (1×128 of A, 128×128 of B), "group" (1×128 of both)
    or "tile" (128×128 of both). `shared`: some tiles are shared out by steps. `packed`: numbers of K that one
    element of A holds. `staged`: scales of each step come with the stage's tiles. `ahead`: so many steps, an even
    number or 0, are a round in which one step's products run while the sums of the one before are added up.
    `buffers`: of a consumer's results on their way out. `limit`: of gate and up where their product is gpt-oss's.
    `written`: columns that are written at a time at the most. `adds`: the product is added to what the output
    holds. `head`: the output's columns are heads of so many, each turned by its row's rotary position. `filled`:
    of a tile's 64 rows so many are loaded and written, the first ones, or 0 for all; others are whatever was in
    shared memory, and what comes of them is theirs alone.
    """

    rows: int = 64
    groups: int = 2
    columns: int = 256
    step: int = 64
    stages: int = 4
    gated: bool = False
    paired: bool = False
    a_turned: bool = False
    b_turned: bool = False
    scales: str = ""
    bias: bool = False
    shared: bool = False
    packed: int = 1
    registers: int = 240
    staged: bool = False
    ahead: int = 0
    buffers: int = 2
    limit: float = 0.0
    written: int = CHUNK
    adds: bool = False
    head: int = 0
    filled: int = 0

    @property
    def height(self) -> int:
        """Rows of the output that a tile has."""
        return self.filled or self.groups * self.rows

    @property
    def written_rows(self) -> int:
        """Rows that are written at a time."""
        return self.filled or 64

    @property
    def loaded_rows(self) -> int:
        """Rows of A that a consumer's part of a stage is filled with."""
        return self.filled or self.rows

    @property
    def promoted(self) -> bool:
        """Whether the sums of 128 steps are scaled and added up in fp32."""
        return self.scales in ("block", "group", "tile")

    @property
    def pieces(self) -> int:
        """Tiles of B that a stage has."""
        return 2 if self.gated or self.paired else 1

    @property
    def width(self) -> int:
        """Columns of the output that a tile has."""
        return self.columns * (2 if self.paired else 1)

    @property
    def chunk(self) -> int:
        """Columns that are written at a time."""
        return min(self.written, self.columns)

    @property
    def a_scales(self) -> int:
        """Numbers that a stage has room for of a consumer's scales of A: one a row, or LINE, of which the first
        counts.
        """
        return LINE if self.scales == "tile" else self.rows

    @property
    def b_scales(self) -> int:
        """The same of B: one a column, or LINE."""
        return self.columns if self.scales == "group" else LINE

    @property
    def doubled(self) -> bool:
        """Whether a consumer has two sums: of 64 rows each, or of a piece of B each."""
        return self.pieces == 2 or self.rows == 128


@dataclass(frozen=True)
class GroupedSchedule(Schedule):
    """Of a product of groups. `masked`: each group has memory of its own. `quantized`: the gated result is E4M3,
    with a scale for 128 columns.
    """

    masked: bool = False
    quantized: bool = False


@dataclass(frozen=True)
class DualSchedule(Schedule):
    """Of a dual product: a gate's and its other factor's, of one A. `columns` are both factors' together: a stage
    has half as many rows of either B, one behind the other, which one instruction multiplies by. `preactivations`:
    gate and other factor are written too.
    """

    preactivations: bool = False

    @property
    def width(self) -> int:
        """Columns of each output that a tile has."""
        return self.columns // 2

    @property
    def chunk(self) -> int:
        """Columns that are written at a time."""
        return min(self.written, self.width)
