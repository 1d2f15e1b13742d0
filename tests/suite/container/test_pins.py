"""`make pin-check`: a lock that does not match its input is found, and so is every other broken pin."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from kernelmark.suite.container import pins, table
from kernelmark.suite.container.engine import Engine
from kernelmark.suite.container.errors import ImageMissing

HOUSE = Path(__file__).resolve().parents[3]
HASH = f"--hash=sha256:{'0' * 64}"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "images.toml").write_text((HOUSE / "docker" / "images.toml").read_text())
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    (requirements / "common.in").write_text("click>=8\n# a remark\n")
    images = table.load(HOUSE).values()
    own = {Path(x).stem for image in images for x in image.every_lock}
    for name in sorted(own - {"torch-cpu", "image-cpu", "image-cuda"}):
        (requirements / f"{name}.txt").write_text(f"click==8.1 \\\n    {HASH}\n")
    for name in ("image-cpu", "image-cuda"):
        (requirements / f"{name}.in").write_text("-r common.in\ntorch==2.13.0\n")
        (requirements / f"{name}.txt").write_text(f"click==8.1 \\\n    {HASH}\ntorch==2.13.0 \\\n    {HASH}\n")
    (requirements / "torch-cpu.txt").write_text(f"--extra-index-url https://x\ntorch==2.13.0+cpu \\\n    {HASH}\n")
    server = tmp_path / "docker" / "registry"
    server.mkdir()
    (server / "requirements.in").write_text("mlflow==3.17.2\n")
    (server / "requirements.txt").write_text(f"mlflow==3.17.2 \\\n    {HASH}\n")
    pins.record(tmp_path)
    return tmp_path


def test_the_projects_own_hold():
    assert pins.check(HOUSE) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("common.in", "click>=8", "click>=9", "requirements/image-cpu.txt is older than image-cpu.in or a file"),
        (
            "image-cuda.in",
            "torch==2.13.0",
            "torch==2.14.0",
            "requirements/image-cuda.txt is older than image-cuda.in",
        ),
        ("image-cpu.txt", "click==8.1", "click==8.2", "requirements/image-cpu.txt was changed by hand: make lock"),
        (
            "image-cpu.txt",
            "torch==2.13.0",
            "torch==2.12.0",
            "not the same torch everywhere: image-cpu.txt has 2.12.0",
        ),
        ("torch-cpu.txt", HASH, "", "requirements/torch-cpu.txt: torch==2.13.0+cpu is not pinned with a hash"),
        (
            "locks.json",
            '"requirements/image-cpu.txt"',
            '"requirements/other.txt"',
            "requirements/image-cpu.txt is not in requirements/locks.json",
        ),
        ("locks.json", "{", "", "requirements/locks.json cannot be read"),
        (
            "../docker/registry/requirements.in",
            "3.17.2",
            "3.17.1",
            "docker/registry/requirements.txt is older than requirements.in",
        ),
    ],
)
def test_what_does_not_hold_is_named(folder, file, old, new, said):
    assert pins.check(folder) == []
    path = folder / "requirements" / file
    path.write_text(path.read_text().replace(old, new, 1))
    assert any(x.startswith(said) for x in pins.check(folder)), pins.check(folder)


def test_a_remark_is_no_change(folder):
    path = folder / "requirements" / "common.in"
    path.write_text(path.read_text().replace("a remark", "another one"))
    assert pins.check(folder) == []


class Registry:
    """A registry behind an engine, which knows one digest for everything, or cannot be asked."""

    def __init__(self, digest: str | None) -> None:
        self.digest = digest
        self.asked: list[str] = []
        self.images = self

    def get_registry_data(self, name: str):
        from docker.errors import APIError

        self.asked.append(name)
        if self.digest is None:
            raise APIError("no such host")
        return type("Data", (), {"id": self.digest})


def test_pin_writes_digest_and_day_and_keeps_the_rest(folder):
    registry = Registry(f"sha256:{'ab' * 32}")
    before = table.load(HOUSE)
    whole = [x for x in before.values() if "h100" in (x.name, x.sibling) or x.name == "rocm"]
    lines = list(pins.pin(Engine(registry, "unix:///x"), folder, ["h100", "rocm"]))
    assert len(lines) == len(whole) > 4
    assert len(registry.asked) == 2  # bases
    assert "was not known" in lines[-1]
    after = table.load(folder)
    assert after["h100"].digest == after["rocm"].digest == registry.digest
    assert after["h100"].trust == "seen in its registry"
    assert table.named(folder, "rocm").problems(HOUSE) == []
    assert after["h100"].verified_at.startswith("20")
    rest = before.keys() - {x.name for x in whole}
    assert {x: after[x] for x in rest} == {x: before[x] for x in rest}
    text = (folder / "docker" / "images.toml").read_text()
    assert [x for x in text.splitlines() if x.startswith("#")] == [
        x for x in (HOUSE / "docker" / "images.toml").read_text().splitlines() if x.startswith("#")
    ]
    tomllib.loads(text)


def test_images_on_one_base_ask_once(folder):
    registry = Registry(f"sha256:{'cd' * 32}")
    assert len(list(pins.pin(Engine(registry, "unix:///x"), folder, ()))) == len(table.load(folder))
    assert len(registry.asked) == len(set(registry.asked)) < len(table.load(folder))


def test_a_registry_that_cannot_be_asked(folder):
    before = (folder / "docker" / "images.toml").read_text()
    with pytest.raises(ImageMissing, match="the base .* is not here and cannot be fetched: no such host"):
        list(pins.pin(Engine(Registry(None), "unix:///x"), folder, ()))
    assert (folder / "docker" / "images.toml").read_text() == before
