"""The toy problem: one C-way variable whose rewards are almost equal.

    maximise E[f(z)],    f(z) = 1/2 + z / (C R),    z in 1..C,
    z ~ Cat(softmax(phi)),    phi_0 = 0

by plain gradient ascent, phi <- phi + step g, with one estimate g per update. Learned parts of an
estimator take one Adam step per update. Reference: Yin, Yue and Zhou, ARSM, ICML 2019.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

import arsm
from arsm.diagnostics import gradient_variance, pseudo_action_share
from arsm.noise import dirichlet
from arsm_experiments.checks import (
    check_asks,
    check_device,
    check_least,
    check_name,
    check_positive,
    check_some,
    pick_device,
)
from arsm_experiments.progress import progress_bars
from arsm_experiments.runs.files import plain_name
from arsm_experiments.runs.writer import open_run

EVERY_UPDATE = "variance_of_every_update"
"""The option, and the metric: the mean over every update since the last measurement."""
EVERY_UPDATE_SEED = 1 << 32
"""Far from the seeds of the updates and of the other measurements."""
ENDS_DRAWN = 100
"""The most categories of a run that traces its first and last one for figures."""
SHARE_DRAWS = 10
LEARNED_PARTS_RATE = 0.01
"""Adam's rate: a network of 64 units learns the level of f, about 0.5, within about ten updates."""
SMALLEST = {
    "categories": 2,
    "seeds": 1,
    "updates": 1,
    "variance_samples": 2,
    "trace_every": 1,
    "checkpoint_every": 1,
}


@dataclass(frozen=True)
class Problem:
    """f(z) = 1/2 + z / (C R) with z in 1..C; the library counts categories from 0."""

    categories: int
    r: float

    def f(self, z: Tensor) -> Tensor:
        """[N, 1] int64, or relaxed [N, 1, C] -> [N] in float64: float32 can hardly tell neighbours
        apart at large C.
        """
        number = torch.arange(1, self.categories + 1, dtype=torch.float64, device=z.device)
        value = z[:, 0].double() @ number if z.is_floating_point() else z[:, 0].double() + 1
        return 0.5 + value / (self.categories * self.r)

    def expected_reward(self, phi: Tensor) -> Tensor:
        """E[f], exactly: [S, 1, C] -> [S]."""
        every = torch.arange(self.categories, device=phi.device).unsqueeze(-1)
        return (phi.softmax(-1) * self.f(every)).sum((-2, -1))


def scaled_step(categories: int, r: float) -> float:
    """C R / 900: the paper's step 1 at C = R = 30, and equally fast progress of the true gradient
    at any other C and R.

    With p ~ 1/C per category and rewards 1/R apart, the logits move by step / (C R) per update:
    this step keeps that constant. The true gradient closes 96% of the gap in 5,000 updates at C =
    30, 99.9% at 1,000 and 99.99% at 10,000.
    """
    return categories * r / 900


@dataclass(frozen=True)
class Toy:
    """Compare estimators on the paper's toy problem: maximise E[0.5 + z/(C R)] by stochastic
    gradient ascent.

    Writes one run folder per C, step size and estimator, with all seeds in it.
    """

    categories: tuple[int, ...] = (30,)
    """C, the number of categories; the paper has 30, 1000 and 10000."""
    r: float = 30.0
    """R: rewards lie between 0.5 and 0.5 + 1/R."""
    steps: tuple[Literal["printed", "scaled"] | float, ...] = ("printed",)
    """Step sizes: numbers, "printed" (1, the paper's) or "scaled" (C R / 900, which suits every
    C).
    """
    updates: int = 5000
    """Number of gradient steps."""
    estimators: tuple[str, ...] = ("exact", "reinforce", "ar", "ars", "arsm", "rloo")
    """Estimators, such as "arsm", "rloo:samples=8" or "4*reinforce"; "exact" is the true
    gradient.
    """
    seeds: int = 10
    """Independent runs per estimator, computed as one batch."""
    seed: int = 0
    """Seed of the random numbers."""
    variance_samples: int = 100
    """Estimates per measured variance."""
    trace_every: int = 50
    """Updates between measurements of variance, gradient, probabilities, entropy and reward."""
    variance_of_every_update: int = 0
    """Estimates by which the variance of each update's estimate is measured too, at least 2, or 0;
    its mean since the last measurement is recorded.
    """
    checkpoint_every: int = 500
    """Updates between checkpoints."""
    device: str = "cpu"
    """cpu, cuda (for many categories), or auto: cuda if there is one."""
    root: Path = Path("runs")
    """Folder for the run folders, ROOT/toy/NAME."""
    name: str = ""
    """Prefix of the run folders' names."""
    resume: bool = False
    """Continue existing run folders from their last checkpoints."""

    experiment: ClassVar[str] = "toy"

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        for words in self.estimators:
            arsm.estimator(words)
        check_name(self.name)
        check_least(self, **SMALLEST)
        if self.variance_of_every_update:
            check_least(self, variance_of_every_update=2)
        check_some(categories=self.categories, steps=self.steps, estimators=self.estimators)
        check_positive(
            r=(self.r,), steps=[step for step in self.steps if not isinstance(step, str)]
        )
        for words, categories in itertools.product(self.estimators, self.categories):
            check_asks(words, torch.zeros(1, categories))
        check_device(self.device)

    def run(self, console: Console) -> None:
        """Run all combinations, one after the other."""
        # these tensors are too small to share among threads
        torch.set_num_threads(1)
        runs = self.runs()
        options = {
            "group": self.name,
            "resume": self.resume,
            "checkpoint_every": self.checkpoint_every,
            "device": pick_device(self.device),
        }
        with progress_bars(console) as progress:
            tasks = {folder: progress.add_task(folder.name, total=self.updates) for folder in runs}
            for folder, config in runs.items():
                # its clock starts now
                progress.reset(tasks[folder])
                for step in ascend(config, self.root, folder.name, **options):
                    progress.update(tasks[folder], completed=step)

    def runs(self) -> dict[Path, dict[str, Any]]:
        """The run folders of this command, each with the settings that determine its results."""
        return {
            self.root / "toy" / folder_name(self.name, config): config for config in self.configs()
        }

    def configs(self) -> Iterator[dict[str, Any]]:
        """The settings that determine each run's results."""
        common = ("r", "updates", "seeds", "seed", "variance_samples", "trace_every")
        # a run without it has the same settings as before this option existed
        every = self.variance_of_every_update
        extra = {EVERY_UPDATE: every} if every else {}
        for categories in self.categories:
            named = {"printed": 1.0, "scaled": scaled_step(categories, self.r)}
            # at C = R = 30 the printed and the scaled step are the same run
            for step in dict.fromkeys(
                named[step] if isinstance(step, str) else step for step in self.steps
            ):
                for estimator in self.estimators:
                    yield {
                        "estimator": estimator,
                        "categories": categories,
                        "step": step,
                        **{key: getattr(self, key) for key in common},
                        **extra,
                    }


def folder_name(prefix: str, config: dict[str, Any]) -> str:
    """E.g. C30-step1-rloo-samples=4."""
    parts = (
        prefix,
        f"C{config['categories']}",
        f"step{config['step']:g}",
        plain_name(config["estimator"]),
    )
    return "-".join(filter(None, parts))


@torch.no_grad()
def ascend(
    config: dict[str, Any],
    root: Path,
    name: str,
    *,
    group: str = "",
    resume: bool,
    checkpoint_every: int,
    device: str = "cpu",
) -> Generator[int, None, None]:
    """Gradient ascent from all seeds at once, recorded in a run folder; yields the updates done."""
    ascent = Ascent(config, device)
    label = "true gradient" if config["estimator"] == "exact" else config["estimator"]
    with open_run(
        root, "toy", name, config, group=group, label=label, resume=resume, device=device
    ) as run:

        def log(step: int) -> None:
            measured = ascent.measure()
            for seed in range(config["seeds"]):
                run.log(step, {key: values[seed] for key, values in measured.items()}, seed)

        if run.state is None:
            log(0)
            run.save(0, ascent.state_dict())
        else:
            ascent.load_state_dict(run.state)
        yield run.step
        for step in range(run.step + 1, config["updates"] + 1):
            ascent.update()
            last = step == config["updates"]
            if last or step % config["trace_every"] == 0:
                log(step)
            if last or step % checkpoint_every == 0:
                run.save(step, ascent.state_dict())
            yield step


class Ascent:
    """The logits of all seeds on their way, with everything that their next update depends on."""

    def __init__(self, config: dict[str, Any], device: str) -> None:
        self.config, self.device = config, device
        self.estimators = SeedEstimators(config, device)
        shape = config["seeds"], 1, config["categories"]
        self.phi = torch.zeros(shape, dtype=torch.float64, device=device)
        self.evaluations = torch.zeros(config["seeds"], dtype=torch.int64, device=device)
        # measuring has separate random numbers: how often it happens must not change any update
        self.noise, self.probe = (
            torch.Generator(device).manual_seed(2 * config["seed"] + i) for i in range(2)
        )
        self.every = EveryUpdate(self.estimators, config, device)

    def update(self) -> None:
        """One step of all seeds."""
        self.every.measure(self.phi)
        estimate = self.estimators.estimate(self.phi, self.noise, learn=True)
        self.phi = self.phi + self.config["step"] * estimate.gradient
        self.evaluations = self.evaluations + estimate.evaluations

    def measure(self) -> dict[str, list[float]]:
        """Every metric, for each seed."""
        found = measure(self.estimators, self.phi, self.config, self.probe)
        found["evaluations"] = self.evaluations
        return {key: value.tolist() for key, value in found.items()} | self.every.take()

    def state_dict(self) -> dict[str, Any]:
        return {
            "phi": self.phi,
            "evaluations": self.evaluations,
            "noise": self.noise.get_state(),
            "probe": self.probe.get_state(),
            **self.every.state_dict(),
            **self.estimators.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phi = state["phi"].to(self.device)
        self.evaluations = state["evaluations"].to(self.device)
        self.noise.set_state(state["noise"])
        self.probe.set_state(state["probe"])
        self.every.load_state_dict(state)
        self.estimators.load_state_dict(state)


class SeedEstimate(NamedTuple):
    """One estimate for every seed."""

    gradient: Tensor
    """[S, 1, C]."""
    evaluations: Tensor
    """[S], of f."""


class SeedEstimators:
    """One estimator for the batch of all seeds, or one per seed if it has learned parts.

    Learned parts minimise `estimator_loss`, the squared norm of the estimate; running statistics
    are updated by `adapt`.
    """

    def __init__(self, config: dict[str, Any], device: str = "cpu") -> None:
        self.problem = Problem(config["categories"], config["r"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config["seed"])
            shared = arsm.estimator(config["estimator"])
            learns = len(shared.learned) > 0
            # shared by the seeds, learned parts would learn from all runs at once
            self.each = (
                [arsm.estimator(config["estimator"]) for _ in range(config["seeds"])]
                if learns
                else [shared]
            )
            self.parts = nn.ModuleList(
                part for estimator in self.each for part in estimator.learned
            )
            # learned parts take their sizes from the first logits
            if learns:
                phi = torch.zeros(config["seeds"], 1, config["categories"], dtype=torch.float64)
                self.estimate(phi, torch.Generator())
        self.parts.to(device)
        parameters = list(self.parts.parameters())
        self.optimiser = torch.optim.Adam(parameters, LEARNED_PARTS_RATE) if parameters else None

    def split(self, phi: Tensor) -> Iterator[tuple[arsm.Estimator, Tensor]]:
        """Each estimator with its rows of phi [S, 1, C]."""
        return zip(self.each, phi.chunk(len(self.each)), strict=True)

    def estimate(
        self, phi: Tensor, generator: torch.Generator, *, learn: bool = False
    ) -> SeedEstimate:
        """Estimate dE[f]/dphi; with `learn`, also update the learned parts."""
        gradients = []
        evaluations = []
        losses = []
        for estimator, rows in self.split(phi):
            with torch.set_grad_enabled(
                estimator.needs_gradient or (learn and self.optimiser is not None)
            ):
                logits = rows.detach().requires_grad_(estimator.needs_gradient)
                # f costs next to nothing: evaluating every query is faster than picking out the
                # distinct ones
                out = arsm.estimate(
                    estimator,
                    logits,
                    self.problem.f,
                    generator=generator,
                    evaluation="dense",
                    max_rows=None,
                )
                gradients.append(
                    torch.autograd.grad(out.value.sum(), logits)[0]
                    if out.grad is None
                    else out.grad
                )
            evaluations.append(out.info["distinct"])
            losses.append(out.estimator_loss)
            if learn:
                estimator.adapt(out)
        if learn and self.optimiser is not None:
            self.optimiser.zero_grad()
            # every parameter belongs to one seed: the sum of losses trains each seed independently
            torch.autograd.backward(losses)
            self.optimiser.step()
        return SeedEstimate(torch.cat(gradients), torch.cat(evaluations))

    def variance(self, phi: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """Variance of one estimate, per component, measured from `samples` estimates: [S, 1, C]."""
        options: dict[str, Any] = {"samples": samples, "generator": generator, "max_rows": None}
        return torch.cat(
            [
                gradient_variance(estimator, rows, self.problem.f, **options)
                for estimator, rows in self.split(phi)
            ]
        )

    def state_dict(self) -> dict[str, Any]:
        """The learned parts and their optimiser; empty if there are none."""
        state = {}
        if len(self.parts):
            state["learned_parts"] = self.parts.state_dict()
        if self.optimiser is not None:
            state["optimiser"] = self.optimiser.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(self.parts):
            self.parts.load_state_dict(state["learned_parts"])
        if self.optimiser is not None:
            self.optimiser.load_state_dict(state["optimiser"])


class EveryUpdate:
    """The variance of every update's estimate, averaged since it was last taken.

    One mean in place of many values keeps the record small. Between measurements an estimator's
    variance may change by orders of magnitude, and a mean over every 50th update misses that. The
    variance from n estimates is unbiased from n = 2 on, and thousands of updates average its noise.
    """

    def __init__(self, estimators: SeedEstimators, config: dict[str, Any], device: str) -> None:
        self.estimators = estimators
        self.samples = config.get(EVERY_UPDATE, 0)
        self.sum = torch.zeros(config["seeds"], dtype=torch.float64, device=device)
        self.updates = 0
        # random numbers of its own: whether it measures must not change anything else
        self.generator = torch.Generator(device).manual_seed(EVERY_UPDATE_SEED + config["seed"])

    def measure(self, phi: Tensor) -> None:
        """Add the variance of the estimate that is about to be drawn at phi [S, 1, C]."""
        if self.samples:
            variance = self.estimators.variance(phi, self.samples, self.generator)
            self.sum = self.sum + variance.mean((-2, -1))
            self.updates += 1

    def take(self) -> dict[str, list[float]]:
        """The mean per seed since the last call; empty if nothing was measured."""
        if self.updates == 0:
            return {}
        mean = (self.sum / self.updates).tolist()
        self.sum = torch.zeros_like(self.sum)
        self.updates = 0
        return {EVERY_UPDATE: mean}

    def state_dict(self) -> dict[str, Any]:
        """Sum, number of updates and generator; empty if nothing is wanted."""
        if not self.samples:
            return {}
        state = {"sum": self.sum, "updates": self.updates, "noise": self.generator.get_state()}
        return {"every_update": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.samples:
            saved = state["every_update"]
            self.sum = saved["sum"].to(self.sum.device)
            self.updates = saved["updates"]
            self.generator.set_state(saved["noise"])


def measure(
    estimators: SeedEstimators, phi: Tensor, config: dict[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    """The quantities that the paper plots, at one phi [S, 1, C]: [S] each."""
    variance = estimators.variance(phi, config["variance_samples"], generator)
    gradient = estimators.estimate(phi, generator).gradient
    probability = phi.softmax(-1)
    # of one draw the share is coarse: a mean over several
    draws = phi.expand(SHARE_DRAWS, *phi.shape)
    ends = {
        "gradient_first": gradient[:, 0, 0],
        "gradient_last": gradient[:, 0, -1],
        "probability_first": probability[:, 0, 0],
    }
    return {
        "reward": estimators.problem.expected_reward(phi),
        **(ends if config["categories"] <= ENDS_DRAWN else {}),
        "probability_last": probability[:, 0, -1],
        "variance": variance.mean((-2, -1)),
        "entropy": arsm.entropy(phi).squeeze(-1),
        "pseudo_action_share": pseudo_action_share(draws, dirichlet(draws, generator)).mean((0, 2)),
    }
