"""How old a library was when it was measured, and its newest release, by `releases.json`. Pure.

The file holds what the package index said on its day; `make releases` asks anew. Nothing asks at report time.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path

import msgspec

from .. import figures

UNKNOWN = "age not known"


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A library's newest release, None where the index has none, and the day of each that is known."""

    newest: str | None
    released: dict[str, date]


class Releases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the index said on the day `asked`, by package, and which package is behind which implementation."""

    asked: date
    implementations: dict[str, str]
    packages: dict[str, Package]

    def age(self, implementation: str, version: str | None, created: str) -> int | None:
        """Days between the release of an implementation's library and a run of it, made at `created`."""
        day, run = self._released(implementation, version), _day(created)
        return None if day is None or run is None or run < day else (run - day).days

    def newest(self, implementation: str, version: str | None) -> str | None:
        """The newest release of its library; None where the index does not know the version that was measured, so
        that its library may be another.
        """
        known = self._released(implementation, version) is not None
        return self.packages[self.implementations[implementation]].newest if known else None

    def told(self, implementation: str, version: str | None, created: str) -> str:
        """All of it: `0.2.1, 43 days old at the run, newest 0.3.0`; a dash where no version is known."""
        if version is None:
            return figures.DASH
        days, newest = self.age(implementation, version, created), self.newest(implementation, version)
        age = told(days) + (" old at the run" if days is not None else "")
        return ", ".join((version, age, *((f"newest {newest}",) if newest else ())))

    def _released(self, implementation: str, version: str | None) -> date | None:
        package = self.packages.get(self.implementations.get(implementation, ""))
        # A local part is another build of the same release: 2.13.0+cu130.
        return package.released.get(version.partition("+")[0]) if package is not None and version else None


def told(days: int | None) -> str:
    """An age."""
    return UNKNOWN if days is None else figures.counted(days, "day")


def _day(created: str) -> date | None:
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        return None
    return (when.astimezone(UTC) if when.tzinfo else when).date()


def parse(data: bytes) -> Releases:
    """The file; raises `msgspec.ValidationError` for what is none."""
    return msgspec.json.decode(data, type=Releases)


@cache
def releases() -> Releases:
    """What comes with the program."""
    return parse(Path(__file__).with_name("releases.json").read_bytes())
