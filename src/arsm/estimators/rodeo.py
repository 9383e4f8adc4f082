"""RODEO: leave-one-out REINFORCE with control variates from a discrete Stein operator."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from arsm.estimators.sloped_group import SlopedGroup
from arsm.scores import less_mean, probabilities
from arsm.types import Queries


class Stein(nn.Module):
    """psi(u, v) = u + a small network, and the coefficients alpha and beta; the network
    starts as the constant 0.
    """

    def __init__(self, alpha: float, beta: float, hidden: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))
        self.beta = nn.Parameter(torch.tensor(float(beta)))
        self.hidden = nn.Linear(2, hidden)
        self.out = nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        x = torch.stack(torch.broadcast_tensors(u, v), -1).to(self.out.weight.dtype)
        return u + self.out(self.hidden(x).tanh()).squeeze(-1).to(u.dtype)


@dataclass(frozen=True, eq=False)
class RODEO(SlopedGroup):
    """Leave-one-out with control variates made by resampling single variables of a surrogate h.

        (A h)(z) = 1/K sum_k sum_c p_kc h(z_{k<-c}) - h(z)
        h_i(z) = mean_{j != i} psi(f'(z_j).(z - z_j), f_j - mean_{m != i} f_m)
        g = 1/n sum_i [(f_i - mean_{j != i} (f_j + alpha (A h_j)(z_j))) x_i + beta A(h_i x)(z_i)]

    with x = z - p for one-hot z. Resampling one variable does not change the
    distribution of z, so A h has mean 0 for every function h that is made without
    looking at z, such as h_i and h_i x. psi, alpha and beta are learned; g is unbiased
    for all of them, and `estimate` returns its squared norm as `estimator_loss`. alpha
    = beta = 0 is RLOO. h costs no evaluation of f beyond the n samples and their
    slopes. Reference: Shi, Zhou, Hwang, Titsias and Mackey, Gradient estimation with
    discrete Stein operators, NeurIPS 2022.

    Attributes:
        samples: n, the number of samples.
        control: Holds psi, alpha and beta, which are learned.
        learned: The learned parts, for the optimiser, `.to(device)` and checkpoints;
            empty for most estimators.
        alpha: Initial value.
        beta: Initial value.
        hidden: Width of psi's network.
    """

    alpha: float = 0.5
    beta: float = 0.5
    hidden: int = 8
    control: Stein = field(init=False, repr=False)

    def new_control(self) -> Stein:
        return Stein(self.alpha, self.beta, self.hidden)

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor:
        n = self.samples
        variables = logits.shape[-2]
        p = probabilities(logits)
        slope = self.slopes(queries, values, p.dtype)  # [n, *B, K, C]
        z = queries.points.detach().to(p.dtype)
        f = less_mean(values.detach()).to(p.dtype)  # [n, *B]
        here, around = self._surrogates(slope, z, f)
        of_variable = (p * around).sum(-1)  # [n, *B, K]: sum_c p_kc h_i(z_i with k at c)
        total = of_variable.sum(-1)
        stein = total / variables - here  # (A h_i)(z_i)

        # A(h_i x)(z_i): resampling k changes x_k, and leaves the x of the other variables
        x = z - p
        unchanged = (total.unsqueeze(-1) - of_variable).unsqueeze(-1) * x
        resampled = p * (around - of_variable.unsqueeze(-1))
        stein_x = (unchanged + resampled) / variables - here[..., None, None] * x

        # leave-one-out, with the noise that A h explains taken off the baselines
        noisy = f + self.control.alpha * stein
        baseline = (noisy.sum(0) - noisy) / (n - 1)
        return ((f - baseline)[..., None, None] * x + self.control.beta * stein_x).mean(0)

    def _surrogates(self, slope: Tensor, z: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """h_i at z_i [n, *B], and at z_i with each variable set to each category [n, *B, K, C]."""
        n = self.samples
        # f'(z_j) at z_i's category of each variable
        at_own = torch.einsum("j...kc,i...kc->ij...k", slope, z)
        own = torch.einsum("j...kc,j...kc->j...", slope, z)
        step = at_own.sum(-1) - own  # [i, j, *B]: f'(z_j).(z_i - z_j)
        step_around = (step.unsqueeze(-1) - at_own).unsqueeze(-1) + slope
        left_out = (f.sum(0) - f) / (n - 1)
        value = f.unsqueeze(0) - left_out.unsqueeze(1)  # [i, j, *B]
        # sample i is left out of its own h, which would else be biased
        others = (1 - torch.eye(n, dtype=f.dtype, device=f.device)) / (n - 1)
        psi = self.control(step, value)
        here = torch.einsum("ij,ij...->i...", others, psi)
        psi_around = self.control(step_around, value[..., None, None])
        around = torch.einsum("ij,ij...->i...", others, psi_around)
        return here, around
