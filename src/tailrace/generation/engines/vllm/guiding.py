"""vLLM's structured outputs: replies that are JSON of a schema.

A token is sampled from what the schema leaves of the vocabulary, and its log-probability is that of this distribution:
vLLM masks the logits before it samples and before it takes log-probabilities. The trainer knows no such masks, so
nobody trains on these replies.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tailrace.errors import RequestRefused
from tailrace.records import GenerationRequest

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.v1.engine.core import EngineCore


class Guide:
    """Of one engine core, which is built without a tokenizer: it gets one with the first request that needs it."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._has_tokenizer = core, False

    def apply(self, request: GenerationRequest, params: VllmSamplingParams) -> None:
        """Let vLLM's settings of a request say its schema, if it has one. Raises `RequestRefused`."""
        schema = request.sampling.json_schema
        if schema is None:
            return
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import StructuredOutputsParams

        if request.prefix_tokens:
            raise RequestRefused(f"request {request.request_id}: JSON of a schema that was interrupted cannot go on")
        config = self._core.vllm_config
        try:
            self._require_tokenizer()
            params.structured_outputs = StructuredOutputsParams(json=schema)
            tokenizer = self._core.structured_output_manager.tokenizer
            params._validate_structured_outputs(config.model_config, config.structured_outputs_config, tokenizer)
        except (OSError, ValueError, VLLMClientError) as error:
            raise RequestRefused(
                f"request {request.request_id}: its JSON schema cannot be followed: {error}"
            ) from error

    def _require_tokenizer(self) -> None:
        """What vLLM makes at its start where it has a tokenizer: that, and a thread that compiles schemas."""
        from vllm.tokenizers import cached_get_tokenizer

        if self._has_tokenizer:
            return
        model, manager = self._core.vllm_config.model_config, self._core.structured_output_manager
        manager.tokenizer = cached_get_tokenizer(
            model.tokenizer,
            runner_type=model.runner_type,
            tokenizer_mode=model.tokenizer_mode,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
        )
        manager.executor = ThreadPoolExecutor(1, thread_name_prefix="tailrace-schemas")
        self._has_tokenizer = True
