"""What the tests of documents share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def program() -> Callable[[str], ModuleType]:
    """Imports a program of `docs/` by its path."""

    sys.path.insert(0, str(DOCS))  # as where a program is run from there

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def part(program) -> Callable[[str], ModuleType]:
    """Imports a part of `docs/results.py`."""
    program("results")
    return lambda name: importlib.import_module(f"_results.{name}")
