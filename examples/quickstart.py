"""One 30-way choice, learned from the rewards of sampled choices.

Two things to see: a single ARSM estimate is noisy, but the average of many is the exact gradient; and gradient ascent
with single estimates gets as far as with the exact gradient. The rewards lie between 0.501 and 0.533, and the last
category is the best.

Expect E[f] = 0.5327 after 5,000 updates of ARSM and of the exact gradient, 0.5328 of leave-one-out REINFORCE with four
samples, while plain REINFORCE settles on a wrong category (0.507).

    python examples/quickstart.py
"""

import argparse

import torch
from torch import Tensor

import arsm

C = 30


def f(z: Tensor) -> Tensor:
    """The reward of each row of choices, z [N, 1] with values 0..C-1 -> [N]; any function will do."""
    return 0.5 + (z[:, 0] + 1) / (C * 30)


def gradient(estimator: arsm.Estimator) -> Tensor:
    """The estimate of dE[f]/dlogits at the uniform distribution, [C]."""
    logits = torch.zeros(C, requires_grad=True)
    return torch.autograd.grad(arsm.estimate(estimator, logits, f).value, logits)[0]


def ascend(estimator: arsm.Estimator, steps: int) -> float:
    """E[f] after plain gradient ascent from the uniform distribution."""
    logits = torch.zeros(C, requires_grad=True)
    optimiser = torch.optim.SGD([logits], lr=1.0, maximize=True)
    for _ in range(steps):
        optimiser.zero_grad()
        arsm.estimate(estimator, logits, f).value.backward()
        optimiser.step()
    return arsm.estimate(arsm.Exact(), logits, f).value.item()


def main(steps: int = 5000) -> dict[str, float]:
    """Print the comparison; returns E[f] at the end for each estimator."""
    torch.manual_seed(0)
    exact = gradient(arsm.Exact())
    print("Error of the gradient at the uniform distribution, relative to its length:")
    for words in ("arsm", "1000*arsm"):
        error = (gradient(arsm.estimator(words)) - exact).norm() / exact.norm()
        print(f"  {words:<12}{error.item():.2f}")

    print(f"E[f] after {steps:,} updates; it starts at {0.5 + 31 / 1800:.4f}, and the best is {0.5 + 1 / 30:.4f}:")
    reached = {words: ascend(arsm.estimator(words), steps) for words in ("exact", "arsm", "rloo", "reinforce")}
    for words, value in reached.items():
        print(f"  {words:<12}{value:.4f}")
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    main(**vars(parser.parse_args()))
