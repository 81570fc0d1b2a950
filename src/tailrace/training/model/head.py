"""From hidden states to log-probabilities and entropies, without ever holding the logits of a whole row.

A head's logits are tokens × vocabulary, of which autograd would keep several copies. Here they exist for a chunk of
tokens at a time, in one of two ways:

    any loss:        forward: chunk ─► logits ─► log-probability, entropy, log-sum-exp       (logits are dropped)
                     backward: chunk ─► logits again ─► gradients of hidden states and head
    pointwise loss:  forward: chunk ─► logits ─► log-probability ─► its derivative ─► both gradients; no second pass

With z the logits at the sample's temperature, p = softmax(z), y the target and H the entropy:

    d logprob / d z = onehot(y) - p,      d H / d z = -p (log p + H)

Where top-p or top-k restricted sampling, p is over what they left (`losses.supports`), and 0 elsewhere. A loss of
candidates c in the target's place (`losses.CandidateComponent`), with derivatives g_c, is judged over the same logits:

    d loss / d z = Σ_c g_c (onehot(c) - p)

The head's gradient grows in float32, or the head's own wider type, whatever logits are computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from tailrace.models.heads import OutputHead
from tailrace.training.losses import CandidateComponent, Loss, LossTokens, PointwiseLoss, candidates_of
from tailrace.training.losses.supports import TokenSupports

GPU_CHUNK_BYTES = 512 << 20
"""Logits per chunk: each chunk rewrites the whole gradient of the head, so that few and big ones are cheaper."""

CPU_CHUNK_BYTES = 4 << 20
"""Logits per chunk on a CPU, so that the passes over them stay in cache."""

_MIN_CPU_TOKENS = 128
"""Fewer tokens per chunk would leave a CPU waiting for the head and its gradient, which no cache holds."""

_GRADIENT_BLOCK_BYTES = 16 << 20
"""Of a 16-bit product on its way into the head's wider gradient."""


class LossOutput(NamedTuple):
    """Of the tokens that bear loss; all but `total` are [num_loss_tokens], without gradient."""

    total: Tensor
    """Scalar: the sum of `losses`; its backward reaches hidden states and head."""
    losses: Tensor
    """0 where the loss did not keep the token."""
    kept: Tensor
    logprobs: Tensor
    entropy: Tensor
    candidate_losses: Tensor | None = None
    """What a loss of candidates says, neither multiplied nor divided by anything; 0 for tokens without a weight. None
    without such a loss."""


def chunk_tokens(vocabulary: int, device: torch.device, chunk_bytes: int | None = None) -> int:
    """Tokens whose float32 logits are held at once; `chunk_bytes` of logits instead of what suits the device.

    >>> chunk_tokens(151_936, torch.device("cuda")), chunk_tokens(1024, torch.device("cpu"))
    (883, 1024)
    """
    if chunk_bytes is None and device.type == "cpu":
        return max(_MIN_CPU_TOKENS, CPU_CHUNK_BYTES // (4 * vocabulary))
    return max(1, (chunk_bytes or GPU_CHUNK_BYTES) // (4 * vocabulary))


class LogprobHead:
    """A model's head as the trainer uses it.

    It computes inside the forward of the head's own module, which gets two more arguments for it: hooks on that module
    (FSDP's, which gather and free its weights) see every use, and other callers get logits as before.
    """

    def __init__(
        self,
        head: OutputHead,
        dtype: torch.dtype,
        chunk_bytes: int | None = None,
        products: Products | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """Logits are computed in `dtype`, and reduced in float32 at least; `compiled`, in fewer passes over them."""
        self._head, self._dtype, self._chunk_bytes = head, dtype, chunk_bytes
        self._products = products or TORCH_PRODUCTS
        self._normalise: Normalise = torch.compile(normalise, dynamic=True) if compiled else normalise
        own = head.linear.forward

        def forward(hidden: Tensor, tokens: LossTokens | None = None, loss: Loss | None = None) -> Tensor | LossOutput:
            return own(hidden) if tokens is None or loss is None else self._score(hidden, tokens, loss)

        head.linear.forward = forward  # type: ignore[method-assign, assignment]

    def __call__(self, hidden: Tensor, tokens: LossTokens, loss: Loss) -> LossOutput:
        """Loss of `hidden` [num_loss_tokens, hidden_size]."""
        output: LossOutput = self._head.linear(hidden, tokens, loss)
        return output

    def _score(self, hidden: Tensor, tokens: LossTokens, loss: Loss) -> LossOutput:
        weight, bias = self._head.linear.weight, self._head.linear.bias
        chunk = chunk_tokens(len(weight), weight.device, self._chunk_bytes)
        rule = LogitRule(
            tokens.targets,
            tokens.temperatures.reciprocal(),
            self._dtype,
            chunk,
            self._head.scale,
            self._head.softcap,
            tokens.supports,
            self._products,
            self._normalise,
        )
        judged = _JudgedCandidates.of(loss, tokens)
        if isinstance(loss, PointwiseLoss) and torch.is_grad_enabled():  # else both gradients would be for nobody
            return LossOutput(*_pointwise_head(hidden, weight, bias, rule, loss, tokens, judged))
        scores = _recomputing_head(hidden, weight, bias, rule, judged)
        return _apply_loss(loss, scores, tokens, judged)


def loss_of_logits(loss: Loss, logits: Tensor, tokens: LossTokens) -> LossOutput:
    """Apply `loss` where the head is not known; holds [num_loss_tokens, vocabulary] several times."""
    scores = _scores_of_logits(logits, tokens)
    logprobs, entropy = scores.gather(1, tokens.targets[:, None]).squeeze(1), -(scores.exp() * scores).sum(-1)
    judged, candidate_losses = _JudgedCandidates.of(loss, tokens), None
    if judged is not None:
        token_ids, losses, slopes = judged.judge(scores.detach(), torch.zeros_like(logprobs), slice(0, len(scores)))
        found = scores.gather(1, token_ids)
        candidate_losses = losses + (slopes * (found - found.detach())).sum(1)
    return _apply_loss(loss, (logprobs, entropy, candidate_losses), tokens, judged)


def _scores_of_logits(logits: Tensor, tokens: LossTokens) -> Tensor:
    """[num_loss_tokens, vocabulary]: log-probabilities at the tokens' temperatures, over their supports."""
    scaled = logits.float() * tokens.temperatures.reciprocal()[:, None]
    if tokens.supports is not None:
        tokens.supports.restrict(scaled)
    return torch.log_softmax(scaled, dim=-1)


def _apply_loss(
    loss: Loss, scores: tuple[Tensor, Tensor, Tensor | None], tokens: LossTokens, judged: _JudgedCandidates | None
) -> LossOutput:
    """Apply `loss` to log-probabilities and entropies, and add the losses of candidates; all are differentiable."""
    logprobs, entropy, candidate_losses = scores
    losses, kept = loss(logprobs, entropy, tokens)
    losses = losses.where(kept, 0.0)
    if judged is not None and candidate_losses is not None:
        losses = losses + candidate_losses * judged.factors(candidate_losses)
        candidate_losses = candidate_losses.detach()
    columns = (losses.detach(), kept.detach(), logprobs.detach(), entropy.detach())
    return LossOutput(losses.sum(), *columns, candidate_losses)


@dataclass(frozen=True, slots=True)
class _JudgedCandidates:
    """What a loss of candidates says of tokens."""

    loss: CandidateComponent
    factor: float
    weights: Tensor | None
    tokens: LossTokens

    @classmethod
    def of(cls, loss: Loss, tokens: LossTokens) -> _JudgedCandidates | None:
        """None where `loss` has none."""
        chosen = candidates_of(loss)
        return None if chosen is None else cls(chosen.loss, chosen.factor, chosen.loss.weights(tokens), tokens)

    def factors(self, like: Tensor, where: slice = slice(None)) -> Tensor:
        """[chunk], or one for all: what the losses are multiplied by, in the type of `like`."""
        return like.new_full((), self.factor) if self.weights is None else self.weights[where].to(like) * self.factor

    def judge(self, logits: Tensor, normaliser: Tensor, where: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tokens of a chunk, by their `logits` [chunk, vocabulary] and log-sum-exps `normaliser` [chunk].

        Token ids of the candidates, [chunk, k], losses, [chunk], and derivatives by the candidates' log-probabilities,
        [chunk, k]: 0 where there is no candidate, and any id; both 0 for tokens without a weight.
        """
        part = self.tokens.part(where)
        token_ids = self.loss.candidates(part).clamp(min=0)
        losses, slopes = self.loss.with_derivatives(logits.gather(1, token_ids) - normaliser[:, None], part)
        weighs = self.loss.weighs(part)  # 0 times what is infinite is not 0
        return token_ids, losses.where(weighs, 0.0), slopes.where(weighs[:, None], 0.0)


class Products(Protocol):
    """The head's matrix products; a processor may have faster ones than torch."""

    def product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """`rows` [num_rows, inputs] times the transpose of `matrix` [outputs, inputs], in their type or a wider one."""

    def add_outer_product(self, total: Tensor, grads: Tensor, inputs: Tensor) -> None:
        """To `total` the transpose of `grads` [num_rows, outputs] times `inputs` [num_rows, inputs].

        Where `total` is of a wider type, no product is ever whole in memory.
        """


class TorchProducts(Products):
    """Torch's own."""

    @override
    def product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        if rows.is_cuda and rows.dtype is torch.bfloat16:  # else sums would be rounded that a GPU has in float32
            return torch.mm(rows, matrix.t(), out_dtype=torch.float32)
        return rows @ matrix.t()

    @override
    def add_outer_product(self, total: Tensor, grads: Tensor, inputs: Tensor) -> None:
        if total.dtype is inputs.dtype:
            total.addmm_(grads.t(), inputs)
            return
        if total.is_cuda:
            torch.addmm(total, grads.t(), inputs, out_dtype=total.dtype, out=total)
            return
        rows = max(1, _GRADIENT_BLOCK_BYTES // (inputs.shape[1] * inputs.element_size()))
        for start in range(0, len(total), rows):
            total[start : start + rows] += grads[:, start : start + rows].t() @ inputs


TORCH_PRODUCTS = TorchProducts()


Normalise: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""As `normalise`."""


def normalise(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, entropies, log-sum-exps, [chunk], and probabilities, [chunk, vocabulary]."""
    chosen = logits.gather(1, targets).squeeze(1)
    probabilities = torch.softmax(logits, dim=1)
    # Not `logsumexp`, which takes several times as long where most exponentials vanish, as outside of supports.
    normaliser = logits.amax(1) - probabilities.amax(1).log()
    entropy = normaliser - torch.linalg.vecdot(probabilities, logits)
    return chosen - normaliser, entropy, normaliser, probabilities


@dataclass(frozen=True, slots=True, eq=False)
class LogitRule:
    """How hidden states and weights become the logits of tokens, and of how many tokens at a time."""

    targets: Tensor
    """[num_tokens], int64."""
    inverse_temperatures: Tensor
    """[num_tokens]; logits are multiplied by it."""
    dtype: torch.dtype
    """Of the head's product."""
    chunk: int
    """Tokens at a time."""
    scale: float = 1.0
    softcap: float | None = None
    """As in `OutputHead`."""
    supports: TokenSupports | None = None
    products: Products = TORCH_PRODUCTS
    normalise: Normalise = normalise

    def for_each_chunk(self, work: Callable[[slice], None]) -> None:
        """Call `work` with the tokens of one chunk after the other; what it holds ends with its call."""
        for start in range(0, len(self.targets), self.chunk):
            work(slice(start, min(start + self.chunk, len(self.targets))))


class _RecomputingHead(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: LogitRule,
        judged: _JudgedCandidates | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        head = _Head(hidden, weight, bias, rule)
        logprobs, entropy, normaliser = (head.new_column() for _ in range(3))
        candidate_losses = None if judged is None else head.new_column()
        found = list[tuple[Tensor, Tensor]]()

        def score(where: slice) -> None:
            logits, _, _ = head.logits(where)
            logprobs[where], entropy[where], normaliser[where], _ = rule.normalise(logits, rule.targets[where, None])
            if judged is not None and candidate_losses is not None:
                token_ids, candidate_losses[where], slopes = judged.judge(logits, normaliser[where], where)
                found.append((token_ids, slopes))

        rule.for_each_chunk(score)
        candidates = (torch.cat(columns) for columns in zip(*found, strict=True)) if found else (None, None)
        ctx.save_for_backward(hidden, weight, bias, entropy, normaliser, *candidates)
        ctx.rule = rule
        ctx.set_materialize_grads(False)  # a loss without entropy needs no gradient of it
        return logprobs, entropy, candidate_losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, entropy, normaliser, candidates, slopes = ctx.saved_tensors
        rule: LogitRule = ctx.rule
        head = _Head(hidden, weight, bias, rule)
        found = _HeadGradients(head, ctx.needs_input_grad, rule.products)
        by_logprob, by_entropy, by_candidates = grads
        by_logprob = torch.zeros_like(normaliser) if by_logprob is None else by_logprob

        def add(where: slice) -> None:
            logits, scales, bend = head.logits(where)
            slope = by_logprob[where, None] * scales
            targets, shares = rule.targets[where, None], slope
            if candidates is not None and by_candidates is not None:
                targets = torch.cat((targets, candidates[where]), dim=1)
                shares = torch.cat((slope, slopes[where] * (by_candidates[where, None] * scales)), dim=1)
                slope = shares.sum(1, keepdim=True)
            log_probabilities = logits.sub_(normaliser[where, None])
            if by_entropy is None:
                gradient = log_probabilities.exp_().mul_(-slope)
            else:
                probabilities = log_probabilities.exp()
                gradient = log_probabilities.add_(entropy[where, None]).mul_(by_entropy[where, None] * scales)
                gradient = gradient.add_(slope).mul_(probabilities).neg_()
            found.add(where, gradient.scatter_add_(1, targets, shares), bend)

        rule.for_each_chunk(add)
        return *found.of(hidden, weight, bias), None, None


class _PointwiseHead(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: LogitRule,
        loss: PointwiseLoss,
        tokens: LossTokens,
        judged: _JudgedCandidates | None,
    ) -> tuple[Tensor | None, ...]:
        head = _Head(hidden, weight, bias, rule)
        found = _HeadGradients(head, ctx.needs_input_grad, rule.products)
        losses, logprobs, entropy = (head.new_column() for _ in range(3))
        candidate_losses = None if judged is None else head.new_column()
        kept = torch.empty_like(losses, dtype=torch.bool)

        def add(where: slice) -> None:
            logits, scales, bend = head.logits(where)
            targets = rule.targets[where, None]
            logprobs[where], entropy[where], normaliser, probabilities = rule.normalise(logits, targets)
            each, derivatives, keeps = loss.with_derivative(logprobs[where], tokens.part(where))
            losses[where], kept[where] = each.where(keeps, 0.0), keeps
            slope = shares = derivatives.where(keeps, 0.0)[:, None] * scales
            if judged is not None and candidate_losses is not None:
                token_ids, candidate_losses[where], slopes = judged.judge(logits, normaliser, where)
                factors = judged.factors(losses, where)
                losses[where] += candidate_losses[where] * factors
                targets = torch.cat((targets, token_ids), dim=1)
                shares = torch.cat((slope, slopes * (scales * factors.unsqueeze(-1))), dim=1)
                slope = shares.sum(1, keepdim=True)
            found.add(where, probabilities.mul_(-slope).scatter_add_(1, targets, shares), bend)

        rule.for_each_chunk(add)
        ctx.save_for_backward(*found.of(hidden, weight, bias))
        columns = (losses, kept, logprobs, entropy, candidate_losses)
        ctx.mark_non_differentiable(*(column for column in columns if column is not None))
        return losses.sum(), *columns

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: nobody else holds these, and a second backward pass is refused because they changed.
        return *(None if grad is None else grad.mul_(grads[0]) for grad in ctx.saved_tensors), *[None] * 4


class _Head:
    """Logits of a row, chunk by chunk, without gradient."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule) -> None:
        self.input, self.weight = hidden.detach().to(rule.dtype), weight.detach().to(rule.dtype)
        self.bias = None if bias is None else bias.detach().to(rule.dtype)
        self.wide = torch.promote_types(rule.dtype, torch.float32)
        self._rule = rule

    def new_column(self) -> Tensor:
        """[num_tokens], with nothing in it yet."""
        return self.input.new_empty(len(self.input), dtype=self.wide)

    def logits(self, where: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """[chunk, vocabulary] at the tokens' temperatures, restricted to their supports, and the two factors of
        their derivative by the head's product: [chunk, 1], and where logits are capped [chunk, vocabulary]."""
        logits = self._rule.products.product(self.input[where], self.weight)
        if self.bias is not None:
            logits += self.bias
        rule, logits = self._rule, logits.to(self.wide)
        scales, bend = rule.inverse_temperatures[where, None], None
        if rule.softcap is None:
            logits.mul_(scales * rule.scale)
        else:
            capped = logits.mul_(rule.scale / rule.softcap).tanh_()
            logits, bend = capped * (scales * rule.softcap), 1 - capped.square()
        if rule.supports is not None:
            rule.supports.part(where).restrict(logits)
        return logits, scales * rule.scale, bend


class _HeadGradients:
    """Gradients of the head's input, weight and bias, where they are needed; the latter two grow chunk by chunk."""

    def __init__(self, head: _Head, needed: Sequence[bool], products: Products) -> None:
        self._head, self._products = head, products
        self._hidden = torch.empty_like(head.input) if needed[0] else None
        self._weight = torch.zeros_like(head.weight, dtype=head.wide) if needed[1] else None
        self._bias = torch.zeros_like(head.bias, dtype=head.wide) if needed[2] and head.bias is not None else None

    def add(self, where: slice, gradient: Tensor, bend: Tensor | None) -> None:
        """`gradient` [chunk, vocabulary], which is overwritten, times `bend`, is that by the head's product."""
        if bend is not None:
            gradient.mul_(bend)
        if self._bias is not None:
            self._bias += gradient.sum(0)
        gradient = gradient.to(self._head.weight.dtype)
        if self._hidden is not None:
            self._hidden[where] = self._products.product(gradient, self._head.weight.t())
        if self._weight is not None:
            self._products.add_outer_product(self._weight, gradient, self._head.input[where])

    def of(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """In the dtypes of the function's inputs."""
        found = (self._hidden, self._weight, self._bias)
        return tuple(
            None if gradient is None or tensor is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(found, tensors, strict=True)
        )


_recomputing_head: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = _RecomputingHead.apply
_pointwise_head: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]] = _PointwiseHead.apply
