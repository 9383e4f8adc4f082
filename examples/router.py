"""A router over experts, trained directly on its goal: right answers within a latency budget.

Eight requests arrive together and share a budget of 40 ms. Four frozen classifiers, from a linear
one (1 ms) to a large network (16 ms), are available. The router chooses one for each request;
requests after the budget is spent get no answer. The objective is the fraction of right answers: 0
or 1 per request, with the requests coupled by the budget. It is not differentiable, and there are
too many combinations, 4^8, to enumerate. Nothing is relaxed.

The router is an ordinary module with an `arsm.Choice` in it: in training it draws an expert for
each request, in `eval` mode it takes the most probable one. `arsm.choices` runs the loss and gives
the router its gradient. Every estimator may evaluate the loss seven times per group, ARSM's own
number at C = 4.

Look at the last four lines, the trained routers, against the four above them, one expert for all.

Expect 0.99 of the answers to be right with ARSM and with leave-one-out REINFORCE, and 0.96 with
averaged REINFORCE; the best single expert gives 0.86.

    python examples/router.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm

K, LATENCY, BUDGET = 8, torch.tensor([1, 2, 6, 16]), 40
HIDDEN = (2, 8, 64)  # widths of the experts after the linear one
C, CLASSES = len(LATENCY), 3
ESTIMATORS = ("arsm", "arsm:pooled=True", "rloo:samples=7", "7*reinforce")


def spiral(n: int) -> tuple[Tensor, Tensor]:
    """Points [n, 2] on three spiral arms, and the arm [n] each belongs to."""
    label = torch.randint(CLASSES, (n,))
    radius = torch.rand(n) * 2
    angle = 2.1 * label + 1.6 * radius + 0.15 * torch.randn(n)
    return radius.unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1), label


def train_experts() -> list[nn.Module]:
    """One linear classifier and three networks of growing size."""
    networks = [nn.Sequential(nn.Linear(2, h), nn.Tanh(), nn.Linear(h, CLASSES)) for h in HIDDEN]
    experts = [nn.Linear(2, CLASSES), *networks]
    for expert in experts:
        optimiser = torch.optim.Adam(expert.parameters(), lr=0.02)
        for _ in range(500):
            x, label = spiral(256)
            optimiser.zero_grad()
            F.cross_entropy(expert(x), label).backward()
            optimiser.step()
    return experts


class Router(nn.Module):
    """Requests [N, K, 2] -> the expert of each, int64 [N, K]."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, C)
        )
        self.choose = arsm.Choice()

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(self.logits(x))


def answered_right(z: Tensor, right: Tensor) -> Tensor:
    """Fraction of right answers within the budget: choices z [N, K]; right [N, K, C]: whether each
    expert is right.
    """
    in_time = LATENCY[z].cumsum(-1) <= BUDGET
    return (right.gather(-1, z.unsqueeze(-1)).squeeze(-1) & in_time).float().mean(-1)


@torch.no_grad()
def groups(experts: list[nn.Module], n: int) -> tuple[Tensor, Tensor]:
    """n groups of requests [n, K, 2], and which experts are right about them [n, K, C]."""
    x, label = spiral(n * K)
    right = torch.stack([expert(x).argmax(-1) == label for expert in experts], -1)
    return x.unflatten(0, (n, K)), right.unflatten(0, (n, K))


def train(router: Router, estimator: arsm.Estimator, experts: list[nn.Module], steps: int) -> None:
    """Raise the fraction of right answers."""

    def answers(x: Tensor, right: Tensor) -> Tensor:
        return answered_right(router(x), right)

    optimiser = torch.optim.Adam(router.parameters(), lr=3e-3, maximize=True)
    for _ in range(steps):
        with arsm.choices(router, estimator) as run:
            value = run(answers, *groups(experts, 64)).mean()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()


def main(steps: int = 1000) -> dict[str, float]:
    """Train the router with each estimator; returns the fraction of right answers on fresh
    requests.
    """
    torch.manual_seed(0)
    experts = train_experts()
    x_test, right_test = groups(experts, 4000)
    print(
        "each expert alone, without a budget:",
        [f"{share:.2f}" for share in right_test.float().mean((0, 1)).tolist()],
    )
    print("right answers within the budget:")
    reached = {}
    for c in range(C):
        z = torch.full((len(x_test), K), c)
        reached[f"always expert {c}"] = answered_right(z, right_test).mean().item()
    for words in ESTIMATORS:
        torch.manual_seed(1)
        router = Router()
        train(router, arsm.estimator(words), experts, steps)
        router.eval()
        with torch.no_grad():
            reached[words] = answered_right(router(x_test), right_test).mean().item()
    for name, share in reached.items():
        print(f"  {name:<20}{share:.3f}")
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="updates of each router")
    main(**vars(parser.parse_args()))
