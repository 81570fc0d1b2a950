"""A conversation with the policy of a run, or with what `tailrace serve --http` serves: a reply has its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from tailrace.errors import DataError, SettingsError, TransportError
from tailrace.guards import decoded, guarded, read_at_most
from tailrace.records import Json
from tailrace.transport.keys import read_http_key

_TIMEOUT_S = 300.0
_MOST_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class ChatPlace:
    """Where it answers (`http://127.0.0.1:8000`), and the key that it takes."""

    url: str
    key: str


def chat_place(url: str | None, key_file: Path | None) -> ChatPlace | None:
    """What the command line says of it; None where it says nothing. Raises `SettingsError`."""
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"--chat is {url!r}; it must be as http://127.0.0.1:8000")
    if key_file is None:
        raise SettingsError("--chat needs --chat-key: the file that `tailrace serve --http-key` wrote")
    return ChatPlace(url, read_http_key(key_file, "--chat-key"))


class _Gateway(msgspec.Struct):
    url: str
    policy_key: str = ""


def running_policy(run_folder: Path) -> ChatPlace | None:
    """Where the policy of a run answers while it goes on; None where it has no gateway, or that tells no key."""
    path = run_folder / "gateway.json"
    found = decoded(lambda: msgspec.json.decode(read_at_most(path, 1 << 16), type=_Gateway))
    if found is None or not found.policy_key or not found.url.startswith(("http://", "https://")):
        return None
    return ChatPlace(found.url, found.policy_key)


class Message(msgspec.Struct, frozen=True):
    """One of a conversation."""

    role: str
    content: str


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the page sends."""

    messages: list[Message]
    temperature: float = 1.0
    max_tokens: int = 256


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What it shows: the text, and how likely each token was."""

    text: str
    finish_reason: str
    texts: list[str]
    logprobs: list[float | None]
    """In nats."""


class _Token(msgspec.Struct):
    token: str = ""
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] = []


class _Content(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Content
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


async def reply(place: ChatPlace, body: bytes) -> Reply:
    """What the policy says. Raises `DataError` where `body` is no conversation, `TransportError` without an answer."""
    with guarded("the conversation cannot be read", DataError):
        asked = msgspec.json.decode(body, type=Asked)
    wanted: dict[str, Json] = {
        "model": "policy",
        "messages": [{"role": one.role, "content": one.content} for one in asked.messages],
        "temperature": min(max(asked.temperature, 0.0), 2.0),
        "max_tokens": min(max(asked.max_tokens, 1), _MOST_TOKENS),
        "logprobs": True,
    }
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            response = await client.post(
                f"{place.url.rstrip('/')}/v1/chat/completions",
                content=msgspec.json.encode(wanted),
                headers={"authorization": f"Bearer {place.key}", "content-type": "application/json"},
            )
    except httpx.HTTPError as error:
        raise TransportError(
            f"{place.url} does not answer ({type(error).__name__}): does the run, or `tailrace serve`, go on?"
        ) from None
    if response.status_code != 200:
        raise TransportError(f"{place.url} answered {response.status_code}: {response.text[:500]}")
    with guarded(f"{place.url} sent no answer that can be read", TransportError):
        choice = msgspec.json.decode(response.content, type=_Answer).choices[0]
    tokens = choice.logprobs.content if choice.logprobs is not None else []
    return Reply(
        text=choice.message.content or "",
        finish_reason=choice.finish_reason or "",
        texts=[token.token for token in tokens],
        logprobs=[_finite(token.logprob) for token in tokens],
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
