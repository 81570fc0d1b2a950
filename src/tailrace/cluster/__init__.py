"""What a cluster is given to start a run, from the run's settings: a Slurm script, manifests of Kubernetes or KubeRay.

In: `RunSettings`, a node's size, options of the target. Out: text. `layout` decides which node has which role,
`command_lines` what each runs, and one module per target writes that down. Nothing here reads a file, asks a cluster or
starts anything; what cannot run there is a `SettingsError` before a line is written.
"""

from __future__ import annotations

from tailrace.cluster.kuberay import render_kuberay
from tailrace.cluster.kubernetes import render_kubernetes
from tailrace.cluster.layout import NodeSize
from tailrace.cluster.manifests import KubernetesOptions
from tailrace.cluster.slurm import SlurmOptions, render_slurm

__all__ = [
    "KubernetesOptions",
    "NodeSize",
    "SlurmOptions",
    "render_kuberay",
    "render_kubernetes",
    "render_slurm",
]
