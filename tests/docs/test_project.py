"""The files around the code agree with it: versions, hooks, workflows, what a wheel carries."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from kernelmark.suite import __version__

HERE = Path(__file__).resolve().parents[2]
MAKEFILE = (HERE / "Makefile").read_text()
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text())
WORKFLOWS = sorted((HERE / ".github" / "workflows").glob("*.yml"))


def test_one_version():
    citation = yaml.safe_load((HERE / "CITATION.cff").read_text())
    assert PROJECT["project"]["version"] == citation["version"] == __version__
    assert f"## {__version__} " in (HERE / "CHANGELOG.md").read_text()


def test_the_hooks_are_the_parts_of_make_check():
    (repository,) = yaml.safe_load((HERE / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    entries = [x["entry"] for x in repository["hooks"]]
    check = re.findall(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[0]
    parts = re.findall(r"ruff \w+", check) + [f"make {x}" for x in check.split("directory ")[1].split()]
    assert [re.sub(r"^\S+/(ruff \w+).*", r"\1", x) for x in entries] == parts


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda x: x.stem)
def test_workflows_call_what_exists(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    lines = [x["run"] for job in workflow["jobs"].values() for x in job["steps"] if "run" in x]
    targets = [y for x in lines for y in re.findall(r"\bmake ([\w./-]+)", x)]
    assert targets
    for target in targets:
        assert re.search(
            rf"^(?:{re.escape(target)}|{re.escape(target.replace('.venv', '$(VENV)'))}):", MAKEFILE, re.M
        )
    # What somebody types into a form is no part of a command: it goes by the environment.
    assert not any("${{" in x for x in lines)


def test_every_leaf_says_that_it_is_typed():
    carried = PROJECT["tool"]["setuptools"]["package-data"]
    for leaf in ("suite", "registry", "kernels", "baselines"):
        assert (HERE / leaf / "py.typed").is_file()
        assert "py.typed" in carried[f"kernelmark.{leaf}"]


def test_a_wheel_carries_every_file_that_is_read():
    carried = PROJECT["tool"]["setuptools"]["package-data"]
    for leaf in ("suite", "registry", "kernels", "baselines"):
        for path in (HERE / leaf).rglob("*"):
            inside = path.relative_to(HERE)
            if not path.is_file() or path.suffix in (".py", ".pyc", ".gz") or "reference" in inside.parts:
                continue
            assert any(
                path in (HERE / package.removeprefix("kernelmark.").replace(".", "/")).glob(pattern)
                for package, patterns in carried.items()
                for pattern in patterns
            ), f"{inside} is in no package-data of pyproject.toml"
