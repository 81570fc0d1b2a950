"""A policy that belongs to no rollout: every request is a conversation of its own, sampled as it asks."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from tailrace.config.gateway import GatewaySettings
from tailrace.errors import BudgetExceeded, SettingsError
from tailrace.gateway.dialects.protocol import ChatRequest, Failure, RequestInvalid
from tailrace.gateway.dialects.token_generation import TokenRequest
from tailrace.gateway.sessions import Session
from tailrace.records import SamplingParams
from tailrace.rollouts import RolloutPolicy


class FixedPolicy(Session):
    """A session that lasts as long as its gateway, for any number of clients."""

    def __init__(
        self, key: str, root_url: str, settings: GatewaySettings, new_policy: Callable[[SamplingParams], RolloutPolicy]
    ) -> None:
        """`new_policy` makes the policy of one request."""
        super().__init__(key, root_url, new_policy(SamplingParams()), settings)
        self._new_policy = new_policy
        self.keeps_sampling = True  # what a request asks for is in its policy
        self.system_messages = None  # another client may ask the same under its own, and no branch is to be kept

    @override
    def policy_for(self, request: ChatRequest | TokenRequest) -> RolloutPolicy:
        form = request.form if isinstance(request, ChatRequest) else None
        asked = SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            max_tokens=request.max_tokens or self.max_model_tokens or SamplingParams().max_tokens,
            seed=None if request.seed is None else abs(request.seed),
            json_schema=None if form is None else form.schema,
        )
        try:
            asked.require_valid()
        except SettingsError as error:
            raise RequestInvalid(str(error)) from error
        return self._new_policy(asked)

    @override
    def refusal(self, error: BudgetExceeded, *, asks_on: bool) -> Failure:
        return Failure(status=400, message=str(error))
