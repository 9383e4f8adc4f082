"""Less noise for the same steps: four ways to change the rollouts of in-state leave-one-out, on
three environments.

    python -m benchmarks.less_noise                    # five seeds, one worker per processor
    python -m benchmarks.less_noise --seeds 2 --ways "common random numbers" "cut after 16 steps"

The variance is the trace of the gradient's covariance at one policy, which common random numbers
made with a third of the steps; times the steps of an iteration it is comparable between ways that
play more and fewer. The return is that of 50 episodes after equal steps of the simulator, rollouts
included. The environments are none of those that `benchmarks.agents` reports. All ways but the
first have common random numbers.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from examples.many_actions import Knobs
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import arsm
from arsm import policy
from arsm.rl import PolicyGradient, Value
from arsm.rl.credit import Branching, Loss, TrueEpisodes, Valued
from arsm.rl.networks import mlp
from arsm.rl.play import EpisodeBranches
from benchmarks.agents import work
from benchmarks.agents_report import read
from benchmarks.measure import table

ITERATIONS = 60
ENVIRONMENTS: dict[str, tuple[Callable[[], Any], int | None, int]] = {
    "CliffWalking, slippery": (
        partial(gymnasium.make, "CliffWalking-v1", is_slippery=True),
        200,
        300_000,
    ),
    "LunarLander, wind": (
        partial(gymnasium.make, "LunarLander-v3", enable_wind=True),
        500,
        300_000,
    ),
    "Knobs, K = 6": (partial(Knobs, 6), None, 100_000),
}
"""Environment, horizon, and steps to learn for."""


class ControlVariate(Branching):
    """A learned h(s, a) = sum_k h_k(s, a_k) taken off the returns, and the gradient of its
    expectation put back.

        g_t = sum_k d/dphi_k E[h_k(s_t, a_k)] + g_t(R - h),    which is unbiased for every h

    It changes the steps that the budget leaves out too.
    """

    def __init__(self, estimator: arsm.Estimator, agent: PolicyGradient) -> None:
        super().__init__(estimator)
        self.shape = agent._logits_shape
        generator = torch.Generator().manual_seed(agent.settings.seed)
        self.network = mlp(
            agent.environment.observations, agent.settings.hidden, math.prod(self.shape), generator
        )

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.network.parameters())

    def gradient(self, batch: TrueEpisodes, branches: EpisodeBranches) -> tuple[Tensor, Loss]:
        rollouts, returns = branches.plan, torch.from_numpy(branches.returns)
        assert rollouts is not None
        assert self.estimator is not None
        true = torch.cat([part.pose().queries.points[0] for part in rollouts.parts])
        h = self.network(batch.observations).unflatten(-1, self.shape)
        own, tried = (
            x.gather(-1, a.unsqueeze(-1)).sum((-2, -1))
            for x, a in ((h, true), (h[rollouts.step], rollouts.action))
        )
        loss = ((own - batch.returns).square().sum() + (tried - returns).square().sum()) / 2
        h, probabilities = h.detach(), batch.logits.softmax(-1)
        exact = probabilities * (h - (probabilities * h).sum(-1, keepdim=True))
        rest = batch.gradient(
            self.estimator, rollouts, batch.returns - own.detach(), returns - tried.detach()
        )
        return exact + rest, lambda: loss


whole = partial(PolicyGradient, credit=arsm.RLOO(2))
"""Rollouts to the end."""


class Cut(Valued):
    """Rollouts that are cut after some steps and go on with a learned value, at the steps of the
    budget's walk alone.
    """

    def __init__(self, steps: int, agent: PolicyGradient) -> None:
        credit = Value(1.0, steps, updates=1, value_updates=1, branch=arsm.RLOO(2), cut=steps)
        world, settings = agent.environment, agent.settings
        generator = torch.Generator().manual_seed(settings.seed)
        super().__init__(
            replace(credit, where="random"),
            world.observations,
            settings.hidden,
            settings.gamma,
            generator,
        )

    def branching(
        self, batch: TrueEpisodes, budget: int | None, generator: torch.Generator
    ) -> Tensor | None:
        return None


def with_credit(make: Callable[[PolicyGradient], Any], **arguments: Any) -> PolicyGradient:
    """An agent with a credit that the library does not have."""
    agent = whole(**arguments)
    agent.credit = make(agent)
    agent._optimizers.append(
        torch.optim.Adam(agent.credit.parameters(), lr=agent.settings.learning_rate)
    )
    return agent


class Kept(PolicyGradient):
    """Steps are kept with probabilities that fall with what a rollout from there costs, rho_t ~ (T
    - t)^(-1/2).
    """

    def _plan(self, batch: TrueEpisodes, generator: torch.Generator) -> policy.Rollouts:
        left = torch.cat(
            [torch.arange(length, 0, -1, dtype=torch.float64) for length in batch.lengths]
        )
        budget = self._budget(len(batch.lengths))
        estimator = self.credit.estimator
        assert budget is not None
        assert estimator is not None
        keep = left.rsqrt()
        for _ in range(10):  # the expected number of rollouts is at most the budget
            keep = (keep * budget / keep.sum()).clamp(max=1.0)
        logits = batch.logits.unsqueeze(0)
        return policy.plan(
            estimator,
            logits,
            batch.actions.unsqueeze(0),
            keep=keep.unsqueeze(0),
            generator=generator,
        )


WAYS: dict[str, Callable[..., PolicyGradient]] = {
    "noise of their own": partial(whole, common_random_numbers=False),
    "common random numbers": whole,
    "cut after 16 steps": partial(with_credit, partial(Cut, 16)),
    "cut after 64 steps": partial(with_credit, partial(Cut, 64)),
    "learned control variate": partial(with_credit, partial(ControlVariate, arsm.RLOO(2))),
    "keep-probabilities": partial(Kept, credit=arsm.RLOO(2)),
}


@dataclass(frozen=True)
class Job:
    """One seed of a way in one environment."""

    environment: str
    way: str
    seed: int
    training: int
    """Steps of the simulator."""


def measure(job: Job) -> dict[str, float]:
    """The variance, the steps per iteration at which it was measured, and the return after
    training.
    """
    torch.set_num_threads(1)
    environment, horizon, _ = ENVIRONMENTS[job.environment]
    made = {"environment": environment, "horizon": horizon, "seed": job.seed}
    first = whole(**made)
    first.learn(steps=job.training // 3, progress=False)
    agent = WAYS[job.way](**made)
    agent.network.load_state_dict(first.network.state_dict())
    parameters = list(agent.network.parameters())
    kept, gradients = parameters_to_vector(parameters).detach().clone(), []

    def keep(_: object) -> bool:
        gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        vector_to_parameters(kept, parameters)
        return len(gradients) < ITERATIONS

    agent.learn(episodes=10**9, callback=keep, progress=False)
    # the scale of the rewards has settled, and a critic has learned
    half = torch.stack(gradients[ITERATIONS // 2 :])
    learner = WAYS[job.way](**made)
    learner.learn(steps=job.training, progress=False)
    found = {
        "variance": float(half.var(0).sum()),
        "played": (agent.steps + agent.replayed) / ITERATIONS,
        "return": learner.evaluate(50, deterministic=False).mean,
    }
    for each in (first, agent, learner):
        each.close()
    return found


def write(folder: Path) -> None:
    """The table of the lines in less_noise.jsonl, in words and as less_noise.csv."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in read(folder / "less_noise.jsonl"):
        groups.setdefault((line["environment"], line["way"]), []).append(line)
    environments = list(dict.fromkeys(environment for environment, _ in groups))
    # a run may end in any order; the table has its own
    ordered = [(e, way) for e in environments for way in WAYS if (e, way) in groups]
    rows = []
    with (folder / "less_noise.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["row", "metric", "mean", "std", "seeds", "paper", "steps", "hardware", "commit"]
        )
        for environment, way in ordered:
            own = groups[environment, way]
            writer.writerows(csv_rows(f"{environment}: {way}", own))
            rows.append([environment, way, *in_words(own)])
    header = ["environment", "way", "steps per iteration", "variance x steps, median", "return"]
    print(table("In-state RLOO(2)", header, rows))


def csv_rows(name: str, own: list[dict[str, Any]]) -> list[list[Any]]:
    """A line per metric: mean and standard deviation over seeds."""
    place = ["; ".join(sorted({line[key] for line in own})) for key in ("hardware", "commit")]
    played = np.mean([line["played"] for line in own])
    found = []
    for metric, values, steps in (
        ("variance x steps", noise_per_step(own), played),
        ("return", np.array([line["return"] for line in own]), own[0]["training"]),
    ):
        deviation = float(values.std(ddof=1)) if len(own) > 1 else ""
        found.append([name, metric, values.mean(), deviation, len(own), "", f"{steps:.0f}", *place])
    return found


def in_words(own: list[dict[str, Any]]) -> list[str]:
    """Steps, noise and return as the printed table has them."""
    returns = np.array([line["return"] for line in own])
    error = returns.std(ddof=1) / math.sqrt(len(own)) if len(own) > 1 else math.nan
    return [
        f"{np.mean([line['played'] for line in own]):.0f}",
        f"{np.median(noise_per_step(own)):.3g}",
        f"{returns.mean():.1f} ± {error:.1f}",
    ]


def noise_per_step(own: list[dict[str, Any]]) -> Any:
    """Variance times cost, which is equal for a method and for averaging two of its gradients."""
    return np.array([line["variance"] * line["played"] for line in own])


def main() -> None:
    """Run what is not done yet, then write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.less_noise", description=__doc__)
    parser.add_argument(
        "--environments",
        nargs="*",
        choices=[*ENVIRONMENTS],
        default=[*ENVIRONMENTS],
        metavar="NAME",
    )
    parser.add_argument("--ways", nargs="*", choices=[*WAYS], default=[*WAYS], metavar="WAY")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps to learn for")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=Path("results/agents"))
    chosen = parser.parse_args()
    jobs = [
        Job(name, way, seed, int(chosen.share * ENVIRONMENTS[name][2]))
        for seed in range(chosen.seeds)
        for name in chosen.environments
        for way in chosen.ways
    ]
    work(chosen.folder / "less_noise.jsonl", jobs, measure, chosen.workers)
    write(chosen.folder)


if __name__ == "__main__":
    main()
