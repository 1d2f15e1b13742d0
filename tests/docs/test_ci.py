"""The CI examples: valid YAML, and every option in them exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from kernelmark.suite.cli import regression, site
from kernelmark.suite.cli.values import Duration

HERE = Path(__file__).parents[2]
FILES = sorted((HERE / "docs" / "ci").glob("*.yml"))
SITES = [x for x in FILES if "pages" in x.name]
GATES = [x for x in FILES if x not in SITES]


def commands(node: Any) -> list[str]:
    """All lines of shell in a document."""
    if isinstance(node, dict):
        lines = [x for name, value in node.items() if name in ("run", "script") for x in _texts(value)]
        return lines + [x for value in node.values() if not isinstance(value, str) for x in commands(value)]
    return [x for value in node for x in commands(value)] if isinstance(node, list) else []


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [x for x in value if isinstance(x, str)] if value else []


def call(path: Path, name: str) -> list[str]:
    """The words of the call of a command."""
    calls = {x for x in commands(yaml.safe_load(path.read_text())) if name in x}
    assert len(calls) == 1, path.name
    return shlex.split(calls.pop().replace("\\\n", " "))[1:]


def test_there_is_one_for_each() -> None:
    assert [x.name for x in FILES] == [
        "github-actions.yml",
        "github-pages.yml",
        "gitlab-ci.yml",
        "gitlab-pages.yml",
    ]


@pytest.mark.parametrize("path", GATES, ids=lambda x: x.stem)
def test_every_option_exists_and_takes_its_value(path: Path) -> None:
    words = call(path, "regression_detector")
    context = regression.command.make_context("regression_detector", list(words))
    assert context.params["attribute"]
    assert context.params["bisect"]
    assert isinstance(context.params["budget"], float)
    assert Duration()("30m") == context.params["budget"]
    for name in ("markdown", "junit", "html"):
        assert context.params[name] is not None
    # What is written is also kept or sent.
    text = path.read_text()
    for name in ("markdown", "junit", "html"):
        assert text.count(str(context.params[name])) > 1, f"{name} is written and not used"


@pytest.mark.parametrize("path", GATES, ids=lambda x: x.stem)
def test_the_exit_code_is_the_verdict(path: Path) -> None:
    text = path.read_text()
    assert "|| true" not in text
    assert "continue-on-error" not in text
    if "gitlab" in path.name:
        assert yaml.safe_load(text)["kernelmark"]["allow_failure"]["exit_codes"] == [3, 4]


@pytest.mark.parametrize("path", SITES, ids=lambda x: x.stem)
def test_the_site_is_kept_between_jobs_and_published(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = path.read_text()
    journals = re.search(r"JOURNALS: (\S+)", text)
    assert journals is not None
    monkeypatch.chdir(HERE)
    words = [x.replace("$JOURNALS", journals[1]) for x in call(path, "kernelmark site")[1:]]
    context = site.command_site.make_context("site", words)
    assert str(context.params["output"]) == "public"
    assert text.count("public") == 3, "it is written, kept for the next job and published"


@pytest.mark.parametrize("path", FILES, ids=lambda x: x.stem)
def test_the_whole_history_is_fetched(path: Path) -> None:
    assert re.search(r"fetch-depth: 0|GIT_DEPTH: \"0\"", path.read_text())
