"""An environment with kernelmark installed from a wheel that was made of an sdist, away from any checkout.

Its other packages are those of the tests' own environment, by links: nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

OURS = ("kernelmark", "__editable__", "__pycache__")
TORCH = ("torch", "triton", "functorch")
BUILD = """
import os, sys, tarfile
from setuptools import build_meta
out = sys.argv[1]
sdist = build_meta.build_sdist(out)
with tarfile.open(os.path.join(out, sdist)) as archive:
    archive.extractall(out, filter="data")
os.chdir(os.path.join(out, sdist.removesuffix(".tar.gz")))
build_meta.build_wheel(out)
"""
ENVIRONMENT = {**os.environ, "PYTHONSAFEPATH": "1", "SETUPTOOLS_USE_DISTUTILS": "local"}


def build(house: Path, place: Path) -> Path:
    """Builds what git knows of a checkout; returns the wheel."""
    source, dist = place / "source", place / "dist"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=house, capture_output=True, text=True, check=True)
    for name in names.stdout.split("\0"):
        if name.startswith(("suite/", "kernels/", "baselines/", "registry/")) or (name and "/" not in name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(house / name)
    python = [sys.executable, "-W", "ignore", "-c", BUILD, str(dist)]
    subprocess.run(python, cwd=source, env=ENVIRONMENT, capture_output=True, check=True)
    return next(dist.glob("*.whl"))


def install(wheel: Path, clean: Path, without: Collection[str] = (), compiled: bool = False) -> Path:
    """A virtual environment at `clean` with the wheel, and without packages of these beginnings; its `bin`.

    `compiled` makes its byte code, as pip does unless told otherwise: seconds that only times are worth.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clean], check=True)
    site = clean / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for folder in (Path(x) for x in sys.path if x.endswith("site-packages")):
        for found in folder.iterdir():
            wanted = not found.name.lower().startswith((*OURS, *without)) and found.suffix != ".pth"
            if wanted and not (site / found.name).exists():
                (site / found.name).symlink_to(found)
    pip = [clean / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--compile" if compiled else "--no-compile", wheel], check=True, cwd=clean)
    return clean / "bin"
