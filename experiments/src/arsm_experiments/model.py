"""The model of one replica, and the metrics that its losses log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm_experiments.replicas import Task


class Model(nn.Module):
    """The model of one replica. Each task is a method; `forward(task, ...)` runs it. Encoder
    parameters come first.

    With `dense`, f is evaluated with static shapes.
    """

    def __init__(self, estimator: arsm.Estimator, *, dense: bool) -> None:
        super().__init__()
        self.estimator, self.dense = estimator, dense

    def initialise(self, variables: int, categories: int) -> None:
        """Glorot-uniform weights and zero biases; then learned parts of the estimator, sized by one
        call.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        self.learned = self.estimator.learned
        if self.learned:
            logits = torch.zeros(1, variables, categories)
            arsm.estimate(self.estimator, logits, lambda z: z.flatten(1).float().sum(-1))

    def adapt(self, layers: Sequence[arsm.Estimate]) -> None:
        """Update the estimator's running statistics by the estimates of a training step."""
        if self.estimator.adapts:
            for layer in layers:
                self.estimator.adapt(layer)

    def of_choices(
        self, layer: nn.Module, z: Tensor, kept: Tensor | None = None, *, frozen: bool = False
    ) -> Tensor:
        """A linear layer applied to one-hot z [N, K], or relaxed z, with dropout mask `kept` [N, K,
        1]: [N, D].

        Without static shapes, the chosen columns of the weight are summed. If frozen, its
        parameters get no gradient.
        """
        weight, bias = weight_and_bias(layer, frozen)
        variables = z.shape[1]
        categories = weight.shape[1] // variables
        if self.dense or z.is_floating_point():
            h = arsm.one_hot(z, categories)
            return self._linear((h if kept is None else h * kept).flatten(1), weight, bias, frozen)
        columns = z + categories * torch.arange(variables, device=z.device)
        weights = None if kept is None else kept.squeeze(-1)
        return bias + F.embedding_bag(
            columns, weight.t().contiguous(), mode="sum", per_sample_weights=weights
        )

    def linear(self, layer: nn.Module, h: Tensor, *, frozen: bool = False) -> Tensor:
        """A linear layer applied to h [N, D], whose parameters get no gradient if frozen."""
        return self._linear(h, *weight_and_bias(layer, frozen), frozen)

    def _linear(self, h: Tensor, weight: Tensor, bias: Tensor, frozen: bool) -> Tensor:
        # of stacked weights F.linear's gradient is transposed in memory; that of the product with
        # h's transpose is not
        return (
            F.linear(h, weight, bias) if frozen or not self.dense else (weight @ h.t()).t() + bias
        )

    @property
    def encoder_size(self) -> int:
        """Number of encoder parameters; the gradient's variance is measured over them."""
        raise NotImplementedError

    @property
    def paces(self) -> Tensor | None:
        """[P]: relative learning rate of each parameter; None if all are equal."""
        return None

    def forward(self, task: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return task(self, *args, **options)

    def encode(
        self, x: Tensor, settings: Mapping[str, Tensor], generator: torch.Generator | None = None
    ) -> Tensor:
        """The top layer's logits for a batch [N, 784]: the code that all losses start from."""
        raise NotImplementedError

    @property
    def prepare(self) -> Task | None:
        """A task that computes what joins the settings of the losses, {name: tensors}, without
        gradient.
        """
        return None

    @property
    def losses(self) -> tuple[Task, ...]:
        """The tasks `loss(x, code, settings, generator)` whose sum is minimised; each also returns
        what it has `seen`.

        The first contains the estimate, and only its gradient reaches the code. The others have
        seen nothing.
        """
        raise NotImplementedError

    def metrics(self, seen: Mapping[str, Any]) -> dict[str, Tensor]:
        """What to log of the first loss."""
        return step_metrics(seen)


def weight_and_bias(layer: nn.Module, frozen: bool) -> tuple[Tensor, Tensor]:
    """A linear layer's parameters; without gradient if frozen."""
    assert isinstance(layer, nn.Linear)
    return (layer.weight.detach(), layer.bias.detach()) if frozen else (layer.weight, layer.bias)


def weights_and_biases(
    layers: Iterable[nn.Module], *, frozen: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of linear layers; without gradient if frozen."""
    weights, biases = zip(*(weight_and_bias(layer, frozen) for layer in layers), strict=True)
    return list(weights), list(biases)


def seen(value: Tensor, layers: Sequence[arsm.Estimate]) -> dict[str, Any]:
    """What `step_metrics` needs of a step."""
    return {"value": value.detach(), "layers": [layer.info for layer in layers]}


def step_metrics(seen: Mapping[str, Any]) -> dict[str, Tensor]:
    """Metrics of a step: negative mean of value [N], distinct evaluations of f per image, whether
    all were finite.
    """
    value, layers = seen["value"], seen["layers"]
    distinct = [info["distinct"] for info in layers]
    # all layers share one evaluation at the true path: count it once
    below = sum(own.shape[0] for own in distinct[1:])
    finite = torch.stack([info["finite"].all() for info in layers]).all()
    return {
        "train": -value.mean(),
        "evaluations": (torch.stack([own.sum() for own in distinct]).sum() - below)
        / value.shape[0],
        "not_finite": 1 - finite.float(),
    }


def learning_loss(layers: Sequence[arsm.Estimate]) -> Tensor | float:
    """The loss of the estimators' learned parts; 0 if there are none."""
    return sum(layer.estimator_loss for layer in layers if layer.estimator_loss is not None)
