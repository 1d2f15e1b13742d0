"""The files around the code agree with it: versions, hooks, workflows, what a wheel carries."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from kernelmark.suite import __version__
from kernelmark.suite.cli import COMMANDS, EXTRAS
from kernelmark.suite.plan import BUILTIN

HERE = Path(__file__).resolve().parents[2]
MAKEFILE = (HERE / "Makefile").read_text()
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text())
README = (HERE / "README.md").read_text()
OPTIONAL = PROJECT["project"]["optional-dependencies"]
WORKFLOWS = sorted((HERE / ".github" / "workflows").glob("*.yml"))


def test_one_version():
    citation = yaml.safe_load((HERE / "CITATION.cff").read_text())
    assert PROJECT["project"]["version"] == citation["version"] == __version__
    assert f"## {__version__} " in (HERE / "CHANGELOG.md").read_text()


def paragraph(begin: str) -> str:
    """The README's text from there to the next empty line, a list that follows it included."""
    found = re.search(rf"^{re.escape(begin)}.*?(?:\n\n- .*?)?(?=\n\n)", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def test_the_changes_have_each_topic_once_and_the_rest_last():
    for version in (HERE / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        topics = re.findall(r"^### (.+?)(?: \(.*\))?$", version, re.MULTILINE)
        assert len(set(topics)) == len(topics)
        assert topics.index("Everything else") == len(topics) - 1


def test_the_readme_names_every_command():
    block = README.partition("\n## Commands\n")[2].partition("```\n")[2].partition("```")[0]
    lines = re.findall(r"^kernelmark ((?:[a-z-]+ \| )*[a-z-]+)", block, re.MULTILINE)
    assert {y for x in lines for y in x.split(" | ")} == COMMANDS.keys()


def test_the_readme_names_every_built_in_plan():
    named = re.findall(r"`([a-z0-9_-]+)`", paragraph("Built-in plans"))
    assert sorted(x for x in named if x != "_tiny") == sorted(BUILTIN)


def test_the_readme_names_every_extra():
    assert set(re.findall(r"`([a-z]+)` \(", paragraph("Extras:"))) == OPTIONAL.keys()


def test_what_a_missing_module_asks_for_is_in_its_extra():
    asked = {x: re.findall(r"\[(\w+)\]", y) for x, y in EXTRAS.items() if "[" in y}
    assert {y for x in asked.values() for y in x} == OPTIONAL.keys()
    packages = {x: {re.match(r"[\w-]+", y)[0] for y in wanted} for x, wanted in OPTIONAL.items()}
    assert {module: extra for module, (extra,) in asked.items() if module not in packages[extra]} == {}


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


def test_what_a_marker_says_is_run_each_night_is():
    text = (HERE / ".github/workflows/nightly.yml").read_text()
    markers = "\n".join(PROJECT["tool"]["pytest"]["ini_options"]["markers"])
    told = re.findall(r"`make (test-[a-z]+)`, each night", markers)
    # Tests of endpoints have no marker: they are in `make test` too, but for what the providers' SDKs do.
    assert sorted([*told, "test-endpoints"]) == sorted(re.findall(r"\bmake (test-[a-z]+)", text))
    by_hand = re.findall(r"`make (test-[a-z]+)`, by hand", markers)
    assert not any(x in y.read_text() for x in by_hand for y in WORKFLOWS if y.stem != "nightly")


PLANTED = """#!/bin/sh
# In place of kernelmark: `corpus build` writes $SAID, and by `--order` and `--packed` what else is planted.
echo "$*" >> "$ASKED"
case "$*" in
    *" pack "*) exit 0 ;;
    *--order*) text="${ORDERED:-$SAID}" ;;
    *--packed*) text="${UNPACKED:-$SAID}" ;;
    *) text="$SAID" ;;
esac
mkdir -p "$KERNELMARK_CORPUS/digest"
echo "$text" > "$KERNELMARK_CORPUS/digest/train.txt"
"""


@pytest.mark.parametrize("differing", [None, "ORDERED", "UNPACKED"])
def test_the_corpus_is_built_twice_each_night_and_bytes_that_differ_are_red(tmp_path, differing):
    assert "make corpus-twice" in (HERE / ".github/workflows/nightly.yml").read_text()
    program = tmp_path / "kernelmark"
    program.write_text(PLANTED)
    program.chmod(0o755)
    elsewhere = tmp_path / "memory"
    given = {"BIN": tmp_path, "VENV": tmp_path, "CORPORA": tmp_path / "corpus", "ELSEWHERE": elsewhere}
    command = [
        "make",
        "--assume-old",
        f"{tmp_path}/.ready",
        "corpus-twice",
        *(f"{x}={y}" for x, y in given.items()),
    ]
    (tmp_path / ".ready").touch()
    variables = {"SAID": "one", "ASKED": str(tmp_path / "asked")} | ({differing: "another"} if differing else {})
    done = subprocess.run(
        command, cwd=HERE, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is (differing is None), done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [x.split()[:2] for x in asked] == [["corpus", y] for y in ("build", "build", "pack", "build")]
    assert asked[1] == f"{asked[0]} --order 7"
    assert elsewhere.exists() is (differing is not None), "what lies in memory is taken away again"


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
