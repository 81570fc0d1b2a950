"""Rendered RayJobs: of fields that KubeRay has, with pods by Kubernetes' schemas, workers with room for all roles."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tailrace.cli import main
from tailrace.config import load_settings
from tailrace.lifecycle.cluster import ClusterNode, place
from tailrace.run.cluster import role_groups, spare_groups
from tests.cluster.commands import require_known

IMAGE = ("--image", "registry.example/tailrace-ray:1", "--placement", "ray")
ON_GPUS = ("--trainer.device", "cuda", "--generator.engine", "vllm")

CASES = {
    "no GPUs": ("--gpus-per-node", "0", "--cpus-per-node", "4"),
    "more ranks than a node has GPUs": (*ON_GPUS, "--trainer.ranks", "12", "--trainer.threads", "2"),
    "generators that come and go": (
        *(*ON_GPUS, "--generator.tensor_parallel", "4", "--generator.replicas", "{min = 2, max = 6}"),
        *("--memory", "64Gi", "--claim", "shared"),
    ),
    "names that a shell would take apart": ("--name", "Run_1.b", "--model.name", 'mod\'els/$(HOME) "x": y'),
}

FIELDS: dict[str, dict[str, type | str]] = {
    "RayJob": {"apiVersion": str, "kind": str, "metadata": dict, "spec": "RayJobSpec"},
    "RayJobSpec": {
        "entrypoint": str,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "rayClusterSpec": "RayClusterSpec",
    },
    "RayClusterSpec": {
        "enableInTreeAutoscaling": bool,
        "autoscalerOptions": "AutoscalerOptions",
        "headGroupSpec": "HeadGroupSpec",
        "workerGroupSpecs": "WorkerGroupSpec",
    },
    "AutoscalerOptions": {"idleTimeoutSeconds": int},
    "HeadGroupSpec": {"rayStartParams": dict, "template": dict},
    "WorkerGroupSpec": {
        "groupName": str,
        "replicas": int,
        "minReplicas": int,
        "maxReplicas": int,
        "rayStartParams": dict,
        "template": dict,
    },
}
"""Those of KubeRay's API reference (docs/reference/api.md of ray-project/kuberay, group ray.io/v1) that are used."""


def require_fields(value: Any, kind: str) -> None:
    """Raise for a field that there is not, or of another type."""
    for one in value if isinstance(value, list) else [value]:
        for name, field in one.items():
            expected = FIELDS[kind][name]
            if isinstance(expected, str):
                require_fields(field, expected)
            else:
                assert type(field) is expected, f"{kind}.{name}"


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """The manifests, by kind."""
    assert main(["cluster", "render", "kuberay", "quickstart", *IMAGE, *arguments]) == 0, capsys.readouterr().err
    return {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}


def cluster(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec = manifests["RayJob"]["spec"]["rayClusterSpec"]
    assert isinstance(spec, dict)
    return spec


def workers(manifests: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["groupName"]: one for one in cluster(manifests)["workerGroupSpecs"]}


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_manifests_have_the_fields_that_there_are(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    manifests = rendered(capsys, *arguments)
    require_fields(manifests["RayJob"], "RayJob")
    assert manifests["RayJob"]["apiVersion"] == "ray.io/v1"
    spec = cluster(manifests)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert {type(value) for value in group["rayStartParams"].values()} == {str}
        template = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "one"},
            "template": group["template"],
        }
        kubernetes_validate.validate(template, "1.37", strict=True)
    for kind in manifests.keys() - {"RayJob"}:
        kubernetes_validate.validate(manifests[kind], "1.37", strict=True)


def test_a_field_that_there_is_not_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    job = rendered(capsys)["RayJob"]
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(KeyError, match="replica"):
        require_fields(job, "RayJob")


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("of", ["minReplicas", "maxReplicas"])
def test_the_workers_have_room_for_every_role(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], of: str
) -> None:
    nodes = []
    for name, group in workers(rendered(capsys, *arguments)).items():
        cpus, gpus = (float(group["rayStartParams"][f"num-{kind}"]) for kind in ("cpus", "gpus"))
        nodes += [ClusterNode(f"{name}-{number}", "", cpus, gpus) for number in range(group[of])]
        limits = group["template"]["spec"]["containers"][0]["resources"].get("limits", {})
        assert float(limits.get("nvidia.com/gpu", 0)) == gpus
    settings = load_settings("quickstart", _of_run(arguments))
    groups = role_groups(settings, has_gpus=True)
    if of == "maxReplicas":
        groups += spare_groups(settings, has_gpus=True)
    assert place(groups, nodes).unplaced == []


def _of_run(arguments: tuple[str, ...]) -> list[str]:
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return [word for pair in pairs if "." in pair[0] for word in pair] + ["--placement", "ray"]


def test_only_a_run_that_may_grow_is_given_nodes_by_the_autoscaler(capsys: pytest.CaptureFixture[str]) -> None:
    fixed, growing = rendered(capsys), rendered(capsys, *CASES["generators that come and go"])
    assert [cluster(one)["enableInTreeAutoscaling"] for one in (fixed, growing)] == [False, True]
    heads = [cluster(one)["headGroupSpec"]["template"]["spec"] for one in (fixed, growing)]
    tokens = [head["automountServiceAccountToken"] for head in heads]
    assert tokens == [False, True], "which the autoscaler speaks to Kubernetes with"
    generators = workers(growing)["generator"]
    assert [generators[of] for of in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 6]


def test_deadlines_are_those_that_the_run_makes_of_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capsys, "--deadline_scale", "3")
    head = cluster(manifests)["headGroupSpec"]["template"]["spec"]
    assert head["terminationGracePeriodSeconds"] == 3 * 80 + 10 + 3 + 10
    for worker in workers(manifests).values():
        assert worker["template"]["spec"]["terminationGracePeriodSeconds"] == 3 * 15 + 10


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_the_command_is_one_that_tailrace_has_and_goes_on_where_its_run_has_begun(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    manifests = rendered(capsys, *arguments)
    for name, text in manifests["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    assert manifests["RayJob"]["spec"]["entrypoint"] == "sh /etc/tailrace/settings/start.sh"
    first, folder, resuming, start = manifests["ConfigMap"]["data"]["start.sh"].splitlines()
    command = shlex.split(first)[2:]
    require_known([word.replace("/etc/tailrace/settings", str(tmp_path)) for word in command])
    assert "--ray.wait_s=900" in command
    assert (folder, start) == ("cd /data", 'exec "$@"')
    assert resuming.startswith(f'if [ -e "runs/{command[4]}/config.toml" ]; then set -- "$@" --resume')


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--placement", "local"), "placement = 'local' has no role on a Ray cluster"),
        (("--ray.address", "10.0.0.1:6379"), "what is rendered makes its own"),
        ((*ON_GPUS, "--generator.tensor_parallel", "16"), "the generator (16 CPUs, 16 GPUs) fits no node of 64 CPUs"),
        (("--folder", "/shared"), "--folder is for slurm"),
        (("--resume",), "goes on by itself"),
        (
            ("--transport.batches", "redis", "--transport.redis.url", "redis://:secret@host:6379/0"),
            "TAILRACE_REDIS_PASSWORD",
        ),
    ],
)
def test_what_cannot_run_there_is_told_in_a_sentence_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    assert main(["cluster", "render", "kuberay", "quickstart", *IMAGE, *arguments]) == 2
    printed = capsys.readouterr()
    assert why in printed.err
    assert printed.out == ""
