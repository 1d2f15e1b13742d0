"""Feeds of regressions: change points to the worse in our rows that the machine does not explain."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import msgspec

from .. import figures
from ..escape import CONTROL
from .facts import Run, file_name
from .timeline import Change, Line

Place = tuple[str, str, str, str]
"""A device, an operator, a case and its cache state."""
ENTRIES = 100
"""Newest that are kept in a feed."""


@dataclass(frozen=True)
class Event:
    """A change point of a line, with its run."""

    line: Line
    change: Change
    run: Run
    page: str
    """Where its case is, from the site's root."""

    @property
    def moment(self) -> str:
        """When it was first measured, as feeds want it."""
        return _moment(self.run.created)

    @property
    def identifier(self) -> str:
        """The same at each build, and no other event's."""
        text = "\n".join((self.line.device, str(self.line.key), str(self.run.commit), self.run.key))
        return f"urn:kernelmark:change:{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:32]}"

    @property
    def title(self) -> str:
        """In a line."""
        key = self.line.key
        change = figures.change(1 + self.change.change)
        return _clean(f"{key.operator} {key.case}: {change} from {self.run.short} on ({self.line.device})")

    @property
    def text(self) -> str:
        """In a sentence."""
        before = _value(self.line, self.run, -1)
        after = _value(self.line, self.run, 0)
        return _clean(
            f"{self.line.key}: {before} before, {after} in run {self.run.name} of commit {self.run.commit}; the "
            f"levels before and after differ by {figures.change(1 + self.change.change)} (p = "
            f"{figures.scientific(self.change.p)}). A change point is drawn, no gate: ask regression_detector."
        )


def events(lines: Iterable[Line], places: Mapping[Place, str] = MappingProxyType({})) -> list[Event]:
    """All change points of our rows that are not the machine's, newest first. `places` says where each case is."""
    found = []
    for line in lines:
        if line.ours:
            runs = {run.name: run for run, _ in line.points}
            key = line.key
            case = line.device, key.operator, key.case, key.cache
            page = places.get(case, f"operator/{file_name(key.operator)}.html")
            found += [Event(line, x, runs[x.run], page) for x in line.changes if x.machine is None]
    found.sort(key=lambda x: (x.line.key, x.line.device))
    return sorted(found, key=lambda x: x.moment, reverse=True)


def regressions(found: Sequence[Event]) -> list[Event]:
    """Those to the worse, as many as a feed holds."""
    return [x for x in found if x.change.worse][:ENTRIES]


def atom(found: Sequence[Event], title: str, site: str, newest: str) -> str:
    """The feed in Atom 1.0 (RFC 4287). `site` is the site's address, or empty: its links are then relative.
    `newest` is when the newest run was made: without an entry that is the feed's date.
    """
    updated = max((x.moment for x in found), default=_moment(newest))
    entries = "".join(
        f"<entry><id>{x.identifier}</id><title>{escape(x.title)}</title><updated>{x.moment}</updated>"
        f"<link href={quoteattr(site + x.page)}/><content type='text'>{escape(x.text)}</content></entry>\n"
        for x in found
    )
    return (
        "<?xml version='1.0' encoding='utf-8'?>\n<feed xmlns='http://www.w3.org/2005/Atom'>"
        f"<id>urn:kernelmark:regressions:{hashlib.sha256(site.encode()).hexdigest()[:32]}</id>"
        f"<title>{escape(_clean(title))}: regressions</title><updated>{updated}</updated>"
        f"<author><name>kernelmark</name></author><link href={quoteattr(site + 'index.html')}/>"
        f"<link rel='self' href={quoteattr(site + 'regressions.atom')}/>\n{entries}</feed>\n"
    )


def json_feed(found: Sequence[Event], title: str, site: str) -> bytes:
    """The same in JSON Feed 1.1."""
    feed: dict[str, Any] = {
        "version": "https://jsonfeed.org/version/1.1",
        "title": f"{_clean(title)}: regressions",
        "home_page_url": f"{site}index.html",
        "feed_url": f"{site}regressions.json",
        "items": [
            {
                "id": x.identifier,
                "url": f"{site}{x.page}",
                "title": x.title,
                "content_text": x.text,
                "date_published": x.moment,
            }
            for x in found
        ],
    }
    return msgspec.json.format(msgspec.json.encode(feed), indent=1) + b"\n"


def _moment(created: str) -> str:
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        when = datetime.fromtimestamp(0, UTC)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat(timespec="seconds")


def _value(line: Line, run: Run, offset: int) -> str:
    # Among those of the run's key: between them may stand what another machine measured.
    points = [x for x in line.points if x[0].key == run.key]
    place = next(i for i, (x, _) in enumerate(points) if x.name == run.name) + offset
    number = points[max(place, 0)][1].number
    return f"{figures.measured(number[0], number[3])} {number[3]}".strip() if number else figures.DASH


def _clean(text: str) -> str:
    """XML has no control characters, not even escaped."""
    return CONTROL.sub("�", text)
