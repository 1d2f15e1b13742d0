"""The plan that repeats what peers' authors published, made of `registry/analysis/published.toml`. Pure.

    python -m kernelmark.suite.fidelity > suite/plans/fidelity.toml

A test holds the file to what this prints.
"""

from __future__ import annotations

import sys

from ..registry.analysis.published import Figure, Published, published
from ..registry.store.record import Case
from .catalog import Catalog
from .shapes import listed, table

HEAD = """\
# Each peer's benchmark as it was published: `kernelmark report RUN --style fidelity` says whether it agrees.
# Made by suite/fidelity.py of registry/analysis/published.toml: it is not to be edited.
replicates = 5
deadline_s = 300

[sampling]
min_samples = 20
max_samples = 500
min_seconds = 0.04
max_seconds = 0.4
warmup_s = 0.2
"""


def case(figure: Figure, catalog: Catalog) -> Case:
    """The case that a figure is of. Raises `InputError` where there is none such."""
    definition = catalog.definition(figure.operator)
    return definition.case(figure.axes, figure.dtype, figure.pass_, **figure.options)  # type: ignore[arg-type]  # checked there


def text(known: Published, catalog: Catalog) -> str:
    """The plan file: each case once, for the peers whose figure it is and those that they are held against."""
    cases: dict[str, Case] = {}
    wanted: dict[str, dict[str, None]] = {}
    for figure in known.figures:
        made = case(figure, catalog)
        cases[made.full_name] = made
        wanted.setdefault(made.full_name, {}).update(
            {figure.peer: None, **({figure.over: None} if figure.over else {})}
        )
    tables = (
        table(x, catalog.definition(x.operator), [f"implementations = {listed(tuple(wanted[name]))}"])
        for name, x in cases.items()
    )
    return HEAD + "".join(tables)


if __name__ == "__main__":
    sys.stdout.write(text(published(), Catalog.default()))
