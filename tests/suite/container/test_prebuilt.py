"""Wheels that were compiled elsewhere: taken by the hash of their lock, refused by any other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.suite.container import build, pins, prebuilt, table

HOUSE = Path(__file__).resolve().parents[3]
LOCK = "requirements/some_thing-wheel.txt"
SOURCES = "requirements/some_thing-source.txt"
NAME = "some_thing-1.2.post1-cp312-cp312-linux_x86_64.whl"
DATA = b"a wheel"
HASH = hashlib.sha256(DATA).hexdigest()


@dataclass(frozen=True)
class House:
    """A folder with the two locks, and the image of a table that names them."""

    folder: Path
    image: table.Image

    def given(self, data: bytes = DATA, name: str = NAME) -> None:
        (self.folder / prebuilt.FOLDER).mkdir(parents=True, exist_ok=True)
        (self.folder / prebuilt.FOLDER / name).write_bytes(data)


@pytest.fixture
def house(tmp_path):
    image = msgspec.structs.replace(table.named(HOUSE, "h100-flash_attn"), sources=SOURCES, wheel=LOCK)
    for lock in image.every_lock:
        (tmp_path / lock).parent.mkdir(exist_ok=True)
        (tmp_path / lock).write_text(f"click==8.1 \\\n    --hash=sha256:{'1' * 64}\n")
    for lock, digest in ((LOCK, HASH), (SOURCES, "0" * 64)):
        (tmp_path / lock).write_text(f"# why\nSome-Thing==1.2.post1 \\\n    --hash=sha256:{digest}\n")
    return House(tmp_path, image)


def test_sources_are_compiled_where_no_wheel_lies(house):
    house.given(name="some_thing-1.3-cp312-cp312-linux_x86_64.whl")
    assert prebuilt.found(house.folder, house.image) is None
    arguments = build._arguments(house.folder, house.image, "base")
    assert (arguments["SOURCES"], arguments["SOURCES_LOCK"]) == (SOURCES, SOURCES)
    assert arguments["COMPILER_LOCK"] == "requirements/nvcc.txt"
    assert "WHEEL" not in arguments
    assert build.labels(house.folder, house.image, "base")["io.kernelmark.compiled"] == "here"


def test_the_wheel_of_the_lock_is_taken_and_said(house):
    before = build._arguments(house.folder, house.image, "base")
    house.given()
    path = prebuilt.FOLDER / NAME
    assert prebuilt.found(house.folder, house.image) == prebuilt.Wheel(path, HASH)
    arguments = build._arguments(house.folder, house.image, "base")
    assert (arguments["SOURCES"], arguments["SOURCES_LOCK"], arguments["WHEEL"]) == (LOCK, LOCK, path.as_posix())
    assert {"COMPILER_LOCK"} == set(before) - set(arguments)
    said = build.labels(house.folder, house.image, "base")["io.kernelmark.compiled"]
    assert said == f"elsewhere: {NAME} (sha256 {HASH})"
    assert house.folder / path in build.files(house.folder, house.image)


def test_a_label_of_its_version_is_part_of_its_name(house):
    house.given()
    (house.folder / LOCK).write_text(f"some-thing==1.2.post1+part --hash=sha256:{HASH}\n")
    assert prebuilt.found(house.folder, house.image) is None
    name = NAME.replace("post1", "post1+part")
    house.given(name=name)
    assert prebuilt.found(house.folder, house.image) == prebuilt.Wheel(prebuilt.FOLDER / name, HASH)


def test_another_wheel_of_that_name_is_refused(house):
    house.given(b"another wheel")
    said = rf"docker/wheels/{NAME} is not the wheel that {LOCK} names: its sha256 is"
    with pytest.raises(InputError, match=said):
        build.inputs(house.folder, house.image, "base")


def test_an_image_without_such_a_lock_looks_for_none(house):
    house.given(b"another wheel")
    assert prebuilt.found(house.folder, msgspec.structs.replace(house.image, wheel="")) is None
    nothing = table.named(HOUSE, "cpu")
    assert build.labels(HOUSE, nothing, "base")["io.kernelmark.compiled"] == ""


def test_a_wheel_without_sources_is_no_wheel(house):
    alone = msgspec.structs.replace(house.image, sources="", compiler="")
    assert f"{alone.name}: a wheel is compiled from sources, and there are none" in alone.problems(house.folder)


def test_wheel_and_sources_are_of_one_version(house):
    assert pins._other_wheel(house.folder, house.image) == []
    (house.folder / LOCK).write_text(f"some-thing==1.2.post1+part --hash=sha256:{HASH}\n")
    assert pins._other_wheel(house.folder, house.image) == []
    (house.folder / SOURCES).write_text(f"some-thing==1.4 --hash=sha256:{'0' * 64}\n")
    assert pins._other_wheel(house.folder, house.image) == [
        f"{LOCK} and {SOURCES} are not of one version: some_thing 1.2.post1+part and some_thing 1.4"
    ]


def test_the_dockerfile_takes_it_by_its_hash_and_from_nowhere_else():
    text = (HOUSE / "Dockerfile").read_text()
    taken = text[text.index('case "${WHEEL}" in *.whl)') :].split(";;")[0]
    assert "--require-hashes --only-binary :all: --find-links /given" in taken
    assert "install --quiet --no-index --no-deps" in text
