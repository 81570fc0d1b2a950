"""What manifests of Kubernetes have in common: names, containers, volumes. Pure: plain values that become YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from tailrace.cluster.layout import Need, NodeSize, stop_s
from tailrace.config.resuming import settings_as_toml
from tailrace.config.settings import RunSettings
from tailrace.errors import SettingsError

Manifest: TypeAlias = dict[str, Any]

WORK = "/data"
"""Where the claim is mounted, and every container's working folder: runs/ lies there."""
SETTINGS = "/etc/tailrace/settings"
KEYS = "/etc/tailrace/keys"
RETRIES = 3
"""Pods that may fail in place of one another."""
_NOTICE_S = 3
"""Within which a run hears of a notice of preemption."""
_SPARE_S = 10
_LONGEST_NAME = 40
_GPUS = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """What the run's settings do not say."""

    node: NodeSize
    image: str
    """Has `tailrace`, what its roles need, and modules that the settings name."""
    claim: str | None = None
    """A claim that is there, on a volume that pods of several nodes may write; None: one is rendered."""
    storage: str = "500Gi"
    """Of the claim that is rendered."""
    memory: str | None = None
    """Of every container, at most; None: no bound."""


def object_name(settings: RunSettings) -> str:
    """The run's name as Kubernetes takes it. Raises `SettingsError` where nothing is left of it, or too much."""
    name = re.sub(r"[^a-z0-9]+", "-", settings.name.lower()).strip("-")
    if not settings.name.isascii() or not name or not name[0].isalpha() or len(name) > _LONGEST_NAME:
        raise SettingsError(
            f"name = {settings.name!r} names no object of Kubernetes: begin with a letter, and take "
            f"{_LONGEST_NAME} letters from a to z, digits and - at most",
            key=("name",),
        )
    return name


def as_yaml(comment: str, manifests: Sequence[Manifest]) -> str:
    """All of them, one document each, below a comment."""
    documents = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + documents


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def labels(name: str, role: str) -> dict[str, str]:
    """Of one role of a run."""
    return {
        "app.kubernetes.io/name": "tailrace",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": role,
    }


def metadata(name: str, run: str, role: str) -> Manifest:
    """Of an object."""
    return {"name": name, "labels": labels(run, role)}


def settings_map(settings: RunSettings, name: str) -> Manifest:
    """The run's settings, all of them, as a file."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(f"{name}-settings", name, "settings"),
        "data": {f"{settings.name}.toml": settings_as_toml(settings)},
    }


def claim(name: str, options: KubernetesOptions) -> list[Manifest]:
    """The volume of runs, where none is there."""
    if options.claim is not None:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(f"{name}-work", name, "work"),
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": options.storage}},
            },
        }
    ]


def container(
    role: str, need: Need, options: KubernetesOptions, *, command: Sequence[str] = (), args: Sequence[str] = ()
) -> Manifest:
    """A role's. What only looks like a reference to a variable stays what it is; `\\0NAME\\0` is one."""
    memory = {"memory": options.memory} if options.memory else {}
    limits = {**memory, **({_GPUS: str(need.gpus)} if need.gpus else {})}
    return {
        "name": role,
        "image": options.image,
        **({"command": list(command)} if command else {}),
        **({"args": list(map(_argument, args))} if args else {}),
        "workingDir": WORK,
        "resources": {"requests": {"cpu": str(need.cpus), **memory}, **({"limits": limits} if limits else {})},
        "volumeMounts": [
            {"name": "work", "mountPath": WORK},
            {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
            {"name": "keys", "mountPath": KEYS, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def pod(name: str, role: str, options: KubernetesOptions, one: Manifest, *, grace_s: int, **further: Any) -> Manifest:
    """The template of a role's pods, with everything that a container of ours mounts."""
    one = {**one, "envFrom": [{"secretRef": {"name": f"{name}-environment", "optional": True}}]}
    volumes: list[Mapping[str, Any]] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": options.claim or f"{name}-work"}},
        {"name": "settings", "configMap": {"name": f"{name}-settings"}},
        {"name": "keys", "secret": {"secretName": f"{name}-keys", "defaultMode": 0o440, "optional": True}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "metadata": {"labels": labels(name, role)},
        "spec": {
            "automountServiceAccountToken": False,
            "shareProcessNamespace": True,  # whose first process reaps what roles leave behind
            "terminationGracePeriodSeconds": grace_s,
            **further,
            "containers": [one],
            "volumes": volumes,
        },
    }


def notice(settings: RunSettings) -> Manifest:
    """What the run's own container does before it is ended: the run hears that it is to make its last save."""
    command = f"touch {WORK}/runs/{settings.name}/preempt; sleep {_NOTICE_S}"
    return {"preStop": {"exec": {"command": ["/bin/sh", "-c", command]}}}


def run_grace_s(settings: RunSettings) -> int:
    """From the notice to the end of the run's container."""
    return _NOTICE_S + trainer_grace_s(settings)


def trainer_grace_s(settings: RunSettings) -> int:
    """For a container that may make a last save."""
    return stop_s(settings) + _SPARE_S


def generator_grace_s(settings: RunSettings) -> int:
    """For one without anything to save."""
    return round(settings.shutdown.stop_generators_s + settings.shutdown.terminate_s) + _SPARE_S


def _argument(argument: str) -> str:
    r"""As Kubernetes reads it.

    >>> print(_argument("$(HOME)"), _argument("$$5"), _argument("tcp://\0POD_IP\0:5757"))
    $$(HOME) $$$$5 tcp://$(POD_IP):5757
    """
    parts = enumerate(argument.split("\0"))
    return "".join(f"$({part})" if index % 2 else part.replace("$", "$$") for index, part in parts)
