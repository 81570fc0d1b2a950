"""A teacher behind an endpoint: `POST {url}/completions` with token ids and `prompt_logprobs`, as vLLM serves it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from typing_extensions import override

from tailrace.errors import ChatFailed, ModelError
from tailrace.records import Int32Array, TokenScores, as_token_ids
from tailrace.rollouts.chat.tokenizer import ChatTokenizer
from tailrace.rollouts.scoring.http_client import HttpClient
from tailrace.rollouts.scoring.teacher.prompt_logprobs import read_prompt_logprobs
from tailrace.rollouts.scoring.teacher.teacher import TokenScorer
from tailrace.timeouts import timeout
from tailrace.urls import without_user

_PROBED_TOKENS = 512
_PROBED_LAST = 64
"""Of the vocabulary's end, where what a family's later models added lies."""
_PROBE_TIMEOUT_S = 60.0


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    max_model_len: int | None = None


_decode_tokenized = msgspec.json.Decoder(_Tokenized).decode


class EndpointScorer(TokenScorer):
    """Scores come from an endpoint. Connections are kept and reused; `close` it when done."""

    def __init__(
        self, url: str, model: str, *, vocabulary: int, top_k: int = 0, api_key_variable: str | None = None
    ) -> None:
        """`url` with its `/v1`; `vocabulary` is the policy's, whose tokens alone count among the `top_k` likeliest.

        Raises `SettingsError` where the variable with its key is not set.
        """
        self._url, self._model = url.rstrip("/"), model
        self._top_k, self._vocabulary = top_k, vocabulary
        self._client = HttpClient(api_key_variable, setting="trainer.loss.distillation.api_key_variable")

    async def require_fitting(self, tokenizer: ChatTokenizer, max_tokens: int) -> None:
        """Raise `ModelError` unless it has this tokenizer, room for branches of `max_tokens`, and scores tokens.

        A text of some hundred tokens from all over the vocabulary must become the same ids there.
        """
        text = tokenizer.decode(_probe(tokenizer.num_tokens))
        expected = tokenizer.encode(text)
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        url = f"{self._url.removesuffix('/v1')}/tokenize"
        try:
            async with timeout(_PROBE_TIMEOUT_S):
                found = _decode_tokenized(await self._client.post(url, body))
        except (TimeoutError, ChatFailed, msgspec.MsgspecError) as error:
            raise ModelError(
                f"{self._name} does not say which tokenizer it has: {str(error) or 'no answer in time'}; start it "
                "before the run, with vLLM, whose POST /tokenize is asked"
            ) from error
        if found.tokens != expected:
            raise ModelError(
                f"{self._name} has another tokenizer than the policy, and would score other tokens than those that "
                "were sampled: choose one of the same family"
            )
        if found.max_model_len is not None and found.max_model_len <= max_tokens:
            raise ModelError(
                f"{self._name} takes {found.max_model_len} tokens, and a rollout's branch may have {max_tokens}, with "
                "one more that the teacher samples: give it a longer context, or lower model.max_model_tokens"
            )
        await self._require_scores(expected[: max(2, max_tokens)])

    @override
    async def ready(self) -> None:
        pass  # it answered before the run

    @override
    async def score(self, token_ids: Int32Array) -> TokenScores:
        body = {
            "model": self._model,
            "prompt": token_ids.tolist(),
            "max_tokens": 1,
            "prompt_logprobs": self._top_k,
        }
        url = f"{self._url}/completions"
        answer = await self._client.post(url, body)
        try:
            return await read_prompt_logprobs(answer, token_ids, top_k=self._top_k, vocabulary=self._vocabulary)
        except (msgspec.MsgspecError, ValueError) as error:
            what = f"{without_user(url)} answered something else than the prompt's log-probabilities: {error}"
            raise ChatFailed(what, may_recover=True) from error

    @override
    async def close(self) -> None:
        await self._client.close()

    @property
    def _name(self) -> str:
        return f"the teacher of trainer.loss.distillation.url = {without_user(self._url)!r}"

    async def _require_scores(self, token_ids: list[int]) -> None:
        try:
            async with timeout(_PROBE_TIMEOUT_S):
                scores = await self.score(as_token_ids(token_ids))
        except (TimeoutError, ChatFailed) as error:
            raise ModelError(f"{self._name} does not score tokens: {str(error) or 'no answer in time'}") from error
        num_alternatives = int((scores.top_ids >= 0).sum(1).max())
        if num_alternatives < self._top_k:
            raise ModelError(
                f"{self._name} names {num_alternatives} likely tokens, and trainer.loss.distillation.top_k is "
                f"{self._top_k}: start it with `--max-logprobs` as high, or lower top_k"
            )


def _probe(vocabulary: int) -> Sequence[int]:
    """Token ids from all over a vocabulary, and its last."""
    places = np.linspace(0, vocabulary, _PROBED_TOKENS, endpoint=False).astype(int)
    last = np.arange(max(0, vocabulary - _PROBED_LAST), vocabulary)
    return [int(place) for place in np.concatenate([places, last])]
