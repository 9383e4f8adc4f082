"""A mixture of experts: choices inside a module, credited by `arsm.choices`.

Sequences of three tokens from four clusters. Each cluster's tokens follow a rule of their own, and the target of a
sequence is the sum over its tokens. A linear expert can learn one rule, so the error shows whether tokens reach the
right experts. The router's logits [B, T, E] go into the choice as they are: T choices per row, one loss per row. Only
the chosen expert of a token is evaluated.

Expect a squared error of 0.06 with leave-one-out over four samples and of 0.02 with ARSM; a router that is not trained
leaves 11.7, and a single expert 5.0.

    python examples/moe_router.py
"""

import argparse

import torch
from torch import Tensor, nn

import arsm

TOKENS, INPUTS, CLUSTERS = 3, 8, 4


class Mixture(nn.Module):
    """Tokens [B, T, 8] -> one number per sequence [B]."""

    def __init__(self, experts: int, learn: bool = True) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, experts)).requires_grad_(learn)
        self.route = arsm.Choice()
        self.experts = nn.Parameter(torch.randn(experts, INPUTS) / INPUTS**0.5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.route(self.gate(x))  # [B, T, E] -> int64 [B, T]
        return (self.experts[z] * x).sum((-2, -1))


class Data:
    """Four clusters and their rules."""

    def __init__(self) -> None:
        self.centres, self.rules = 2 * torch.randn(CLUSTERS, INPUTS), torch.randn(CLUSTERS, INPUTS) / INPUTS**0.5

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        cluster = torch.randint(CLUSTERS, (n, TOKENS))
        x = self.centres[cluster] + torch.randn(n, TOKENS, INPUTS)
        return x, (self.rules[cluster] * x).sum((-2, -1))


def train(model: Mixture, data: Data, estimator: arsm.Estimator, steps: int) -> float:
    """The squared error on fresh sequences, with the most probable experts."""

    def loss_function(x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square()

    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(steps):
        with arsm.choices(model, estimator) as run:
            loss = run(loss_function, *data.draw(128)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        return loss_function(*data.draw(4000)).mean().item()


def main(steps: int = 600) -> dict[str, float]:
    """Train each model; returns their errors."""
    reached = {}
    for name, experts, learn, estimator in [
        ("RLOO(4)", CLUSTERS, True, arsm.RLOO(4)),
        ("ARSM", CLUSTERS, True, arsm.ARSM()),
        ("untrained router", CLUSTERS, False, arsm.RLOO(4)),
        ("one expert", 1, False, arsm.RLOO(2)),
    ]:
        torch.manual_seed(0)
        reached[name] = train(Mixture(experts, learn), Data(), estimator, steps)
        print(f"{name:<20}{reached[name]:.3f}", flush=True)
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    main(**vars(parser.parse_args()))
