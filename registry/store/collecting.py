"""Work on a large journal without the search for cycles, which takes longer than the work.

Of 200,000 records Python makes millions of objects, none of them part of a cycle, and looks through all of them
again and again.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No search for cycles until its end."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
