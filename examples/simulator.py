"""A black-box simulator as f: a shop's stock, simulated in NumPy.

Every weekday has one of 12 stock levels, up to which the shop orders in the evening. The goods
arrive two days later, and demand is random, with a weekly rhythm. The seven levels of a week make
12^7 plans. f passes the plans to a NumPy function and turns the profits back into a tensor; a
simulator needs nothing else.

The demand is passed as context. All plans that an estimate compares then meet the same customers
(common random numbers), and the estimate is still unbiased, because the demand does not depend on
the plans.

Expect a profit of 33.1 to 33.3 per day from ARSM, pooled ARSM and leave-one-out REINFORCE, and 32.4
from averaged REINFORCE, all at 67 simulations at most; the best level that is the same every day
earns 29.6.

    python examples/simulator.py
"""

import argparse

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import arsm

DAYS, WEEKS = 7, 4
LEVELS = 5 * np.arange(12)
MEAN_DEMAND = np.array([4, 4, 5, 6, 10, 16, 8])
LEAD, PRICE, HOLDING, LOST = 2, 5.0, 0.5, 3.0
ESTIMATORS = ("arsm", "arsm:pooled=True", "rloo:samples=67", "67*reinforce")


def draw_demand(rng: np.random.Generator, n: int) -> NDArray[np.int64]:
    """Customers per day, [n, WEEKS * DAYS]."""
    return rng.poisson(np.tile(MEAN_DEMAND, WEEKS), (n, WEEKS * DAYS))


def simulate(plan: NDArray[np.int64], demand: NDArray[np.int64]) -> NDArray[np.float64]:
    """Average daily profit of plans [N, DAYS], as indices into LEVELS, under demand [N, WEEKS *
    DAYS].
    """
    stock, profit = np.full(len(plan), 20), np.zeros(len(plan))
    on_order = np.zeros((len(plan), LEAD), dtype=np.int64)
    for day in range(WEEKS * DAYS):
        stock = stock + on_order[:, 0]
        sold = np.minimum(stock, demand[:, day])
        stock = stock - sold
        profit += PRICE * sold - HOLDING * stock - LOST * (demand[:, day] - sold)
        on_order[:, 0] = on_order[:, 1]
        on_order[:, 1] = np.maximum(LEVELS[plan[:, day % DAYS]] - stock - on_order[:, 0], 0)
    return profit / (WEEKS * DAYS)


def f(z: Tensor, demand: Tensor) -> Tensor:
    """The simulator as f: rows of choices in, a floating tensor out."""
    return torch.from_numpy(simulate(z.numpy(), demand.numpy())).float()


def main(steps: int = 300) -> dict[str, float]:
    """Learn a plan with each estimator; returns the daily profit of the most likely plan under
    fresh demand.
    """
    test_demand = draw_demand(np.random.default_rng(1), 2000)
    constant = [
        simulate(np.full((2000, DAYS), level), test_demand).mean() for level in range(len(LEVELS))
    ]
    reached = {"best constant level": float(max(constant))}
    for words in ESTIMATORS:
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        logits = torch.zeros(DAYS, len(LEVELS), requires_grad=True)
        optimiser = torch.optim.Adam([logits], lr=0.1, maximize=True)
        for _ in range(steps):
            demand = torch.from_numpy(draw_demand(rng, 4))
            optimiser.zero_grad()
            out = arsm.estimate(
                arsm.estimator(words), logits.expand(4, -1, -1), f, demand, frozen=True
            )
            out.value.mean().backward()
            optimiser.step()
        plan = logits.argmax(-1).numpy()
        reached[words] = float(simulate(np.tile(plan, (2000, 1)), test_demand).mean())
        print(f"{words:<20} {reached[words]:6.2f} per day with the levels {LEVELS[plan].tolist()}")
    print(f"{'best constant level':<20} {reached['best constant level']:6.2f}")
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    main(**vars(parser.parse_args()))
