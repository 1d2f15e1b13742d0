"""The package as strangers get it: built, installed away from any checkout and without torch, and used."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import pytest

from .installed import ENVIRONMENT, TORCH, build, install

HOUSE = Path(__file__).resolve().parents[1]
JOURNAL = next((HOUSE / "registry/reference").glob("*-509e.jsonl.gz"))


@pytest.fixture(scope="module")
def kernelmark(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The installed command, in an environment that has every package of ours but torch and triton.

    The wheel is made of the sdist, so that both are whole.
    """
    place = tmp_path_factory.mktemp("package")
    commands = install(build(HOUSE, place), place / "clean", without=TORCH)

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {name: x for name, x in ENVIRONMENT.items() if not name.startswith(("KERNELMARK_", "MLFLOW_"))}
        own |= {"KERNELMARK_HOME": str(place / "home"), **variables}
        command = [str(commands / "kernelmark"), *arguments]
        return subprocess.run(command, cwd=place, env=own, capture_output=True, text=True, check=False, timeout=60)

    return call


def test_it_is_the_installed_one_and_lists(kernelmark: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    found = json.loads(kernelmark("list", "--json", "--device", "cpu").stdout)["operators"]
    ours = {x["reason"] for operator in found for x in operator["implementations"] if x["name"] == "torch"}
    assert len(found) > 20
    assert ours == {"torch is not installed: pip install torch"}


def test_run_without_torch_says_what_list_says(
    kernelmark: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = kernelmark("run", "--operator", "gelu", "--device", "cpu")
    assert done.returncode == 2
    assert "nothing of this plan can run here:\n  torch is not installed: pip install torch (" in done.stderr
    assert "Traceback" not in done.stderr


def test_results_of_others_are_taken_in_and_shown(
    kernelmark: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert kernelmark("import", "--no-sync", str(JOURNAL)).returncode == 0
    shown = kernelmark("show", "latest", "--json")
    assert json.loads(shown.stdout)["rows"]
    page = kernelmark("report", "latest")
    assert page.returncode == 0, page.stderr


def test_what_the_extras_ask_for_is_what_is_locked() -> None:
    from packaging.requirements import Requirement

    wanted: Mapping[str, Requirement] = {
        x.name: x
        for x in map(Requirement, metadata.requires("kernelmark") or ())
        if x.marker is None or any(x.marker.evaluate({"extra": name}) for name in ("registry", "images"))
    }
    assert {"mlflow", "jinja2", "docker", "click"} <= wanted.keys()
    assert {x.name: True for x in wanted.values()} == {
        name: x.specifier.contains(metadata.version(name)) for name, x in wanted.items()
    }
