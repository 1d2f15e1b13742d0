"""From members of a package to texts, and from texts to the bytes of a corpus. Pure; the same on every Python.

Nothing here depends on the order in which packages are given, on a file system, or on Unicode's tables: lines end
at newlines and blanks are ASCII's.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .manifest import Manifest, Package

END = b"\0"
"""After each text. No text holds it."""
_TAG = re.compile(r"<[^<>]*>")
_BLANK = re.compile(r"[ \t\r\n\f\v]+")
_BREAK = re.compile(r"</(?:p|li|ul|ol|h[1-6]|dd|dt)>|<br ?/?>")


@dataclass(frozen=True, order=True)
class Text:
    """One text: where it comes from, the group that is not parted, and what it says."""

    package: str
    member: str
    group: str
    content: str


def text(package: Package, member: str, data: bytes, largest: int) -> Text | None:
    """A member as a text; None where it is none: another file, too large, not UTF-8, empty."""
    if not re.fullmatch(package.files, member) or (package.without and re.fullmatch(package.without, member)):
        return None
    try:
        content = (gzip.decompress(data) if member.endswith(".gz") else data).decode("utf-8", "strict")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None
    if package.key is not None:
        content = _strings(content, package.key)
    elif len(data) >= largest:
        return None
    content = content.replace("\r\n", "\n").strip(" \t\r\n\f\v")
    if not content or "\0" in content:
        return None
    found = re.match(package.group, member)
    return Text(package.name, member, f"{package.name}/{found[0] if found else ''}", content + "\n")


def _strings(content: str, key: str) -> str:
    """All strings of a key anywhere in a JSON document, in its order, a blank line between."""
    try:
        found = _values(json.loads(content), key)
        return "\n\n".join(x for x in map(plain, found) if x)
    except (ValueError, RecursionError):
        return ""


def _values(node: Any, key: str) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from _values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, key)


def plain(marked: str) -> str:
    """HTML as plain text: a line a paragraph."""
    lines = (_BLANK.sub(" ", html.unescape(_TAG.sub("", x))).strip(" ") for x in _BREAK.split(marked))
    return "\n".join(x for x in lines if x)


def validated(group: str, every: int) -> bool:
    """Whether a group's texts are for validation."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") % every == 0


def assemble(texts: Iterable[Text], manifest: Manifest) -> dict[str, bytes]:
    """The bytes of `train` and `validation`: texts sorted, equal ones and equal long lines once.

    A line that both could hold is left to the validation text, so that nothing long of it is trained on.
    """
    ordered = sorted(texts)
    parts = {"validation": [x for x in ordered if validated(x.group, manifest.validation_every)]}
    parts["train"] = [x for x in ordered if not validated(x.group, manifest.validation_every)]
    lines: set[bytes] = set()
    whole: set[bytes] = set()
    out = {}
    for name, own in parts.items():
        made = bytearray()
        for x in own:
            data = x.content.encode()
            if (digest := _digest(data)) in whole:
                continue
            whole.add(digest)
            if kept := _fresh(data, lines, manifest.line):
                made += kept + END
        out[name] = bytes(made)
    return out


def _fresh(data: bytes, seen: set[bytes], least: int) -> bytes:
    """A text without the long lines that were there before; empty where no other long line is left."""
    kept, fresh = [], False
    for line in data.split(b"\n"):
        bare = line.strip(b" \t\r\f\v")
        if len(bare) >= least:
            if (digest := _digest(bare)) in seen:
                continue
            seen.add(digest)
            fresh = True
        kept.append(line)
    return b"\n".join(kept) if fresh else b""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=12).digest()
