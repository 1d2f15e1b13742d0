"""New operators and baselines: files that run as they are, with an example to be replaced.

In a checkout of the program the files go to its folders; anywhere else they make a private root, which
`KERNELMARK_PATH` names.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ..registry.errors import InputError, unknown
from .catalog import Catalog

TEMPLATES = Path(__file__).with_name("templates")
WIDTH = 115
"""Longest line of a written file."""

_NORM = "rms_norm"
_NORM_BODY = """\
    from torch.nn import functional

    return lambda x, weight, eps: functional.rms_norm(x, weight.shape, weight, eps)"""
_OTHER_BODY = """\

    def call({arguments}: Any) -> Any:
        raise NotImplementedError("baselines/{name}.py does not call its library yet")

    return call"""


@dataclass(frozen=True)
class Written:
    """What was written, and whether it is a private root that `KERNELMARK_PATH` has to name."""

    files: tuple[Path, ...]
    private: bool


def operator(name: str, folder: Path, catalog: Catalog, family: str | None = None) -> Written:
    """Writes an operator, its kernel for a GPU, its kernel for a CPU, and a test.

    `family` is the folder below `kernels/` that the kernel goes to, asked for in the program's own checkout and
    nowhere else. Raises `InputError` for a wrong or taken name, an unknown family, or a file that is there.
    """
    _checked(name, "operator", list(catalog.operators))
    private = _private(folder, catalog)
    if private:
        if family is not None:
            raise InputError(
                "--family is for the program's own kernels; a private kernel lies in kernels/ itself."
            )
        places = {
            f"operators/{name}.py": "operator",
            f"kernels/{name}.py": "kernel_private",
            f"kernels/cpu/{name}.py": "kernel_cpu",
            f"baselines/{name}_torch.py": "baseline",
            f"tests/test_{name}.py": "test_private",
        }
    else:
        family = _family(folder, family)
        places = {
            f"suite/operators/{name}.py": "operator",
            f"kernels/{family}/{name}.py": "kernel",
            f"kernels/cpu/{name}.py": "kernel_cpu",
            f"tests/kernels/test_{name}.py": "test_kernel",
        }
    words = {
        "NAME": name,
        "TITLE": f"`{name}`",
        "FAMILY": family or "",
        "RECORD": "kernelmark.registry.store.record" if private else "...registry.store.record",
        "DECLARED": "kernelmark.suite.operator" if private else "..operator",
    }
    texts = {path: _filled(template, words) for path, template in places.items() if template != "baseline"}
    if private:
        body = "    return lambda x: x * x.sigmoid()"
        texts[f"baselines/{name}_torch.py"] = _baseline("torch", name, f"`{name}` by PyTorch", body)
    return Written(_write(folder, texts), private)


def baseline(name: str, folder: Path, catalog: Catalog, operator_name: str = _NORM) -> Written:
    """Writes a baseline of one operator. For `rms_norm` it calls PyTorch and is measured at once; for another one
    its rows are `unsupported` until the library's call stands in its place.

    Raises `InputError` for a wrong or taken name, an unknown operator, or a file that is there.
    """
    chosen = catalog.operator(operator_name)
    taken = {x for root in catalog.roots for x in root.files("baselines")}
    taken |= {x.name for x in catalog.of_operator(operator_name)}
    _checked(name, "baseline", sorted(taken))
    arguments = ": Any, ".join(inspect.signature(chosen.reference).parameters)
    body = _NORM_BODY if operator_name == _NORM else _OTHER_BODY.format(arguments=arguments, name=name)
    text = _baseline(name, operator_name, f"`{name}`", body)
    return Written(_write(folder, {f"baselines/{name}.py": text}), _private(folder, catalog))


def _baseline(name: str, operator_name: str, title: str, body: str) -> str:
    words = {
        "NAME": name,
        "TITLE": title,
        "OPERATOR": operator_name,
        "SUMMARY": f"`{operator_name}`",
        "BODY": body,
    }
    return _filled("baseline", words)


def _filled(template: str, words: Mapping[str, str]) -> str:
    return Template((TEMPLATES / f"{template}.py.txt").read_text(encoding="utf-8")).substitute(words)


def _checked(name: str, kind: str, taken: list[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise InputError(
            f"{name!r} cannot name a file and a function: write small letters, digits and underscores, a letter "
            f"first, such as my_{kind}."
        )
    if name in taken:
        raise InputError(f"{name!r} exists already. Names taken: {', '.join(taken)}.")


def _private(folder: Path, catalog: Catalog) -> bool:
    """Whether a folder is not the program's own checkout. Raises `InputError` for another checkout of it."""
    own = catalog.roots[0].folder
    if folder.resolve() == own and (own / "suite" / "operators").is_dir():
        return False
    if (folder / "suite" / "operators").is_dir():
        raise InputError(
            f"{folder} is a checkout of kernelmark, but the one that runs is installed from {own}: "
            f"files written here would not be found. Use that checkout's own environment, or another --folder."
        )
    return True


def _family(folder: Path, family: str | None) -> str:
    families = sorted(
        x.name
        for x in (folder / "kernels").iterdir()
        if (x / "__init__.py").is_file() and not x.name.startswith(("_", "cpu"))
    )
    if family is None:
        raise InputError(f"--family says which folder of kernels/ it goes to. Known: {', '.join(families)}.")
    if family not in families:
        raise unknown("family", family, families)
    return family


def _write(folder: Path, texts: Mapping[str, str]) -> tuple[Path, ...]:
    """Writes files, none where one of them is there already."""
    paths = {folder / path: text for path, text in texts.items()}
    for path in paths:
        if path.exists():
            raise InputError(f"{path} exists already; nothing was written.")
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tuple(paths)
