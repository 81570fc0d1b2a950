"""`cluster render`: what a cluster is given to start a run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from tailrace.commands.arguments import Name, PerNode, Quantity, Recipe, show_progress, write_out
from tailrace.errors import SettingsError


@dataclass(frozen=True)
class Cluster:
    """Print what a cluster is given to start a run. Any setting of the run can follow as --section.key VALUE."""

    action: Annotated[Literal["render"], tyro.conf.Positional]
    """The one thing that there is to do."""
    target: Annotated[Literal["slurm", "kubernetes", "kuberay"], tyro.conf.Positional]
    """A batch script, or manifests; with a Ray cluster for the run, or without."""
    recipe: Recipe
    """A packaged recipe (`tailrace recipes`), or a .toml file, by its path in the folder that a job runs in."""
    name: Name = None
    """Name of the run's folder under runs/; without one, the recipe's or file's."""
    gpus_per_node: PerNode = 8
    """GPUs that a node has."""
    cpus_per_node: PerNode = 64
    """CPUs that a node has."""
    folder: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """slurm: the folder that the job runs in, on a file system that all nodes share: runs/ lies there."""
    setup: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LINE"), tyro.conf.UseAppendAction] = ()
    """slurm: lines of shell that make `tailrace` a command of every node."""
    sbatch: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE"), tyro.conf.UseAppendAction] = ()
    """slurm: further options of sbatch."""
    image: Annotated[str | None, tyro.conf.arg(metavar="IMAGE")] = None
    """kubernetes, kuberay: the containers' image, which has `tailrace` and what its roles need."""
    claim: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Also: a claim that is there, on a volume that pods of several nodes write; without one, one is rendered."""
    storage: Quantity = None
    """Also: of the claim that is rendered, as in 500Gi, which it is unless set."""
    memory: Quantity = None
    """Also: of every container, as in 256Gi; unset: no bound."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config import load_settings, placed
        from tailrace.reporting.masking import names_of_keys

        self._refuse_others_options()
        if self.name is not None:
            overrides = [*overrides, f"--name={json.dumps(self.name, ensure_ascii=False)}"]
        settings = load_settings(self.recipe, overrides)
        with placed(self.recipe, overrides):
            rendered = self._rendered(settings, overrides)
        if names := names_of_keys(settings.model_dump(mode="json")):
            show_progress(
                f"{', '.join(names)} may hold keys, which are rendered as they are: let their values name variables "
                'of the environment in their place ("Bearer $MCP_KEY")'
            )
        write_out(rendered)
        return 0

    def _rendered(self, settings: Any, overrides: list[str]) -> str:
        from tailrace.cluster import (
            KubernetesOptions,
            NodeSize,
            SlurmOptions,
            render_kuberay,
            render_kubernetes,
            render_slurm,
        )
        from tailrace.run.cluster import role_groups, spare_groups

        node = NodeSize(self.gpus_per_node, self.cpus_per_node)
        if self.target == "slurm":
            chosen = SlurmOptions(node, self.folder or "", self.setup, self.sbatch)
            return render_slurm(settings, self.recipe, overrides, chosen)
        if self.image is None:
            raise SettingsError("name the containers' image, which has `tailrace` and what its roles need: --image")
        options = KubernetesOptions(node, self.image, self.claim, self.storage or "500Gi", self.memory)
        if self.target == "kuberay":
            has_gpus = node.gpus > 0
            groups, spare = role_groups(settings, has_gpus=has_gpus), spare_groups(settings, has_gpus=has_gpus)
            return render_kuberay(settings, groups, spare, overrides, options)
        return render_kubernetes(settings, self.recipe, overrides, options)

    def _refuse_others_options(self) -> None:
        others = ("image", "claim", "storage", "memory") if self.target == "slurm" else ("folder", "setup", "sbatch")
        if given := [name for name in others if getattr(self, name)]:
            target = "kubernetes and kuberay" if self.target == "slurm" else "slurm"
            raise SettingsError(f"--{given[0]} is for {target}: leave it out")
        if self.claim and self.storage:
            raise SettingsError("--storage is of a claim that is rendered, and --claim names one that is there")
