"""The commit that made a row slower, by an A/B against the baseline at each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ...registry.detection.bisection import Answer, Finding, Search, Suspect, judge
from ...registry.detection.comparison import Options
from ...registry.detection.verdict import Verdict
from ...registry.errors import InputError
from ...registry.store.record import Key
from .interleaved import NotMeasurable, Tell
from .revisions import WORKTREE, Checkout, Revision

Compare = Callable[[Revision, Revision, Sequence[Key], Options], Mapping[Key, Verdict]]
"""An A/B of two revisions on some rows; `NotMeasurable` or `InputError` where there is nothing to measure."""


@dataclass
class Bisection:
    """The search for the commits that made rows slower. `until` is when measuring ends, by `time.monotonic`."""

    checkout: Checkout
    base: Revision
    current: Revision
    rooms: Sequence[str]
    compare: Compare
    options: Options
    until: float
    tell: Tell
    _line: list[tuple[Revision, Suspect]] = field(default_factory=list, init=False)
    _fork: bool = field(default=False, init=False)
    _seen: dict[tuple[int, Key], Verdict] = field(default_factory=dict, init=False)

    def find(self, verdicts: Iterable[Verdict]) -> list[Finding]:
        """The commit of each of these rows, all of which are slower now."""
        whole = {x.key: x for x in verdicts}
        self._line = self._suspects()
        if len(self._line) == 0:
            return [Finding(key, (), "no commit between the two changes any kernel") for key in whole]
        searches = {key: Search(high=len(self._line)) for key in whole}
        known: dict[Key, dict[int, Answer]] = {key: {} for key in whole}
        while asked := self._next(searches, known):
            index, keys = asked
            revision = self._line[index - 1][0]
            self.tell(f"bisection: {revision}, {len(keys)} of {len(whole)} rows")
            answers = self._ask(index, [whole[key] for key in keys])
            for key in keys:
                known[key][index] = answers[key]
                searches[key] = searches[key].told(index, answers[key])
        return [self._finding(whole[key], search, len(known[key])) for key, search in searches.items()]

    def _suspects(self) -> list[tuple[Revision, Suspect]]:
        """The commits that change a kernel or baseline, and uncommitted changes where they are what is judged."""
        line = self.checkout.between(self.base.commit, self.current.commit)
        code = self.checkout.code([self.base.commit, *(x.commit for x in line)], self.rooms)
        out = []
        last = code.get(self.base.commit)
        for x in line:
            if code.get(x.commit) != last:
                out.append((Revision(x.commit[:10], x.commit), Suspect(x.commit, x.date, x.author, x.subject)))
            last = code.get(x.commit)
        # The line may begin with an ancestor of the baseline, which lacks what the baseline has since.
        first = line[0].commit if line else ""
        begins = bool(out) and out[0][1].commit == first
        self._fork = begins and bool(self.checkout.between(first, self.base.commit))
        if self.current.dirty:
            out.append((self.current, Suspect(WORKTREE, "", "", "uncommitted changes")))
        return out

    def _next(
        self, searches: Mapping[Key, Search], known: Mapping[Key, Mapping[int, Answer]]
    ) -> tuple[int, list[Key]] | None:
        """The next commit to measure, and the rows that want it measured."""
        for search in searches.values():
            if (index := search.next()) is not None:
                # A process costs the same for many rows as for one: all whose range holds the commit go along.
                keys = [
                    key
                    for key, x in searches.items()
                    if x.stopped_at is None and x.low < index < x.high and index not in known[key]
                ]
                return index, keys
        return None

    def _ask(self, index: int, verdicts: Sequence[Verdict]) -> dict[Key, Answer]:
        options, left = self.options, list(verdicts)
        out: dict[Key, Answer] = {}
        for _ in range(2):  # what the shipped procedure leaves open is measured once more, twice as often
            try:
                found = self.compare(self.base, self._line[index - 1][0], [x.key for x in left], options)
            except (NotMeasurable, InputError) as error:
                self.tell(f"bisection: passed over, {error}")
                return {**{x.key: "broken" for x in verdicts}, **out}
            self._seen |= {(index, key): x for key, x in found.items()}
            for x in left:
                out[x.key] = judge(found[x.key], x.change or 0.0) if x.key in found else "broken"
            left = [x for x in left if out[x.key] == "unknown"]
            if not left or time.monotonic() >= self.until:
                break
            pairs = 2 * options.rerun_pairs
            options = msgspec.structs.replace(options, pairs=pairs, rerun_pairs=pairs)
        return out

    def _finding(self, verdict: Verdict, search: Search, steps: int) -> Finding:
        suspects = tuple(self._line[i - 1][1] for i in search.suspects)
        if search.stopped_at is not None:
            where = self._line[search.stopped_at - 1][0]
            why = "within the budget" if time.monotonic() >= self.until else "beyond doubt"
            reason = f"one of {len(suspects)} commits: {where} could not be told {why}"
        elif len(suspects) > 1:
            reason = f"one of {len(suspects)} commits: all but the last of them cannot be measured"
        elif self._fork and search.high == 1:
            reason = "already so where the two part ways: the baseline has something that this line lacks"
        else:
            reason = "found"
        step = self._step(verdict, search)
        return Finding(verdict.key, suspects, reason, step.change, step.low, step.high, steps)

    def _step(self, verdict: Verdict, search: Search) -> Verdict:
        """The change over what is suspected alone, measured where it is not the whole one."""
        if search.low == 0 and search.high == len(self._line):
            return verdict
        if search.low == 0 and (search.high, verdict.key) in self._seen:
            return self._seen[search.high, verdict.key]
        before = self.base if search.low == 0 else self._line[search.low - 1][0]
        if time.monotonic() < self.until:
            try:
                found = self.compare(before, self._line[search.high - 1][0], [verdict.key], self.options)
                return found[verdict.key]
            except (NotMeasurable, InputError, KeyError):
                pass
        return msgspec.structs.replace(verdict, change=None, low=None, high=None)
