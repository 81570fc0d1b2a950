"""What the page asks for, as JSON. Every route reads; a run is found by its name among those there are, by no path."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tailrace.dashboard.chat import ChatPlace, reply, running_policy
from tailrace.dashboard.folders import RunRow, RunState, RunTable, find_runs, is_run_folder, summary_of
from tailrace.dashboard.names import as_text
from tailrace.dashboard.others import OthersFiles, about, find_sources, source_at
from tailrace.dashboard.rollout_files import Matches, RolloutTable, StepFiles, Wanted, part, shortened
from tailrace.dashboard.run_data import RunCache, RunData
from tailrace.dashboard.run_events import RunEvent
from tailrace.dashboard.schedule import Schedule, Waterfall
from tailrace.dashboard.settings_view import Change, changes_from_recipe, read_settings
from tailrace.dashboard.tailing import stamp_of
from tailrace.dashboard.token_view import PAGE_TOKENS, TokenPage, TokenReader, token_steps
from tailrace.dashboard.trace_spans import trace_files
from tailrace.errors import TailraceError
from tailrace.extras import extra_needed
from tailrace.records import Json
from tailrace.reporting.advice import HISTORY, Advice, advice
from tailrace.reporting.masking import masked_text
from tailrace.reporting.sinks import Kind
from tailrace.reporting.summary import RunSummary

_VERSION = importlib.metadata.version("tailrace")
_SEARCH_S = 0.4
_TAKE_IN_S = 1.0
"""Of others' files, by one request that shows them."""
_MOST_BODY_BYTES = 1 << 20


class NotFound(TailraceError):
    """What was asked for is not there."""


class Runs(msgspec.Struct, frozen=True):
    """All runs."""

    place: str
    is_one: bool
    """The folder is one run's."""
    version: str
    runs: list[RunRow]


class RunDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's pages need to know of it."""

    row: RunRow
    summary: RunSummary | None
    steps: list[int]
    """Those with a file of rollouts."""
    evaluations: list[int]
    tokens: StepFiles
    chats: dict[str, str] = {}
    """What answers, by its name in `api/chat`: the run's own policy while it goes on, what `--chat` names."""
    checkpoints: list[str] = []
    is_traced: bool = True
    """Whether there is a trace, or may yet be: else nobody need ask for it."""
    note: str = ""
    """What its files do not tell, where they are another library's."""


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of `metrics.jsonl` behind its first `after` lines: null where a line has no value."""

    generation: int
    """Another one than before: nothing that was read before counts, and `after` is 0."""
    after: int
    count: int
    columns: dict[str, list[float]]
    names: list[str] = []
    """All metrics that there are, where they were asked for."""


class SettingsPage(msgspec.Struct, frozen=True):
    """A run's settings."""

    text: str
    changes: tuple[Change, ...] | None
    """None where the folder does not say what the recipe was."""


Handler: TypeAlias = Callable[[Request], object]


class Dashboard:
    """The routes over one folder: a run's, or one of many."""

    def __init__(self, root: Path, chat: ChatPlace | None = None) -> None:
        self._root, self._chat = root, chat
        self._cache, self._table, self._others = RunCache(), RunTable(), OthersFiles()
        self._tokens = TokenReader()
        self._lock = threading.Lock()

    def application(self) -> Starlette:
        """As ASGI, with the page itself."""
        routes: dict[str, Handler] = {
            "/api/runs": self.runs,
            "/api/runs/{run}": self.run,
            "/api/runs/{run}/curves": self.curves,
            "/api/runs/{run}/events": self.events,
            "/api/runs/{run}/advice": self.advice,
            "/api/runs/{run}/settings": self.settings,
            "/api/runs/{run}/waterfall": self.waterfall,
            "/api/runs/{run}/schedule": self.schedule,
            "/api/runs/{run}/rollouts": self.rollouts,
            "/api/runs/{run}/rollout": self.rollout,
            "/api/runs/{run}/text": self.text,
            "/api/runs/{run}/search": self.search,
            "/api/runs/{run}/tokens": self.tokens,
        }
        return Starlette(
            routes=[
                *(Route(path, _answering(handler), methods=["GET"]) for path, handler in routes.items()),
                Route("/api/runs/{run}/chat", self.chat, methods=["POST"]),
                Mount("/", _Page(directory=str(importlib.resources.files(__package__) / "static"), html=True)),
            ]
        )

    def _found(self) -> dict[str, Path]:
        """Run folders by name; then those made of other libraries' files, with what was taken in of these."""
        found = find_runs(self._root)
        if is_run_folder(self._root):
            return found
        for source in find_sources(self._root, besides=set(found.values())):
            name = source.name if source.name not in found else f"{source.name} ({source.library})"
            found.setdefault(name, self._others.folder(source))
        return found

    def _rows(self, found: dict[str, Path]) -> list[RunRow]:
        with self._lock:
            return self._table.rows(found)

    def _row(self, request: Request) -> RunRow:
        """Raises `NotFound`."""
        row = next((row for row in self._rows(self._found()) if row.id == request.path_params["run"]), None)
        if row is None:
            raise self._not_there(request)
        return row

    def _folder(self, request: Request) -> Path:
        """Raises `NotFound`."""
        folder = self._found().get(request.path_params["run"])
        if folder is None:
            raise self._not_there(request)
        self._others.update([folder], seconds=_TAKE_IN_S)
        return folder

    def _not_there(self, request: Request) -> NotFound:
        return NotFound(f"there is no run {request.path_params['run']!r} in {as_text(self._root)}")

    def _run(self, request: Request) -> RunData:
        return self._cache.get(self._folder(request))

    def runs(self, _request: Request) -> Runs:
        """The table of all."""
        found = self._found()
        self._others.update(found.values(), seconds=_TAKE_IN_S)
        is_one = is_run_folder(self._root) or source_at(self._root) is not None
        return Runs(as_text(self._root.resolve().name), is_one, _VERSION, self._rows(found))

    def run(self, request: Request) -> RunDetail:
        """One run's row, and what there is of it."""
        folder, row = self._folder(request), self._row(request)
        files = self._cache.get(folder).rollouts.files()
        return RunDetail(
            row=row,
            summary=summary_of(folder),
            steps=files.steps,
            evaluations=files.evaluations,
            tokens=token_steps(folder),
            chats={name: place.url for name, place in self._chats(folder, row).items()},
            checkpoints=sorted(as_text(path.name) for path in (folder / "checkpoints").glob("step_*")),
            is_traced=bool(trace_files(folder)) or (row.state is not RunState.READ and _writes_trace(folder)),
            note=tracker.note if (tracker := about(folder)) else "",
        )

    def curves(self, request: Request) -> Curves:
        """Metrics by name or pattern: `names=reward/mean,reward/*/std&after=120&generation=0`."""
        columns, lock = self._run(request).metrics()
        patterns = [name for name in request.query_params.get("names", "").split(",") if name][:200]
        with lock:
            is_known = _number(request, "generation") in (None, columns.generation)
            after = min(max(0, _number(request, "after") or 0), columns.count) if is_known else 0
            return Curves(
                generation=columns.generation,
                after=after,
                count=columns.count,
                columns={name: columns.values(name, after) for name in columns.matching(["step", "wall_s", *patterns])},
                names=list(columns.columns) if "all" in request.query_params else [],
            )

    def events(self, request: Request) -> list[RunEvent]:
        """What happened."""
        return self._run(request).events()

    def advice(self, request: Request) -> list[Advice]:
        """What is wrong."""
        columns, lock = self._run(request).metrics()
        with lock:
            return advice(columns.newest(2 * HISTORY))  # between two steps lies the line of one evaluation at most

    def settings(self, request: Request) -> SettingsPage:
        """Its settings, and what differs from its recipe."""
        folder = self._folder(request)
        stamp = tuple(stamp_of(folder / file) for file in ("config.toml", "recipe.toml"))
        text = masked_text(read_settings(folder / "config.toml").text_of_file)
        return SettingsPage(text, changes_from_recipe(folder, stamp))

    def waterfall(self, request: Request) -> Waterfall:
        """A step's phases."""
        found = self._run(request).waterfall(_number(request, "step"))
        if found is None:
            raise NotFound("the trace has no step: observability.trace_mb is 0, or none was trained yet")
        return found

    def schedule(self, request: Request) -> Schedule:
        """Who did what in a stretch of time."""
        found = self._run(request).schedule(_seconds(request, "from"), _seconds(request, "to"))
        if found is None:
            raise NotFound("there is no trace: observability.trace_mb is 0, or nothing was traced yet")
        return found

    def rollouts(self, request: Request) -> RolloutTable:
        """A step's, or an evaluation's."""
        return self._run(request).rollouts.table(_kind(request), _step(request))

    def rollout(self, request: Request) -> Json:
        """One, with long texts cut."""
        return shortened(self._record(request))

    def text(self, request: Request) -> Json:
        """One text of a rollout, whole: `at=messages/3/content`."""
        return part(self._record(request), request.query_params.get("at", "").split("/"))

    def _record(self, request: Request) -> dict[str, Json]:
        kind, step, rollout_id = _kind(request), _step(request), request.query_params.get("id", "")
        record = self._run(request).rollouts.record(kind, step, rollout_id)
        if record is None:
            raise NotFound(f"{kind} {step} has no rollout {rollout_id!r}")
        return record

    def search(self, request: Request) -> Matches:
        """Rollouts that hold a text, or are of an environment, an outcome, a range of reward or length: in the file
        that is viewed (`kind=step&step=7`), then in the newest; `from=step_3` goes on where an answer's `next` said."""
        wanted = Wanted(**{name: request.query_params.get(name, "") for name in Wanted.__struct_fields__})
        if wanted.is_any:
            raise NotFound("there is nothing to search for")
        rollouts = self._run(request).rollouts
        files = rollouts.newest_first((_kind(request), _number(request, "step") or 0))
        names = [f"{kind}_{step}" for kind, step in files]
        begin = request.query_params.get("from", "")
        return rollouts.search(wanted, files[names.index(begin) if begin in names else 0 :], seconds=_SEARCH_S)

    def tokens(self, request: Request) -> TokenPage:
        """A stretch of a branch of a rollout: `step=3&id=...&branch=0&from=4000&count=20000`."""
        try:
            found = self._tokens.page(
                self._folder(request),
                request.query_params.get("id", ""),
                step=_step(request),
                is_evaluation=_kind(request) == "evaluation",
                branch=_number(request, "branch") or 0,
                first=_number(request, "from") or 0,
                count=_number(request, "count") or PAGE_TOKENS,
            )
        except ModuleNotFoundError as error:
            raise NotFound(extra_needed("reading tokens", error.name, "parquet")) from error
        if found is None:
            raise NotFound(
                "no tokens of it were written: observability.tokens_every_steps says of which steps they are"
            )
        return found

    def _chats(self, folder: Path, row: RunRow) -> dict[str, ChatPlace]:
        own = running_policy(folder) if row.state is RunState.RUNNING else None
        places = {"running policy": own, "served model": self._chat}
        return {name: place for name, place in places.items() if place is not None}

    def _chat_place(self, request: Request) -> ChatPlace:
        """Raises `NotFound`."""
        name = request.query_params.get("with", "")
        places = self._chats(self._folder(request), self._row(request))
        if name not in places:
            raise NotFound(
                f"no {name or 'policy'} answers: the run has ended, or it has no gateway; docs/ui.md says more"
            )
        return places[name]

    async def chat(self, request: Request) -> Response:
        """Ask a policy: the one thing that is not read from files."""
        try:
            place = await anyio.to_thread.run_sync(self._chat_place, request)
        except NotFound as error:
            return _json({"error": str(error)}, 404)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_BODY_BYTES:
                return _json({"error": "the conversation is too long"}, 413)
        try:
            return _json(await reply(place, body))
        except TailraceError as error:
            return _json({"error": str(error)}, 502)


class _Page(StaticFiles):
    """Files of the page: asked for again each time, and sent only where they changed."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """As Starlette's."""
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def _answering(handler: Handler) -> Callable[[Request], Response]:
    """In a thread: what cannot be found or read is told, and no error of the server's."""

    def answering(request: Request) -> Response:
        try:
            return _json(handler(request))
        except NotFound as error:
            return _json({"error": str(error)}, 404)
        except (TailraceError, OSError) as error:
            return _json({"error": str(error)}, 422)

    return answering


def _json(value: object, status: int = 200) -> Response:
    return Response(
        msgspec.json.encode(value), status, headers={"cache-control": "no-store"}, media_type="application/json"
    )


def _writes_trace(folder: Path) -> bool:
    return read_settings(folder / "config.toml").flat.get("observability.trace_mb") != 0


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else None


def _step(request: Request) -> int:
    step = _number(request, "step")
    if step is None:
        raise NotFound("step must be a number")
    return step


def _seconds(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise NotFound(f"{name} must be a number") from None


def _kind(request: Request) -> Kind:
    match kind := request.query_params.get("kind", "step"):
        case "step" | "evaluation":
            return kind
    raise NotFound(f"kind is {kind!r}; it must be step or evaluation")
