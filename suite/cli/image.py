"""`kernelmark image`: which pinned images there are, building one, pinning their bases."""

from __future__ import annotations

from pathlib import Path

import click

from ...registry.errors import InputError
from .container_options import build_options, options, tell
from .names import images


@click.group("image")
def command_image() -> None:
    """The pinned images: which there are, building, pinning."""


@command_image.command("list")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def list_images(as_json: bool) -> None:
    """What docker/images.toml declares."""
    from ..container.session import known

    images = known()
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(list(images.values())), indent=2).decode())
        return
    from ...registry.views.table import Column, Table, show

    # A narrow terminal drops the base, then whether it was seen.
    table = Table(
        (Column("image"), Column("for", folds=20), Column("base", folds=20, drop=2), Column("pin", drop=1))
    )
    for x in images.values():
        verified = f"seen {x.verified_at}" if x.verified_at else f"not verified, trust {x.trust}"
        table.add(x.name, x.summary, x.base, verified if x.digest else "digest not known")
    show([table])


@command_image.command("build")
@click.argument("name", metavar="IMAGE", shell_complete=images)
@click.option("--fresh", is_flag=True, help="Build anew, without any cache.")
@build_options
def build_image(name: str, fresh: bool, **building: Path | str | None) -> None:
    """Build an image, unless the same one is here; prints its digest."""
    from ..container import build, engine, table

    folder = build.checkout()
    image = table.named(folder, name)
    chosen = options(**building, fresh=fresh)  # type: ignore[arg-type]  # click made them
    image.base_or(chosen.stand_in)
    built = build.obtain(engine.find(), folder, image, chosen, tell)
    if said := build.remark(built):
        tell(said)
    click.echo(built.id)


@command_image.command("sbom")
@click.argument("name", metavar="IMAGE")
@build_options
def list_contents(name: str, **building: Path | str | None) -> None:
    """What an image holds, with versions and licences: a bill of materials in CycloneDX's form, as JSON."""
    import json

    from ...registry.store.home import Home
    from ..container.contents import bill, contents
    from ..container.session import reached

    session = reached(name, Home(), options(**building), tell)  # type: ignore[arg-type]  # click made them
    held = contents(session)
    for kind in ("python", "system"):
        stated = sum(bool(x["license"]) for x in held[kind])
        tell(f"{len(held[kind])} {kind} packages, the licence of {stated} stated")
    click.echo(json.dumps(bill(session, held), indent=2))


@command_image.command("pin")
@click.argument("names", nargs=-1, metavar="[IMAGE...]", shell_complete=images)
def pin_images(names: tuple[str, ...]) -> None:
    """Ask the registry for the digest of each base, and write it with today's date to docker/images.toml."""
    from ..container import build, engine, pins

    for line in pins.pin(engine.find(), build.checkout(), names):
        click.echo(line)


@command_image.command("pin-check")
def check_pins() -> None:
    """Is each lock made from its input, and is each table of docker/images.toml whole? Needs no network."""
    from ..container import build, pins

    folder = build.checkout()
    problems = pins.check(folder)
    if problems:
        raise InputError("\n".join(["the pins do not hold:", *(f"  {x}" for x in problems)]))
    click.echo("locks match their inputs; the table of images is whole")


@command_image.command("locked", hidden=True)
def locked() -> None:
    """Note what each lock was made from; `make lock` calls it."""
    from ..container import build, pins

    pins.record(build.checkout())
