"""What the programs of this folder share: pages of which some blocks are written by a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def placed(page: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """The page with what its blocks are now, each between `<!-- NAME -->` and `<!-- end of NAME -->`."""
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, opened, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise SystemExit(f"no marks {begin.strip()} and {end.strip()}")
        page = f"{before}{begin}{block()}{end}{after}"
    return page
