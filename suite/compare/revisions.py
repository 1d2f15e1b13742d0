"""Revisions of a checkout: what git calls them, what code they hold, and copies of them to measure.

A tree with uncommitted changes is a revision of its own, spelled `worktree`; HEAD is always the commit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ...registry.errors import HarnessError, InputError, unknown

WORKTREE = "worktree"
"""The name of the checkout as it lies there, uncommitted changes included."""
ROOMS = ("kernels", "baselines")
"""What is taken from each commit; everything else is the harness."""
STOPPING = (signal.SIGINT, signal.SIGTERM)
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Set in git's hooks, where they would send every command to the repository that runs the hook."""
SHOWN = 8
"""Revisions named in a message about one that does not exist."""


@dataclass(frozen=True)
class Revision:
    """A commit under the name it was asked for; `dirty` means: with the uncommitted changes on top."""

    name: str
    commit: str
    dirty: bool = False

    def __str__(self) -> str:
        if self.dirty:
            return f"{WORKTREE} (uncommitted changes on {self.commit[:10]})"
        return self.name if self.commit.startswith(self.name) else f"{self.name} @ {self.commit[:10]}"


_COMMIT = "--format=%H%x1f%aI%x1f%an%x1f%s"


@dataclass(frozen=True)
class Commit:
    """A commit as people know it. `date` is the author's, ISO 8601."""

    commit: str
    date: str
    author: str
    subject: str


@dataclass(frozen=True)
class Checkout:
    """A git checkout."""

    folder: Path

    @classmethod
    def here(cls, folder: Path | None = None) -> Checkout:
        """The checkout that a folder, by default the current one, lies in."""
        start = cls(folder or Path.cwd())
        found = start._ask("rev-parse", "--show-toplevel")
        if found is None:
            raise InputError(f"{start.folder} is not in a git checkout; go to the one whose commits to compare.")
        return cls(Path(found))

    def resolve(self, name: str) -> Revision:
        """The revision that git understands by a name. Raises `InputError` that says what exists."""
        if name == WORKTREE:
            head = self._ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
            if head is None:
                raise InputError("this checkout has no commits yet.")
            return Revision(name if self.dirty else "HEAD", head, self.dirty)
        found = self._ask("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if found is None or not name:
            raise self._unknown(name)
        return Revision(name, found)

    def tracks(self, folder: str) -> bool:
        """Whether git knows any file of a folder, given relative to the checkout."""
        return bool(self._git("ls-files", "--", folder))

    @property
    def dirty(self) -> bool:
        """Whether anything is changed or new that git does not ignore."""
        return bool(self._git("status", "--porcelain"))

    def code(self, commits: Iterable[str], folders: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """By commit, what its folders hold, as git's hashes, equal for equal code; without unknown commits."""
        wanted = list(dict.fromkeys(commits))
        asked = [f"{commit}:{folder}" for commit in wanted for folder in folders]
        exists = [f"{commit}^{{commit}}" for commit in wanted]
        answer = self._git("cat-file", "--batch-check=%(objectname)", text="\n".join([*asked, *exists]) + "\n")
        lines = ["" if x.endswith(" missing") else x for x in answer.splitlines()]
        size = len(folders)
        return {
            commit: tuple(lines[i * size : (i + 1) * size])
            for i, commit in enumerate(wanted)
            if lines[len(asked) + i]
        }

    def times(self, commits: Iterable[str]) -> dict[str, int]:
        """When commits were made, in seconds since 1970; those that this checkout lacks are left out."""
        known = self.code(commits, ())
        answer = self._git("log", "--no-walk=unsorted", "--format=%H %ct", "--stdin", text="\n".join(known) + "\n")
        return {line.split()[0]: int(line.split()[1]) for line in answer.splitlines()} if known else {}

    def between(self, base: str, current: str) -> list[Commit]:
        """The mainline from one commit to another, oldest first, `current` last and `base` left out.

        A merge counts as one commit. Where `base` is not among the ancestors, the line begins with the commit
        that both descend from.
        """
        fork = self._ask("merge-base", base, current)
        listed = self._git("log", "--first-parent", "--reverse", _COMMIT, f"{base}..{current}").split("\n")
        if fork is not None and fork != base:
            listed = [*self._git("log", "--no-walk", _COMMIT, fork).split("\n"), *listed]
        # `splitlines` would also cut a subject at a form feed or at Unicode's line separator.
        return [Commit(*line.split("\x1f", 3)) for line in listed if line]

    def before(self, revision: Revision, count: int) -> list[str]:
        """So many commits of the mainline before a revision, newest first; its own among them if it is dirty."""
        listed = self._git("log", "--first-parent", "--format=%H", f"-n{count + 1}", revision.commit).splitlines()
        return listed[:count] if revision.dirty else listed[1:]

    def tag(self, revision: Revision, pattern: str | None = None) -> str | None:
        """The last tag before a revision, of those that match a glob pattern; None if there is none."""
        match = ["--match", pattern] if pattern else []
        start = revision.commit if revision.dirty else f"{revision.commit}^"
        return self._ask("describe", "--tags", "--abbrev=0", *match, start)

    @contextlib.contextmanager
    def copies(self, revisions: Mapping[str, Revision]) -> Iterator[dict[str, Path]]:
        """A folder with each revision's files, by the names given; nothing of them is left afterwards."""
        top: Path | None = None
        try:
            with _undisturbed():
                top = Path(tempfile.mkdtemp(prefix="kernelmark-")).resolve()
                folders = {side: top / side for side in revisions}
                for side, revision in revisions.items():
                    self._copy(revision, folders[side])
            yield folders
        finally:
            with _undisturbed():
                if top is not None:
                    self._remove(top)

    def _copy(self, revision: Revision, folder: Path) -> None:
        if not revision.dirty:
            # Hooks are for people at work: one that fails or writes would spoil the copy.
            quiet = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
            self._git(*quiet, "worktree", "add", "--quiet", "--detach", str(folder), revision.commit)
            return
        listed = self._git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        folder.mkdir()
        for name in filter(None, listed):
            source, target = self.folder / name, folder / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def _remove(self, top: Path) -> None:
        for folder in top.iterdir():
            if (folder / ".git").is_file():
                # Twice forced: also where a worktree is locked because making it was cut short.
                self._ask("worktree", "remove", "--force", "--force", str(folder))
        shutil.rmtree(top, ignore_errors=True)
        self._ask("worktree", "prune")

    def _unknown(self, name: str) -> InputError:
        listed = self._ask("for-each-ref", "--sort=-committerdate", "--format=%(refname:short)") or ""
        begun = self._ask("rev-parse", "--verify", "--quiet", "HEAD") is not None
        names = [*(["HEAD", WORKTREE] if begun else []), *listed.split()]
        near = get_close_matches(name, names, n=3)
        error = unknown("revision", name, list(dict.fromkeys([*near, *names[: SHOWN + 2]])))
        more = f" and {len(names) - SHOWN - 2} more branches and tags." if len(names) > SHOWN + 2 else ""
        shallow = self._ask("rev-parse", "--is-shallow-repository") == "true"
        hint = " This clone is shallow: `git fetch --unshallow` brings the rest." if shallow else ""
        return InputError(f"{error}{more}{hint}")

    def _ask(self, *arguments: str) -> str | None:
        """What git says, or None where it says no."""
        try:
            return self._git(*arguments)
        except HarnessError:
            return None

    def _git(self, *arguments: str, text: str = "") -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(self.folder), *arguments],
                input=text,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                check=True,
                env={name: value for name, value in os.environ.items() if name not in ELSEWHERE},
                start_new_session=True,  # Ctrl-C on the terminal is for us
            )
        except OSError as error:
            raise HarnessError(f"git cannot be run: {error.strerror}") from None
        except subprocess.CalledProcessError as error:
            raise HarnessError(f"git {' '.join(arguments)} failed: {error.stderr.strip()}") from None
        # Of other whitespace some belongs to what is named: a file's name, and the mark before an empty subject.
        return done.stdout.strip("\n")


def commit_times(commits: Iterable[str]) -> dict[str, int]:
    """`Checkout.times` of the checkout here. Outside of one nothing: the order of measuring has to do."""
    try:
        return Checkout.here().times(commits)
    except InputError:
        return {}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and termination wait until the end: a worktree half made or half removed would stay for ever."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not arrive here
        return
    caught: list[int] = []
    before = {x: signal.signal(x, lambda number, frame: caught.append(number)) for x in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
