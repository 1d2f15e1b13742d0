"""Asks an engine for shards until the run is whole: what ended without a delivery is asked for again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import filelock

from ...registry.errors import Ended, HarnessError, InputError, KernelmarkError
from ...registry.store.home import Home
from ..run.supervisor import Interrupted
from .collect import Refused, State, collect, deliveries_of
from .delivery import found
from .engine import Engine, EngineError
from .order import Order, folder_of

POLL_S = 2.0
"""How often an engine is asked how its tasks stand."""
CANCELLED = "cancelled"
"""The file in an order's folder that says that nobody wants it any more."""

Tell = Callable[[State, dict[int, str], tuple[Refused, ...]], None]
"""Is told how a run stands, what the engine has, and what was refused since it was last told."""


class Cancelled(KernelmarkError):
    """`kernelmark fleet cancel`, from elsewhere."""

    exit_code = 130


def drive(
    order: Order,
    home: Home,
    engine: Engine,
    tell: Tell,
    attempts: int = 3,
    sleep: Callable[[float], None] = time.sleep,
) -> State:
    """Until all shards are here. Raises `KernelmarkError` where one was not whole in so many attempts."""
    folder = folder_of(home, order.run)
    try:
        with filelock.FileLock(folder / "driver.lock", timeout=0):
            # Not before: it is for who drives the run now.
            (folder / CANCELLED).unlink(missing_ok=True)
            return _drive(order, home, engine, tell, attempts, sleep)
    except KeyboardInterrupt as error:
        code = error.exit_code if isinstance(error, Ended) else 130
        raise Interrupted(f"interrupted; what came back is kept. {again(order)}", code) from None
    except filelock.Timeout:
        raise InputError(
            f"run {order.run} is driven by another process: kernelmark fleet status {order.run}"
        ) from None


def _drive(
    order: Order, home: Home, engine: Engine, tell: Tell, attempts: int, sleep: Callable[[float], None]
) -> State:
    folder = folder_of(home, order.run)
    # What an earlier driver refused is refused again, and is no news.
    known = _names(deliveries_of(home, order.run))
    collect(order, home)
    asked: Counter[int] = Counter()
    reasons: dict[int, str] = {}
    while True:
        # First what the engine has, then what is there: a shard that ends in between is not asked for twice.
        held = _held(order, engine)
        seen = _names(deliveries_of(home, order.run))
        state = collect(order, home, known=known)
        known |= seen
        reasons |= {x.shard: f"{x.host or 'some host'}: {x.reason}" for x in state.refused}
        tell(state, held, state.refused)
        if not state.missing:
            return state
        if lasting := [x for x in state.refused if x.lasting]:
            engine.cancel()
            raise InputError(f"shard {lasting[0].shard}/{order.shards}: {lasting[0].reason}")
        if (folder / CANCELLED).exists():
            engine.cancel()
            raise Cancelled(f"run {order.run} was cancelled. {again(order)}")
        lost = [x for x in state.missing if x not in held]
        if given_up := [x for x in lost if asked[x] >= attempts]:
            _give_up(order, engine, given_up, reasons, attempts)
        if lost:
            asked.update(lost)
            engine.submit(lost)
        sleep(POLL_S)


def _held(order: Order, engine: Engine) -> dict[int, str]:
    try:
        return engine.held()
    except EngineError as error:  # its shards may well go on without us
        raise EngineError(f"{str(error).rstrip('.')}. {again(order)}") from None


def _names(folder: Path) -> frozenset[str]:
    return frozenset(x.name for x in found(folder))


def _give_up(order: Order, engine: Engine, shards: list[int], reasons: dict[int, str], attempts: int) -> None:
    engine.cancel()
    first = shards[0]
    said = engine.said(first)
    nothing = "nothing came back" + (f": {said}" if said else ": its host died, or its task could not start")
    # What cannot be read may be anybody's: it stands as shard 0.
    why = reasons.get(first) or reasons.get(0, nothing)
    raise HarnessError(
        f"shard {first}/{order.shards} was asked for {attempts} times and is not whole. "
        f"The last time: {why.rstrip('.')}. {again(order)}"
    )


def again(order: Order) -> str:
    """What to do about a run that is not whole."""
    if order.engine == "local":
        return f"Go on with: kernelmark run --resume {order.run} --parallel --gpus, with {order.shards} of them"
    if order.engine == "kubernetes":  # nobody but whoever applied the Job can ask for anything
        return f"Have its Job run again, and then: kernelmark fleet collect {order.run} --from FOLDER"
    return f"Go on with: kernelmark fleet run --resume {order.run}"
