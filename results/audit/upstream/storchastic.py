"""Storchastic 0.3.7 alone: UnorderedSetEstimator gives a constant a gradient, DisARM gives none.

The first line should be 0, the second 0.0240. pip install storchastic==0.3.7
"""

import storch
import torch
from storch.method import DisARM, UnorderedSetEstimator
from torch.distributions import Bernoulli, OneHotCategorical

torch.manual_seed(0)


def mean_gradient(logits, method, distribution, f, calls):
    found = []
    for _ in range(calls):
        storch.reset()
        phi = logits.repeat(1000, 1).requires_grad_()
        rows = storch.denote_independent(phi, 0, "rows")
        storch.add_cost(f(method()(distribution(logits=rows))), "f")
        storch.backward()
        found.append(phi.grad * len(phi))
    found = torch.cat(found)
    return found.mean(0), found.std(0) / len(found) ** 0.5


def one(z):
    """The constant 1: the gradient of its expectation is 0."""
    return z.sum(-1)


logits = torch.tensor([1.2, 0.3, -0.5, -0.9])
print(mean_gradient(logits, lambda: UnorderedSetEstimator("z", k=2), OneHotCategorical, one, 10))

# f(b) = (b - 0.45)^2: the gradient is sigma(0.4) sigma(-0.4) (0.55^2 - 0.45^2) = 0.0240
square = storch.deterministic(lambda b: ((b.float() - 0.45) ** 2).sum(-1))
print(mean_gradient(torch.tensor([0.4]), lambda: DisARM("b"), Bernoulli, square, 20))
