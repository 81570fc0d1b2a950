"""Rendered manifests: valid by Kubernetes' schemas, their commands by the command's parser, and what they promise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tailrace.cli import main
from tests.cluster.commands import require_known

IMAGE = ("--image", "registry.example/tailrace:1")
SPREAD = ("--gpus-per-node", "0", "--cpus-per-node", "4", "--generator.replicas", "2")
WITH_PASSWORD = ("--transport.batches", "redis", "--transport.redis.url", "redis://host:6379/0?password=secret")
ON_GPUS = ("--trainer.device", "cuda", "--generator.engine", "vllm")

ODD = 'mod\'els/$(HOME) "x": $$(POD_IP) $$ $y'

CASES = {
    "one pod": IMAGE,
    "generators in pods of their own": (*IMAGE, *SPREAD, "--memory", "64Gi", "--claim", "shared"),
    "names that Kubernetes would take for references": (*(*IMAGE, *SPREAD, "--name", "Run_1.b", "--model.name", ODD),),
    "ranks and generators on GPUs": (
        *(*IMAGE, *ON_GPUS, "--trainer.ranks", "8", "--generator.replicas", "4", "--generator.tensor_parallel", "4"),
        *(
            "--generator.vllm.max_num_seqs",
            "256",
        ),
    ),
    "a trainer in a pod of its own": (
        *(*IMAGE, *SPREAD, "--placement", "redis", "--transport.redis.url", "redis://trainer@host:6379/0"),
    ),
}


def rendered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The manifests, by kind and name."""
    assert main(["cluster", "render", "kubernetes", "quickstart", *arguments]) == 0, capsys.readouterr().err
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def containers(manifests: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Of every manifest that has pods."""
    return {
        key: one["spec"]["template"]["spec"]["containers"][0]
        for key, one in manifests.items()
        if "template" in one.get("spec", {})
    }


VARIABLE = re.compile(r"\$(?:\$|\((\w+)\))")


def expanded(found: re.Match[str]) -> str:
    """What Kubernetes puts there: `$$` is a `$`, whatever follows, and a variable that there is not stays as it is."""
    if found.group() == "$$":
        return "$"
    return {"POD_IP": "192.0.2.7"}.get(found.group(1), found.group())


def command(container: dict[str, Any]) -> list[str]:
    """As the kubelet would start it, with the address of its pod, and without the shell around it."""
    words = [VARIABLE.sub(expanded, word) for word in container["args"]]
    return words if words[0] == "tailrace" else [*container["command"], *words]


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_manifests_are_valid_by_the_schemas_of_kubernetes(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], version: str
) -> None:
    for manifest in rendered(capsys, *arguments).values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_refuse_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    job = rendered(capsys, *IMAGE)["Job", "quickstart"]
    job["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_every_command_is_one_that_tailrace_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    manifests = rendered(capsys, *arguments)
    (settings,) = (one["data"] for (kind, _), one in manifests.items() if kind == "ConfigMap")
    for name, text in settings.items():
        (tmp_path / name).write_text(text)
    for container in containers(manifests).values():
        require_known([word.replace("/etc/tailrace/settings", str(tmp_path)) for word in command(container)])


def test_a_pod_without_gpus_starts_a_run_whose_trainer_has_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu = ("--gpus-per-node", "1", "--trainer.device", "cuda")
    manifests = rendered(capsys, *CASES["a trainer in a pod of its own"], *on_a_gpu)
    found = containers(manifests)
    assert "nvidia.com/gpu" in found["Job", "quickstart-trainer"]["resources"]["limits"]
    assert "limits" not in found["Job", "quickstart"]["resources"]
    (tmp_path / "quickstart.toml").write_text(manifests["ConfigMap", "quickstart-settings"]["data"]["quickstart.toml"])
    assert main(["key", str(tmp_path / "generators.key")]) == 0
    words = [
        re.sub("/etc/tailrace/(settings|keys)", str(tmp_path), word) for word in command(found["Job", "quickstart"])
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([*words[1:], "--dry-run"]) == 0, capsys.readouterr().err


def test_names_reach_the_roles_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capsys, *CASES["names that Kubernetes would take for references"])
    serve = command(containers(manifests)["StatefulSet", "run-1-b-generators"])
    assert serve[:5] == ["tailrace", "serve", ODD, "--address", "tcp://192.0.2.7:5757"]
    train = command(containers(manifests)["Job", "run-1-b"])
    assert train[1:5] == ["train", "/etc/tailrace/settings/Run_1.b.toml", "--name", "Run_1.b"]


def test_the_run_connects_to_every_generator_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capsys, *CASES["ranks and generators on GPUs"])
    generators = manifests["StatefulSet", "quickstart-generators"]["spec"]
    service = manifests["Service", "quickstart-generators"]["spec"]
    names = [f"quickstart-generators-{index}.{generators['serviceName']}" for index in range(generators["replicas"])]
    addresses = ",".join(f"tcp://{name}:{service['ports'][0]['port']}" for name in names)
    assert f"--generator.connect={addresses}" in command(containers(manifests)["Job", "quickstart"])
    assert service["publishNotReadyAddresses"]
    assert service["selector"].items() <= generators["template"]["metadata"]["labels"].items()


def test_gpus_are_those_of_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    found = containers(rendered(capsys, *CASES["ranks and generators on GPUs"]))
    assert found["Job", "quickstart"]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert found["StatefulSet", "quickstart-generators"]["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def test_a_pod_has_as_long_to_end_as_its_run_may_take(capsys: pytest.CaptureFixture[str]) -> None:
    job = rendered(capsys, *IMAGE, "--shutdown.grace_s", "300")["Job", "quickstart"]
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 355 + 10 + 3 + 10
    (hook,) = pod["containers"][0]["lifecycle"].values()
    assert hook["exec"]["command"][-1] == "touch /data/runs/quickstart/preempt; sleep 3"


def test_deadlines_are_those_that_the_run_makes_of_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    slowly = ("--deadline_scale", "3", "--generator.router.start_deadline_s", "100")
    manifests = rendered(capsys, *IMAGE, *SPREAD, *slowly)
    pods = {key: one["spec"]["template"]["spec"] for key, one in manifests.items() if "template" in one.get("spec", {})}
    assert pods["Job", "quickstart"]["terminationGracePeriodSeconds"] == 3 * 80 + 10 + 3 + 10
    assert pods["StatefulSet", "quickstart-generators"]["terminationGracePeriodSeconds"] == 3 * 15 + 10
    found = containers(manifests)
    assert found["StatefulSet", "quickstart-generators"]["startupProbe"]["failureThreshold"] == 300 / 5
    assert "--generator.connect_wait_s=300" in command(found["Job", "quickstart"])
    assert "deadline_scale = 3.0" in manifests["ConfigMap", "quickstart-settings"]["data"]["quickstart.toml"]


def test_pods_whose_status_says_that_the_run_goes_on_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capsys, *CASES["a trainer in a pod of its own"])
    ignored = {}
    for name in ("quickstart", "quickstart-trainer"):
        rules = manifests["Job", name]["spec"]["podFailurePolicy"]["rules"]
        ignored[name] = [
            rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule and rule["action"] == "Ignore"
        ]
    assert ignored == {"quickstart": [[75]], "quickstart-trainer": [[75, 143]]}


def test_every_pod_has_a_first_process_that_reaps_orphans(capsys: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capsys, *CASES["a trainer in a pod of its own"])
    pods = [one["spec"]["template"]["spec"] for one in manifests.values() if "template" in one.get("spec", {})]
    assert [pod["shareProcessNamespace"] for pod in pods] == [True] * 3


def test_no_secret_is_rendered(capsys: pytest.CaptureFixture[str]) -> None:
    manifests = rendered(capsys, *CASES["a trainer in a pod of its own"])
    assert "Secret" not in {kind for kind, _ in manifests}
    pods = [one["spec"]["template"]["spec"] for one in manifests.values() if "template" in one.get("spec", {})]
    assert len(pods) == 3
    for pod in pods:
        assert {"secretName": "quickstart-keys", "defaultMode": 0o440, "optional": True} in [
            volume.get("secret") for volume in pod["volumes"]
        ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "name the containers' image"),
        ((*IMAGE, "--folder", "/shared"), "--folder is for slurm"),
        ((*IMAGE, "--claim", "a", "--storage", "1Gi"), "--claim names one that is there"),
        ((*IMAGE, *ON_GPUS, "--trainer.ranks", "16"), "need 16 GPUs, and a node has 8"),
        ((*IMAGE, "--name", "_1"), "names no object of Kubernetes"),
        ((*IMAGE, "--name", "a" * 60), "40 letters"),
        ((*IMAGE, "--name", "größe"), "letters from a to z"),
        ((*IMAGE, *WITH_PASSWORD), "TAILRACE_REDIS_PASSWORD"),
        ((*IMAGE, "--resume"), "goes on by itself"),
        ((*IMAGE, *SPREAD, "--generator.replicas", "{min = 4, max = 9}"), "lets generators come and go"),
        ((*IMAGE, *SPREAD, "--generator.return_routed_experts", "true"), 'write transport.payloads = "value"'),
    ],
)
def test_what_cannot_run_there_is_told_in_a_sentence_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    assert main(["cluster", "render", "kubernetes", "quickstart", *arguments]) == 2
    printed = capsys.readouterr()
    assert why in printed.err
    assert printed.out == ""


def test_keys_that_are_rendered_are_told_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    headers = '{Authorization = "Bearer sesame", X-Key = "$MCP_KEY"}'
    mcp = (
        "--environment.name",
        "mcp",
        "--environment.args.url",
        "https://host/mcp",
        "--environment.args.headers",
        headers,
    )
    assert main(["cluster", "render", "kubernetes", "quickstart", *IMAGE, *mcp]) == 0
    told = capsys.readouterr().err
    assert "environments.0.args.headers.Authorization may hold keys" in told
    assert "sesame" not in told
    assert "X-Key" not in told
    assert main(["cluster", "render", "kubernetes", "quickstart", *IMAGE]) == 0
    assert capsys.readouterr().err == ""
