"""`serve`, `leave`, `join` and `key`: parts of a run on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tailrace.commands.arguments import KeyFile, RunName, refuse, run_to_end, tell
from tailrace.errors import SettingsError


@dataclass(frozen=True)
class Serve:
    """Generate for runs elsewhere (--generator.connect), or join one. Any --model.* or --generator.* can follow."""

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Hugging Face id, local folder, .gguf file, or bundled:quickstart. With --join, unset: the run's."""
    join: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Join a run that goes on: its folder or name, or, on another host, its generator.join_address (with --key)."""
    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Where to listen (tcp://127.0.0.1:5757; with --join, unset: where the run on this host finds it). One that other
    machines can reach needs --key."""
    key: KeyFile = None
    """Key file, which clients must have as well; it is written where there is none. With --join: the run's."""
    http: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Answer HTTP clients there too (127.0.0.1:8000), as docs/gateway.md says. Any --gateway.* setting can follow."""
    http_key: KeyFile = None
    """File with the key that HTTP clients send; it is written where there is none. Unset: a new key is printed."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.config.serving import load_serve_settings
        from tailrace.run.serving import ADDRESS, serve

        if self.join is not None:
            return self._join(self.join, overrides)
        if self.model is None:
            raise SettingsError("name a model to serve, or a run to join (--join)")
        settings = load_serve_settings(self.model, overrides, self.http)
        if self.http_key and settings.gateway is None:
            raise SettingsError("--http-key is about HTTP: say where to listen (--http)")
        return run_to_end(serve(settings, self.address or ADDRESS, self.key, tell, http_key=self.http_key))

    def _join(self, run: str, overrides: list[str]) -> int:
        from tailrace.run.joined_serving import JoinOptions, serve_run

        if self.http or self.http_key:
            raise SettingsError("--http: a generator that joins a run answers that run alone")
        options = JoinOptions(run, self.key, self.address, self.model, overrides)
        return run_to_end(serve_run(options, tell))


@dataclass(frozen=True)
class Leave:
    """Let a generator of a run go: its requests move on with their tokens, and its process ends."""

    run: RunName
    """The run's folder or name, or its generator.join_address (with --key)."""
    generator: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="GENERATOR")]
    """As metrics and logs call it: generator-2."""
    key: KeyFile = None
    """The run's key file, for an address."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.run.joined_serving import release

        refuse(overrides)
        run_to_end(release(self.run, self.generator, self.key))
        tell(f"{self.generator} leaves the run {self.run}")
        return 0


@dataclass(frozen=True)
class Join:
    """Have the trainer of a run on another machine (--placement redis): both see one Redis and one folder of runs."""

    name: RunName
    """Name of the run, which may start later."""
    redis: Annotated[str, tyro.conf.arg(metavar="URL")]
    """redis://HOST:PORT/0, or rediss://; its password may stand in TAILRACE_REDIS_PASSWORD."""
    runs: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """The folder of runs, as this machine sees it."""
    prefix: str = "tailrace"
    """As transport.redis.prefix of the run."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.run.joining import join

        refuse(overrides)
        return run_to_end(join(self.name, self.redis, self.runs, self.prefix, tell))


@dataclass(frozen=True)
class Key:
    """Write a key file for generators elsewhere, which they (`tailrace serve --key`) and their runs have alike."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Where it goes; nothing may be there."""

    def __call__(self, overrides: list[str]) -> int:
        """Run the command."""
        from tailrace.transport.keys import write_keys

        refuse(overrides)
        write_keys(self.file, "key")
        return 0
