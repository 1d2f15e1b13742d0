"""What would make one page too large stands on several: blocks of HTML, packed in order into pages by their bytes.

A page of a site is there at once on a phone because it is small, whatever journals hold. Nothing here knows what a
block shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

ROOM = 200_000
"""Bytes of a page's blocks, of which one alone may take more. With what all pages have around them a page stays
below 300 kB.
"""


@dataclass(frozen=True)
class Frame:
    """What blocks stand in, like a section or a table; opened again where a page begins within it."""

    opening: str
    closing: str


@dataclass(frozen=True)
class Block:
    """HTML that is not divided, within its frames, the outermost first. `label` says in a word what it is of,
    `chart` is its series' place among those of all blocks.
    """

    html: str
    frames: tuple[Frame, ...] = ()
    label: str = ""
    chart: int | None = None

    def size(self, before: tuple[Frame, ...] = ()) -> int:
        """Bytes behind a block in the frames `before`."""
        opened = self.frames[_shared(before, self.frames) :]
        return len(self.html.encode()) + sum(len(x.opening.encode()) + len(x.closing.encode()) for x in opened)


@dataclass(frozen=True)
class Sheet:
    """One page's blocks."""

    blocks: tuple[Block, ...]

    @property
    def html(self) -> str:
        """Them, with frames that neighbours share opened once."""
        return "".join(_joined(self.blocks))

    @property
    def label(self) -> str:
        """What is on it: of its first and of its last block."""
        named = list(dict.fromkeys(x.label for x in self.blocks if x.label))
        return " to ".join(dict.fromkeys(named[:1] + named[-1:]))

    @property
    def charts(self) -> tuple[int, ...]:
        """The places of its blocks' series."""
        return tuple(x.chart for x in self.blocks if x.chart is not None)


def sheets(blocks: Iterable[Block], room: int = ROOM) -> tuple[Sheet, ...]:
    """Blocks in order, as many on a page as there is room for, at least one; one empty page without any.

    What stands in one frame is kept together where it fits on a page, and would not on what is left of this one.
    """
    found = list(blocks)
    rest = [0] * (len(found) + 1)  # bytes from a block to the end of its innermost frame
    for place in reversed(range(len(found))):
        same = place + 1 < len(found) and found[place].frames == found[place + 1].frames
        rest[place] = found[place].size(found[place].frames) + (rest[place + 1] if same else 0)
    pages: list[list[Block]] = [[]]
    used = 0
    stack: tuple[Frame, ...] = ()
    for place, block in enumerate(found):
        size = block.size(stack)
        whole = rest[place] + block.size() - block.size(block.frames)
        together = block.frames != stack and whole <= room and used > room / 2
        if pages[-1] and used + (whole if together else size) > room:
            pages.append([])
            used, size = 0, block.size()
        pages[-1].append(block)
        used, stack = used + size, block.frames
    return tuple(Sheet(tuple(x)) for x in pages)


def numbered(name: str, number: int) -> str:
    """The name of a page's file, without ending, by its number from 1 on; no name of the site's own has a dot."""
    return name if number == 1 else f"{name}.{number}"


def _joined(blocks: Sequence[Block]) -> Iterator[str]:
    stack: tuple[Frame, ...] = ()
    for block in blocks:
        shared = _shared(stack, block.frames)
        yield from (x.closing for x in reversed(stack[shared:]))
        yield from (x.opening for x in block.frames[shared:])
        yield block.html
        stack = block.frames
    yield from (x.closing for x in reversed(stack))


def _shared(some: Sequence[Frame], others: Sequence[Frame]) -> int:
    """How many of their outermost frames are the same."""
    return sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(some, others, strict=False)))
