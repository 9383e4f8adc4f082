"""`arsm compare`: bias, variance and cost of estimators at equal budgets of evaluations, on several
kinds of problems.

toy       one C-way variable, f(z) = 1/2 + z / (C R), at logits half trained by the true gradient
network   K = 20 ten-way variables and a random network f(z) = w' tanh(V onehot(z)), logits
          N(0, scale^2): from untrained (0.1) to confident (6)
binary    the same with 2 categories
vae       a trained VAE's ELBO, f(z) = ln p(x, z) - ln q(z | x), at the encoder's logits for a few
          validation images
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

import arsm
from arsm.comparison import best_additive, compare, reference_gradient
from arsm.diagnostics import Moments
from arsm.ranking import Compared, Ranking
from arsm.scores import centred, probabilities
from arsm_experiments.checks import check_least, check_some
from arsm_experiments.data import load_mnist
from arsm_experiments.layout import Layout
from arsm_experiments.progress import progress_bars
from arsm_experiments.runs.files import RunError
from arsm_experiments.runs.reader import load_checkpoint, read_header, read_run
from arsm_experiments.runs.writer import Run, open_run
from arsm_experiments.toy import Problem as ToyProblem
from arsm_experiments.toy import scaled_step
from arsm_experiments.vae import Vae, VaeNetwork, log_q

TOY_UPDATES = 1000
VAE_IMAGES = 4
MEASURED = (
    "evaluations",
    "milliseconds",
    "variance",
    "bias",
    "bias_error",
    "variance_error",
    "milliseconds_error",
)
"""The numbers of a row that a run records."""
FLOOR = "floor"
"""Leave-one-out of f minus its best additive fit at the same logits: a floor for additive control
variates.
"""
ONE_VARIABLE = (
    "reinforce",
    "ars",
    "ars-plus",
    "arsm",
    "arsm-plus",
    "rloo",
    "otb",
    "dr-grpo",
    "grpo",
    "rloo:ridge=1.0",
    "disarm",
    "carms",
    "unordered-set",
    "exact-plus-sampled",
    "relax",
    "nvil",
    "gumbel-softmax:temperature=0.5",
    "gumbel-softmax:temperature=0.5,hard=True",
    "reinmax-rao",
    "imle",
    "aimle",
)
SEVERAL_VARIABLES = (
    FLOOR,
    "reinforce",
    "ars",
    "ars-plus",
    "arsm",
    "arsm-plus",
    "arsm:pooled=True",
    "arsm:references=2,pooled=True",
    "rloo",
    "otb",
    "dr-grpo",
    "grpo",
    "rloo:ridge=1.0",
    "rloo:surrogate=logits",
    "disarm",
    "carms",
    "local-expectation",
    "muprop",
    "rebar",
    "relax",
    "nvil",
    "double-control",
    "4*rodeo:samples=11",
    "gumbel-softmax:temperature=0.5",
    "gumbel-softmax:temperature=0.5,hard=True",
    "straight-through",
    "decoupled-straight-through:backward=0.5",
    "gumbel-rao",
    "gapped-straight-through",
    "reinmax",
    "reinmax-rao",
    "imle",
    "aimle",
)
BINARY = (
    FLOOR,
    "reinforce",
    "arsm",
    "arsm-plus",
    "arsm:pooled=True",
    "rloo",
    "rloo:ridge=1.0",
    "disarm",
    "ugc",
    "carms",
    "local-expectation",
    "double-control",
    "rodeo",
    "nvil",
)


class ComparedProblem(NamedTuple):
    """A problem to compare estimators on."""

    logits: Tensor
    """[B, K, C]."""
    f: Callable[..., Tensor]
    estimators: tuple[str, ...]
    """The estimators that apply to it."""
    budget: int
    """Evaluations per estimate, unless the user says otherwise."""
    context: tuple[Tensor, ...] = ()
    """[B, ...] each: f's other arguments."""
    config: Mapping[str, Any] = MappingProxyType({})
    """Settings that determine the results, besides the problem's name."""


def toy(categories: int) -> ComparedProblem:
    """The toy problem after 1,000 of 5,000 updates with the true gradient, at the step size scaled
    to C.
    """
    problem = ToyProblem(categories, r=30.0)
    phi = torch.zeros(1, 1, categories, dtype=torch.float64)
    # neither at the start, where all categories are alike, nor at the end, where one is certain
    for _ in range(TOY_UPDATES):
        gradient = arsm.estimate(arsm.Exact(), phi, problem.f, max_rows=None).grad
        assert gradient is not None
        phi = phi + scaled_step(categories, problem.r) * gradient
    # ARSM+ compares all pairs of categories
    fitting = tuple(words for words in ONE_VARIABLE if categories <= 100 or words != "arsm-plus")
    return ComparedProblem(phi, problem.f, fitting, 4)


def network(
    scale: float, rows: int = 4, variables: int = 20, categories: int = 10, hidden: int = 64
) -> ComparedProblem:
    """A random network with one hidden layer; rows have different logits."""
    generator = torch.Generator().manual_seed(1)
    v, w, logits = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((variables, categories, hidden), (hidden,), (rows, variables, categories))
    )

    def f(z: Tensor) -> Tensor:
        # relaxed points of estimators that differentiate f
        if z.is_floating_point():
            return torch.einsum("nkc,kch->nh", z, v).div(math.sqrt(variables)).tanh() @ w
        return v[torch.arange(variables), z].sum(1).div(math.sqrt(variables)).tanh() @ w

    if categories == 2:
        return ComparedProblem(scale * logits, f, BINARY, 12)
    return ComparedProblem(scale * logits, f, SEVERAL_VARIABLES, 46)


def vae(folder: Path) -> ComparedProblem:
    """A VAE with its first seed's best weights; ln q inside f is detached, as in training."""
    config = vae_config(folder)
    model = VaeNetwork(config)
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    # a trained model, at logits that training meets
    model.load_state_dict(Layout.of(model).unpack(checkpoint["state"]["best"][0]))
    # only the gradient of the logits is compared
    model.requires_grad_(False)
    x = load_mnist().validation[:VAE_IMAGES].float()
    logits = model.encode(x)

    def elbo(z: Tensor, x: Tensor, log_q1: Tensor) -> Tensor:
        return model.log_joint([z], x) - log_q(log_q1, z)

    # one evaluation per swap, and one for the true sample
    budget = 1 + math.comb(config.categories, 2)
    decided = {"checkpoint": folder.resolve().name, "checkpoint_step": checkpoint["step"]}
    return ComparedProblem(logits, elbo, SEVERAL_VARIABLES, budget, (x, logits), decided)


def vae_config(folder: Path) -> Vae:
    """The settings that a VAE was trained with; refuses a folder without a one-layer VAE."""
    for name in ("config.json", "checkpoint.pt"):
        if not (folder / name).is_file():
            raise RunError(
                f"{folder} has no {name}; give --checkpoint a run folder that `arsm vae` has made."
            )
    header = read_header(folder)
    if header["experiment"] != "vae" or header["config"]["layers"] != 1:
        raise RunError(
            f"{folder} holds no VAE of one layer; give --checkpoint a run folder of `arsm vae "
            "--layers 1`."
        )
    fields = {field.name for field in dataclasses.fields(Vae)}
    given = {key: value for key, value in header["config"].items() if key in fields}
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    return Vae(**options)


PROBLEMS: dict[str, Callable[[], ComparedProblem]] = {
    "toy-30": lambda: toy(30),
    "toy-1000": lambda: toy(1000),
    "network-0.1": lambda: network(0.1),
    "network-1": lambda: network(1.0),
    "network-3": lambda: network(3.0),
    "network-6": lambda: network(6.0),
    "binary-1": lambda: network(1.0, categories=2),
    "binary-3": lambda: network(3.0, categories=2),
}


@dataclass(frozen=True)
class Compare:
    """Rank estimators by mean squared error times evaluations, at one budget of evaluations per
    estimate.

    Writes one run folder per problem. For your own logits and f: `arsm.compare`.
    """

    problems: tuple[str, ...] = tuple(PROBLEMS)
    """Any of toy-30, toy-1000 (one variable), network-0.1, network-1, network-3, network-6 (K = 20,
    C = 10), binary-1, binary-3 (K = 20, C = 2) and vae, which needs --checkpoint."""
    checkpoint: Path | None = None
    """Run folder of `arsm vae` that holds the model for the problem vae."""
    budget: int | None = None
    """Evaluations of f per estimate; None for 4 with one variable, ARSM's 46 with K = 20 and C =
    10, and 12 with K = 20 and C = 2."""
    estimators: tuple[str, ...] = ()
    """Estimators, such as "arsm", "rloo:ridge=1.0" or your own as "mine.py:MyEstimator"; "floor" is
    leave-one-out with the best additive control variate, fitted to f. Empty for all that apply to
    the problem."""
    samples: int = 500
    """Draws per estimator, to measure its bias and variance."""
    training: int = 1000
    """Training steps for an estimator's learned parts."""
    seed: int = 0
    """Seed of the random numbers."""
    name: str = ""
    """Prefix of the run folders' names, to add estimators to a problem that has a run: the report
    shows both in one table; if both have an estimator, the later numbers count."""
    root: Path = Path("runs")
    """Folder for the run folders, ROOT/compare/PROBLEM; for vae, the checkpoint's name is added."""
    resume: bool = False
    """Continue existing run folders; finished ones are only shown."""
    latex: Path | None = None
    """Also write the table for a paper, with the rules of booktabs."""
    csv: Path | None = None
    """Also write all numbers, unrounded."""
    figure: Path | None = None
    """Also draw the table; the name ends in .pdf, .svg or .png. With several problems, files get
    the problem's name too."""
    highlight: str | None = None
    """The estimator to set off in the LaTeX table and the figure."""

    experiment: ClassVar[str] = "compare"

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        for words in self.estimators:
            if words != FLOOR:
                arsm.estimator(words)
        check_some(problems=self.problems)
        for problem in self.problems:
            if problem not in PROBLEMS and problem != "vae":
                raise ValueError(
                    f'There is no problem "{problem}"; known are {", ".join(PROBLEMS)}, vae.'
                )
        if ("vae" in self.problems) != (self.checkpoint is not None):
            raise ValueError(
                "--problems vae and --checkpoint, a run folder of `arsm vae`, need each other; "
                "give both."
            )
        if self.checkpoint is not None:
            try:
                vae_config(self.checkpoint)
            except RunError as error:
                raise ValueError(str(error)) from None
        check_least(self, samples=2, training=0, budget=1)
        if self.highlight is not None and self.highlight not in self.estimators:
            raise ValueError("--highlight must be one of --estimators, in the same words.")

    def run(self, console: Console) -> None:
        """Measure every estimator on every problem."""
        # times are compared, and threads that wait for a busy core would decide them
        torch.set_num_threads(1)
        runs = self.runs()
        with progress_bars(console) as progress:
            tasks = {
                folder: progress.add_task(asked["problem"], total=None)
                for folder, asked in runs.items()
            }
            for folder, asked in runs.items():
                problem = asked["problem"]
                task = tasks[folder]
                # its clock starts now
                progress.reset(task)
                setting = (
                    vae(self.checkpoint)
                    if self.checkpoint and problem == "vae"
                    else PROBLEMS[problem]()
                )
                estimators = self.estimators or setting.estimators
                config = {
                    **setting.config,
                    "shape": list(setting.logits.shape),
                    "budget": setting.budget,
                    "estimators": list(estimators),
                    **asked,
                }
                with open_run(self.root, "compare", folder.name, config, resume=self.resume) as run:
                    progress.update(task, total=len(estimators), completed=run.step)
                    # found only if an estimator is left to measure: it takes longest
                    reference = None
                    for number in range(run.step, len(estimators)):
                        reference = reference or find_reference(setting, config)
                        progress.update(task, description=f"{problem}: {estimators[number]}")
                        measure(run, setting, config, number, reference)
                        progress.update(task, description=problem, completed=number + 1)
        for folder, asked in runs.items():
            self.show(ranked(folder), asked["problem"], console)

    def show(self, found: Ranking, problem: str, console: Console) -> None:
        """Print a problem's table, and write the files that were asked for."""
        console.print(f"\n{problem}\n{found}\n", markup=False, highlight=False, soft_wrap=True)
        for path, text in (
            (self.latex, found.latex(self.highlight)),
            (self.csv, found.csv()),
        ):
            if path is not None:
                self.place(path, problem).write_text(text)
        if self.figure is not None:
            found.figure(self.highlight).savefig(self.place(self.figure, problem))

    def place(self, path: Path, problem: str) -> Path:
        """The file of one of the problems."""
        return path if len(self.problems) == 1 else path.with_stem(f"{path.stem}-{problem}")

    def runs(self) -> dict[Path, dict[str, Any]]:
        """The run folders of this command, each with the options that determine its results; the
        problem adds more.
        """
        # options left to the problem are not part of what was asked for
        given = {"budget": self.budget, "estimators": list(self.estimators)}
        options = {key: value for key, value in given.items() if value}
        options |= {key: getattr(self, key) for key in ("samples", "training", "seed")}
        found = {}
        for problem in self.problems:
            checkpoint = (
                self.checkpoint.resolve().name if self.checkpoint and problem == "vae" else ""
            )
            name = "-".join(filter(None, (self.name, problem, checkpoint)))
            found[self.root / "compare" / name] = {"problem": problem, **options}
        return found


def ranked(folder: Path) -> Ranking:
    """The rows of a run folder, the best first."""
    record = read_run(folder)
    rows = []
    for line in record.metrics:
        words = record.config["estimators"][line["step"] - 1]
        measured = {key: line.get(key, math.nan) for key in MEASURED}
        rows.append(
            Compared(words, arsm.estimator("rloo" if words == FLOOR else words), **measured)
        )
    return Ranking(tuple(sorted(rows, key=lambda row: row.cost)))


def find_reference(setting: ComparedProblem, config: dict[str, Any]) -> Moments:
    """The reference gradient for measuring bias, from separate random numbers."""
    generator = torch.Generator().manual_seed(1000 * config["seed"] + 999)
    return reference_gradient(
        setting.logits, setting.f, *setting.context, samples=config["samples"], generator=generator
    )


def less_additive(
    setting: ComparedProblem, reference: Moments, budget: int, generator: torch.Generator
) -> tuple[ComparedProblem, Moments]:
    """f minus its best additive fit, and the exact gradient of the fit."""
    h = best_additive(
        setting.logits, setting.f, *setting.context, budget=budget, generator=generator
    )

    def rest(z: Tensor, h: Tensor, *context: Tensor) -> Tensor:
        return setting.f(z, *context) - h.gather(-1, z.unsqueeze(-1)).sum((-2, -1))

    # the fit's part of the gradient is known, so that the rest alone is estimated
    p = probabilities(setting.logits.double())
    known = p * centred(p, h)
    return setting._replace(f=rest, context=(h, *setting.context)), Moments(
        reference.mean - known, reference.variance
    )


def measure(
    run: Run, setting: ComparedProblem, config: dict[str, Any], number: int, reference: Moments
) -> None:
    """Measure one estimator, with its own random numbers, and record it as step `number` + 1."""
    with torch.random.fork_rng():
        torch.manual_seed(config["seed"])  # the learned parts' initial weights
        # by its number: a run that is resumed, or has fewer estimators, draws the same
        generator = torch.Generator().manual_seed(1000 * config["seed"] + number)
        words = config["estimators"][number]
        if words == FLOOR:
            setting, reference = less_additive(setting, reference, config["budget"], generator)
            words = "rloo"
        (row,) = compare(
            setting.logits,
            setting.f,
            *setting.context,
            budget=config["budget"],
            estimators=[words],
            samples=config["samples"],
            training=config["training"],
            reference=reference,
            generator=generator,
        )
    run.log(number + 1, {key: getattr(row, key) for key in (*MEASURED, "cost")})
    # an empty state: what is measured does not depend on earlier estimators
    run.save(number + 1, {})
