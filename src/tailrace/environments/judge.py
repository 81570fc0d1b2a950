"""What an environment says of the language model that judges its groups; `rollouts.scoring.judge` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from tailrace.records import Group, Message

RUBRIC = """\
- An answer that does what was asked scores clearly above one that does not, whatever its style.
- Among answers that do, the more direct one scores higher.
- Judge only what is written: claims of success count for nothing.
- Use the whole range, so that better answers can be told from worse ones even where the differences are small."""
"""For environments that say nothing better."""


class JudgeSettings(BaseModel, extra="forbid", frozen=True):
    """A judge that scores the rollouts of a group relative to each other: `[environments.judge]` in TOML.

    What is unset is left out wherever settings are written down or sent to another process: there, too, it is that of
    the environment's own judge, where it has one.
    """

    rubric: str | None = Field(
        None, min_length=1, description="What makes a rollout better. Unset: doing what was asked, then directness."
    )
    url: str | None = Field(
        None, pattern=r"^https?://", description="An OpenAI-compatible endpoint with its `/v1`. Unset: the policy's."
    )
    model: str = Field("", description="What the endpoint calls the model; unused with the own engine.")
    api_key_variable: str | None = Field(None, description="Environment variable with its key. Unset: no key is sent.")
    temperature: float = Field(1.0, ge=0, description="Of the judge. At 0 a second call may fail as the first.")
    max_tokens: int = Field(1024, ge=1, description="Tokens of one verdict at most.")
    timeout_s: float = Field(60.0, gt=0, description="Seconds one call may take.")
    retries: int = Field(2, ge=0, description="Calls after one that failed, timed out or gave no valid scores.")
    retry_pause_s: float = Field(0.5, ge=0, description="Seconds before the first retry, doubled every time.")
    weight: float = Field(1.0, description="Of the judge's score, 0 to 1, in the reward.")
    own_weight: float = Field(0.0, description="Of the reward that a rollout had of its own, in the reward.")
    prompt_price: float = Field(0.0, ge=0, description="Of a million prompt tokens, in any currency.")
    completion_price: float = Field(0.0, ge=0, description="Of a million completion tokens.")

    @model_serializer(mode="wrap")
    def _what_is_set(self, all_of: SerializerFunctionWrapHandler) -> dict[str, object]:
        """None is unset, as in TOML, which cannot say it."""
        written = all_of(self).items()
        return {name: value for name, value in written if name in self.model_fields_set and value is not None}


class JudgeFormat(Protocol):
    """How a judge is asked about a group, and how its answer is read. Pure: the judge does the calling."""

    def prompt(self, group: Group, rubric: str) -> list[Message]:
        """The conversation whose next message is the verdict."""

    def scores(self, answer: str, group: Group) -> Sequence[float]:
        """One score from 0 to 1 per rollout, in their order. Raises `JudgeFailed` for an answer that holds none."""
