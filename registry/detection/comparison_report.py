"""A comparison as it ended, with all that its outputs need."""

from __future__ import annotations

import msgspec

from ..store.record import Key
from .attribution import Attribution
from .bisection import Finding
from .comparison import Options
from .decision import DEFAULTS, Progress
from .descriptive import Descriptive
from .verdict import FAIL_ON, Verdict, exit_code, worst_first

HEADLINES = {
    0: "No regression",
    1: "Regression found",
    2: "Wrong usage",
    3: "Inconclusive",
    4: "Not comparable, or nothing to compare",
    5: "The harness failed",
}
"""What each exit code means, in a headline."""


class ComparisonReport(msgspec.Struct, frozen=True):
    """A comparison as it ended. `base` and `current` say what was compared ("main @ 1a2b3c4").

    `fails` is what `--fail-on` chose; `others` are exit codes that arose outside the verdicts.
    """

    base: str
    current: str
    progress: Progress
    options: Options = DEFAULTS
    fails: frozenset[str] = FAIL_ON
    others: tuple[int, ...] = ()
    statistics: dict[Key, Descriptive] = {}
    attributions: tuple[Attribution, ...] = ()
    findings: tuple[Finding, ...] = ()
    remarks: tuple[str, ...] = ()
    """What a reader must know of the comparison as a whole."""

    @property
    def slower(self) -> list[Verdict]:
        """What `--attribute` and `--bisect` look into."""
        return [x for x in self.verdicts if x.kind in ("regression", "warning")]

    @property
    def verdicts(self) -> list[Verdict]:
        """Worst first."""
        return worst_first(self.progress.verdicts)

    @property
    def exit_code(self) -> int:
        """What the command ends with."""
        return exit_code(self.progress.verdicts, self.fails, self.others)

    @property
    def headline(self) -> str:
        """The exit code in words; where `--fail-on` parts it from what was found, both."""
        code, found = self.exit_code, {x.kind for x in self.progress.verdicts}
        if code == 0 and "regression" in found:
            return "Regression found, which does not fail"
        flagged = any(y.metric in self.fails for x in self.progress.verdicts for y in x.flags)
        if code == 1 and "regression" not in found and not flagged:
            return "Change found that fails"
        return HEADLINES[code]
