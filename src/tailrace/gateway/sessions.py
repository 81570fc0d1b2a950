"""Keys and what they open: a key is one rollout, for as long as its agent has an endpoint.

    key of a rollout that is open ─► its session        that has ended ─► 410        any other key, or none ─► 401

A key proves itself (it is signed), so that those of rollouts long past need not be remembered, nor those of rollouts
that a process before this one had.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import hmac
import secrets
from collections.abc import Iterator

from typing_extensions import override

from tailrace.config.gateway import GatewaySettings
from tailrace.environments import AgentResult, ChatFormat, Endpoint, Offer
from tailrace.errors import BudgetExceeded, EngineFailed, EnvironmentFailed
from tailrace.gateway.conversations import Conversations
from tailrace.gateway.dialects.json_form import require_no_form
from tailrace.gateway.dialects.protocol import ChatRequest, Failure, RequestInvalid
from tailrace.gateway.dialects.token_generation import TokenRequest
from tailrace.gateway.offers import Offers
from tailrace.gateway.system_messages import FirstSystemMessages
from tailrace.gateway.turns import Turns
from tailrace.records import SamplingParams
from tailrace.rollouts import RolloutPolicy

_SIGNATURE = 32
"""Characters: 128 bits."""


class Session(Endpoint):
    """One rollout, as its clients see it."""

    def __init__(self, key: str, root_url: str, policy: RolloutPolicy, settings: GatewaySettings) -> None:
        self._key, self._root_url, self._policy = key, root_url, policy
        self.keeps_sampling = settings.sampling == "run"
        self.system_messages = FirstSystemMessages() if settings.system_messages == "first" else None
        self.turns = Turns()
        self.conversations = Conversations()
        self.context = contextvars.copy_context()
        """Of whoever plays the rollout: what its turns take is counted there."""
        self.told_of_no_budget = False
        """A client was sent the empty answer of a turn for which nothing was left, and none has had a reply since."""
        self.engine_failure: EngineFailed | None = None
        self._reported: AgentResult | None = None
        self._ended = asyncio.Event()
        self.offers: Offers | None = None
        """Where clients outside may claim it."""
        self.hear()

    @property
    @override
    def key(self) -> str:
        return self._key

    @property
    @override
    def root_url(self) -> str:
        return self._root_url

    @property
    @override
    def openai_url(self) -> str:
        return f"{self._root_url}/v1"

    @property
    @override
    def path_url(self) -> str:
        return f"{self._root_url}/rollouts/{self._key}"

    @property
    @override
    def chat_format(self) -> ChatFormat | None:
        return self._policy.chat_format

    @property
    @override
    def reported(self) -> AgentResult | None:
        return self._reported

    @override
    async def ended(self) -> None:
        await self._ended.wait()

    @override
    async def play_outside(self, offer: Offer) -> None:
        assert self.offers is not None  # rollouts have some
        await self.offers.play(self, offer)

    @property
    def has_ended(self) -> bool:
        """Whether its agent said so, or what plays it has left."""
        return self._ended.is_set()

    def hear(self) -> None:
        """A client asks for something, or has waited for an answer until now."""
        self.heard_s = asyncio.get_running_loop().time()

    @property
    def sampling(self) -> SamplingParams | None:
        """Of all that is sampled for it; None: every request has its own."""
        return self._policy.sampling

    def refusal(self, error: BudgetExceeded, *, asks_on: bool) -> Failure | None:
        """What a client is told where no budget is left; None: its reply ends at once, for its length.

        Whoever `asks_on`, after a client was told that way and none has had a reply since, is told why.
        """
        return Failure(status=429, message=str(error)) if asks_on else None

    def lacks_budget(self, error: BudgetExceeded) -> None:
        """Nothing was left for a turn."""
        self._policy.no_budget = error

    @property
    def max_model_tokens(self) -> int | None:
        """Of prompt and completion, at most."""
        return self._policy.max_model_tokens

    def policy_for(self, request: ChatRequest | TokenRequest) -> RolloutPolicy:
        """Who answers a request. Raises `RequestInvalid` where nobody can."""
        if isinstance(request, ChatRequest):
            require_no_form(request.form)
        return self._policy

    def count_tokens(self, request: ChatRequest) -> int:
        """Of a prompt. Raises `RequestInvalid` where the model's template refuses it."""
        try:
            return len(self._policy.prompt_of(request.messages, request.tools))
        except (EnvironmentFailed, ValueError) as error:
            raise RequestInvalid(str(error)) from error

    def report(self, result: AgentResult) -> None:
        """Its agent says what it earned, and that it has ended."""
        self._reported = result
        self._ended.set()

    def end(self) -> None:
        """Its agent says that it has ended."""
        self._ended.set()

    def close(self) -> None:
        """Nothing more is sampled for it; requests that still run are told so."""
        self._ended.set()
        self.turns.cancel()


class Sessions:
    """The rollouts that have an endpoint now."""

    def __init__(self, settings: GatewaySettings, secret: bytes = b"") -> None:
        """`secret` signs keys: that of the run, whose gateways know each other's keys; none: one of its own."""
        self._settings, self.offers = settings, Offers()
        self.secret = secret or secrets.token_bytes(32)
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def open(self, policy: RolloutPolicy, root_url: str) -> Session:
        """A session with a key of its own."""
        number = secrets.token_hex(8)
        key = f"{number}-{self._signature(number)}"
        session = self._open[key] = Session(key, root_url, policy, self._settings)
        session.offers = self.offers
        return session

    def add(self, session: Session) -> None:
        """A session with a key that somebody chose."""
        self._open[session.key] = session

    def close(self, session: Session) -> None:
        """Its key is that of a rollout that has ended."""
        self._open.pop(session.key, None)
        session.close()

    def find(self, path_key: str | None, keys: list[str]) -> Session:
        """The session of a request: by the key in its path, else by those in its headers.

        Raises `RequestInvalid`: 401 for no key, one that was never given, and another rollout's beside that in the
        path; 410 for one of a rollout that has ended.
        """
        key = path_key or next((one for one in keys if one in self._open or self._is_ours(one)), None)
        if key is None:
            raise RequestInvalid(
                "no key was sent: send the rollout's, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
                if not keys
                else "this key is not that of a rollout: send the one that the agent was given",
                status=401,
            )
        session = self._open.get(key)
        if session is None:
            if self._is_ours(key):
                raise RequestInvalid(
                    "this rollout has ended, or is not played here: nothing more is sampled for it", status=410
                )
            raise RequestInvalid("the key in the path is not that of a rollout", status=401)
        if any(one != key and self._is_ours(one) for one in keys):
            raise RequestInvalid("the keys in the path and in a header are those of different rollouts", status=401)
        session.hear()
        return session

    def _is_ours(self, key: str) -> bool:
        number, _, signature = key.partition("-")
        return signature.isascii() and hmac.compare_digest(signature, self._signature(number))

    def _signature(self, number: str) -> str:
        return hmac.new(self.secret, number.encode(), hashlib.sha256).hexdigest()[:_SIGNATURE]
