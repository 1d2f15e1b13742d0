"""The journal: JSON Lines, appended and flushed as each measurement is made. It is the truth.

A journal is one `Header`, then `Record` and `Ceiling` lines in the order they were made, and a `Footer`
where a session ended. A line torn by a power cut can only be the last one and costs that line only; a
bad line anywhere else is an error that names its number. A path ending in `.gz` is read compressed.
"""

from __future__ import annotations

import gzip
import inspect
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from ..errors import InputError
from . import schema_1
from .metric import Metric
from .record import SCHEMA_VERSION, Ceiling, Footer, Header, Line, Record

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding raises for bytes that are no line: bad JSON, the wrong fields, not UTF-8."""


class _Version(msgspec.Struct):
    schema_version: int | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Journal:
    """A journal in memory. `torn` is True where the last line was cut off and left out."""

    header: Header
    records: tuple[Record, ...] = ()
    ceilings: tuple[Ceiling, ...] = ()
    footers: tuple[Footer, ...] = ()
    torn: bool = False
    path: Path | None = field(default=None, compare=False)

    def metric(self, name: str) -> Metric:
        """What a name means here. A name that the header lacks is a plain number."""
        return next((x for x in self.header.metrics if x.name == name), Metric(name, "1", "neither"))


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


def read(path: Path) -> Journal:
    """Reads a journal. Raises `InputError` with the line number for anything but a torn last line."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except FileNotFoundError:
        raise InputError(f"no journal at {path}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return parse(text, path)


def parse(text: bytes, path: Path | None = None) -> Journal:
    """Parses the bytes of a journal; `path` is for messages."""
    name = str(path) if path else "journal"
    lines = text.split(b"\n")
    tail = lines.pop()  # what follows the last newline: empty unless the last write was cut off
    if not lines:
        raise InputError(f"{name} is empty or holds no whole line: not a kernelmark journal")
    if lines[0].strip():
        _check_version(lines[0], 1, name)  # a newer header may well decode here, and mean something else
    decode = decoder(lines[0])
    decoded = {number: _decode(decode, line, number, name) for number, line in enumerate(lines, 1) if line.strip()}
    torn = False
    if tail.strip():
        try:  # an editor may have taken the last newline away: a line that parses whole is whole
            decoded[len(lines) + 1] = decode(tail)
        except _UNREADABLE:
            torn = True
    header = decoded.get(1)
    if not isinstance(header, Header):
        raise InputError(f"{name}: line 1 is not a header: not a kernelmark journal")
    for number, line in decoded.items():
        if isinstance(line, Header) and number > 1:
            raise InputError(f"{name}: line {number} is a second header: two journals in one file; split them")
    return Journal(
        header=header,
        records=tuple(_unique(x for x in decoded.values() if isinstance(x, Record))),
        ceilings=tuple(x for x in decoded.values() if isinstance(x, Ceiling)),
        footers=tuple(x for x in decoded.values() if isinstance(x, Footer)),
        torn=torn,
        path=path,
    )


def decoder(header: bytes) -> Callable[[bytes], Line]:
    """What reads the lines of a journal that begins with this line."""
    return schema_1.decode if _version(header) == 1 else _decoder.decode


def _decode(decode: Callable[[bytes], Line], line: bytes, number: int, name: str) -> Line:
    try:
        return decode(line)
    except _UNREADABLE as error:
        _check_version(line, number, name)
        raise InputError(f"{name}: line {number}: {error}") from None


def _check_version(line: bytes, number: int, name: str) -> None:
    """Raises `InputError` for a line that a newer kernelmark wrote."""
    version = _version(line)
    if version is not None and version > SCHEMA_VERSION:
        raise InputError(
            f"{name}: line {number}: written with journal schema {version}, this kernelmark "
            f"reads up to {SCHEMA_VERSION}; install a newer kernelmark to read it"
        )


def _version(line: bytes) -> int | None:
    try:
        return msgspec.json.decode(line, type=_Version).schema_version
    except _UNREADABLE:
        return None


def _unique(records: Iterable[Record]) -> Iterator[Record]:
    """A run killed between writing a record and noting it may measure it again: the first one counts."""
    seen = set()
    for record in records:
        if (record.identity, record.replicate) not in seen:
            seen.add((record.identity, record.replicate))
            yield record


class Writer:
    """Appends lines to a journal; each is on disk when `write` returns.

    Raises `OSError` as the file system gives it (full disk, no permission); a line that could not be
    written whole is taken back, so that what stands in the file stays readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
        """Appends one line and waits until it is on disk."""
        data = encode(line)
        start = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(28, "No space left on device", str(self.path))
            os.fsync(self._file.fileno())
        except OSError:
            os.truncate(self.path, start)
            raise

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
