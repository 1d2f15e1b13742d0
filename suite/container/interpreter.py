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
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import suite
from ...registry.errors import InputError
from ..environments import ASK
from .build import ROOMS
from .engine import Engine
from .launch import Limits, confined
from .session import Session

if TYPE_CHECKING:
    from docker.types import Mount

HOUSE = Path(suite.__file__).resolve().parents[1]
HARNESS = "/harness"
"""Where the harness lies in a container a second time, for Python to find it before the image's own."""


@contextlib.contextmanager
def opened(session: Session, folders: Collection[Path]) -> Iterator[Path]:
    """A file that starts workers as a Python would, in a container that sees these folders.

    Raises `InputError` for an image that cannot measure with this harness, or an engine on another machine.
    """
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    engine, image = session.engine, session.image
    if not engine.local:
        raise InputError(
            f"the engine at {engine.address} is on another machine, which does not see the commits' copies: "
            f"compare two images where their engine runs."
        )
    name = f"kernelmark-{image.name}-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as held:
        try:
            container = engine.client.containers.create(
                image.id,
                [],
                name=name,
                entrypoint=["cat"],  # it ends with its input, which ends with us
                stdin_open=True,
                auto_remove=True,
                user=_user(engine),
                mounts=_mounts(folders),
                **confined(engine, image, session.gpus, Limits().shared_memory),
            )
            held.callback(_removed, engine, name)
            connection = container.attach_socket(params={"stdin": 1, "stream": 1})
            held.callback(_closed, connection)
            container.start()
            asked = container.exec_run(["python", "-c", ASK], environment=ENVIRONMENT)
        except (DockerException, RequestException) as error:
            raise engine.explain(error, "starting a container for workers") from None
        if asked.exit_code != 0:
            said = (asked.output.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise InputError(f"image {image.name} cannot measure with this harness: {said}")
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="kernelmark-"))
        yield _started_by(Path(folder) / "python", engine, str(container.id))


ENVIRONMENT = {"PYTHONPATH": HARNESS, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _user(engine: Engine) -> str:
    """Who may read what we may: us, or the root of an engine that runs as us and maps it to us."""
    rootless = any("rootless" in str(x) for x in engine.client.info().get("SecurityOptions") or ())
    return "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"


def _mounts(folders: Collection[Path]) -> list[Mount]:
    from docker.types import Mount

    rooms = [(HOUSE / room, f"{HARNESS}/kernelmark/{room}") for room in ROOMS]
    places = [*((source, str(source)) for source, _ in rooms), *((x, str(x)) for x in folders)]
    return [
        Mount(target, str(source), type="bind", read_only=True)
        for source, target in dict.fromkeys((*rooms, *places))
    ]


def _started_by(file: Path, engine: Engine, container: str) -> Path:
    words = [sys.executable, "-m", f"{__package__}.relay", engine.address, container]
    file.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    file.chmod(0o755)
    return file


def _closed(connection: Any) -> None:
    """The SDK hands out a file over a socket, whose closing leaves the socket open."""
    owner = connection._sock
    connection.close()
    owner.close()


def _removed(engine: Engine, name: str) -> None:
    from docker.errors import DockerException

    with contextlib.suppress(DockerException):
        engine.client.containers.get(name).remove(force=True)
