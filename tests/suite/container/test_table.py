"""The table of images: the project's own, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.suite.container import table

HOUSE = Path(__file__).resolve().parents[3]
MINE = """
[defaults]
platform = "linux/amd64"
apt_snapshot = "20261115T000000Z"
verified_at = ""
[one]
summary = "a test"
accelerator = "none"
base = "docker.io/library/debian:12"
digest = ""
trust = "none"
python = "3.11"
apt = []
locks = ["requirements/image-one.txt"]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "images.toml").write_text(MINE)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "image-one.txt").write_text("")
    return tmp_path


def test_the_projects_own():
    images = table.load(HOUSE)
    assert {"h100", "a100", "l4", "t4", "b200", "cpu", "rocm"} <= set(images)
    assert [x for image in images.values() for x in image.problems(HOUSE)] == []
    assert images["h100"].architectures == ("9.0a",)
    for image in images.values():
        if image.digest:
            assert re.fullmatch(r".+:.+@sha256:[0-9a-f]{64}", image.pinned_base)


def test_what_is_not_pinned_is_not_built(folder):
    image = table.named(folder, "one")
    assert image.platform == "linux/amd64"
    with pytest.raises(
        InputError, match=r"image one: the digest of its base .* is not known \(none\). `make pin`"
    ):
        _ = image.pinned_base


def test_an_unknown_image_lists_those_that_exist(folder):
    with pytest.raises(InputError, match="unknown image 'onn'. Did you mean 'one'\\? Known: one."):
        table.named(folder, "onn")
    with pytest.raises(InputError, match="images are built from a checkout"):
        table.load(folder / "docker")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("accelerator = ", "accelerater = ", r"images.toml, \[one\]: Object contains unknown field `accelerater`"),
        ('python = "3.11"\n', "", r"\[one\]: Object missing required field `python`"),
        ('"none"\nbase', '"tpu"\nbase', r"\[one\]: Invalid enum value 'tpu'"),
        ("apt = []", "apt = [", "cannot be read: "),
    ],
)
def test_a_broken_table_is_named(folder, old, new, said):
    path = folder / "docker" / "images.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=said):
        table.load(folder)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('digest = ""', 'digest = "sha256:12"', "one: digest 'sha256:12' is not sha256: and 64 hex digits"),
        ("debian:12", "debian", "one: base 'docker.io/library/debian' is not NAME:TAG"),
        ('verified_at = ""', 'verified_at = "today"', "one: verified_at 'today' is not a day"),
        ('verified_at = ""', 'verified_at = "2026-11-01"', "one: verified_at without a digest"),
        ("20261115T000000Z", "yesterday", "one: apt_snapshot 'yesterday' is not a time"),
        ('"none"\nbase', '"nvidia"\nbase', "one: an NVIDIA image needs architectures, cuda and minimum_driver"),
        ("image-one", "image-two", "one: lock requirements/image-two.txt does not exist"),
        ("requirements/image-one.txt", "docker/images.toml", "one: lock docker/images.toml is none that the"),
    ],
)
def test_problems(folder, old, new, said):
    path = folder / "docker" / "images.toml"
    path.write_text(path.read_text().replace(old, new))
    problem = table.named(folder, "one").problems(folder)[0]
    assert problem.startswith(said)
