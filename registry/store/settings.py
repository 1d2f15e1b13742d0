"""A user's own configuration file: where results live by default, and defaults of commands' options.

It is `kernelmark/config.toml` in `$XDG_CONFIG_HOME` (`~/.config`), or what `KERNELMARK_CONFIG` names:

    home = "~/results"

    [defaults.run]
    plan = "standard"
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..errors import InputError

Value: TypeAlias = bool | int | float | str | list[bool | int | float | str]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says. `defaults` has by command the values of its options, named as on the command line."""

    home: str | None = None
    defaults: dict[str, dict[str, Value]] = {}


def file() -> Path:
    """Where the file is or would be."""
    named = os.environ.get("KERNELMARK_CONFIG")
    # Unlike Path's, this one does not raise where a user has no home, as in a container under a bare number.
    folder = Path(os.path.expanduser(os.environ.get("XDG_CONFIG_HOME") or "~/.config"))
    return Path(named) if named else folder / "kernelmark" / "config.toml"


def load() -> Settings:
    """What the file says; nothing where there is none. Raises `InputError` for one that cannot be used, and where
    `KERNELMARK_CONFIG` names none.
    """
    path = file()
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark first
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.environ.get("KERNELMARK_CONFIG"):  # a typing error there would drop all that the file says
            raise InputError(
                f"{path}, which $KERNELMARK_CONFIG names, cannot be read: {error.strerror}. Name a file that is "
                "there, or unset it."
            ) from None
        return Settings()
    except PermissionError as error:
        # A folder that is closed to us is somebody else's: a container runs as another user with root's home.
        if not os.path.exists(path) and "KERNELMARK_CONFIG" not in os.environ:
            return Settings()
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    try:
        return msgspec.convert(tomllib.loads(text), Settings)
    except (msgspec.ValidationError, ValueError) as error:  # TOML's errors are ValueErrors
        raise InputError(
            f"{path}: {error}. It may have `home` and tables of options, [defaults.run] say."
        ) from None
