"""A Kubernetes Job for a run in shards, printed for `kubectl apply -f -`: nothing here talks to a cluster."""

from __future__ import annotations

from typing import Any

import msgspec

from ...registry.errors import InputError
from .order import Order
from .task import ORDER

LONGEST = 100_000
"""Bytes of an order that travels as a variable; Linux takes 128 KiB."""
MOUNT = "/deliveries"


def manifest(order: Order, claim: str, hosts: int | None) -> dict[str, Any]:
    """The Job: an index a shard, at most `hosts` of them at once, deliveries on the volume of `claim`.

    Its pods may do next to nothing, as the launcher's containers. Raises `InputError` without an image's digest.
    """
    image = order.image or ""
    if "@sha256:" not in image:
        raise InputError("a Job needs its image by digest: --image registry/name@sha256:…")
    text = msgspec.json.encode(order).decode()
    if len(text) > LONGEST:
        raise InputError(
            f"the order has {len(text)} bytes, more than {LONGEST}: put the plan file into the image."
        )
    labels = {"app": "kernelmark", "run": name_of(order)}
    script = (
        f'exec python -m {__package__}.task - --shard $((JOB_COMPLETION_INDEX + 1)) --into {MOUNT} --node "$NODE"'
    )
    container = {
        "name": "kernelmark",
        "image": image,
        "command": ["/bin/sh", "-c", script],
        "env": [
            {"name": ORDER, "value": text},
            {"name": "KERNELMARK_IMAGE_DIGEST", "value": image.rpartition("@")[2]},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "resources": {"limits": {"nvidia.com/gpu": order.gpus}} if order.gpus else {},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "deliveries", "mountPath": MOUNT}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "deliveries", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if order.exclusive:  # never two shards on one host; of other pods only taints keep a host free
        alone = {"labelSelector": {"matchLabels": {"app": "kernelmark"}}, "topologyKey": "kubernetes.io/hostname"}
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(order), "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": order.shards,
            "parallelism": min(hosts or order.shards, order.shards),
            "backoffLimitPerIndex": 3,
            "maxFailedIndexes": order.shards,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def name_of(order: Order) -> str:
    """The Job's name: a run's, as Kubernetes writes names."""
    return f"kernelmark-{order.run.lower().replace('_', '-')[:48].rstrip('-')}"
