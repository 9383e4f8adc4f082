"""NVIL: REINFORCE with a learned baseline for every row."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from arsm.checks import check_decay
from arsm.draws import SampleNoise, one_sample, sample_noise, samples
from arsm.estimators.relax import ZeroNetwork, give_size
from arsm.scores import probabilities, score
from arsm.types import Estimate, Estimator, Queries


class MLPBaseline(ZeroNetwork):
    """A network of the probabilities, p [N, K, C] -> [N], with which NVIL starts as
    REINFORCE.
    """

    def forward(self, p: Tensor) -> Tensor:
        return self.value(p)


class RunningMoments(nn.Module):
    """Running mean and variance of what the baseline leaves over."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("variance", torch.zeros((), dtype=torch.float64))

    def update(self, values: Tensor, decay: float) -> None:
        """Move both towards those of the values, [...]."""
        values = values.double()
        self.mean.lerp_(values.mean(), 1 - decay)
        # about the running mean: a batch of one row has a variance too
        self.variance.lerp_((values - self.mean).square().mean(), 1 - decay)

    def scale(self) -> Tensor:
        """max(1, sd): []."""
        return self.variance.sqrt().clamp_min(1.0)


@dataclass(frozen=True, eq=False)
class NVIL(Estimator):
    """REINFORCE with a learned baseline and a running mean.

        g_kc = (f(z) - b(p) - m) / s (1[z_k = c] - p_kc),    p_k = softmax(phi_k)

    The baseline b is a network that sees the probabilities, by which it can tell the
    rows of a batch apart, and never the sample. One evaluation of f, which need not be
    differentiable. Unbiased for all b and m if s = 1, which is the default. With
    `normalise`, s = max(1, sd): the estimate is 1/s of an unbiased one, for all logits
    alike, and steps keep their size where f has a large scale.

    b is learned: `estimate` returns the squared norm of g as `estimator_loss`, which
    depends on b's parameters alone. The paper fits b to f by least squares; the squared
    norm weights these squares by |onehot(z) - p|^2, so that its minimum is the baseline
    with the least variance. m and sd, the running mean and standard deviation of f(z) -
    b(p), are moved by `adapt` after an estimate; without it m = 0 and sd = 0. For a
    baseline that sees more than the probabilities, such as the input x, use
    `Reinforce(baseline=b(x).detach())` and train b yourself. Reference: Mnih and
    Gregor, Neural variational inference and learning in belief networks, ICML 2014.

    Attributes:
        baseline: b: an nn.Module, p [N, K, C] -> [N], row by row.
        normalise: Divide by s, which scales the gradient.
        decay: Weight of the past in m and sd; the paper's is 0.8.
        running: Holds m and sd.
        learned: The learned parts, for the optimiser, `.to(device)` and checkpoints;
            empty for most estimators.
    """

    baseline: nn.Module = field(default_factory=MLPBaseline)
    normalise: bool = False
    decay: float = 0.8
    running: RunningMoments = field(init=False, repr=False)

    learned: nn.ModuleList = field(init=False, repr=False)

    adapts = True

    def __post_init__(self) -> None:
        if not isinstance(self.baseline, nn.Module):
            raise TypeError(
                f"baseline must be an nn.Module p [N, K, C] -> [N], but is "
                f"{type(self.baseline).__name__}."
            )
        check_decay(self.decay)
        object.__setattr__(self, "running", RunningMoments())
        object.__setattr__(self, "learned", nn.ModuleList([self.baseline, self.running]))

    @property
    def unbiased(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.normalise

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> SampleNoise:
        return sample_noise(logits, 1, generator, z)

    def ask(self, logits: Tensor, noise: SampleNoise) -> Queries:
        return one_sample(samples(logits, noise).squeeze(-2))

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        # attached to b: the squared norm of the gradient is the loss that b minimises
        residual = values[0] - self._baseline_of(logits) - self.running.mean
        if self.normalise:
            residual = residual / self.running.scale()
        dtype = torch.promote_types(values.dtype, logits.dtype)
        return residual.to(dtype)[..., None, None] * score(logits, queries.z)

    def _baseline_of(self, logits: Tensor) -> Tensor:
        """b [*B], attached to its parameters alone."""
        p = probabilities(logits)
        rows = p.reshape(-1, *p.shape[-2:])
        give_size(self.baseline, "NVIL", rows)
        found = self.baseline(rows)
        if found.shape != rows.shape[:1]:
            raise ValueError(
                f"baseline must return one value per row, shape {list(rows.shape[:1])}, but "
                f"returned {list(found.shape)}."
            )
        return found.reshape(p.shape[:-2])

    @torch.no_grad()
    def adapt(self, out: Estimate) -> None:
        """Move m and sd towards the mean and standard deviation of out.value - b."""
        if out.logits is None:
            raise ValueError(
                "NVIL's baseline needs the logits of an estimate, but out.logits is None."
            )
        # bare logits [C] are one variable
        logits = out.logits if out.logits.ndim > 1 else out.logits.unsqueeze(0)
        self.running.update(out.value - self._baseline_of(logits), self.decay)
