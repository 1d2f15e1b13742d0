"""A corpus of two tiny wheels: the same bytes in any order, checked wherever they come from."""

from __future__ import annotations

import gzip
import json
import random
import re
import tarfile
import zipfile
from pathlib import Path

import msgspec
import pytest
from kernelmark.registry.errors import HarnessError, InputError
from kernelmark.suite import cli
from kernelmark.suite.corpus import build, pack, place
from kernelmark.suite.corpus import manifest as manifests
from kernelmark.suite.corpus.manifest import Manifest, Package, Part
from kernelmark.suite.corpus.text import END, Text, assemble, plain, text, validated

HERE = Path(__file__).resolve().parents[3]
LONG = "a line of more than thirty-two characters, number"


def wheel(path: Path, members: dict[str, bytes], seed: int = 0) -> str:
    """Writes a wheel, its members in some order; gives its hash."""
    names = sorted(members)
    random.Random(seed).shuffle(names)
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, members[name])
    return build.sha256(path.read_bytes())


def code(number: int) -> bytes:
    return f"import this\n{LONG} {number}\n".encode()


CODE = {
    **{f"thing/part{i}/a.py": code(i) for i in range(40)},
    "thing/vendored/x.py": code(99),
    "thing/latin.py": "é".encode("latin-1"),
    "thing/copy.py": code(3),
    "thing-1.0.dist-info/licenses/LICENSE": b"Do what you like.",
}
JSON = {
    "docs/data/a/2020/service.json.gz": gzip.compress(
        json.dumps({"documentation": "<p>One &amp; two</p><p>three</p>", "x": [{"documentation": LONG}]}).encode()
    ),
    "docs/data/broken.json.gz": b"not gzip",
}


@pytest.fixture
def made(tmp_path):
    """Makes a folder of wheels and a manifest of them, in an order of its own."""

    def make(seed: int = 0) -> tuple[Manifest, Path]:
        folder = tmp_path / f"wheels{seed}"
        folder.mkdir()
        thing = wheel(folder / "thing-1.0-py3-none-any.whl", CODE, seed)
        docs = wheel(folder / "docs-2.0-py3-none-any.whl", JSON, seed)
        packages = [
            Package("thing", "thing-1.0-py3-none-any.whl", thing, "MIT", r".*\.py", r".*/vendored/.*"),
            Package(
                "docs",
                "docs-2.0-py3-none-any.whl",
                docs,
                "MIT",
                r".*\.json\.gz",
                key="documentation",
                group="docs/data/[^/]+",
            ),
        ]
        random.Random(seed).shuffle(packages)
        return Manifest(tuple(packages), validation_every=10), folder

    return make


def test_the_bytes_do_not_depend_on_any_order(made):
    first, other = (build.built(*made(seed)) for seed in (0, 5))
    assert first == other
    assert {name: len(data) for name, data in first.items()} == {"validation": 394, "train": 2304}


def test_the_corpus_was_built_twice_with_the_manifests_hashes():
    said = (HERE / "registry" / "reference" / "corpus" / "said.txt").read_text()
    hashes = [x.split() for x in said.splitlines() if len(x.partition(" ")[0]) == 64]
    found = {(Path(path).parts[0], Path(path).stem): digest for digest, path in hashes}
    places = {place for place, _ in found}
    assert len(places) == 2
    for name, part in manifests.load().parts.items():
        assert {found[place, name] for place in places} == {part.sha256}


def test_the_packed_corpus_was_small_enough_to_travel_and_unpacked_again():
    said = (HERE / "registry" / "reference" / "corpus" / "said.txt").read_text()
    _, _, packed = said.partition("kernelmark corpus pack ")
    (size,) = re.findall(r"^(\d+) corpus\.packed$", packed, re.MULTILINE)
    assert int(size) < 27e6
    assert f": {int(size) / 1e6:.1f} MB; there" in packed
    unpacked = dict(re.findall(r"^(\w+) .*sha256 (\w+)$", packed, re.MULTILINE))
    assert unpacked == {name: part.sha256 for name, part in manifests.load().parts.items()}


def test_an_order_is_drawn_for_packages_and_members(made):
    manifest, wheels = made()
    read = [[x.member for x in build.texts(manifest, wheels, order=order)] for order in (None, 3, 3)]
    assert read[0] != read[1] == read[2]
    assert sorted(read[0]) == sorted(read[1])
    assert {x.startswith("thing") for x in (read[0][0], read[0][-1])} == {True, False}, "packages one by one"
    assert build.built(manifest, wheels, order=3) == build.built(manifest, wheels)


def test_it_says_how_far_it_is_by_what_is_read_and_not_by_packages(made):
    told = []
    build.built(*made(), lambda what, fraction: told.append((what, fraction)))
    fractions = [x for _, x in told]
    assert fractions == sorted(fractions)
    assert told[0][1] == 0
    assert told[-1] == ("assembling", build.READING)
    wheels = {what: fraction for what, fraction in told if what != "assembling"}
    assert set(wheels) == {"thing-1.0-py3-none-any.whl", "docs-2.0-py3-none-any.whl"}
    assert len(told) > 4


def test_what_counts_as_text_and_what_does_not(made):
    manifest, wheels = made()
    found = {x.member: x for x in build.texts(manifest, wheels)}
    assert "thing/vendored/x.py" not in found
    assert "thing/latin.py" not in found, "strict UTF-8"
    assert "docs/data/broken.json.gz" not in found
    page = found["docs/data/a/2020/service.json.gz"]
    assert page.content == f"One & two\nthree\n\n{LONG}\n"
    assert page.group == "docs/docs/data/a"
    assert found["thing/part7/a.py"].group == "thing/thing/part7/"


def test_a_folder_is_never_parted():
    texts = [Text("p", f"f{i % 20}/{i}.py", f"p/f{i % 20}/", f"{LONG} {i}\n") for i in range(400)]
    manifest = Manifest((), validation_every=5)
    parts = assemble(texts, manifest)
    for x in texts:
        own, other = ("validation", "train") if validated(x.group, 5) else ("train", "validation")
        assert x.content.encode() in parts[own]
        assert x.content.encode() not in parts[other]
    assert parts["validation"]


def test_a_long_line_is_kept_once_and_not_in_both_parts():
    groups = [f"p/{i}/" for i in range(50)]
    kept = next(x for x in groups if validated(x, 5))
    trained = [x for x in groups if not validated(x, 5)][:2]
    same = f"{LONG} of both\n"
    texts = [Text("p", x, x, f"short\n{same}{LONG} {x}\n") for x in (*trained, kept)]
    parts = assemble(texts, Manifest((), validation_every=5))
    assert parts["validation"] == f"short\n{same}{LONG} {kept}\n".encode() + END
    assert parts["train"] == b"".join(f"short\n{LONG} {x}\n".encode() + END for x in trained)


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("<p>a  b</p>", "a b"),
        ("x<br>y<br/>z", "x\ny\nz"),
        ("1 &lt; 2 and <code>f()</code>\n more", "1 < 2 and f() more"),
        ("a\N{NO-BREAK SPACE}b", "a\N{NO-BREAK SPACE}b"),
    ],
)
def test_markup_is_taken_off(marked, expected):
    assert plain(marked) == expected


def test_members_that_hold_the_separator_are_no_text():
    package = Package("p", "p-1-py3-none-any.whl", "0" * 64, "MIT", ".*")
    assert text(package, "a.py", b"a\0b", 100) is None
    assert text(package, "a.py", b"x" * 100, 100) is None
    assert text(package, "a.py", b"\n x\r\ny \n", 100).content == "x\ny\n"


def with_parts(manifest: Manifest, made: dict[str, bytes]) -> Manifest:
    parts = {name: Part(len(data), build.sha256(data)) for name, data in made.items()}
    return msgspec.structs.replace(manifest, parts=parts)


def test_another_corpus_than_the_manifests_is_refused(made):
    manifest, wheels = made()
    right = with_parts(manifest, build.built(manifest, wheels))
    assert build.built(right, wheels)
    wrong = msgspec.structs.replace(right, parts={**right.parts, "train": Part(5, "0" * 64)})
    with pytest.raises(HarnessError, match="not the manifest's corpus: train: 2304 bytes"):
        build.built(wrong, wheels)


def test_a_wheel_that_was_changed_is_refused(made):
    manifest, wheels = made()
    with open(wheels / "thing-1.0-py3-none-any.whl", "ab") as file:
        file.write(b"more")
    with pytest.raises(InputError, match="has sha256 .* remove that file"):
        build.built(manifest, wheels)


def test_a_corpus_travels_as_one_file(made, tmp_path):
    manifest, wheels = made()
    parts = build.built(manifest, wheels)
    manifest = with_parts(manifest, parts)
    build.write(parts, build.licences(manifest, wheels), tmp_path / "here")
    assert set(build.verify(manifest, tmp_path / "here")) == {"train", "validation"}
    files = [tmp_path / "a.tar.xz", tmp_path / "b.tar.xz"]
    for file in files:
        pack.pack(manifest, tmp_path / "here", file)
    assert files[0].read_bytes() == files[1].read_bytes()
    found, licences = pack.unpack(manifest, files[0])
    assert found == parts
    assert b"== thing 1.0: LICENSE ==\nDo what you like." in licences
    (tmp_path / "here" / "train.txt").write_bytes(parts["train"][:-1] + b"!")
    with pytest.raises(HarnessError, match="train: 2304 bytes"):
        build.verify(manifest, tmp_path / "here")


def test_a_packed_file_is_not_believed(made, tmp_path):
    manifest, wheels = made()
    manifest = with_parts(manifest, build.built(manifest, wheels))
    text_file = tmp_path / "x"
    text_file.write_text("no archive")
    with pytest.raises(InputError, match="not a packed corpus"):
        pack.unpack(manifest, text_file)
    with tarfile.open(tmp_path / "link.tar.xz", "w:xz") as archive:
        entry = tarfile.TarInfo("train.txt")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(entry)
    with pytest.raises(InputError, match="more than a corpus"):
        pack.unpack(manifest, tmp_path / "link.tar.xz")


def test_a_manifest_says_what_is_wrong_with_it(tmp_path):
    file = tmp_path / "manifest.toml"
    row = '[[packages]]\nname = "x"\nfile = "{}"\nsha256 = "{}"\nlicence = "MIT"\nfiles = "{}"\n'
    for given, said in (
        (("x-1-py3-none-any.whl", "0" * 63, ".*"), "64 hexadecimal digits"),
        (("../x.whl", "0" * 64, ".*"), "not a wheel's name"),
        (("x-1-py3-none-any.whl", "0" * 64, "("), "no regular expression"),
    ):
        file.write_text(row.format(*given))
        with pytest.raises(InputError, match=said):
            manifests.load(file)


def test_the_manifest_names_at_least_150_mb_and_every_package_has_a_notice():
    manifest = manifests.load()
    assert sum(x.bytes for x in manifest.parts.values()) >= 150e6
    assert 500_000 < manifest.parts["validation"].bytes < 0.02 * manifest.parts["train"].bytes
    notice = manifests.FILE.with_name("NOTICE").read_text()
    for x in manifest.packages:
        line = next(line for line in notice.splitlines() if line.startswith(f"{x.name} {x.version} "))
        assert x.licence in line


def test_the_command_takes_wheels_that_are_there_and_packs_them(made, tmp_path, monkeypatch, capsys):
    manifest, wheels = made()
    manifest = with_parts(manifest, build.built(manifest, wheels))
    monkeypatch.setattr(manifests, "load", lambda path=None: manifest)
    monkeypatch.setattr(place, "load", lambda: manifest)
    monkeypatch.setenv("KERNELMARK_CORPUS", str(tmp_path / "corpora"))

    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.run_command(cli.cli, ["corpus", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out + err

    with pytest.raises(place.NoCorpus, match="kernelmark corpus build"):
        place.opened()
    assert call("verify")[0] == 2
    code, said = call("build", "--wheels", str(wheels))
    assert code == 0, said
    assert manifest.parts["train"].sha256 in said
    corpus = place.opened()
    assert bytes(corpus.parts["train"][:4]) == b"One "
    packed = tmp_path / "corpus.tar.xz"
    assert call("pack", str(packed))[0] == 0
    for x in (tmp_path / "corpora").rglob("*.txt"):
        x.unlink()
    assert call("build", "--packed", str(packed))[0] == 0
    assert call("verify")[0] == 0


def test_the_pages_say_what_the_manifest_has():
    made = manifests.load()
    train, validation = (made.parts[x].bytes / 1e6 for x in ("train", "validation"))
    page, changes = (" ".join((HERE / x).read_text().split()) for x in ("docs/convergence.md", "CHANGELOG.md"))
    assert len(made.packages) == 8
    assert "downloads eight pinned packages" in page
    assert f"makes {train + validation:.1f} MB of text" in page
    assert f"{train:.1f} MB are to train on, {validation:.1f} MB to validate on" in page
    assert f"makes {train + validation:.1f} MB of text from pinned packages, {train:.1f} MB of them" in changes
