"""An image's Python in the place of an interpreter: the workers of one side of an A/B, in one container.

The container stays while an A/B lasts, so that what one worker compiled is there for the next. It has as few
rights as one that measures a whole run, and code comes from this machine, read-only and at the same places: the
harness that runs here, which measures both sides, and the copies of the commits.

Nothing outlives us there. The container's one process reads from a connection that we hold, and so does whatever
runs a worker (`relay.py` here, `inside.py` there): where a connection ends, for whatever reason, so does the other
side of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import suite
from ...registry.errors import InputError, last_line
from ..environments import ASK, CHECK_S
from .build import LABEL, ROOMS
from .engine import Engine
from .launch import Limits, confined
from .relay import HARNESS
from .session import Session

if TYPE_CHECKING:
    from docker.types import Mount

HOUSE = Path(suite.__file__).resolve().parents[1]


@contextlib.contextmanager
def opened(session: Session, folders: Collection[Path], marks: Mapping[str, str] | None = None) -> Iterator[Path]:
    """A file that starts workers as a Python would, in a container that sees these folders; `marks` as `confined`
    takes them.

    Raises `LaunchError` where the engine refuses, and `InputError` for an image that cannot measure with this
    harness or an engine on another machine.
    """
    engine, image = session.engine, session.image
    if not engine.local:
        raise InputError(
            f"the engine at {engine.address} is on another machine, which does not see the commits' copies: "
            f"compare two images where their engine runs."
        )
    name = f"kernelmark-{image.name}-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kernelmark-"))).resolve()
        held.callback(_removed, engine, name)
        try:
            container = engine.client.containers.create(
                image.id,
                [],
                name=name,
                labels={f"{LABEL}launcher": str(os.getpid())},
                entrypoint=["cat"],  # it ends with its input, which ends with us
                stdin_open=True,
                auto_remove=True,
                user=_user(engine),
                mounts=_mounts(_harness(folder), folders),
                **confined(engine, image, session.gpus, Limits().shared_memory, marks),
            )
            connection = container.attach_socket(params={"stdin": 1, "stream": 1})
            held.callback(_closed, connection)
            container.start()
        except _errors() as error:
            raise engine.explain(error, "starting a container for workers") from None
        words = [sys.executable, "-m", f"{__package__}.relay", engine.address, str(container.id)]
        _checked(words, image.name)
        file = folder / "python"
        file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        file.chmod(0o755)
        yield file


def _harness(folder: Path) -> Path:
    """A package of links to our rooms, which a container sees at their own places: our root is the one of the code
    that commits have."""
    package = folder / "harness" / "kernelmark"
    package.mkdir(parents=True)
    for room in ROOMS:
        (package / room).symlink_to(HOUSE / room)
    return package.parent


def _mounts(harness: Path, folders: Collection[Path]) -> list[Mount]:
    from docker.types import Mount

    places = {HARNESS: harness} | {str(x): x for x in (*(HOUSE / room for room in ROOMS), *folders)}
    return [Mount(place, str(source), type="bind", read_only=True) for place, source in places.items()]


def _user(engine: Engine) -> str:
    """Who may read what we may: us, or the root of an engine that runs as us and maps it to us."""
    rootless = any("rootless" in str(x) for x in engine.client.info().get("SecurityOptions") or ())
    return "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"


def _checked(words: list[str], name: str) -> None:
    """Raises `InputError` unless the image's Python can measure."""
    try:
        done = subprocess.run(
            [*words, "-c", ASK, "1"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK_S
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"image {name} cannot measure: importing torch takes more than {CHECK_S:g} s.") from None
    if done.returncode != 0:
        said = last_line(done.stdout + done.stderr)
        raise InputError(f"image {name} cannot measure with this harness: {said}")


def _errors() -> tuple[type[Exception], ...]:
    """What the SDK lets through: its own, and those of a connection that breaks."""
    from docker.errors import DockerException

    return DockerException, OSError


def _closed(connection: Any) -> None:
    """The SDK hands out a file over a socket, whose closing leaves the socket open."""
    owner = connection._sock
    connection.close()
    owner.close()


def _removed(engine: Engine, name: str) -> None:
    """The container goes; it need not exist, nor the engine any more."""
    with contextlib.suppress(*_errors()):
        engine.client.containers.get(name).remove(force=True)
