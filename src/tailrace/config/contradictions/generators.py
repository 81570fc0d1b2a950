"""Between generators, and what they are asked to return."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tailrace.config.contradictions.contradiction import Contradiction, first_twice, key_of_other_hosts
from tailrace.errors import SettingsError
from tailrace.generation.engines.vllm.requests import HIGHEST_TEMPERATURE
from tailrace.records.sampling import LEAST_TEMPERATURE
from tailrace.transport.keys import require_safe_address

if TYPE_CHECKING:
    from tailrace.config.settings import RunSettings
    from tailrace.generation.settings import GeneratorSettings, ModelSettings

_SUPPORT_IDS = 2**31


def _replicas(settings: RunSettings) -> Iterator[Contradiction]:
    generator = settings.generator
    if settings.placement == "inline" and (generator.replicas.max > 1 or generator.connect):
        key = "generator.connect" if generator.connect else "generator.replicas"
        message = f'{key} needs generators in processes of their own: leave it out, or write placement = "local"'
        yield Contradiction(message, key, "placement")
    if generator.connect and generator.replicas.max > 1:
        yield Contradiction(
            "generator.connect names generators that run already, generator.replicas starts new ones: leave one out",
            *("generator.replicas", "generator.connect"),
        )
    if generator.connect_key and not generator.connect:
        message = "generator.connect_key is for generator.connect, which is empty: leave it out, or name the generators"
        yield Contradiction(message, "generator.connect_key")
    for address in generator.connect:
        yield from _unguarded(address, generator.connect_key, "generator.connect", "generator.connect_key")
    if twice := first_twice(generator.connect):
        yield Contradiction(f"generator.connect names {twice} twice", "generator.connect")
    yield from _joining(generator)
    yield from _growing(settings)


def _growing(settings: RunSettings) -> Iterator[Contradiction]:
    """A launcher of one's own may start more generators as a cluster's does."""
    chosen, unset = settings.generator.replicas, type(settings.generator.replicas)()
    names = [name for name in ("grow_after_s", "shrink_after_s") if getattr(chosen, name) != getattr(unset, name)]
    if names and not chosen.may_join:
        why = f"generator.replicas has min = max = {chosen.max}: leave it out, or write a larger max"
    elif names and settings.placement != "ray" and ":" not in settings.placement:
        why = "only with placement = 'ray' a run starts more of them by itself: leave it out, or choose that"
    else:
        return
    yield Contradiction(
        f"generator.replicas.{names[0]} is about how many generators a run has, and {why}",
        *(f"generator.replicas.{names[0]}", "placement"),
    )


def _joining(generator: GeneratorSettings) -> Iterator[Contradiction]:
    address, keys = generator.join_address, ("generator.join_address", "generator.replicas")
    if address is not None and not generator.replicas.may_join:
        yield Contradiction(
            f"generator.join_address is for generators that join, and generator.replicas = {generator.replicas.max} "
            "takes none in: leave it out, or write generator.replicas = {min = ..., max = ...}",
            *keys,
        )
    if generator.join_key is not None and address is None:
        message = "generator.join_key is for generator.join_address, which is unset: leave it out, or say where"
        yield Contradiction(message, "generator.join_key")
    if address is not None:
        yield from _unguarded(address, generator.join_key, "generator.join_address", "generator.join_key")


def _unguarded(address: str, key: str | None, setting: str, key_setting: str) -> Iterator[Contradiction]:
    """One that other machines can reach, without a key."""
    try:
        require_safe_address(address, has_keys=key is not None, setting=setting, key_setting=key_setting)
    except SettingsError as error:
        yield Contradiction(str(error), setting)


def _router_replay(settings: RunSettings) -> Iterator[Contradiction]:
    keys = ("trainer.router_replay", "generator.return_routed_experts")
    replay, returned = settings.trainer.router_replay, settings.generator.return_routed_experts
    if replay == "on" and not returned:
        yield Contradiction(
            "trainer.router_replay = 'on' replays the experts that generation chose, and "
            "generator.return_routed_experts = false leaves them unknown: write generator.return_routed_experts = true",
            *keys,
        )
    elif returned and (elsewhere := key_of_other_hosts(settings)) and settings.transport.payloads == "reference":
        yield Contradiction(
            f"generators of {elsewhere} do not see this run's shared memory, and transport.payloads = 'reference' "
            'leaves routed experts there: write transport.payloads = "value"',
            *("transport.payloads", elsewhere),
        )
    elif replay == "off" and returned:
        yield Contradiction(
            "generator.return_routed_experts = true sends experts for every token and layer to a trainer that "
            "trainer.router_replay = 'off' keeps from using them: leave one of them out",
            *keys,
        )
    elif returned and settings.trainer.loss.reference_kl is not None:
        yield Contradiction(
            "generator.return_routed_experts = true trains the policy with the experts that generation chose, and the "
            "model of trainer.loss.reference_kl chooses its own, so that equal weights would diverge: leave one out",
            *("trainer.loss.reference_kl", "generator.return_routed_experts"),
        )


def _supports(settings: RunSettings) -> Iterator[Contradiction]:
    rollouts, generator = settings.rollouts, settings.generator
    knows = generator.engine != "vllm" or generator.connect or generator.vllm.get("return_sampling_mask")
    if rollouts.restricts and not knows:
        key = "rollouts.top_p" if rollouts.top_p < 1 else "rollouts.top_k"
        yield Contradiction(
            f"{key} restricts what is sampled, and the trainer has to know what was left: add "
            "generator.vllm.return_sampling_mask = true (vLLM on GPUs), or choose generator.engine = 'torch'",
            *(key, "generator.engine"),
        )


def _support_room(settings: RunSettings) -> Iterator[Contradiction]:
    """A batch names the ids of supports by 31 bits; each sampled token brings `top_k` of them."""
    rollouts, trainer, batch_size = settings.rollouts, settings.trainer, settings.scheduling.batch_size
    longest = min(rollouts.max_rollout_tokens or settings.max_model_tokens, settings.max_model_tokens)
    rank_rollouts = -(-batch_size // trainer.row_groups)
    ids = rank_rollouts * longest * rollouts.top_k
    if ids >= _SUPPORT_IDS:
        yield Contradiction(
            f"rollouts.top_k = {rollouts.top_k:,} sends so many token ids with each token: {rank_rollouts:,} rollouts "
            f"of {longest:,} tokens, one rank's part of a batch, are {ids:,} ids, and a batch holds {_SUPPORT_IDS:,}: "
            "lower rollouts.top_k, scheduling.batch_size or model.max_model_tokens, or raise trainer.ranks",
            *("rollouts.top_k", "scheduling.batch_size"),
        )


def context_beyond_slots(model: ModelSettings, generator: GeneratorSettings) -> Iterator[Contradiction]:
    """A context that was asked for and that no slot holds; of a run, and of a generator that no run started."""
    chosen, most = model.max_model_tokens, generator.max_cache_tokens
    if chosen is not None and chosen > most:
        yield Contradiction(
            f"model.max_model_tokens = {chosen} asks for a longer context than a slot holds, which is "
            f"generator.max_cache_tokens = {most}: write generator.max_cache_tokens = {chosen}",
            *("model.max_model_tokens", "generator.max_cache_tokens"),
        )


def _contexts(settings: RunSettings) -> Iterator[Contradiction]:
    """`model.max_model_tokens` may be below a completion's limit: it becomes the model's own context where unset."""
    yield from context_beyond_slots(settings.model, settings.generator)
    most, asked = settings.generator.max_cache_tokens, dict[str, tuple[str, int]]()
    for one in settings.environments:
        if one.max_tokens is None:
            asked["rollouts.max_tokens"] = "rollouts.max_tokens", settings.rollouts.max_tokens
        else:
            asked[f"max_tokens of environment {one.id or one.name!r}"] = "environments", one.max_tokens
    for what, (key, tokens) in asked.items():
        if tokens >= most:
            yield Contradiction(
                f"{what} is {tokens}, which leaves no room for a prompt in a slot: that holds "
                f"generator.max_cache_tokens = {most}, prompt and completion together; raise it, or lower {what}",
                *(key, "generator.max_cache_tokens"),
            )


def temperatures(settings: RunSettings, *, of_judges: bool = False) -> Iterator[Contradiction]:
    """Those asked for that the run's engine does not sample at. `of_judges` as `temperatures_outside` has it."""
    for key, temperature in settings.temperatures_outside(LEAST_TEMPERATURE, math.inf, of_judges=of_judges):
        yield Contradiction(
            f"{key} asks for a temperature of {temperature:g}, and engines sample at {LEAST_TEMPERATURE:g} or above: "
            "write one of those",
            key,
        )
    if settings.generator.engine != "vllm" or settings.generator.connect:  # the latter say themselves what they take
        return
    for key, temperature in settings.temperatures_outside(0.0, HIGHEST_TEMPERATURE, of_judges=of_judges):
        yield Contradiction(
            f"{key} asks for a temperature of {temperature:g}, and generator.engine = 'vllm' samples at "
            f"{HIGHEST_TEMPERATURE:g} at most: write less, or choose the torch engine",
            *(key, "generator.engine"),
        )


CHECKS = (
    _replicas,
    _router_replay,
    _supports,
    _support_room,
    _contexts,
    temperatures,
)
