"""ARS+: ARS whose noise is integrated out as far as the pseudo actions allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from arsm.estimators.ars import ARS
from arsm.noise import fixed_point
from arsm.references import ReferenceNoise, ask_references
from arsm.types import Queries


@dataclass(frozen=True, eq=False)
class ARSPlus(ARS):
    """ARS with pi_j replaced by its conditional mean, given the pseudo actions and the
    ratios of the other elements.

        g_kc = [f(z^{c<->j}) - mean_m f(z^{m<->j})] w_k
        w_k  = 1 - C E[pi_{k j_k} | z_k^{1<->j}, ..., z_k^{C<->j}, rho_k]

    where rho_i = pi_i / (1 - pi_j). pi_j ~ Beta(1, C - 1) does not depend on rho, and
    each pseudo action compares it with one threshold, so that the pseudo actions say
    that it lies between l and u:

        1 - C E[pi_j | l <= pi_j < u] = (C - 1) (a (1 - t^C) / (1 - t^{C-1}) - 1),
        a = 1 - l,  t = (1 - u) / (1 - l)

    A row k whose pseudo actions all agree gets 0: differences of f are due to other
    rows there and have mean 0. The variance is never above that of ARS. For one
    variable of two categories this is DisARM. Given the pseudo actions alone, without
    rho, the mean of pi_j is a sum of exponentially many terms, and is not computed.
    Reference: Dong, Mnih and Tucker, Coupled gradient estimators for discrete latent
    variables, NeurIPS 2021, where all elements but pi_j and one other, drawn at random,
    are held instead of rho; measured at C = 3 to 10, that leaves more variance.
    """

    def ask(self, logits: Tensor, noise: ReferenceNoise) -> Queries:
        return ask_integrated(logits, noise.log_pi, noise.references.unsqueeze(-2))


def ask_integrated(logits: Tensor, log_pi: Tensor, references: Tensor) -> Queries:
    """As `ask_references`, with the conditional means as weights; references [*B, J, 1 or K]."""
    queries = ask_references(logits, log_pi, references)
    pseudo = queries.aux.pseudo
    weight = reference_weight(logits, log_pi, references.expand(pseudo.shape[:-1]), pseudo)
    return replace(queries, aux=queries.aux._replace(weight=weight))


def reference_weight(logits: Tensor, log_pi: Tensor, references: Tensor, pseudo: Tensor) -> Tensor:
    """1 - C E[pi_kj | pseudo actions, ratios of the others]: references [*B, J, K],
    pseudo [*B, J, K, C] -> [*B, J, K].

    c wins its swap with j iff ln pi_j < theta_c = phi_c + min(min_{i != c, j} (ln pi_i
    - phi_i), ln pi_c - phi_j).
    """
    categories = logits.shape[-1]
    if categories == 1:
        return torch.zeros_like(references, dtype=torch.float64)
    # in fixed point, as the pseudo actions were found: the thresholds must agree with them
    phi, a = (x.unsqueeze(-3).expand(pseudo.shape) for x in fixed_point(logits, log_pi))
    j = references.unsqueeze(-1)
    c = torch.arange(categories, device=logits.device)

    # theta_c: the best without j and c is the first of the best two without j that is not c
    others, order = (a - phi).masked_fill(c == j, torch.inf).topk(2, largest=False)
    best = torch.where(c == order[..., :1], others[..., 1:], others[..., :1])
    swapped = (a - phi.gather(-1, j)).masked_fill(c == j, torch.inf)
    theta = (phi + torch.minimum(best, swapped)).masked_fill(phi == -torch.inf, -torch.inf)

    # ln pi_j lies above the thresholds of those that lose, and below those of the winners
    wins = pseudo == c
    lower = theta.masked_fill(wins, -torch.inf).amax(-1)
    upper = theta.masked_fill(~wins, torch.inf).amin(-1)

    # ln(1 - pi_j); with the ratios rho held, theta moves with it
    rest = torch.log1p(-a.gather(-1, j).squeeze(-1).exp()).clamp_min(torch.finfo(a.dtype).min)
    # ln(1 - l), ln(1 - u)
    log_above = F.logsigmoid(rest - lower)
    log_beyond = F.logsigmoid(rest - upper)

    # the conditional mean; expm1 keeps the digits of 1 - t^C where t is near 1
    log_t = log_beyond - log_above
    ratio = torch.expm1(categories * log_t) / torch.expm1((categories - 1) * log_t)
    ratio = torch.where(log_t < 0, ratio, categories / (categories - 1))  # 0 / 0 at t = 1
    agree = (pseudo == pseudo[..., :1]).all(-1)
    return torch.where(agree, 0.0, (categories - 1) * (log_above.exp() * ratio - 1))
