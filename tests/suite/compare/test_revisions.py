"""Revisions of a small repository: names, copies, and what is left of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.suite.compare.revisions import Checkout, Revision, commit_times


@pytest.fixture
def repository(make_repository):
    """With two commits, the second of which is tagged."""
    repository = make_repository("repository")
    repository.commit(kernels__one="1\n")
    repository.commit(kernels__one="2\n", other="x\n")
    repository.git("tag", "v1.0")
    return repository


@pytest.fixture
def checkout(repository) -> Checkout:
    return Checkout.here(repository.folder / "kernels")


def test_whatever_git_resolves(repository, checkout):
    head, first = repository.git("rev-parse", "HEAD"), repository.git("rev-parse", "HEAD~1")
    names = {"HEAD": head, "main": head, "v1.0": head, "HEAD~1": first, "main^": first, first[:8]: first}
    assert {name: checkout.resolve(name).commit for name in names} == names
    assert str(checkout.resolve("HEAD~1")) == f"HEAD~1 @ {first[:10]}"
    assert str(checkout.resolve(first)) == first


@pytest.mark.parametrize("name", ["mian", "", "--all", "HEAD~9", "main:kernels"])
def test_garbage_names_what_exists(checkout, name):
    with pytest.raises(InputError, match=r"unknown revision .*Known: .*HEAD.*v1\.0") as error:
        checkout.resolve(name)
    assert error.value.exit_code == 2
    if name == "mian":
        assert "Did you mean 'main'?" in str(error.value)


def test_many_names_are_not_all_listed(repository, checkout):
    for number in range(30):
        repository.git("branch", f"topic-{number}")
    with pytest.raises(InputError, match="and 24 more branches and tags") as error:
        checkout.resolve("topci-7")
    assert "Did you mean 'topic-7'?" in str(error.value)


def test_a_shallow_clone_says_so(repository, tmp_path):
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.folder}", str(tmp_path / "shallow"))
    with pytest.raises(InputError, match="shallow: `git fetch --unshallow`"):
        Checkout.here(tmp_path / "shallow").resolve("HEAD~1")


def test_outside_a_checkout_and_before_a_commit(make_repository, tmp_path):
    with pytest.raises(InputError, match="is not in a git checkout"):
        Checkout.here(tmp_path)
    empty = make_repository("empty")
    with pytest.raises(InputError, match="no commits yet"):
        Checkout.here(empty.folder).resolve("worktree")
    with pytest.raises(InputError, match="Known: none"):
        Checkout.here(empty.folder).resolve("main")


def test_a_dirty_tree_is_its_own_revision(repository, checkout):
    head = repository.git("rev-parse", "HEAD")
    assert checkout.resolve("worktree") == Revision("HEAD", head)
    repository.write(kernels__new="3\n")
    dirty = checkout.resolve("worktree")
    assert (dirty.commit, dirty.dirty) == (head, True)
    assert str(dirty) == f"worktree (uncommitted changes on {head[:10]})"
    assert checkout.resolve("HEAD") == Revision("HEAD", head)


def test_copies_hold_each_revision_and_go_away(repository, checkout):
    repository.write(kernels__one="dirty\n", kernels__new="3\n")
    (repository.folder / "other.py").unlink()
    (repository.folder / ".git/hooks/post-checkout").write_text("#!/bin/sh\ntouch hooked.py\nexit 1\n")
    (repository.folder / ".git/hooks/post-checkout").chmod(0o755)
    names = {"a": "HEAD~1", "b": "HEAD", "c": "worktree"}
    with checkout.copies({side: checkout.resolve(name) for side, name in names.items()}) as folders:
        texts = {
            side: {str(x.relative_to(folder)): x.read_text() for x in sorted(folder.rglob("*.py"))}
            for side, folder in folders.items()
        }
    assert texts == {
        "a": {"kernels/one.py": "1\n"},
        "b": {"kernels/one.py": "2\n", "other.py": "x\n"},
        "c": {"kernels/new.py": "3\n", "kernels/one.py": "dirty\n"},
    }
    assert not folders["a"].parent.exists()
    assert len(repository.git("worktree", "list").splitlines()) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_copies_go_away_whatever_happens(repository, checkout, error):
    made = []

    def interrupted() -> None:
        with checkout.copies({"a": checkout.resolve("HEAD"), "b": checkout.resolve("HEAD~1")}) as folders:
            (folders["b"] / "new.py").write_text("in the way of `git worktree remove`")
            made.append(folders["a"].parent)
            raise error

    with pytest.raises(error):
        interrupted()
    assert not made[0].exists()
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_ctrl_c_waits_until_a_copy_is_whole(repository, checkout, monkeypatch):
    made: list[Path] = []
    copy = Checkout._copy

    def slowly(self: Checkout, revision: Revision, folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        copy(self, revision, folder)
        made.append(folder)

    monkeypatch.setattr(Checkout, "_copy", slowly)
    revisions = {"a": checkout.resolve("HEAD"), "b": checkout.resolve("HEAD~1")}
    with pytest.raises(KeyboardInterrupt), checkout.copies(revisions):
        raise AssertionError("interrupted before it got here")
    assert [x.name for x in made] == ["a", "b"]
    assert not made[0].parent.exists()
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_equal_code_has_equal_hashes(repository, checkout):
    first, second = repository.git("rev-parse", "HEAD~1"), repository.git("rev-parse", "HEAD")
    third = repository.commit(other="y\n")
    code = checkout.code([first, second, third, "0" * 40], ["kernels", "baselines"])
    assert list(code) == [first, second, third]
    assert code[first] != code[second] == code[third]
    assert list(checkout.times([first, "0" * 40])) == [first]
    assert checkout.times(["0" * 40]) == {}


def test_times_of_the_checkout_here_and_none_outside_of_one(repository, checkout, tmp_path, monkeypatch):
    head = repository.git("rev-parse", "HEAD")
    monkeypatch.chdir(checkout.folder)
    assert commit_times({head}) == checkout.times([head]) != {}
    monkeypatch.chdir(tmp_path)
    assert commit_times({head}) == {}


def test_within_a_hook_of_another_repository(repository, make_repository, monkeypatch):
    other = make_repository("other")
    monkeypatch.setenv("GIT_DIR", str(other.folder / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.folder / ".git/index"))
    checkout = Checkout.here(repository.folder)
    assert checkout.folder == repository.folder
    with checkout.copies({"a": checkout.resolve("v1.0")}) as folders:
        assert (folders["a"] / "kernels/one.py").read_text() == "2\n"


def test_names_that_are_no_text(repository, checkout):
    (repository.folder / os.fsdecode(b"kernels/caf\xe9.py")).write_text("4\n")
    with checkout.copies({"a": checkout.resolve("worktree")}) as folders:
        assert len(list((folders["a"] / "kernels").iterdir())) == 2


def test_subjects_and_names_are_taken_as_they_are(repository, checkout):
    first = repository.git("rev-parse", "HEAD")
    subjects = ["a\u2028b", "c\x0cd", ""]
    for subject in subjects:
        repository.git("commit", "--quiet", "--allow-empty", "--allow-empty-message", "-m", subject)
    found = checkout.between(first, repository.git("rev-parse", "HEAD"))
    assert [x.subject for x in found] == subjects
    assert checkout.between(first, first) == []
    (repository.folder / " first").write_text("x")
    with checkout.copies({"head": checkout.resolve("worktree")}) as folders:
        assert (folders["head"] / " first").is_file()
