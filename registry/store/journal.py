"""The journal: JSON Lines, appended and flushed as each measurement is made. It is the truth.

A journal is one `Header`, then `Record` and `Ceiling` lines in the order they were made, and a `Footer`
where a session ended; `Launches` follow where rows were profiled. A line torn by a power cut can only be the
last one and costs that line only; a bad line anywhere else is an error that names its number.
A path ending in `.gz` is read compressed.
"""

from __future__ import annotations

import contextlib
import gzip
import inspect
import io
import json
import math
import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import msgspec

from ..errors import InputError
from . import bounds, collecting, schema_1
from .metric import Metric
from .record import SCHEMA_VERSION, Ceiling, Footer, Header, Launches, Line, Record

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, bounds.OutOfBounds, RecursionError)
"""What decoding raises for bytes that are no line: bad JSON, the wrong fields, not UTF-8."""


ROUNDED_S = 1.0
"""What a session's end may be off by."""
NO_JOURNAL = "; not a kernelmark journal (`kernelmark import --format` takes other tools' results)"
"""What is said of a file whose first line is no header."""


class _Version(msgspec.Struct):
    schema_version: int | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Journal:
    """A journal in memory. `torn` is True where the last line was cut off and left out; `lines` has the number of
    each record's line, from 1."""

    header: Header
    records: tuple[Record, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()
    footers: tuple[Footer, ...] = ()
    torn: bool = False
    path: Path | None = field(default=None, compare=False)
    lines: tuple[int, ...] = field(default=(), compare=False)
    launches: tuple[Launches, ...] = ()

    def metric(self, name: str) -> Metric:
        """What a name means here. A name that the header lacks is a plain number."""
        return next((x for x in self.header.metrics if x.name == name), Metric(name, "1", "neither"))

    @property
    def elapsed_s(self) -> float | None:
        """Seconds in which at least one of its sessions went on: those that shards side by side share count once.
        None without any. A session's end is known to a second.
        """
        found, until = 0.0, -math.inf
        for begin, end in sorted(map(_span, self.footers)):
            # Sessions one after the other may seem to touch, by the second that an end is rounded to.
            found += end - begin if begin > until - ROUNDED_S else max(0.0, end - until)
            until = max(until, end)
        return found or None


def _span(footer: Footer) -> tuple[float, float]:
    """When a session began and ended, in seconds since 1970; a time that is none is the beginning."""
    try:
        ended = datetime.fromisoformat(footer.ended)
        end = (ended if ended.tzinfo else ended.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        end = 0.0
    return end - footer.wall_s, end


def encode(line: Line) -> bytes:
    """One line of a journal, newline included."""
    return _encoder.encode(line) + b"\n"


def schema() -> dict[str, object]:
    """The JSON Schema of a journal's lines, as `journal.schema.json` beside this file holds it.

    Write that file anew with `python -m kernelmark.registry.store.journal > registry/store/journal.schema.json`.
    """
    out = msgspec.json.schema(Line)
    for definition in out["$defs"].values():  # Python 3.13 takes a docstring's indentation away, 3.11 does not
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a kernelmark journal, schema version {SCHEMA_VERSION}",
        **out,
    }


def read(path: Path, lean: bool = False) -> Journal:
    """Reads a journal. Raises `InputError` with the line number for anything but a torn last line.

    `lean` is for who only looks at its rows: samples are arrays of numbers in place of tuples, a quarter of the
    size, and records do not say how long their stages took. What was read so cannot be written again.
    """
    with _opened(path) as file:
        return _parsed(file, path, lean)


def parse(text: bytes, path: Path | None = None) -> Journal:
    """Parses the bytes of a journal; `path` is for messages."""
    return _parsed(io.BytesIO(text), path)


def content(path: Path) -> bytes:
    """The bytes of a journal, inflated. Raises `InputError` for one that cannot be read or is too large."""
    with _opened(path) as file:
        text = file.read(bounds.INFLATED + 1)
    if len(text) > bounds.INFLATED:
        raise InputError(_too_large(str(path)))
    return text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file, inflated as it is read."""
    try:
        with open(path, "rb") as raw:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
    except FileNotFoundError:
        raise InputError(f"no journal at {path}: No such file or directory") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read, it is not a whole gzip file: {error}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def _too_large(name: str) -> str:
    return (
        f"{name}: more than {bounds.INFLATED >> 20} MiB, {bounds.LINES:,} lines or {bounds.LINE >> 20} MiB a "
        "line: no journal of a run"
    )


def _parsed(file: BinaryIO, path: Path | None, lean: bool = False) -> Journal:
    """A line at a time: of a large journal only what is kept is ever in memory."""
    with collecting.paused():
        return _lines(file, str(path) if path else "journal", path, lean)


def _lines(file: BinaryIO, name: str, path: Path | None, lean: bool) -> Journal:
    check = bounds.Bounds().checked
    decode: Callable[[bytes], Line] = _decoder.decode
    header: Header | None = None
    records: list[Record] = []
    numbers: list[int] = []
    seen: dict[tuple[str, str, str, str], set[int]] = {}
    ceilings: list[Ceiling] = []
    footers: list[Footer] = []
    launches: list[Launches] = []
    torn = False
    number = size = 0
    while raw := file.readline(bounds.LINE + 1):
        number += 1
        size += len(raw)
        if len(raw) > bounds.LINE or size > bounds.INFLATED or number > bounds.LINES:
            raise InputError(_too_large(name))
        whole = raw.endswith(b"\n")  # what follows the last newline was cut off, unless it parses whole
        if number == 1:
            if not whole:
                raise InputError(f"{name} is empty or holds no whole line: not a kernelmark journal")
            _check_version(raw, 1, name)  # a newer header may well decode here, and mean something else
            decode = decoder(raw)
        if not raw.strip():
            continue
        try:
            line = check(decode(raw), raw)
        except _UNREADABLE as error:
            if not whole:
                torn = True
                break
            _check_version(raw, number, name)
            other = "" if header is not None or _tells_header(raw) else NO_JOURNAL
            raise InputError(f"{name}: line {number}: {_told(error)}{other}") from None
        if header is not None and isinstance(line, Record):
            # A run killed between writing a record and noting it may measure it again: the first one counts.
            row = (line.case.operator, line.case.name, line.implementation, line.cache)
            replicates = seen.get(row)
            if replicates is None:
                replicates = seen[row] = set()
            if line.replicate not in replicates:
                replicates.add(line.replicate)
                records.append(_lean(line) if lean else line)
                numbers.append(number)
            continue
        match line:
            case Header() if number > 1:
                raise InputError(f"{name}: line {number} is a second header: two journals in one file; split them")
            case Header():
                header = line
            case Ceiling():
                ceilings.append(line)
            case Launches():
                launches.append(line)
            case Footer():
                footers.append(line)
        if header is None:
            break
    if number == 0:
        raise InputError(f"{name} is empty or holds no whole line: not a kernelmark journal")
    if header is None:
        raise InputError(f"{name}: line 1 is not a header: not a kernelmark journal")
    return Journal(
        header,
        tuple(records),
        tuple(ceilings),
        tuple(footers),
        torn,
        path,
        tuple(numbers),
        tuple(launches),
    )


_SHORT = 4
"""So few samples take more as an array than as a tuple."""
_NOTHING: dict[str, float] = {}


def _lean(record: Record) -> Record:
    msgspec.structs.force_setattr(record, "spent_s", _NOTHING)
    samples = record.measurement.samples if record.measurement is not None else {}
    for name, values in samples.items():
        if len(values) > _SHORT:
            samples[name] = cast("tuple[float, ...]", array("d", values))
    return record


def read_header(path: Path) -> Header | None:
    """A journal's header, the rest of it unread; None if there is none."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            line = file.readline(bounds.LINE)
        found = bounds.Bounds().checked(decoder(line)(line), line)
    except (OSError, EOFError, ValueError, zlib.error, RecursionError):  # msgspec's and bad UTF-8 are ValueErrors
        return None
    return found if isinstance(found, Header) else None


def _told(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def decoder(header: bytes) -> Callable[[bytes], Line]:
    """What reads the lines of a journal that begins with this line."""
    return schema_1.decode if _version(header) == 1 else _decoder.decode


def _check_version(line: bytes, number: int, name: str) -> None:
    """Raises `InputError` for a line that a newer kernelmark wrote."""
    version = _version(line)
    if version is not None and version > SCHEMA_VERSION:
        raise InputError(
            f"{name}: line {number}: written with journal schema {version}, this kernelmark "
            f"reads up to {SCHEMA_VERSION}; install a newer kernelmark to read it"
        )


def _version(line: bytes) -> int | None:
    return _marked(line).schema_version


def _tells_header(line: bytes) -> bool:
    """Whether a line that is no valid header means to be one."""
    return _marked(line).kind == "header"


def _marked(line: bytes) -> _Version:
    """What a line says of itself; nothing where it cannot be read."""
    try:
        return msgspec.json.decode(line, type=_Version)
    except _UNREADABLE:
        return _Version()


def _checked_header(header: Header) -> bytes:
    """Its line, which has been read as a reader will read it."""
    try:
        data = encode(header)
        bounds.Bounds().checked(_decoder.decode(data), data)
    except (*_UNREADABLE, OverflowError, TypeError) as error:
        raise InputError(
            f"run {header.run} cannot be recorded, no journal may hold this: {_told(error)}."
        ) from None
    return data


class Writer:
    """Appends lines to a journal; each is on disk when `write` returns.

    Raises `OSError` as the file system gives it (full disk, no permission); a line that could not be
    written whole is taken back, so that what stands in the file stays readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        """How many it has written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._mend()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by `close`)

    def _mend(self) -> None:
        """Cuts off a torn last line, so that what is appended starts on a line of its own."""
        if not self.path.exists():
            return
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole != len(text):
            try:
                decoder(text.partition(b"\n")[0])(text[whole:])
            except _UNREADABLE:
                os.truncate(self.path, whole)
            else:
                with open(self.path, "ab") as file:
                    file.write(b"\n")

    def write(self, line: Line) -> None:
        """Appends one line and waits until it is on disk. Raises `InputError` for a header that no reader takes:
        all that is measured under it would be out of reach.
        """
        data = _checked_header(line) if isinstance(line, Header) else encode(line)
        start = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(28, "No space left on device", str(self.path))
            os.fsync(self._file.fileno())
        except OSError:
            os.truncate(self.path, start)
            raise
        self.lines += 1

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2, ensure_ascii=False))
