"""How old a library was at a run, and its newest release."""

from __future__ import annotations

from datetime import date

import pytest
from kernelmark.registry.analysis.releases import Package, Releases, releases, told

KNOWN = Releases(
    asked=date(2026, 11, 24),
    implementations={"quack": "quack-kernels", "sdpa_flash": "torch", "gone": "unlisted"},
    packages={
        "quack-kernels": Package("0.3.0", {"0.3.0": date(2026, 11, 1), "0.2.1": date(2026, 10, 9)}),
        "torch": Package("2.13.0", {"2.13.0": date(2026, 11, 20)}),
    },
)


@pytest.mark.parametrize(
    ("implementation", "version", "created", "days", "newest"),
    [
        ("quack", "0.2.1", "2026-11-21T10:00:00Z", 43, "0.3.0"),
        ("quack", "0.2.1", "2026-11-21T01:00:00+02:00", 42, "0.3.0"),
        ("sdpa_flash", "2.13.0+cu130", "2026-11-21T10:00:00Z", 1, "2.13.0"),
        ("quack", "0.2.1", "2026-10-08T10:00:00Z", None, "0.3.0"),  # a clock before the release
        ("quack", "0.2.1", "yesterday", None, "0.3.0"),
        ("quack", "0.1.0", "2026-11-21T10:00:00Z", None, None),
        ("quack", None, "2026-11-21T10:00:00Z", None, None),
        ("gone", "1.0", "2026-11-21T10:00:00Z", None, None),
        ("another", "1.0", "2026-11-21T10:00:00Z", None, None),
    ],
)
def test_the_age_is_that_at_the_run(
    implementation: str, version: str | None, created: str, days: int | None, newest: str | None
) -> None:
    assert KNOWN.age(implementation, version, created) == days
    assert KNOWN.newest(implementation, version) == newest


def test_what_is_not_known_is_said() -> None:
    assert [told(x) for x in (43, 1, 0, None)] == ["43 days", "1 day", "0 days", "age not known"]
    created = "2026-11-21T10:00:00Z"
    assert KNOWN.told("quack", "0.2.1", created) == "0.2.1, 43 days old at the run, newest 0.3.0"
    assert KNOWN.told("quack", "0.1.0", created) == "0.1.0, age not known"
    assert KNOWN.told("quack", None, created) == "–"


def test_the_file_that_comes_with_the_program_is_read() -> None:
    found = releases()
    assert all(x.newest in x.released for x in found.packages.values())
    assert all(day <= found.asked for x in found.packages.values() for day in x.released.values())
