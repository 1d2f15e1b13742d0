"""Shards that are taken out of a run: kept apart, so that they count no more and are asked for again.

A host of another kind than the others may deliver first, and a shard may have been measured while something else
was at work on its GPU. Which of them is the odd one only people know.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import filelock

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.store.shards import path_of, shards_of
from ...registry.store.transfer import join
from .collect import dropped_in, reported, whole_shards
from .delivery import digest
from .order import Order, folder_of
from .task import JOURNAL, REPORT

WHOLE = "whole"
"""What a run's own journal is called that was laid aside: the last one."""


def drop(order: Order, home: Home, shards: Sequence[int]) -> list[Path]:
    """Takes whole shards out; where each is kept. The run is joined anew from those that stay, and is none where
    none stays; its journal as it was is kept beside them.

    Raises `InputError` for a shard that is not here, before any is touched, and where somebody drives the run.
    """
    folder = folder_of(home, order.run)
    try:
        with filelock.FileLock(folder / "driver.lock", timeout=0):
            return _drop(order, home, sorted(set(shards)))
    except filelock.Timeout:
        raise InputError(
            f"run {order.run} is driven by another process; end it first: kernelmark fleet cancel {order.run}"
        ) from None


def _drop(order: Order, home: Home, shards: Sequence[int]) -> list[Path]:
    here = [x.shard for x in whole_shards(order, home)]
    if lacking := [x for x in shards if x not in here]:
        there = f"these are: {', '.join(map(str, here))}" if here else "none is"
        raise InputError(f"of run {order.run} shard {lacking[0]} is not here; {there}.")
    reports = reported(order, home) if order.compare else {}
    apart = dropped_in(home, order.run)
    apart.mkdir(exist_ok=True)
    kept = []
    with filelock.FileLock(home.folder / "import.lock"):  # nobody takes a shard in, and joins them, meanwhile
        if not order.compare:
            _lay_aside(order, home)
        for shard in shards:
            source = path_of(home, order.run, (shard, order.shards))
            data = reports[shard][1] if order.compare else source.read_bytes()
            ending = Path(REPORT if order.compare else JOURNAL).suffix
            kept.append(apart / f"{shard}-of-{order.shards}-{digest(data)}{ending}")
            if order.compare:  # what was delivered stays where it is, and is known by its hash
                kept[-1].write_bytes(data)
            else:
                os.replace(source, kept[-1])
    if shards_of(home, order.run):
        join(home, order.run)
    return kept


def _lay_aside(order: Order, home: Home) -> None:
    """Puts the run's own journal beside the shards that were taken out, before any of them is touched. One that
    still had them would refuse all others, were this process killed here; where there is none, `collect` makes it.
    Nor is it deleted: it may have what no shard has, and another file in its place is told from it by its inode.
    """
    joined = home.journal(order.run)
    for path in (joined, joined.with_name(f"{joined.name}.gz")):
        if path.exists():
            os.replace(path, dropped_in(home, order.run) / path.name.replace(order.run, WHOLE, 1))
