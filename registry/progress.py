"""How whatever takes long says how far it is, without knowing who shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Tell: TypeAlias = Callable[[str, float], None]
"""Hears what is under way, and which fraction of all is done."""


def untold(what: str, fraction: float) -> None:
    """Tells nobody."""
