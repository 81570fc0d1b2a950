"""How tokens are sampled."""

from __future__ import annotations

import msgspec

from tailrace.errors import SettingsError

LEAST_TEMPERATURE = 0.01
"""Above 0: vLLM samples at this one where it is asked for less, and divided by much less logits overflow."""
MOST_STOP_TOKEN_IDS = 128
"""Of one request: as many as vLLM's newer model runner takes."""
_MOST_TOKEN_ID = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one request's sampling; they travel with the tokens, because the loss needs the same distribution."""

    temperature: float = 1.0
    """Logits are divided by it, `LEAST_TEMPERATURE` or above; 0 is greedy (its log-probabilities are those of 1)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach it; 1 keeps all."""
    top_k: int = 0
    """Keep the k most likely tokens; 0, or as many as the vocabulary has, keeps all."""
    max_tokens: int = 256
    """Tokens of this completion at most."""
    stop_token_ids: tuple[int, ...] = ()
    """A sampled token among these, `MOST_STOP_TOKEN_IDS` at most, ends the completion, and is its last token."""
    returns_supports: bool = False
    """Whether the tokens that top-p and top-k left are returned with each token, as training on it needs."""
    seed: int | None = None
    """Seed of this request's own random stream; None draws from the engine's."""
    json_schema: str | None = None
    """What the reply has to be, a schema of JSON as JSON; None: any text. Never of rollouts that are trained on."""
    n: int = 1
    """Sequences of one request; there is no other number than 1."""

    @property
    def restricts(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary alone."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def require_valid(self) -> None:
        """Raise `SettingsError` for a value outside its range, naming the field."""
        if not (self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE):
            raise SettingsError(
                f"sampling.temperature is {self.temperature}; it must be 0 (greedy), or {LEAST_TEMPERATURE:g} or above"
            )
        if not 0 < self.top_p <= 1:
            raise SettingsError(f"sampling.top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise SettingsError(f"sampling.top_k is {self.top_k}; it must be 0 (off) or above")
        if len(self.stop_token_ids) > MOST_STOP_TOKEN_IDS:
            raise SettingsError(
                f"sampling.stop_token_ids names {len(self.stop_token_ids)} tokens; {MOST_STOP_TOKEN_IDS} are the most"
            )
        if strange := [one for one in self.stop_token_ids if not 0 <= one <= _MOST_TOKEN_ID]:
            raise SettingsError(f"sampling.stop_token_ids holds {strange[0]}, which no token has as its id")
        if self.n != 1:
            raise SettingsError(
                f"sampling.n is {self.n}; a request samples one sequence: ask once for each, they share their prompt's "
                "cache as requests of one group"
            )
        if self.max_tokens < 1:
            raise SettingsError(f"sampling.max_tokens is {self.max_tokens}; it must be 1 or above")
