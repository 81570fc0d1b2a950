"""Settings of the model and of the generator."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]


class ModelSettings(BaseModel):
    """Which model is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        description="Hugging Face id, local folder in Hugging Face layout, .gguf file, or bundled:quickstart"
    )
    dtype: Dtype = Field(
        default="float32",
        description="Type of the weights that generate; with bfloat16, residual stream and logits stay in float32",
    )
    max_model_tokens: int | None = Field(
        default=None, ge=2, description="Prompt and completion together, in tokens; unset: what the model was made for"
    )


class GeneratorSettings(BaseModel):
    """How completions are sampled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["torch"] = Field(default="torch", description="Engine that runs the model")
    device: str = Field(default="cpu", description="Where the torch engine runs: cpu, cuda, cuda:1, ...")
    slots: int = Field(default=64, ge=1, description="Requests that run at the same time in one generator")
    max_cache_tokens: int = Field(
        default=4096, ge=2, description="Tokens that one slot can hold; caps model.max_model_tokens"
    )
    prefill_chunk_tokens: int = Field(
        default=512, ge=1, description="Prompt tokens computed in one engine step beside the running completions"
    )
    chunk_tokens: int = Field(default=64, ge=1, description="Tokens of a completion between two reports of the engine")
    threads: int = Field(default=1, ge=1, description="CPU threads of the engine")
    seed: int = Field(default=0, ge=0, description="Seed of the random streams of requests that bring none")
