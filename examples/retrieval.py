"""A 100,000-way choice: which item to show for a query, when only the shown item earns a reward.

The policy is a softmax over 100,000 items; its logits are inner products of a learned embedding of
the query with the items'. The reward of an item is unknown until it is shown, so evaluations of f
are what counts. Two tables:

1. squared error x evaluations of each estimator at three policies: uniform, at the start of
   training, and trained;
2. the exact expected reward after training with about eight evaluations per query, and with as many
   as ARSM needs.

Do not use ARSM here. Expect leave-one-out REINFORCE and the unordered set, which draws its noise
once instead of eight times, to be the best: about 0.02, 0.02 and 0.01 at the three policies, and a
reward of 0.78 and 0.79 after training, from 0.555. ARSM is as good per evaluation only at the
uniform policy, where it evaluates all items for one estimate; at the other two it costs 60 to 120
times as much (with `--samples 200`), and it reaches 0.65 with 4,400 evaluations per query. Four
references instead of all bring its evaluations down to a handful, at 3 to 10 times the cost of the
best; it does not learn at all in this time.

    python examples/retrieval.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

import arsm

C, D, SCALE, QUERIES = 100_000, 16, 20.0, 4
MEASURED = (
    "rloo:samples=8",
    "unordered-set:samples=8",
    "exact-plus-sampled:exact=4,samples=4",
    "arsm:references=4",
    "arsm",
)
TRAINED = ("rloo:samples=8", "unordered-set:samples=8", "arsm:references=4", "arsm")


def queries(n: int) -> Tensor:
    return F.normalize(torch.randn(n, D), dim=-1)


class Catalogue:
    """The items, and their relevance: closeness to the query after a rotation that the policy has
    to find.
    """

    def __init__(self) -> None:
        self.items = F.normalize(torch.randn(C, D), dim=-1)
        skew = 0.12 * torch.randn(D, D)
        self.rotation = torch.matrix_exp(skew - skew.T)
        self.test_queries = queries(32)

    def reward(self, z: Tensor, query: Tensor) -> Tensor:
        """Reward of the items shown, between 0 and 1: z [N, 1], query [N, D] -> [N]."""
        return (self.items[z[:, 0]] * (query @ self.rotation)).sum(-1).clamp_min(0)

    def estimate(self, estimator: arsm.Estimator, query: Tensor, weight: Tensor) -> arsm.Estimate:
        """Estimate E[reward] for the queries [B, D], embedded by weight [D, D]."""
        return arsm.estimate(
            estimator, self.logits(query, weight), self.reward, query, max_rows=None
        )

    def gradient(
        self, estimator: arsm.Estimator, query: Tensor, weight: Tensor
    ) -> tuple[Tensor, float]:
        """An estimate of dE[reward]/dlogits [B, 1, C], and the evaluations per query that it
        needed.
        """
        out = self.estimate(estimator, query, weight)
        assert out.grad is not None
        return out.grad, out.info["distinct"].double().mean().item()

    def logits(self, query: Tensor, weight: Tensor) -> Tensor:
        return (query @ weight @ self.items.T).unsqueeze(1)  # [B, 1, C]


def measure(catalogue: Catalogue, samples: int) -> None:
    """Print mean squared error x evaluations, and its standard error, at the three policies."""
    policies = (torch.zeros(D, D), SCALE * torch.eye(D), SCALE * catalogue.rotation)
    query = queries(1)
    entropies = [arsm.entropy(catalogue.logits(query, weight)).item() for weight in policies]
    print(
        f"{'policy with an entropy of':<38}" + "".join(f"{nats:>20.1f} nats" for nats in entropies)
    )
    for words in MEASURED:
        cells = []
        for weight in policies:
            exact = catalogue.gradient(arsm.Exact(), query, weight)[0]
            errors, evaluations = torch.zeros(samples), 0.0
            for i in range(samples):
                gradient, used = catalogue.gradient(arsm.estimator(words), query, weight)
                errors[i] = (gradient - exact).square().sum()
                evaluations += used / samples
            cost = errors * evaluations
            cells.append(
                f"{cost.mean():.2g} ± {cost.std() / samples**0.5:.1g} at {evaluations:,.0f}"
            )
        print(f"{words:<38}" + "".join(f"{cell:>25}" for cell in cells), flush=True)


def train(catalogue: Catalogue, estimator: arsm.Estimator, steps: int) -> tuple[float, float]:
    """The expected reward after training, and the evaluations per query that it took."""
    torch.manual_seed(1)
    weight = (SCALE * torch.eye(D)).requires_grad_()
    optimiser = torch.optim.Adam([weight], lr=0.03 * SCALE, maximize=True)
    evaluations = 0.0
    for _ in range(steps):
        out = catalogue.estimate(estimator, queries(QUERIES), weight)
        optimiser.zero_grad()
        out.value.mean().backward()
        optimiser.step()
        evaluations += out.info["distinct"].double().mean().item() / steps
    return expected_reward(catalogue, weight.detach()), evaluations


def expected_reward(catalogue: Catalogue, weight: Tensor) -> float:
    """Expected reward on the test queries, by enumeration of all items."""
    return catalogue.estimate(arsm.Exact(), catalogue.test_queries, weight).value.mean().item()


def main(steps: int = 60, samples: int = 30) -> dict[str, float]:
    """Print both tables; returns the expected reward before and after training."""
    torch.manual_seed(0)
    catalogue = Catalogue()
    print(
        f"Squared error x evaluations (lower is better), at how many evaluations, from {samples} "
        "estimates:"
    )
    measure(catalogue, samples)
    reached = {"untrained": expected_reward(catalogue, SCALE * torch.eye(D))}
    print(
        f"Expected reward after {steps} steps of {QUERIES} queries, from "
        f"{reached['untrained']:.3f}:"
    )
    for words in TRAINED:
        reached[words], evaluations = train(catalogue, arsm.estimator(words), steps)
        print(
            f"{words:<38}{reached[words]:.3f} at {evaluations:,.0f} evaluations per query",
            flush=True,
        )
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=int, default=30)
    main(**vars(parser.parse_args()))
