"""A teacher: another model behind an endpoint, which says how likely it finds the tokens that the policy sampled.

    group ─► POST {url}/completions, once for each branch: token ids, `prompt_logprobs` ─► column `teacher_logprobs`

It is a stage of scoring, which goes on while other groups generate. Token ids are sent as they were sampled, so that
the teacher must have the policy's tokenizer, which it is asked about before the first rollout. vLLM serves this form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from tailrace.errors import ChatFailed, ModelError, ScoringFailed, TeacherFailed
from tailrace.records import TEACHER_LOGPROBS, Branch, Float32Array, Group
from tailrace.rollouts.scoring.http_client import HttpClient

_PROBED_TOKENS = 512


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Completions(msgspec.Struct):
    choices: list[_Choice]


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    max_model_len: int | None = None


_decode_completions = msgspec.json.Decoder(_Completions).decode
_decode_tokenized = msgspec.json.Decoder(_Tokenized).decode


class Tokenizes(Protocol):
    """What a teacher is compared with."""

    @property
    def num_tokens(self) -> int:
        """Of the vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens."""


@dataclass(frozen=True, slots=True)
class TeacherPlan:
    """Where a teacher is, and how long it is waited for."""

    url: str
    """With its `/v1`."""
    model: str
    api_key_variable: str | None = None
    timeout_s: float = 60.0
    retries: int = 2
    retry_pause_s: float = 0.5


class Teacher:
    """Scores the groups of a run, any number at once."""

    def __init__(self, plan: TeacherPlan) -> None:
        """Raises `SettingsError` where the variable with its key is not set."""
        self._plan, self._url = plan, plan.url.rstrip("/")
        self._client = HttpClient(plan.api_key_variable, setting="trainer.loss.distillation.api_key_variable")

    async def require_fitting(self, tokenizer: Tokenizes, max_tokens: int) -> None:
        """Raise `ModelError` unless the teacher has this tokenizer, and room for branches of `max_tokens`.

        A text of some hundred tokens from all over the vocabulary must become the same ids there.
        """
        places = np.linspace(0, tokenizer.num_tokens, _PROBED_TOKENS, endpoint=False)
        text = tokenizer.decode(places.astype(int).tolist())
        body = {"model": self._plan.model, "prompt": text, "add_special_tokens": False}
        url = f"{self._url.removesuffix('/v1')}/tokenize"
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                found = _decode_tokenized(await self._client.post(url, body))
        except (TimeoutError, ChatFailed, msgspec.MsgspecError) as error:
            raise ModelError(
                f"{self._name} does not say which tokenizer it has: {str(error) or 'no answer in time'}; start it "
                "before the run, with vLLM, whose POST /tokenize is asked"
            ) from error
        if found.tokens != tokenizer.encode(text):
            raise ModelError(
                f"{self._name} has another tokenizer than the policy, and would score other tokens than those that "
                "were sampled: choose one of the same family"
            )
        if found.max_model_len is not None and found.max_model_len <= max_tokens:
            raise ModelError(
                f"{self._name} takes {found.max_model_len} tokens, and a rollout's branch may have {max_tokens}, with "
                "one more that the teacher samples: give it a longer context, or lower model.max_model_tokens"
            )

    async def __call__(self, group: Group) -> Group:
        """The group, each sampled branch with its column. Raises `ScoringFailed`, and `TeacherFailed` in a group."""
        branches = [one for rollout in group.rollouts for one in rollout.branches if one.num_completion_tokens]
        if odd := next((one for one in branches if one.temperature not in (None, 1.0)), None):
            raise ScoringFailed(
                f"task {group.task.task_id}: a turn was sampled at temperature {odd.temperature}, and a teacher tells "
                "its log-probabilities at 1: leave chat(temperature=...) out"
            )
        async with asyncio.TaskGroup() as asking:
            for branch in branches:
                asking.create_task(self._score(branch, group))
        return group

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    @property
    def _name(self) -> str:
        return f"the teacher of trainer.loss.distillation.url = {self._plan.url!r}"

    async def _score(self, branch: Branch, group: Group) -> None:
        """Ask until it answers. Waits for the teacher, and before a retry."""
        plan, failure, may_pass = self._plan, "", False
        for attempt in range(plan.retries + 1):
            pause_s = 0.0
            try:
                async with asyncio.timeout(plan.timeout_s):
                    logprobs = await self._ask(branch)
                branch.set_column(TEACHER_LOGPROBS, np.where(branch.loss_mask, logprobs, 0))
            except TimeoutError:
                failure, may_pass = f"no answer within {plan.timeout_s:g} s (distillation.timeout_s)", True
            except ChatFailed as error:
                failure, may_pass = str(error), error.may_recover
                pause_s = max(error.pause_s, plan.retry_pause_s * 2**attempt)
                if not may_pass:
                    break
            else:
                return
            if pause_s and attempt < plan.retries:
                await asyncio.sleep(pause_s)
        failed = TeacherFailed(f"task {group.task.task_id}: the teacher scored nothing; the last answer: {failure}")
        failed.may_pass = may_pass
        raise failed

    async def _ask(self, branch: Branch) -> Float32Array:
        """[num_tokens]: of each token after those before it; 0 of the first. Raises `ChatFailed`."""
        token_ids = branch.token_ids.tolist()
        body = {"model": self._plan.model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._client.post(f"{self._url}/completions", body)
        return await asyncio.to_thread(self._read, answer, token_ids)

    def _read(self, answer: bytes, token_ids: list[int]) -> Float32Array:
        try:
            told = _decode_completions(answer).choices[0].prompt_logprobs
            if told is None or len(told) != len(token_ids):
                raise ValueError(f"{0 if told is None else len(told)} log-probabilities for {len(token_ids)} tokens")
            logprobs = np.array(
                [0.0, *(each[str(token)].logprob for each, token in zip(told[1:], token_ids[1:], strict=True) if each)],
                np.float32,
            )
            if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all():
                raise ValueError("a token has no finite log-probability")
        except (msgspec.MsgspecError, IndexError, KeyError, ValueError) as error:
            raise ChatFailed(
                f"{self._url}/completions answered something else than the prompt's log-probabilities: {error}",
                may_recover=True,
            ) from error
        return logprobs
