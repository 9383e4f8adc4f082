"""A black box over named settings: which settings of a small network are best, found by training
it.

The network classifies points on spiral arms. Seven settings, from its width to its optimiser, have
2 to 6 values each: 10,800 combinations in all. f takes one of them, trains the network, and returns
the accuracy on fresh points; some combinations diverge, which counts as a failure and is avoided.
`arsm.maximize` evaluates at most 160 combinations, 16 at a time in two processes, each once. Ctrl-C
returns the best so far.

Expect an accuracy of 0.996, where random search over as many combinations reaches 0.97 and the
average one 0.43.

    python examples/black_box.py
"""

import argparse
import math
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm

SETTINGS = {
    "width": (4, 8, 16, 32, 64),
    "layers": (1, 2, 3),
    "activation": (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU),
    "rate": (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
    "optimiser": (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop),
    "features": (False, True),
    "noise": (0.0, 0.05, 0.2, 0.5, 1.0),
}


def spiral(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points [n, 2] on three arms, and the arm [n] each belongs to."""
    label = torch.randint(3, (n,), generator=generator)
    radius = torch.rand(n, generator=generator) * 2
    angle = 2.1 * label + 2.5 * radius + 0.1 * torch.randn(n, generator=generator)
    return radius.unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1), label


def accuracy(chosen: dict[str, Any], steps: int = 40) -> float:
    """f: train with these settings and return the accuracy, the same for the same settings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)

    def inputs(x: Tensor) -> Tensor:
        return (
            torch.cat([x, x.square(), x.norm(dim=-1, keepdim=True)], -1)
            if chosen["features"]
            else x
        )

    layers: list[nn.Module] = []
    for _ in range(chosen["layers"]):
        layers += [nn.LazyLinear(chosen["width"]), chosen["activation"]()]
    model = nn.Sequential(*layers, nn.LazyLinear(3))
    model(inputs(torch.zeros(1, 2)))
    optimiser = chosen["optimiser"](model.parameters(), chosen["rate"])
    for _ in range(steps):
        x, label = spiral(64, generator)
        x = inputs(x)
        loss = F.cross_entropy(
            model(x + chosen["noise"] * torch.randn(x.shape, generator=generator)), label
        )
        if not math.isfinite(loss.item()):
            raise FloatingPointError("diverged")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x, label = spiral(2000, generator)
    with torch.no_grad():
        return (model(inputs(x)).argmax(-1) == label).double().mean().item()


def main(evaluations: int = 160, workers: int = 2) -> dict[str, float]:
    """Search; returns the best accuracy, and that of random search with as many evaluations."""
    rng = random.Random(0)
    points = [
        {name: rng.choice(values) for name, values in SETTINGS.items()} for _ in range(evaluations)
    ]
    with ProcessPoolExecutor(workers) as executor:
        best = arsm.maximize(accuracy, SETTINGS, evaluations=evaluations, map=executor.map)
        drawn = list(executor.map(_or_zero, points))
    print(best)
    reached = {
        "maximize": best.value,
        "random search": max(drawn),
        "average": statistics.mean(drawn),
    }
    for name, value in reached.items():
        print(f"  {name:<15}{value:.3f}")
    return reached


def _or_zero(chosen: dict[str, Any]) -> float:
    try:
        return accuracy(chosen)
    except FloatingPointError:
        return 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, default=160)
    parser.add_argument("--workers", type=int, default=2)
    main(**vars(parser.parse_args()))
