"""What an image holds: its Python distributions and its system's packages, with versions and licences.

Asked of the image itself, by a program of Python's standard library that runs in it without a network and writes
nothing; said as a software bill of materials in CycloneDX's form (ECMA-424).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from ... import suite
from .build import LABEL
from .launch import confined
from .session import Session

ASK = r"""
import glob, json, os, re, subprocess
from importlib import metadata
found = {"python": [], "system": []}
for x in metadata.distributions():
    m = x.metadata
    classifiers = [y.rpartition(" :: ")[2] for y in m.get_all("Classifier") or () if y.startswith("License ::")]
    written = (m.get("License") or "").strip().partition("\n")[0]
    stated = m.get("License-Expression") or "; ".join(classifiers) or written
    found["python"].append({"name": m["Name"], "version": x.version, "license": stated[:200]})
try:
    said = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"],
                          capture_output=True, text=True).stdout
except OSError:
    said = ""
for line in said.splitlines():
    name, version, architecture = line.split()
    try:
        text = open(f"/usr/share/doc/{name}/copyright", errors="replace").read()
    except OSError:
        text = ""
    kinds = sorted(set(re.findall(r"^License: *(\S.*?)\s*$", text, re.M)))
    found["system"].append({"name": name, "version": version, "architecture": architecture,
                            "license": "; ".join(kinds)[:400]})
system = dict(re.findall(r'^(\w+)="?([^"\n]*)', open("/etc/os-release").read(), re.M))
found["distribution"] = system.get("ID", "linux")
print(json.dumps(found))
"""


def contents(session: Session) -> dict[str, Any]:
    """Of an image: `python` and `system`, lists of packages with `name`, `version` and `license` (empty where none
    is stated in a form that can be read), and the name of its `distribution`.
    """
    from docker.errors import DockerException

    engine, image = session.engine, session.image
    without = replace(image, accelerator="none")  # no GPU, nor what GPUs need of a machine
    try:
        said = engine.client.containers.run(
            image.id,
            ["-c", ASK],
            entrypoint=["python"],
            remove=True,
            user="10001:10001",
            **confined(engine, without, (), "64m"),
        )
    except DockerException as error:
        raise engine.explain(error, "asking an image what it holds") from None
    found: dict[str, Any] = json.loads(said)
    found["python"].sort(key=lambda x: str(x["name"]).lower())
    found["system"].sort(key=lambda x: str(x["name"]))
    return found


def bill(session: Session, held: dict[str, Any]) -> dict[str, Any]:
    """The bill of materials of an image that holds this."""
    image = session.image
    distribution = held["distribution"]
    components = [
        _component(x, f"pkg:pypi/{quote(x['name'].lower().replace('_', '-'))}@{quote(x['version'], safe=':')}")
        for x in held["python"]
    ]
    components += [
        _component(
            x,
            f"pkg:deb/{distribution}/{quote(x['name'])}@{quote(x['version'], safe=':')}?arch={x['architecture']}",
        )
        for x in held["system"]
    ]
    told = {**image.labels, f"{LABEL}size": str(image.size)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "kernelmark", "version": suite.__version__}]},
            "component": {
                "type": "container",
                "name": f"kernelmark-{image.name}",
                "version": image.id,
                "properties": [{"name": x, "value": y} for x, y in sorted(told.items()) if y],
            },
        },
        "components": components,
    }


def _component(x: dict[str, str], address: str) -> dict[str, Any]:
    told = {"licenses": [{"license": {"name": x["license"]}}]} if x["license"] else {}
    return {"type": "library", "name": x["name"], "version": x["version"], "purl": address, **told}
