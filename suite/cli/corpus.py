"""`kernelmark corpus`: the text that models are trained on, rebuilt from pinned packages."""

from __future__ import annotations

from pathlib import Path

import click

from ..corpus import build, encoding, manifest, pack, place
from ..run.progress import Tally


@click.group("corpus")
def command_corpus() -> None:
    """The text that models are trained on, rebuilt from pinned packages: no data set, no text in the repository.

    It lies in $KERNELMARK_CORPUS, by default in the folder `corpus` of the results' home.
    """


@command_corpus.command("build")
@click.option(
    "--wheels", type=click.Path(path_type=Path), help="Folder of the wheels; what it lacks is downloaded."
)
@click.option("--packed", type=click.Path(path_type=Path, dir_okay=False), help="Take a packed corpus instead.")
@click.option("--order", type=int, help="Read packages and members in an order drawn from this: the same bytes.")
def build_corpus(wheels: Path | None, packed: Path | None, order: int | None) -> None:
    """Make the corpus here: download pinned packages, or take a packed file, and check every byte."""
    asked = manifest.load()
    target = place.folder(asked)
    if packed is not None:
        parts, licences = pack.unpack(asked, packed)
    else:
        kept = wheels or target.parent / "wheels"
        with Tally("fetching packages") as tally:
            build.fetch(asked.packages, kept, tally.show)
        with Tally("making the corpus") as tally:
            parts, licences = build.built(asked, kept, tally.show, order), build.licences(asked, kept)
    build.write(parts, licences, target)
    _told(asked, build.verify(asked, target), target)


@command_corpus.command("pack")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def pack_corpus(file: Path) -> None:
    """Write the corpus that is here into one compressed FILE, for a machine without network."""
    asked = manifest.load()
    source = place.folder(asked)
    build.verify(asked, source)
    size = pack.pack(asked, source, file)
    click.echo(f"{file}: {size / 1e6:.1f} MB; there: kernelmark corpus build --packed {file.name}")


@command_corpus.command("verify")
def verify_corpus() -> None:
    """Is the corpus here the manifest's, byte for byte?"""
    asked = manifest.load()
    target = place.folder(asked)
    _told(asked, build.verify(asked, target), target)


@command_corpus.command("encode")
@click.option(
    "--encoder",
    type=click.Path(path_type=Path, dir_okay=False),
    help="GPT-2's file of merges, r50k_base.tiktoken or gpt2.tiktoken; by default openai-whisper's.",
)
def encode_corpus(encoder: Path | None) -> None:
    """Write the corpus that is here in GPT-2's tokens too, which `data = "corpus_gpt2"` trains on."""
    asked = manifest.load()
    by = encoding.encoder(encoder)
    target = place.folder(asked)
    build.verify(asked, target)
    with Tally("encoding the corpus") as tally:
        found = encoding.encode(asked, target, by, tally.show)
    for name, count in found.items():
        click.echo(f"{name:12}{count / 1e6:8.1f} M tokens, {asked.parts[name].bytes / count:.2f} bytes each")


def _told(asked: manifest.Manifest, parts: dict[str, manifest.Part], folder: Path) -> None:
    for name, part in parts.items():
        click.echo(f"{name:12}{part.bytes / 1e6:8.1f} MB  sha256 {part.sha256}")
    click.echo(f"corpus {asked.digest} in {folder}")
