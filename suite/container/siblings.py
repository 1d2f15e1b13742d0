"""One run over several images of a set: each library's rows in the image that holds its environment.

Libraries that cannot share an environment cannot share an image either. So an image may have siblings, each with
one environment more, on the same base and with the same torch. The supervisor runs here and takes an image's
Python for that of its environment (`interpreter.py`): a cell goes to the worker of its environment, and the rows
of all stand in one journal. Its `image_digest` is the digest of the set; the images' own are noted beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...registry.errors import InputError, unknown
from ..run.fingerprint import IMAGE_DIGEST, IMAGE_NAME, IMAGES
from .contents import contents
from .interpreter import opened
from .session import Session
from .table import siblings

ENVIRONMENTS = "KERNELMARK_ENVIRONMENTS"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,99}")


def names(folder: Path, image: str, environments: Sequence[str]) -> dict[str, str]:
    """The images of a set by environment: `image` itself, and its siblings that hold these environments.

    `all` stands for all of them. Raises `InputError` with those that exist.
    """
    there = siblings(folder, image)
    if not there:
        raise InputError(f"image {image} has no siblings in docker/images.toml: leave --with out.")
    wanted = list(there) if "all" in environments else list(environments)
    for name in wanted:
        if name not in there:
            raise unknown(f"sibling of image {image}", name, [*there, "all"])
    return {"core": image, **{name: there[name].name for name in wanted}}


def digest(sessions: Mapping[str, Session]) -> str:
    """The digest of a set: of its images' digests and the environments that they hold."""
    text = "\n".join(f"{name}={x.image.id}" for name, x in sorted(sessions.items()))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


@contextlib.contextmanager
def held(name: str, sessions: Mapping[str, Session]) -> Iterator[None]:
    """While this is held, every environment of this process is an image's, and no other exists.

    A folder stands in for each: a Python that starts workers in a container, and the names and versions of what is
    installed there.
    """
    marks = {
        IMAGE_NAME: name,
        IMAGE_DIGEST: digest(sessions),
        IMAGES: " ".join(f"{x}={y.image.id}" for x, y in sorted(sessions.items())),
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kernelmark-"))).resolve()
        for environment, session in sessions.items():
            python = stack.enter_context(opened(session, session.roots, marks))
            lay(folder / f".venv-{environment}", python, contents(session)["python"])
        before = os.environ.get(ENVIRONMENTS)
        os.environ[ENVIRONMENTS] = str(folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ[ENVIRONMENTS]
            else:
                os.environ[ENVIRONMENTS] = before


def lay(folder: Path, python: Path, distributions: Sequence[Mapping[str, str]]) -> None:
    """An environment's folder, as far as it is looked at without being run."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(python)
    packages = folder / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    for x in distributions:
        if not (_NAME.fullmatch(x["name"]) and _NAME.fullmatch(x["version"])):
            continue  # it becomes a folder's name here, and an image may say anything
        described = packages / f"{x['name'].replace('-', '_')}-{x['version']}.dist-info"
        described.mkdir(exist_ok=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {x['name']}\nVersion: {x['version']}\n")
