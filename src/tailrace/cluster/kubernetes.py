"""A run as plain Kubernetes objects, without Ray. Pure.

Job NAME               tailrace train: orchestrator and ranks; a pod that takes its place goes on with --resume
StatefulSet NAME-...   tailrace serve: generators, each under a name of its own (a Service without an address)
Job NAME-trainer       placement = "redis": tailrace join, the trainer in a pod of its own
ConfigMap, PersistentVolumeClaim, and two Secrets that are made by hand: keys, and variables of the environment
"""

from __future__ import annotations

from tailrace.cluster import command_lines
from tailrace.cluster.command_lines import PORT
from tailrace.cluster.layout import GENERATOR, HEAD, TRAINER, Layout, lay_out
from tailrace.cluster.manifests import (
    KEYS,
    RETRIES,
    SETTINGS,
    KubernetesOptions,
    Manifest,
    as_yaml,
    claim,
    container,
    generator_grace_s,
    labels,
    metadata,
    notice,
    object_name,
    pod,
    run_grace_s,
    settings_map,
    trainer_grace_s,
)
from tailrace.config.deadlines import with_scaled_deadlines
from tailrace.config.settings import RunSettings
from tailrace.lifecycle.exit_codes import ExitCode

KEY = f"{KEYS}/generators.key"
_RESUMING = 'if [ -e "runs/{run}/config.toml" ]; then set -- "$@" --resume; fi; exec "$@"'
_COMMENT = """\
{run}, rendered by `tailrace cluster render kubernetes`. Once, before `kubectl apply -f THIS_FILE`:
  tailrace key generators.key
  kubectl create secret generic {name}-keys --from-file=generators.key
  kubectl create secret generic {name}-environment --from-literal=HF_TOKEN=...    (where anything needs a password)
When the run is over: kubectl delete -f THIS_FILE, less the claim, which has the run's folder."""


def render_kubernetes(settings: RunSettings, recipe: str, overrides: list[str], options: KubernetesOptions) -> str:
    """The manifests. `recipe` and `overrides` are what `settings` were made of. Raises `SettingsError`."""
    name, layout = object_name(settings), lay_out(settings, options.node)
    command_lines.require_renderable(settings, overrides)
    manifests = [settings_map(settings, name), *claim(name, options)]
    settings = with_scaled_deadlines(settings)  # as the run does with those of the map
    if not layout.is_single:
        command_lines.require_connectable(settings, recipe, overrides)
        manifests += _generators(settings, name, layout, options)
    if settings.placement == "redis":
        manifests.append(_trainer(settings, name, layout, options))
    manifests.append(_run(settings, name, layout, options))
    return as_yaml(_COMMENT.format(run=settings.name, name=name), manifests)


def _run(settings: RunSettings, name: str, layout: Layout, options: KubernetesOptions) -> Manifest:
    hosts = [f"{name}-generators-{index}.{name}-generators" for index in range(len(layout.generators))]
    addresses = ",".join(f"tcp://{host}:{PORT}" for host in hosts)
    connecting = command_lines.connect_to(addresses, KEY, settings) if hosts else []
    command = command_lines.train(settings, f"{SETTINGS}/{settings.name}.toml", [], connecting)
    resuming = ["/bin/sh", "-c", _RESUMING.format(run=settings.name), "sh"]
    one = container(HEAD, layout.need(HEAD), options, command=resuming, args=command)
    one["lifecycle"], grace_s = notice(settings), run_grace_s(settings)
    template = pod(name, HEAD, options, one, grace_s=grace_s, restartPolicy="Never")
    return _job(name, name, HEAD, template, [ExitCode.PREEMPTED])


def _trainer(settings: RunSettings, name: str, layout: Layout, options: KubernetesOptions) -> Manifest:
    command = command_lines.join(settings, "runs")
    one = container(TRAINER, layout.need(TRAINER), options, command=command[:1], args=command[1:])
    grace_s = trainer_grace_s(settings)
    template = pod(name, TRAINER, options, one, grace_s=grace_s, restartPolicy="Never")
    return _job(f"{name}-trainer", name, TRAINER, template, [ExitCode.PREEMPTED, ExitCode.TERMINATED])


def _job(name: str, run: str, role: str, template: Manifest, goes_on: list[ExitCode]) -> Manifest:
    """A pod that was moved, or whose status says that its run goes on, is replaced without end; bad settings end it."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(name, run, role),
        "spec": {
            "backoffLimit": RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [*map(int, goes_on)]}},
                    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [int(ExitCode.BAD_SETTINGS)]}},
                ]
            },
            "template": template,
        },
    }


def _generators(
    settings: RunSettings, name: str, layout: Layout, options: KubernetesOptions
) -> tuple[Manifest, Manifest]:
    """A pod that is not there yet has its name already, since the run connects to all of them from its start."""
    owner, role = f"{name}-generators", GENERATOR
    command = command_lines.serve(settings, f"tcp://\0POD_IP\0:{PORT}", KEY)
    one = container(role, layout.need(role), options, command=command[:1], args=command[1:])
    listens = {"tcpSocket": {"port": "calls"}}
    start_s = settings.generator.router.start_deadline_s
    one |= {
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"name": "calls", "containerPort": PORT}],
        "startupProbe": {**listens, "periodSeconds": 5, "failureThreshold": max(1, round(start_s / 5))},
        "readinessProbe": {**listens, "periodSeconds": 10},
        "livenessProbe": {**listens, "periodSeconds": 20, "failureThreshold": 6},
    }
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, name, role),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(name, role),
            "ports": [{"name": "calls", "port": PORT}],
        },
    }
    stateful_set: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(owner, name, role),
        "spec": {
            "serviceName": owner,
            "replicas": len(layout.generators),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels(name, role)},
            "template": pod(name, role, options, one, grace_s=generator_grace_s(settings)),
        },
    }
    return service, stateful_set
