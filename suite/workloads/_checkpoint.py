"""Where a training program is, on disk: written whole or not at all, so that a killed one goes on from there."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a file in place of the last one. Raises `OSError`, naming it, where it cannot be written."""
    import torch

    partial = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        # On a full disk torch raises a RuntimeError, for a file that is too short, while it handles the OSError.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from None


@dataclass(frozen=True)
class Checkpoint:
    """The file of one arm in one replicate, in the run's own folder; nowhere without such a folder."""

    path: Path | None

    @classmethod
    def of(cls, scratch: Path | None, *identity: object) -> Checkpoint:
        """What tells an arm's file from the others of its run."""
        if scratch is None:
            return cls(None)
        return cls(scratch / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}.pt")

    def save(self, state: Mapping[str, Any]) -> None:
        """Writes a state in place of the last one, where the disk takes it: training goes on without, and would
        begin anew after a kill.
        """
        if self.path is not None:
            with contextlib.suppress(OSError):
                write(self.path, state)

    def load(self, device: Any) -> dict[str, Any] | None:
        """The state, its tensors on a device; None where there is none. Nothing in it is executed."""
        import torch

        if self.path is None or not self.path.is_file():
            return None
        found: dict[str, Any] = torch.load(self.path, map_location=device, weights_only=True)
        return found

    def remove(self) -> None:
        """It is not needed any more; the folder goes with the last one."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()
