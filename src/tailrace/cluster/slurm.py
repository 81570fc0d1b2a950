"""A run as one Slurm job, without Ray: a batch script that starts orchestrator, ranks and generators by `srun`. Pure.

batch script ── srun ──► tailrace train      orchestrator; its trainer's ranks are roles that it starts again itself
     │  │ └──── srun ──► tailrace serve      one step for each generator, started again when it ends
     │  └────── srun ──► tailrace join       placement = "redis": the trainer, on a node of its own
     └── SIGUSR1 of --signal ──► runs/NAME/preempt ──► last save, status 75 ──► scontrol requeue ──► --resume
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tailrace.cluster import command_lines
from tailrace.cluster.layout import HEAD, TRAINER, Layout, NodeSize, lay_out, stop_s
from tailrace.config.deadlines import with_scaled_deadlines
from tailrace.config.settings import RunSettings
from tailrace.errors import SettingsError

_NAMES = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment consolidate-segments
constraint container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid
gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input
job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus
network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe partition power prefer priority profile
propagate qos quiet reboot requeue reservation resv-ports segment signal sockets-per-node spread-job stepmgr
switches thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes verbose wait
wait-all-nodes wckey wrap
"""
OPTIONS = frozenset(_NAMES.split())
"""Long names of what `sbatch` takes (Slurm 24.11)."""
_OURS = frozenset({"array", "chdir", "gres", "job-name", "mem", "mincpus", "no-requeue", "nodes", "signal", "wrap"})
"""Those that the run's settings decide, and those that would make another job of it."""
_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev", "/run", "/proc")
_SIGNAL_SPARE_S = 30
_LATEST_SIGNAL_S = 65_535


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """What the run's settings do not say."""

    node: NodeSize
    folder: str
    """Where the job runs, as every node sees it: `runs/` lies there."""
    setup: Sequence[str] = ()
    """Lines of shell that make `tailrace` a command of every node."""
    sbatch: Sequence[str] = ()
    """Further options of sbatch, NAME=VALUE or NAME."""


def render_slurm(settings: RunSettings, recipe: str, overrides: Sequence[str], options: SlurmOptions) -> str:
    """The batch script. `recipe` and `overrides` are what `settings` were made of. Raises `SettingsError`."""
    _require_shared(options.folder)
    command_lines.require_renderable(settings, overrides)
    settings = with_scaled_deadlines(settings)  # as the run does itself
    layout = lay_out(settings, options.node)
    if not layout.is_single:
        command_lines.require_connectable(settings, recipe, overrides)
    keeps = not layout.is_single
    parts = [
        "#!/bin/bash",
        *_header(settings, layout, options),
        "",
        f"# {settings.name}, rendered by `tailrace cluster render slurm`: sbatch THIS_FILE.",
        "noticed=",
        "trap noticed=yes USR1 # until there is a run to tell: it would end this script",
        *options.setup,
        "set -uo pipefail",
        "",
        f"run={_word(settings.name)}",
        "mkdir -p runs",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "step=(srun --nodes=1 --ntasks=1 --exact --mem=0 --unbuffered)",
        *([_KEEPING] if keeps else [""]),
        _FINISH.replace("{ending}", _END_KEPT if keeps else ""),
        *(_generators(settings, layout) if layout.generators else []),
        *(_trainer(settings, layout) if settings.placement == "redis" else []),
        *_run(settings, recipe, overrides, layout),
        _END,
    ]
    return "\n".join(parts)


_KEEPING = """
# keep LOG COMMAND...: runs a command, and again whenever it has ended, until this script ends.
kept=()
keep() {
  local log=$1
  shift
  trap '{ kill -TERM "$!"; wait "$!"; } 2>/dev/null; exit 0' TERM # a variable of ours would be set a moment too late
  while true; do
    "$@" >>"$log" 2>&1 &
    wait "$!"
    if [ "$?" -eq 2 ]; then exit 2; fi # bad settings: the log says which
    sleep 5 &
    wait "$!"
  done
}
"""

_ADDRESSES = """\
# address NODE PORT: where a generator listens, by the address that the orchestrator's node has for its node.
address() {
  local found
  read -r found _ < <(getent ahostsv4 "$1")
  echo "tcp://$found:$2"
}
"""

_END_KEPT = """\
  kill -TERM "${kept[@]}" 2>/dev/null
"""

_FINISH = """\
# finish STATUS: ends all that is left, and this script with the status of its run.
finish() {
{ending}  wait
  case "$1$noticed" in
  # 1 after a notice: the last save took longer than shutdown.grace_s, and the checkpoint before it counts.
  75* | 143yes | 1yes) scontrol requeue "$SLURM_JOB_ID" ;; # goes on with --resume, on whatever nodes it is given
  esac
  exit "$1"
}
"""

_END = """\
main=$!

# Notice of preemption, or of the end of the job's time: the run saves, and ends with status 75. One that has no folder
# yet has nothing to save. It is told until it has ended: what is older than its process is none of its own.
notice() {
  noticed=yes
  while kill -0 "$main" 2>/dev/null; do
    touch "runs/$run/preempt" || { kill -TERM "$main"; break; }
    sleep 1
  done &
}
trap notice USR1
trap 'kill -TERM "$main"' TERM INT
if [ -n "$noticed" ]; then notice; fi
while kill -0 "$main" 2>/dev/null; do wait "$main"; done # a signal ends a wait
wait "$main"
finish "$?"
"""


def _header(settings: RunSettings, layout: Layout, options: SlurmOptions) -> list[str]:
    notice_s = stop_s(settings) + _SIGNAL_SPARE_S
    if notice_s > _LATEST_SIGNAL_S:
        raise SettingsError(
            f"section shutdown allows {notice_s} s for the end of a run, and Slurm gives notice {_LATEST_SIGNAL_S} s "
            "before the end of a job at most: lower shutdown.grace_s",
            key=("shutdown", "grace_s"),
        )
    values: dict[str, str | None] = {
        "job-name": settings.name,
        "nodes": str(layout.num_nodes),
        "exclusive": None,
        "mem": "0",
        "mincpus": str(layout.busiest_node_cpus),
        "chdir": options.folder,
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": None,
        "signal": f"B:USR1@{notice_s}",
    }
    if layout.has_gpus:
        values["gres"] = f"gpu:{options.node.gpus}"
    return [_directive(name, value) for name, value in (values | dict(map(_further, options.sbatch))).items()]


def _further(given: str) -> tuple[str, str | None]:
    """`NAME=VALUE` of a user. Raises `SettingsError`."""
    name, equals, value = given.removeprefix("--").partition("=")
    if name not in OPTIONS:
        raise SettingsError(f"--sbatch {given}: sbatch has no option {name!r}; write NAME=VALUE, as in partition=gpu")
    if name in _OURS:
        raise SettingsError(f"--sbatch {given}: {name} follows from the run's settings: leave it out")
    return name, value if equals else None


def _directive(name: str, value: str | None) -> str:
    if value is None:
        return f"#SBATCH --{name}"
    if re.search(r"[\"\\\n\r\0]", value):
        raise SettingsError(f"{name} is {value!r}, which no line of #SBATCH can say: leave quotes and line ends out")
    return f'#SBATCH --{name}="{value}"' if re.search(r"[\s#']", value) else f"#SBATCH --{name}={value}"


def _require_shared(folder: str) -> None:
    path = PurePosixPath(folder)
    if not folder:
        raise SettingsError("--folder is missing: name the folder as every node of the job sees it")
    if not path.is_absolute() or ".." in path.parts:
        raise SettingsError(f"--folder {folder} is no absolute path: name the folder as every node of the job sees it")
    if any(path.is_relative_to(one) for one in _OF_ONE_NODE):
        raise SettingsError(
            f"--folder {folder} is each node's own: name one on a file system that all nodes share, where the run's "
            "folder is found again on another node"
        )


def _generators(settings: RunSettings, layout: Layout) -> list[str]:
    serve = command_lines.serve(settings, "\0where\0", "\0key\0")
    return [
        _ADDRESSES,
        f"key=runs/{settings.name}.generators.key # without it nobody can use a generator or send it weights",
        'if [ ! -e "$key" ]; then tailrace key "$key" || exit 2; fi',
        f"nodes_of_generators=({' '.join(map(str, layout.generators))})",
        "connect=",
        'for index in "${!nodes_of_generators[@]}"; do',
        "  node=${nodes[${nodes_of_generators[$index]}]}",
        f'  where=$(address "$node" $(({command_lines.PORT} + index)))',
        "  connect+=${connect:+,}$where",
        f'  keep "runs/$run.generator-$index.log" {_step("$node", layout, "generator")} \\',
        f"    {_words(serve, '    ')} &",
        '  kept+=("$!")',
        "done",
        "",
    ]


def _trainer(settings: RunSettings, layout: Layout) -> list[str]:
    node = f"${{nodes[{layout.node_of(TRAINER)}]}}"
    return [
        f'keep "runs/$run.trainer.log" {_step(node, layout, TRAINER)} \\',
        f"  {_words(command_lines.join(settings, 'runs'), '  ')} &",
        'kept+=("$!")',
        "",
    ]


def _run(settings: RunSettings, recipe: str, overrides: Sequence[str], layout: Layout) -> list[str]:
    connecting = command_lines.connect_to("\0connect\0", "\0key\0", settings) if layout.generators else []
    return [
        'if [ -n "$noticed" ]; then finish 75; fi # there is nothing to save',
        "resume=()",
        'if [ -e "runs/$run/config.toml" ]; then resume=(--resume); fi',
        f"{_step('${nodes[0]}', layout, HEAD)} \\",
        f"  {_words(command_lines.train(settings, recipe, overrides, connecting), '  ')} \\",
        '    "${resume[@]}" &',
    ]


def _step(node: str, layout: Layout, role: str) -> str:
    need = layout.need(role)
    gpus = f"gpu:{need.gpus}" if need.gpus else "none"  # a step that asks for nothing waits for all GPUs of the job
    gres = f" --gres={gpus}" if layout.has_gpus else ""
    return f'"${{step[@]}}" --nodelist="{node}" --cpus-per-task={need.cpus}{gres}'


def _words(arguments: Sequence[str], indent: str) -> str:
    """A command, each option on a line of its own."""
    lines: list[list[str]] = [[]]
    for argument in arguments:
        if argument.startswith("--"):
            lines.append([])
        lines[-1].append(_word(argument))
    return f" \\\n{indent}  ".join(map(" ".join, lines))


def _word(argument: str) -> str:
    r"""An argument as the shell reads it. What stands between two NULs is the name of a variable.

    >>> print(_word("my run's.toml"), _word("--generator.connect=\0connect\0"))
    'my run'"'"'s.toml' --generator.connect="$connect"
    """
    parts = enumerate(argument.split("\0"))
    return "".join(f'"${part}"' if index % 2 else shlex.quote(part) for index, part in parts if part) or "''"
