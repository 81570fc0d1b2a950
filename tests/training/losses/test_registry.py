"""Settings name the loss; one's own is a function in a module."""

from __future__ import annotations

import pytest
import torch

from tailrace.errors import SettingsError, TrainingError
from tailrace.training.losses import LOSSES, LossTokens, MeasuredLoss, PointwiseLoss, WeightedLoss, load_loss
from tailrace.training.losses.clipped_ratio import ClippedRatio
from tailrace.training.settings.losses import ClippedRatioSettings, OwnLossSettings
from tailrace.training.settings.trainer import TrainerSettings

Answer = tuple[torch.Tensor, torch.Tensor]


def own_loss(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> Answer:
    return -logprobs, torch.ones_like(logprobs, dtype=torch.bool)


def scaled_loss(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens, *, scale: float) -> Answer:
    return -scale * logprobs, torch.ones_like(logprobs, dtype=torch.bool)


class ScaledLoss(PointwiseLoss):
    def __init__(self, scale: float = 1.0) -> None:
        if scale < 0:
            raise ValueError("a scale below 0")
        self.scale = scale

    def with_derivative(
        self, logprobs: torch.Tensor, tokens: LossTokens
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ones = torch.ones_like(logprobs)
        return -self.scale * logprobs, -self.scale * ones, ones.bool()


class NotALoss:
    pass


MADE = ScaledLoss(2.0)
NOTHING = LossTokens(*(torch.zeros(0) for _ in range(5)), torch.zeros(1, dtype=torch.int64))


def own(name: str, **args: object) -> OwnLossSettings:
    return OwnLossSettings(name=f"{__name__}:{name}", args=args)


def test_the_default_is_the_clipped_ratio_with_its_settings() -> None:
    assert load_loss(ClippedRatioSettings(clip_low=0.1)) == ClippedRatio(ClippedRatioSettings(clip_low=0.1))
    assert load_loss(TrainerSettings().loss) == ClippedRatio(ClippedRatioSettings())


def test_each_built_in_loss_has_settings_of_its_own() -> None:
    names = [settings.model_fields["name"].default for settings in LOSSES]
    assert len({*names}) == len(names)
    for settings, name in zip(LOSSES, names, strict=True):
        table = {"name": name, **{key: 1 for key, field in settings.model_fields.items() if field.is_required()}}
        chosen = TrainerSettings.model_validate({"loss": table, "steps_per_batch": 2}).loss
        assert type(chosen) is settings
        assert callable(load_loss(chosen))


def test_a_loss_of_ones_own_is_named_by_module_and_function() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    losses, kept = load_loss(own("own_loss"))(logprobs, logprobs, NOTHING)
    assert (losses.tolist(), kept.tolist()) == ([1.0, 2.0], [True, True])
    losses, _ = load_loss(own("MADE"))(logprobs, logprobs, NOTHING)
    assert losses.tolist() == [2.0, 4.0]


def test_args_are_given_to_a_class_once_and_to_a_function_at_each_call() -> None:
    made = load_loss(own("ScaledLoss", scale=3.0))
    assert isinstance(made, PointwiseLoss)  # the head sees it
    logprobs = torch.tensor([-1.0, -2.0])
    assert [part.tolist() for part in made.with_derivative(logprobs, NOTHING)] == [[3.0, 6.0], [-3.0, -3.0], [True] * 2]
    losses, _ = load_loss(own("scaled_loss", scale=0.5))(logprobs, logprobs, NOTHING)
    assert losses.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (OwnLossSettings(name="no_such_module:loss"), "there is no module 'no_such_module'"),
        (own("nothing"), "has no 'nothing'"),
        (OwnLossSettings(name="math:pi"), "that is 3.14159.*, not a function"),
        (own("scaled_loss"), "cannot be called with .* missing a required.* argument: 'scale'"),
        (own("own_loss", scale=1.0), "cannot be called with .* and trainer.loss.args = .*unexpected keyword .*'scale'"),
        (own("ScaledLoss", scale=-1.0), "making it with trainer.loss.args = .* raised ValueError: a scale below 0"),
        (own("ScaledLoss", size=1.0), "unexpected keyword argument 'size'"),
        (own("NotALoss"), "that is .*NotALoss.*, not a function"),
        (own("MADE", scale=1.0), "trainer.loss.args are for a class or a function.*leave them out"),
    ],
)
def test_losses_that_cannot_be_made_are_refused(settings: OwnLossSettings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_loss(settings)


KEPT = torch.ones(2, dtype=torch.bool)


def summed(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> Answer:
    return -logprobs.sum(), KEPT


def alone(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    return -logprobs


def keeps_all_at_once(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> Answer:
    return -logprobs, torch.tensor(True)


def keeps_by_number(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> Answer:
    return -logprobs, torch.ones_like(logprobs)


class SummedSlope(PointwiseLoss):
    def with_derivative(
        self, logprobs: torch.Tensor, tokens: LossTokens
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return -logprobs, torch.tensor(-1.0), KEPT


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("summed", r"its loss is a tensor \[\] of float32"),
        ("alone", r"it answered a tensor \[2\] of float32"),
        ("keeps_all_at_once", r"its kept is a tensor \[\] of bool"),
        ("keeps_by_number", r"its kept is a tensor \[2\] of float32"),
        ("SummedSlope", r"its derivative is a tensor \[\] of float32"),
    ],
)
@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_a_loss_that_does_not_answer_for_each_token_does_not_train(name: str, found: str, entropy: float) -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    loss = load_loss(own(name).model_copy(update={"entropy": entropy}))
    with pytest.raises(TrainingError, match=f"trainer.loss.name is .*{name}.* must answer .*{found}"):
        loss(logprobs, logprobs, NOTHING)


def detached(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> Answer:
    return -logprobs.detach(), KEPT


def mistaken(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> Answer:
    return -tokens.columns["weights"] * logprobs, KEPT


class MistakenSlope(PointwiseLoss):
    def with_derivative(
        self, logprobs: torch.Tensor, tokens: LossTokens
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (tokens.columns["weights"],) * 3


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_a_loss_without_a_gradient_for_what_it_keeps_does_not_train(entropy: float) -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = load_loss(own("detached").model_copy(update={"entropy": entropy}))
    with pytest.raises(TrainingError, match=r"trainer.loss.name is .*detached.* depends on neither logprobs nor entro"):
        loss(logprobs, logprobs * 2, NOTHING)
    with torch.no_grad():  # where it is only counted what is kept
        assert loss(logprobs, logprobs, NOTHING)[1].all()


def constant(logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> Answer:
    return torch.zeros_like(logprobs), KEPT


def test_a_loss_of_0_for_what_it_keeps_needs_no_gradient_and_teaches_nothing() -> None:
    logprobs = torch.tensor([-1.0, -torch.inf], requires_grad=True)
    losses, kept = load_loss(own("constant"))(logprobs, logprobs * 2, NOTHING)
    assert (losses.tolist(), kept.tolist()) == ([0, 0], [True, True])
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert gradient.tolist() == [0, 0]


@pytest.mark.parametrize("name", ["mistaken", "MistakenSlope"])
def test_what_a_loss_raises_is_told_with_its_name_and_line(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    with pytest.raises(TrainingError, match=f"trainer.loss.name is .*{name}.* raised KeyError: 'weights' .*{__file__}"):
        load_loss(own(name))(logprobs, logprobs, NOTHING)


class Measured:
    """Answers a mean where a value for each token is asked for."""

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor, tokens: LossTokens) -> Answer:
        return -logprobs, KEPT

    def token_metrics(self, logprobs: torch.Tensor, tokens: LossTokens) -> dict[str, torch.Tensor]:
        return {"training/clip_share": logprobs.mean()}

    def importance_weights(self, logprobs: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
        return logprobs.exp().mean()


class MistakenMeasures(Measured):
    def token_metrics(self, logprobs: torch.Tensor, tokens: LossTokens) -> dict[str, torch.Tensor]:
        return {"training/clip_share": tokens.columns["weights"]}

    def importance_weights(self, logprobs: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
        return tokens.columns["weights"]


@pytest.mark.parametrize(
    ("name", "metrics", "weights"),
    [
        ("Measured", r"its training/clip_share is a tensor \[\]", r"its importance_weights is a tensor \[\]"),
        ("MistakenMeasures", "raised KeyError: 'weights'", "raised KeyError: 'weights'"),
    ],
)
def test_a_measure_that_is_not_of_each_token_is_refused_by_name(name: str, metrics: str, weights: str) -> None:
    loss, logprobs = load_loss(own(name)), torch.tensor([-1.0, -2.0])
    assert isinstance(loss, MeasuredLoss)
    assert isinstance(loss, WeightedLoss)
    with pytest.raises(TrainingError, match=f"trainer.loss.name is .*{name}.*{metrics}"):
        loss.token_metrics(logprobs, NOTHING)
    with pytest.raises(TrainingError, match=f"trainer.loss.name is .*{name}.*{weights}"):
        loss.importance_weights(logprobs, NOTHING)


def test_samples_are_summed_and_spread_back() -> None:
    zeros = torch.zeros(6)
    tokens = LossTokens(
        zeros.long(), zeros, zeros, zeros, zeros.int(), torch.tensor([0, 2, 2, 5, 6]), {"pair": torch.zeros(6, 2)}
    )
    values = torch.arange(6.0, requires_grad=True)
    sums = tokens.sum_by_sample(values)
    assert sums.tolist() == [1.0, 0.0, 9.0, 5.0]
    (gradient,) = torch.autograd.grad((sums * torch.tensor([1.0, 7.0, 2.0, 3.0])).sum(), values)
    assert gradient.tolist() == [1, 1, 2, 2, 2, 3]
    assert tokens.spread(sums).tolist() == [1, 1, 9, 9, 9, 5]
    part = tokens.part(slice(1, 4))
    assert part.sample_offsets.tolist() == [0, 1, 1, 3, 3]
    assert part.columns["pair"].shape == (3, 2)
    assert part.sample_lengths.tolist() == tokens.sample_lengths.tolist() == [2, 0, 3, 1]
    assert part.part(slice(1, 2)).sample_lengths.tolist() == [2, 0, 3, 1]
    assert part.spread(part.sample_lengths).tolist() == [2, 3, 3]
