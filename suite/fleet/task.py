"""One shard on one host: runs `kernelmark`, and delivers its journal.

    python -m kernelmark.suite.fleet.task ORDER --shard I --into FOLDER [--node NAME] [--tied]
                                          [--home FOLDER [--any-board]]

ORDER is a file, or `-` for $KERNELMARK_ORDER. This is what an engine starts; no code that measures runs in the
engine's own process. Exit code 0: there is a delivery, whatever the shard's own exit code, which is in it.

With --home the shard is measured there, and goes on with what is there of it (with --any-board on another board,
too); else in a folder that is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import hmac
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...registry.store.home import Home
from ...registry.store.shards import path_of
from ..run.fingerprint import ENGINE, HOST_HASH, PARALLEL
from .delivery import TAIL, Delivery, digest, write
from .order import Order

ORDER = "KERNELMARK_ORDER"
JOURNAL = "journal.jsonl"
REPORT = "report.json"


def host_of(order: Order, node: str, environ: Mapping[str, str]) -> str:
    """Tells hosts apart, and GPUs of one host where a task sees some of them; names neither."""
    mac = hmac.new(order.salt.encode(), node.encode(), hashlib.sha256).hexdigest()[:10]
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or (order.device == "cpu" and order.engine != "local"):
        return f"h{mac}"
    if not visible.replace(",", "").isdigit():  # UUIDs, of GPUs or of parts of one
        visible = hmac.new(order.salt.encode(), visible.encode(), hashlib.sha256).hexdigest()[:6]
    return f"h{mac}_{visible.replace(',', '_')}"


def command(
    order: Order,
    shard: int,
    home: Path,
    plan: Path | None,
    environ: Mapping[str, str],
    any_board: bool = False,
) -> list[str]:
    """The command line of a shard; `plan` is where the plan's file was laid, if it is one. A shard that was begun
    in that home goes on, with `any_board` on another board too.
    """
    python, part = sys.executable, f"{shard}/{order.shards}"
    begun = path_of(Home(home), order.run, (shard, order.shards))
    if begun.exists():
        over = ["--any-board"] if any_board else []
        again = ["--resume", str(begun), *over, "--output", str(home)]
        return [python, "-m", "kernelmark.suite", "run", "--journal-only", *again]
    asked = ["--plan", order.plan if plan is None else str(plan), "--shard", part, *order.arguments]
    asked += ["--seed", str(order.seed), "--output", str(home)]
    if order.compare:
        detector = "from kernelmark.suite.cli.regression import main; main()"
        return [python, "-c", detector, "--mode", "ab", "--json", "--device", order.device, *asked]
    asked += ["--run", order.run, *(["--control", order.control] if order.control else [])]
    if order.container == "docker" and order.image is not None:
        gpus = ["--gpus", environ.get("CUDA_VISIBLE_DEVICES") or "0"] if order.device == "cuda" else []
        return [python, "-m", "kernelmark.suite", "bench", order.image, *gpus, "--journal-only", *asked]
    return [python, "-m", "kernelmark.suite", "run", "--journal-only", "--device", order.device, *asked]


def perform(
    order: Order, shard: int, into: Path, node: str, home: Path | None = None, any_board: bool = False
) -> Path:
    """Measures a shard to its end and writes its delivery; the delivery's folder. See the module for `home`."""
    into.mkdir(parents=True, exist_ok=True)
    host = host_of(order, node, os.environ)
    # On the host's own disk: what is under way is nobody else's business, and a network's folder may be slow.
    work = Path(tempfile.mkdtemp(prefix="kernelmark-"))
    home = work / "home" if home is None else home
    begin = time.monotonic()
    try:
        plan = None
        if order.plan_text is not None:
            plan = work / Path(order.plan).name
            plan.write_text(order.plan_text, encoding="utf-8")
        environment = {**os.environ, HOST_HASH: host, ENGINE: order.engine, "PYTHONSAFEPATH": "1"}
        if not order.exclusive:
            environment.setdefault(PARALLEL, "shared")
        with open(work / "log", "wb") as log, open(work / "out", "wb") as out:
            process = subprocess.Popen(
                command(order, shard, home, plan, os.environ, any_board),
                stdin=subprocess.DEVNULL,
                stdout=out if order.compare else log,
                stderr=log,
                env=environment,
                cwd=order.checkout or None,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            for number in (signal.SIGTERM, signal.SIGHUP):  # the engine takes the host back
                signal.signal(number, lambda *_: _end(process.pid))
            code = process.wait()
        contents = _contents(order, shard, Home(home), work / "out")
        delivery = Delivery(
            run=order.run,
            shard=(shard, order.shards),
            host=host,
            code=code if code >= 0 else 128 - code,
            wall_s=time.monotonic() - begin,
            files={name: digest(data) for name, data in contents.items()},
            said=(work / "log").read_bytes()[-TAIL:].decode(errors="replace"),
        )
        folder = into / f"{shard}-{secrets.token_hex(6)}"
        write(folder, delivery, contents)
        return folder
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _contents(order: Order, shard: int, home: Home, out: Path) -> dict[str, bytes]:
    """What there is to deliver: a shard's journal, or a comparison's report and the journals behind it."""
    if not order.compare:
        path = path_of(home, order.run, (shard, order.shards))
        return {JOURNAL: path.read_bytes()} if path.exists() else {}
    found = {path.name: path.read_bytes() for path in home.paths().values()}
    return {REPORT: out.read_bytes(), **found} if out.stat().st_size else {}


def _end_with_parent() -> None:
    """A task that is killed leaves nobody behind who goes on measuring beside the one asked again."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)


def _ends_with_input() -> None:
    """Ends this process in order when whoever started it is gone, which closes our input."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="kernelmark.suite.fleet.task", allow_abbrev=False)
    parser.add_argument("order")
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--node", default=platform.node())
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--any-board", action="store_true")
    given = parser.parse_args(arguments)
    text = os.environ[ORDER].encode() if given.order == "-" else Path(given.order).read_bytes()
    order = msgspec.json.decode(text, type=Order)
    if given.tied:
        threading.Thread(target=_ends_with_input, daemon=True).start()
    print(perform(order, given.shard, given.into, given.node, given.home, given.any_board))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
