"""Asks the package index when the baselines' libraries were released, for `registry/analysis/releases.json`.

    python -m kernelmark.suite.releases > registry/analysis/releases.json      (make releases)

The index is the one that pip is set up with, by its environment before its files. It is asked once a library, by
the simple API in JSON (PEP 691, with times of upload: PEP 700). A user and a password in its address are sent to
it and are in nothing that is written, errors included.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime
from typing import Any

from ..registry.analysis.releases import Package, Releases
from ..registry.store.record import FAKE, PROVIDER
from .catalog import Catalog

INDEX = "https://pypi.org/simple"
"""Where pip looks unless it is told otherwise."""
KEPT = 60
"""Newest releases of a library whose days are kept."""
PLACES = (":env:", "install", "global")
"""Where pip's settings are, the strongest first."""
Fetch = Callable[[str], Any]


def setting(listed: str, name: str) -> str | None:
    """A setting of pip from what `pip config list` says."""
    found = dict(x.split("=", 1) for x in listed.splitlines() if "=" in x)
    values = (found.get(f"{place}.{name}") for place in PLACES)
    return next((x.strip("'\"") for x in values if x), None)


def apart(index: str) -> tuple[str, str | None]:
    """An index's address without user and password, and the header `Authorization` of these; None without any."""
    found = urllib.parse.urlsplit(index)
    said, _, host = found.netloc.rpartition("@")
    if not said:
        return index, None
    user, _, password = (urllib.parse.unquote(x) for x in said.partition(":"))
    encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
    return urllib.parse.urlunsplit(found._replace(netloc=host)), f"Basic {encoded}"


def needed(catalog: Catalog) -> dict[str, str]:
    """By implementation of others the library whose version its rows have."""
    return {
        x.name: x.requires[0]
        for x in sorted(catalog.implementations, key=lambda x: x.name)
        if x.requires and x.provider not in (PROVIDER, FAKE)
    }


def package(files: Iterable[Mapping[str, Any]]) -> Package:
    """The releases of a library from the files that the index lists. A release is as old as its first file.

    The newest is none that was taken back, and none before its release unless there is nothing else, as for pip.
    """
    from packaging.utils import (
        InvalidSdistFilename,
        InvalidWheelFilename,
        parse_sdist_filename,
        parse_wheel_filename,
    )
    from packaging.version import Version

    days: dict[Version, date] = {}
    offered: set[Version] = set()
    for x in files:
        name = x["filename"]
        try:
            version = parse_wheel_filename(name)[1] if name.endswith(".whl") else parse_sdist_filename(name)[1]
        except (InvalidWheelFilename, InvalidSdistFilename):
            continue  # an installer or an egg of old
        if not x.get("yanked"):
            offered.add(version)
        if x.get("upload-time"):
            day = datetime.fromisoformat(x["upload-time"]).astimezone(UTC).date()
            days[version] = min(day, days.get(version, day))
    final = {x for x in offered if not x.is_prerelease}
    newest = max(final or offered, default=None)
    kept = sorted(days, reverse=True)[:KEPT]
    return Package(str(newest) if newest is not None else None, {str(x): days[x] for x in kept})


def asked(catalog: Catalog, index: str, fetch: Fetch, today: date) -> Releases:
    """What the index says of every library. One that it does not have is left out: its age is not known."""
    implementations = needed(catalog)
    found = {}
    for name in sorted(set(implementations.values())):
        page = fetch(f"{index.rstrip('/')}/{name}/")
        if page is not None:
            found[name] = package(page["files"])
    return Releases(today, implementations, found)


def text(found: Releases) -> str:
    """The file: a line a library."""
    import msgspec

    made = msgspec.to_builtins(found)
    lines = [f'"asked": {json.dumps(made["asked"])}']
    for part in ("implementations", "packages"):
        inner = ",\n".join(f"  {json.dumps(x)}: {json.dumps(y)}" for x, y in made[part].items())
        lines.append(f'"{part}": {{\n{inner}\n}}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _fetcher(certificates: str | None, authorization: str | None) -> Fetch:
    context = ssl.create_default_context(cafile=certificates)

    def fetch(address: str) -> Any:
        asked = urllib.request.Request(address, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        if authorization is not None:  # for this host alone: no other that it sends us on to
            asked.add_unredirected_header("Authorization", authorization)
        try:
            with urllib.request.urlopen(asked, timeout=60, context=context) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    return fetch


def main() -> None:
    """Prints the file."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    index, authorization = apart(setting(listed, "index-url") or INDEX)
    fetch = _fetcher(setting(listed, "cert"), authorization)
    sys.stdout.write(text(asked(Catalog.default(), index, fetch, datetime.now(UTC).date())))


if __name__ == "__main__":
    main()
