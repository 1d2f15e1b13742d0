"""`kernelmark site`: a static folder of pages on all results over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from ...registry.errors import InputError
from ...registry.figures import counted
from ...registry.store.home import Home

if TYPE_CHECKING:
    from ...registry.site.coverage import Expected
    from ..operator import Operator


@click.command("site")
@click.argument("journals", nargs=-1, type=click.Path(path_type=Path, exists=True), metavar="[JOURNAL|FOLDER]...")
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="The site's folder.")
@click.option("--title", default="kernelmark", show_default=True, help="The site's name.")
@click.option("--url", default="", help="Where it will be served: feeds then hold whole links.")
@click.option(
    "--journals",
    "where",
    default="copy",
    show_default=True,
    metavar="copy|none|URL",
    help="Whether journals are copied beside the pages, left out, or lie below this address.",
)
@click.option("--fresh", is_flag=True, help="Forget what the site holds, and start anew.")
def command_site(journals: tuple[Path, ...], output: Path, title: str, url: str, where: str, fresh: bool) -> None:
    """A folder of pages that opens from a disk and from any web server: where each operator stands on each device,
    its history, any two commits, devices or libraries beside each other, and what was never run.

    Takes in the journals given, or those of folders; without any, the home's. What the site holds already stays,
    so that a day's journals are added in seconds.
    """
    from ...registry.site.build import MEMORY, Settings, build
    from ..compare.revisions import commit_times
    from ..run.progress import Tally

    for address in (url, *([where] if where not in ("copy", "none") else [])):
        if address and (urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc):
            raise InputError(f"{address!r} is no address: write https://HOST/PATH.")
    home = Home()
    sources = list(found_in(journals)) if journals else list(home.paths().values())
    if not sources and not (output / MEMORY).is_file():
        where_looked = ", ".join(map(str, journals)) or str(home.journals)
        raise InputError(
            f"no journal in {where_looked}; make one with `kernelmark run`, or name files or folders."
        )
    with Tally("building the site") as tally:
        settings = Settings(title, url, where)
        built = build(sources, output, settings, _expected(), commit_times, fresh, tally.show)
    for reason in built.skipped:
        click.echo(f"left out  {reason}", err=True)
    click.echo(f"journals  {built.added} added, {built.runs} in all, {counted(built.rows, 'row')}")
    lacks = "" if find_spec("pyarrow") else "; no rows.parquet: pip install pyarrow"
    click.echo(f"files     {built.written} written{lacks}")
    click.echo(f"site      {output / 'index.html'}")


def found_in(given: Iterable[Path]) -> Iterable[Path]:
    """Journals among files, and anywhere below folders."""
    for path in given:
        if path.is_dir():
            yield from sorted(x for x in path.rglob("*.jsonl*") if x.name.endswith((".jsonl", ".jsonl.gz")))
        else:
            yield path


def _expected() -> Mapping[str, Expected]:
    """What exists, with the cases of the standard plan, by the families of kernels."""
    from ...registry.site.coverage import Expected
    from ..catalog import Catalog

    catalog = Catalog.default()
    names: dict[str, dict[str, tuple[str, ...]]] = {x: {} for x in catalog.definitions}
    for x in catalog.implementations:
        names[x.operator][x.name] = x.devices
    cases: dict[str, Sequence[str]] = {
        name: [case.name for grid in operator.plans.get("standard", ()) for case in operator.expand(grid)]
        for name, operator in catalog.operators.items()
    }
    families = {name: path.parent.name for root in catalog.roots for name, path in root.files("kernels").items()}
    families |= {x: _family(y, families) for x, y in catalog.operators.items() if x not in families}
    families |= dict.fromkeys(catalog.workloads, "workloads")
    return {
        name: Expected(found, tuple(cases.get(name, ())), families.get(name, "").replace("_", " "))
        for name, found in names.items()
    }


def _family(operator: Operator, families: Mapping[str, str]) -> str:
    """Of an operator that no folder of kernels has: of GPUs' exchanges, or that of the operator that its name ends
    with (`linear` of `int8_linear`); empty where neither is.
    """
    if operator.sharding is not None:
        return "collective"
    ends = [x for x in families if operator.name.endswith(f"_{x}")]
    return families[max(ends, key=len)] if ends else ""
