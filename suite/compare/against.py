"""What a commit is compared with so that small slowdowns do not add up: a release, or the best of the last ones.

Five commits that are 2.5 % slower each are below every limit one by one, and 13 % together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from ...registry.detection.earlier import run_means
from ...registry.errors import InputError
from ...registry.store.index import Index, clean
from ...registry.store.record import PROVIDER, Key
from .interleaved import Tell
from .revisions import Checkout, Revision

FORMS = "best:N (the fastest of the last N commits, by stored runs), tag or tag:PATTERN (the last release)"


def against(
    checkout: Checkout,
    index: Index,
    current: Revision,
    wanted: str,
    operators: Collection[str],
    tell: Tell,
    *,
    providers: Collection[str] = (PROVIDER,),
    device: str | None = None,
) -> Revision:
    """The revision that `wanted` means. Raises `InputError` that says what there is.

    `providers` are those of the kernels that the commits hold, `device` the one whose times count; None means any.
    """
    name, _, rest = wanted.partition(":")
    if name == "tag":
        tag = checkout.tag(current, rest or None)
        if tag is None:
            raise InputError(f"no tag{f' like {rest}' if rest else ''} is before {current}; see `git tag`.")
        return checkout.resolve(tag)
    if name != "best" or not rest.isdigit() or int(rest) < 1:
        raise InputError(f"--against {wanted}: it takes {FORMS}.")
    commits = checkout.before(current, int(rest))
    if not commits:
        raise InputError(f"no commit is before {current}.")
    found = fastest(_times(index, commits, operators, providers, device))
    if found is None:
        tell(f"no run of the last {len(commits)} commits is stored: the oldest of them stands for the best")
        found = commits[-1]
    tell(f"the best of the last {len(commits)} commits: {found[:10]}")
    return Revision(found[:10], found)


def fastest(times: Mapping[str, Mapping[Key, float]]) -> str | None:
    """The commit whose rows are the fastest together: the geometric mean over the rows that most commits have.

    Of commits that are equally fast it is the first named. None where no commit has a time.
    """
    counted = {key for rows in times.values() for key in rows}
    common = {key for key in counted if 2 * sum(key in rows for rows in times.values()) > len(times)}
    least = {key: min(rows[key] for rows in times.values() if key in rows) for key in common}

    def slowness(commit: str) -> float:
        logs = [math.log(ms / least[key]) for key, ms in times[commit].items() if key in least]
        return sum(logs) / len(logs) if logs else math.inf

    timed = [x for x in times if slowness(x) < math.inf]
    return min(timed, key=slowness, default=None)


def _times(
    index: Index,
    commits: Collection[str],
    operators: Collection[str],
    providers: Collection[str],
    device: str | None,
) -> dict[str, dict[Key, float]]:
    """By commit, its kernels' times in its newest run, of the comparability key that was measured last."""
    entries = [x for commit in commits for x in clean(index.runs(commit=commit, device=device))]
    if not entries:
        return {}
    key = max(entries, key=lambda x: x.created).key
    out: dict[str, dict[Key, float]] = {}
    for entry in sorted(entries, key=lambda x: x.created):
        if entry.key == key:
            rows = {
                row: mean.ms
                for row, mean in run_means(index.processes(entry)).items()
                if mean.provider in providers and (not operators or row.operator in operators)
            }
            out.setdefault(str(entry.commit), {}).update(rows)
    return {commit: out[commit] for commit in commits if out.get(commit)}
