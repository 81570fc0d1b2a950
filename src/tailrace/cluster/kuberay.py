"""A run on a Ray cluster of its own, which KubeRay's operator makes and takes away again. Pure.

RayJob NAME            `tailrace train --placement ray` in the head's pod: scheduler and agents, no role on Ray's nodes
  head                 no CPUs and no GPUs of Ray's own: roles are on the workers
  workers trainer      pods for the ranks, as many of them in each as a node has room for
  workers generator    a pod for each generator, or several where it fits no node; min to max where there may be more
ConfigMap, PersistentVolumeClaim, and a Secret that is made by hand: variables of the environment
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.cluster import command_lines
from tailrace.cluster.layout import HEAD, Need, NodeSize
from tailrace.cluster.manifests import (
    RETRIES,
    SETTINGS,
    WORK,
    KubernetesOptions,
    Manifest,
    as_yaml,
    claim,
    container,
    generator_grace_s,
    metadata,
    notice,
    object_name,
    pod,
    run_grace_s,
    settings_map,
)
from tailrace.config.deadlines import with_scaled_deadlines
from tailrace.config.settings import RunSettings
from tailrace.errors import SettingsError
from tailrace.lifecycle.cluster import RoleGroup

_START = "start.sh"
_SCRIPT = """\
set -- {command}
cd {work}
if [ -e "runs/{run}/config.toml" ]; then set -- "$@" --resume; fi
exec "$@"
"""
"""What an entrypoint says goes through several shells, so that says no more than where this is."""
_AUTOSCALER_S = 900.0
"""For a node, where the settings do not say: the operator makes a pod, and its image may have to be fetched."""
_IDLE_S = 60
"""After which the autoscaler takes away a pod without a role."""
_ENVIRONMENT = [
    {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
    {"name": "RAY_worker_niceness", "value": "0"},
]
"""No reports to Ray's makers, and no roles of low priority: a pod has nothing else to do."""
_COMMENT = """\
{run}, rendered by `tailrace cluster render kuberay`, for KubeRay 1.2 or later. Before `kubectl apply -f THIS_FILE`:
  kubectl create secret generic {name}-environment --from-literal=HF_TOKEN=...    (where anything needs a password)
The cluster goes with the run. When that is over: kubectl delete -f THIS_FILE, less the claim, which has its folder."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Pods that are alike, each one a node of the Ray cluster."""

    name: str
    cpus: int
    gpus: int
    least: int
    most: int


def render_kuberay(
    settings: RunSettings,
    groups: Sequence[RoleGroup],
    spare: Sequence[RoleGroup],
    overrides: Sequence[str],
    options: KubernetesOptions,
) -> str:
    """The manifests. `groups` are what the run needs of nodes, `spare` what it may ask for. Raises `SettingsError`."""
    name = object_name(settings)
    command_lines.require_renderable(settings, overrides)
    _require_ray(settings)
    workers = worker_pods(groups, spare, options.node)
    files = settings_map(settings, name)
    files["data"][_START] = _script(settings)
    manifests = [files, *claim(name, options), _job(with_scaled_deadlines(settings), name, workers, options)]
    return as_yaml(_COMMENT.format(run=settings.name, name=name), manifests)


def worker_pods(groups: Sequence[RoleGroup], spare: Sequence[RoleGroup], node: NodeSize) -> list[Workers]:
    """Pods that have room for these groups. Raises `SettingsError` for a role that no node has room for.

    >>> from tailrace.lifecycle.cluster import Bundle
    >>> ranks = RoleGroup("trainer", tuple(Bundle(f"trainer-{rank}", 2, 1) for rank in range(12)), "PACK")
    >>> replicas = [RoleGroup(name, (Bundle(name, 4, 4),)) for name in ("generator-0", "generator-1", "generator-2")]
    >>> for one in worker_pods([ranks, *replicas[:1]], replicas[1:], NodeSize(gpus=8, cpus=64)):
    ...     print(one)
    Workers(name='trainer', cpus=16, gpus=8, least=2, most=2)
    Workers(name='generator', cpus=4, gpus=4, least=1, most=3)
    """
    found: dict[str, Workers] = {}
    for number, group in enumerate((*groups, *spare)):
        kind = group.name.rpartition("-")[0] or group.name
        own = _pods_of(kind, group, node)
        before = found.get(kind, Workers(kind, own.cpus, own.gpus, 0, 0))
        least = before.least + (own.least if number < len(groups) else 0)
        found[kind] = Workers(kind, own.cpus, own.gpus, least, before.most + own.most)
    return [*found.values()]


def _pods_of(kind: str, group: RoleGroup, node: NodeSize) -> Workers:
    """Of one group, whose bundles are alike."""
    bundle, count = group.bundles[0], len(group.bundles)
    fitting = [there // wanted for there, wanted in ((node.cpus, bundle.cpus), (node.gpus, bundle.gpus)) if wanted]
    together = min(count, *fitting)
    if together < (count if group.strategy == "STRICT_PACK" else 1):
        raise SettingsError(
            f"{bundle} fits no node of {node.cpus} CPUs and {node.gpus} GPUs: lower what it asks for, or say what a "
            "node has (--gpus-per-node, --cpus-per-node)"
        )
    pods = math.ceil(count / together)
    return Workers(kind, together * bundle.cpus, together * bundle.gpus, pods, pods)


def _require_ray(settings: RunSettings) -> None:
    if settings.placement != "ray":
        raise SettingsError(
            f"placement = {settings.placement!r} has no role on a Ray cluster: write placement = 'ray', or render for "
            "kubernetes",
            key=("placement",),
        )
    if settings.ray.address is not None:
        raise SettingsError(
            "ray.address names a cluster that is there, and what is rendered makes its own: leave it out",
            key=("ray", "address"),
        )


def _script(settings: RunSettings) -> str:
    waiting = [] if settings.ray.wait_s is not None else [f"--ray.wait_s={_AUTOSCALER_S:g}"]
    command = command_lines.train(settings, f"{SETTINGS}/{settings.name}.toml", waiting)
    return _SCRIPT.format(command=shlex.join(command), work=WORK, run=settings.name)


def _job(settings: RunSettings, name: str, workers: Sequence[Workers], options: KubernetesOptions) -> Manifest:
    """A cluster that is lost with its head is made anew, as often as `backoffLimit` says; the run goes on in it."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(name, name, HEAD),
        "spec": {
            "entrypoint": f"sh {SETTINGS}/{_START}",
            "backoffLimit": RETRIES,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": _cluster(settings, name, workers, options),
        },
    }


def _cluster(settings: RunSettings, name: str, workers: Sequence[Workers], options: KubernetesOptions) -> Manifest:
    grows = any(one.most > one.least for one in workers)
    rollouts = settings.rollouts
    head = Need(HEAD, 0, 2 + rollouts.workers + rollouts.num_agent_workers)
    growing = {"autoscalerOptions": {"idleTimeoutSeconds": _IDLE_S}} if grows else {}
    return {
        "enableInTreeAutoscaling": grows,
        **growing,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod(settings, name, head, options, is_head=True, automountServiceAccountToken=grows),
        },
        "workerGroupSpecs": [
            {
                "groupName": one.name,
                "replicas": one.least,
                "minReplicas": one.least,
                "maxReplicas": one.most,
                "rayStartParams": {"num-cpus": str(one.cpus), "num-gpus": str(one.gpus)},
                "template": _pod(settings, name, Need(one.name, one.gpus, one.cpus), options, is_head=False),
            }
            for one in workers
        ],
    }


def _pod(
    settings: RunSettings, name: str, need: Need, options: KubernetesOptions, *, is_head: bool, **further: Any
) -> Manifest:
    """The operator fills in the command, which is `ray start`, and beside the head's the autoscaler, which asks it."""
    one = {**container(need.role, need, options), "env": _ENVIRONMENT}
    grace_s = generator_grace_s(settings)
    if is_head:
        one["lifecycle"], grace_s = notice(settings), run_grace_s(settings)
    return pod(name, need.role, options, one, grace_s=grace_s, **further)
