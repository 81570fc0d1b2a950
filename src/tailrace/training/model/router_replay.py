"""Router replay: the experts that generation chose, used again in training.

A mixture-of-experts layer sends each token to the `top_k` experts with the highest router logits. Generator and trainer
compute these with different kernels, and a trainer may be versions ahead, so that some tokens get other experts in
training than when they were sampled: their log-probabilities jump, and the ratio of the loss with them. With replay the
layer uses the experts that generation recorded, weighted by the router's present logits by the family's own rule;
gradients reach the router through these weights.

    router(hidden) ──→ logits, own weights, own experts
                         │                    └─ where nothing was recorded ─┐
                         └─ rule(logits, experts) ←── recorded, otherwise ───┘ ──→ logits, weights, experts

The hook sits on the routers alone, after transformers' own code has run, so experts implementations, packed rows,
autocast and activation checkpointing are as they were. Routing replay for reinforcement learning was proposed by Zheng
et al. 2025 (arXiv:2507.18071, §5.3) and, with the generator's routing, by Ma et al. 2025 (arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from tailrace.errors import ModelError, TrainingError
from tailrace.models.routers import Router, as_routing, find_routers, probe_router
from tailrace.training.ranks import ALONE, Ranks

RoutingRule: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""From a router, its logits [num_tokens, num_experts] and experts [num_tokens, top_k] (int64) to their weights."""

_TOLERANCE = 1e-5


def softmax_rule(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Probabilities among all experts: Qwen3-MoE without `norm_topk_prob`, OLMoE, Qwen2-MoE."""
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)


def normalised_softmax_rule(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Probabilities among the chosen experts: Mixtral, Qwen3-MoE with `norm_topk_prob`."""
    weights = softmax_rule(router, logits, experts)
    return weights / weights.sum(dim=-1, keepdim=True)


_RULES: dict[str, RoutingRule] = {"softmax": softmax_rule, "normalised softmax": normalised_softmax_rule}


def add_routing_rule(name: str, rule: RoutingRule) -> None:
    """Add another family's rule. A router gets the first rule that gives its own weights for its own experts."""
    _RULES[name] = rule


class RouterReplay:
    """The hooks on a model's routers, without effect outside of `using`.

    Raises `ModelError` for a model without routers, or with one whose weights follow no known rule.
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = find_routers(model)
        if not self._routers:
            raise ModelError(f"{type(model).__name__} has no routers whose experts could be replayed")
        self._rules = [_rule_of(router) for router in self._routers]
        self._recorded: Tensor | None = None
        self._columns: list[int] = []
        self._sums: list[Tensor | None] = []
        self._totals: Tensor | None = None
        self._routed = 0
        for index, router in enumerate(self._routers):
            router.module.register_forward_hook(partial(self._replay, index))

    @contextmanager
    def using(self, recorded: Tensor | None) -> Iterator[None]:
        """Replay `recorded` [num_tokens, layers, top_k] in forward and backward passes inside; None replays nothing.

        `recorded` is uint8 or uint16 on the model's device, of all layers or of those with experts. A token whose
        entries are all the type's greatest number routes itself. Raises `TrainingError` for an array of another shape,
        and where a router was never asked.
        """
        if recorded is None:
            yield
            return
        self._columns = self._columns_of(recorded)
        self._recorded, self._sums = recorded, [None] * len(self._routers)
        try:
            yield
            self._count(len(recorded))
        finally:
            self._recorded, self._sums = None, []

    def take_metrics(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Of what all ranks replayed since the last call, by their names in the table; empty if nothing was.

        Raises `TrainingError` where a record named an expert that the model lacks.
        """
        own = [0.0] * 3 if self._totals is None else self._totals.tolist()
        parts = ranks.gather([*own, float(self._routed)])
        self._totals, self._routed = None, 0
        replayed, agreement, foreign, routed = map(sum, zip(*parts, strict=True))
        if not routed:
            return {}
        if foreign:
            raise TrainingError(
                f"{foreign:.0f} recorded routings name experts that the model lacks: they are another model's"
            )
        metrics = {"training/replayed_share": replayed / routed}
        if replayed:
            metrics["training/router_agreement"] = agreement / replayed
        return metrics

    def _columns_of(self, recorded: Tensor) -> list[int]:
        """Where the layer of each router lies in the record."""
        top_k, layers = self._routers[0].top_k, [router.layer for router in self._routers]
        shape, dtype = tuple(recorded.shape), recorded.dtype
        if dtype not in (torch.uint8, torch.uint16) or len(shape) != 3 or shape[2] != top_k:
            raise TrainingError(
                f"recorded experts are {dtype} {list(shape)}; expected uint8 or uint16 [num_tokens, layers, {top_k}]"
            )
        if shape[1] == len(layers):
            return list(range(len(layers)))
        if shape[1] > max(layers):
            return layers
        raise TrainingError(f"experts of {shape[1]} layers were recorded, and the model has {len(layers)} with experts")

    def _replay(self, index: int, module: nn.Module, inputs: object, answer: object) -> tuple[Tensor, ...] | None:
        """The hook: the router's answer, with the recorded experts."""
        if self._recorded is None:
            return None
        own = as_routing(answer)
        if own is None or len(own.experts) != len(self._recorded):
            raise TrainingError(
                f"{self._routers[index].name} was to replay {len(self._recorded)} tokens and was given others"
            )
        unknown = torch.iinfo(self._recorded.dtype).max
        recorded = self._recorded[:, self._columns[index]].to(own.experts.dtype)
        is_known = (recorded != unknown).any(dim=-1)
        is_sound = (recorded < own.logits.shape[1]).all(dim=-1)
        replayed = is_known & is_sound
        experts = torch.where(replayed[:, None], recorded, own.experts)
        self._sums[index] = _sums(own.experts, recorded, replayed, is_known & ~is_sound)
        weights = self._rules[index](module, own.logits, experts)
        return own.logits, weights.to(own.weights.dtype), experts

    def _count(self, num_tokens: int) -> None:
        sums = [layer for layer in self._sums if layer is not None]
        if len(sums) < len(self._routers):
            raise TrainingError(
                f"{len(sums)} of {len(self._routers)} routers were asked while their experts were replayed"
            )
        total = torch.stack(sums).sum(dim=0)
        self._totals = total if self._totals is None else self._totals + total
        self._routed += num_tokens * len(sums)


@torch.no_grad()
def _sums(own: Tensor, recorded: Tensor, replayed: Tensor, foreign: Tensor) -> Tensor:
    """[3]: replayed routings, the sum of their agreement with the router's own choice, and those of no such expert."""
    shared = (recorded[:, :, None] == own[:, None, :]).any(dim=-1).float().mean(dim=-1)
    return torch.stack([replayed.sum().double(), (shared * replayed).sum().double(), foreign.sum().double()])


@torch.no_grad()
def _rule_of(router: Router) -> RoutingRule:
    routing = probe_router(router.module)
    assert routing is not None  # else it would be no router
    for rule in _RULES.values():
        found = rule(router.module, routing.logits, routing.experts).to(routing.weights.dtype)
        if torch.allclose(found, routing.weights, rtol=_TOLERANCE, atol=_TOLERANCE):
            return rule
    raise ModelError(
        f"the weights of {router.name} ({type(router.module).__name__}) follow none of the rules that router replay "
        f'knows ({", ".join(_RULES)}): set trainer.router_replay = "off", or add its own (docs/router-replay.md)'
    )
