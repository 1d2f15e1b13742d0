"""Makes the pictures of the pages that kernelmark writes, from journals of `registry/reference/`: `make pictures`.

    python docs/pictures.py           makes all
    python docs/pictures.py NAME …    makes these

A site of all journals and reports of some runs are written to a scratch folder, and a headless Chromium takes
pictures of them. Pages have few colors, so that a palette keeps pictures small. They are looked at by
people and held to nothing: a font of another machine is another picture.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "registry" / "reference"
PICTURES = HERE / "pictures"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Picture:
    """A part of a page: of a `page` of the site, or of the report of a run, seen through a window. With `style`,
    CSS that leaves out what is between parts, what can be unfolded is.
    """

    page: str
    width: int
    height: int
    dark: bool = False
    scripts: bool = True
    style: str = ""


CURVES = """
header, nav, main h2, section.run > *, section.part, .part details > *, details.rows, .part .single ~ .single {
    display: none !important;
}
section.run { display: flex; flex-direction: column }
section.run > #run1-convergence, section.run > figure, section.run > details, section.part:has(> #run1-converge) {
    display: block !important;
}
section.run > details { order: 1 }
"""
"""Of a report on convergence: differences by step, the losses' curves and the gradients' health."""

WORTH = """
header, nav, main > *, section.run > * { display: none !important }
main > section.run, section.run > #run1-worth, section.run > #run1-worth ~ * { display: block !important }
section.run > section.part { display: none !important }
"""
"""Of a report on worth: its table."""

SITE = {
    "site-overview": Picture("index.html", 1280, 1500),
    "site-overview-dark": Picture("index.html", 1280, 900, dark=True),
    "site-operator": Picture("operator/matmul.html", 1280, 1200),
    "site-phone": Picture("index.html", 390, 1200),
    "site-no-scripts": Picture("operator/rms_norm.html", 1280, 900, scripts=False),
    "site-serving": Picture("serving.html", 1280, 1600),
    "site-scaling": Picture("scaling.html", 1280, 1200),
}
REPORTS = {
    "report": ("20261121-105936-48c0", Picture("", 1400, 900)),
    "report-converge": ("converge-10k", Picture("", 1280, 1500)),
    "report-converge-curves": ("converge-10k", Picture("", 1040, 2010, style=CURVES)),
    "report-train": ("train-h200", Picture("", 1280, 1500)),
    "report-worth": ("20261130-021233-c7e4", Picture("", 900, 1020, style=WORTH)),
    "report-serving": ("20261130-093749-1d89", Picture("", 1280, 1500)),
    "report-rates": ("20261201-022856-1fc4", Picture("", 1280, 2260)),
}


def kernelmark(home: Path, *command: str) -> None:
    """Runs the command line of this checkout."""
    variables = {**os.environ, "KERNELMARK_HOME": str(home)}
    command = (sys.executable, "-m", "kernelmark.suite", *command)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)


def address_of(page: Path, picture: Picture) -> str:
    """Of a page, or of another beside it: the same without its scripts, as what takes pictures needs them itself,
    or parts of it.
    """
    if picture.style:
        cut = page.with_suffix(".cut.html")
        text = page.read_text(encoding="utf-8").replace("<details>", "<details open>")
        cut.write_text(text.replace("</head>", f"<style>{picture.style}</style></head>", 1), encoding="utf-8")
        return cut.as_uri()
    if picture.scripts:
        return page.as_uri()
    without = page.with_suffix(".without.html")
    text = re.sub(r"<script\b.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    without.write_text(re.sub(r"</?noscript>", "", text), encoding="utf-8")
    return without.as_uri()


def taken(browser: str, address: str, picture: Picture, to: Path, scratch: Path) -> None:
    """One picture as PNG."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    command += ["--disable-background-networking", f"--user-data-dir={scratch / 'profile'}"]
    command += [f"--window-size={picture.width},{picture.height}", "--virtual-time-budget=20000"]
    command += ["--force-dark-mode"] if picture.dark else []
    subprocess.run([*command, f"--screenshot={to}", address], check=True, capture_output=True, timeout=120)
    _reduced(to)


def _reduced(picture: Path) -> None:
    """The same of few colors, where Pillow is there to do it."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(picture) as whole:
        # By coverage: a color of a few dots counts as much as the ground.
        whole.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)


def main(wanted: list[str]) -> int:
    """Makes all pictures, or those wanted."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if browser is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 2
    names = wanted or [*SITE, *REPORTS]
    if unknown := [x for x in names if x not in SITE | REPORTS]:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join([*SITE, *REPORTS])}", file=sys.stderr)
        return 2
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if any(x in SITE for x in names):
            kernelmark(scratch, "site", str(RECORDS), "--output", str(scratch / "site"), "--journals", "none")
        for name in names:
            to = PICTURES / f"{name}.png"
            if name in SITE:
                picture = SITE[name]
                address = address_of(scratch / "site" / picture.page, picture)
            else:
                run, picture = REPORTS[name]
                page = scratch / f"{name}.html"
                for journal in sorted(RECORDS.glob(f"{run}*.jsonl.gz")):  # shards are joined
                    kernelmark(scratch, "import", str(journal))
                kernelmark(scratch, "report", run, "-o", str(page))
                address = address_of(page, picture)
            taken(browser, address, picture, to, scratch)
            print(f"{to.relative_to(HERE.parent)}  {to.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
