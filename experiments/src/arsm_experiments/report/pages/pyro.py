"""The generated parts of results/pyro/README.md."""

from __future__ import annotations

import statistics

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, short
from arsm_experiments.runs import lines

OURS = "arsm.pyro.ELBO, "
SAMPLING = (
    "Trace_ELBO, 1 particle",
    "Trace_ELBO, 8 particles",
    "TraceGraph_ELBO, running average, 8 particles",
)
"""Pyro's losses that sample."""
ENUMERATION = "TraceEnum_ELBO"
FEW, MANY, RIDGE = (f"{OURS}RLOO({words})" for words in ("8", "32", "8, ridge=1.0"))
LOSSES = (*SAMPLING, ENUMERATION, FEW, MANY, RIDGE)
PROBLEMS = {
    "mixture": ("mixture", 2),
    "HMM, mean-field guide": ("mean-field HMM", 4),
    "HMM, chain guide": ("chain HMM", 4),
    "digits VAE": ("digits VAE", 8),
}
"""Columns: their short names, and CPU seconds of training."""
VAE = "digits VAE"
ESTIMATES = (
    "Trace_ELBO, 8 particles",
    "TraceGraph_ELBO, running average, 8 particles",
    "TraceGraph_ELBO, network, 8 particles",
    f"{OURS}rloo:samples=8",
    f"{OURS}rloo:samples=8,live=1",
    f"{OURS}rloo:samples=16,ridge=1.0,surrogate=logits",
    f"{OURS}rloo:samples=32,ridge=1.0,surrogate=logits,live=4",
    f"{OURS}local-expectation",
    f"{OURS}arsm:pooled=True",
    f"{OURS}arsm",
)
"""Rows of the table of variances."""
GUIDE = {
    "rloo:samples=8": "RLOO(8)",
    "rloo:samples=16,ridge=1.0,surrogate=logits": 'RLOO(16, ridge=1.0, surrogate="logits")',
    "arsm:pooled=True": "ARSM(pooled=True)",
    "arsm": "ARSM()",
}
"""Rows of the guide."""
Trained = dict[tuple[str, str], dict[int, float]]
"""trained[problem, loss][seed] is an ELBO per row."""


def _named(loss: str) -> str:
    """A loss as the page names it."""
    return f"`{loss.removeprefix(OURS)}`" if loss.startswith(OURS) else loss


def _trained(tables: Tables, problem: str, loss: str) -> Cell | None:
    """The ELBO after training, if the loss can take the problem."""
    metric = f"ELBO per row after {PROBLEMS[problem][1]} CPU s"
    return tables.cells("pyro/training.csv").get((f"{problem}: {loss}", metric))


def _step(tables: Tables, problem: str, loss: str) -> tuple[float, float] | None:
    """Milliseconds of a step, and as a multiple of Trace_ELBO's."""
    cells, row = tables.cells("pyro/training.csv"), f"{problem}: {loss}"
    if (row, "CPU ms") not in cells:
        return None
    return cells[row, "CPU ms"].mean, cells[row, "time / Trace_ELBO's with 8 particles"].mean


def times(tables: Tables) -> str:
    """CPU milliseconds of a step."""
    rows = []
    for loss in LOSSES:
        found = [_step(tables, problem, loss) for problem in PROBLEMS]
        cells = ["-" if step is None else f"{step[0]:.0f} ({step[1]:.2f})" for step in found]
        rows.append([_named(loss), *cells])
    return markdown(["time of a step", *PROBLEMS], rows)


def training(tables: Tables) -> str:
    """The ELBO after equal CPU seconds, and what follows."""
    rows = []
    for loss in LOSSES:
        cells = []
        for problem in PROBLEMS:
            found = _trained(tables, problem, loss)
            decimals = 1 if problem == VAE else 2
            cells.append("-" if found is None else f"{found.mean:.{decimals}f}")
        rows.append([_named(loss), *cells])
    header = [f"{name}, {seconds} s" for name, seconds in PROBLEMS.values()]
    return f"{markdown(['ELBO per row', *header], rows)}\n{_finding(tables)}"


def _finding(tables: Tables) -> str:
    """Who is ahead after training, and what a step costs."""
    trained = _by_seed(tables)
    steps = [_step(tables, problem, FEW) for problem in PROBLEMS]
    ratios = [step[1] for step in steps if step is not None]
    ridge, chain = _step(tables, "HMM, chain guide", RIDGE), "HMM, chain guide"
    assert ridge is not None
    return "\n".join(
        [
            "- **At equal seconds**, `RLOO(8)` less the best of Pyro's sampling losses: "
            f"{_ahead(trained, SAMPLING)}. Less `TraceEnum_ELBO`, which is exact: "
            f"{_ahead(trained, (ENUMERATION,))}. Differences are paired by seed (same data, start "
            "and minibatches), with 95% intervals.",
            "- **A step** with 8 particles takes "
            f"{min(ratios):.2f} to {max(ratios):.2f} times `Trace_ELBO`'s.",
            "- **A ridge on a chain guide** asks for samples of its own at every stage, and the "
            f"guide runs twice: a step takes {ridge[1]:.2f} times `Trace_ELBO`'s; the ELBO less "
            f"`RLOO(8)`'s is {_apart(trained, chain, RIDGE, FEW)}.",
            "- **32 particles**, less 8: "
            + listed(
                [
                    f"{name} {_apart(trained, problem, MANY, FEW)}"
                    for problem, (name, _) in PROBLEMS.items()
                ]
            )
            + ".",
        ]
    )


def _by_seed(tables: Tables) -> Trained:
    """The ELBOs of all trainings."""
    found: Trained = {}
    for run in lines.read(tables.results / "pyro/runs.jsonl.xz"):
        if "elbo" in run:
            found.setdefault((run["problem"], run["loss"]), {})[run["seed"]] = run["elbo"]
    return found


def _apart(trained: Trained, problem: str, loss: str, other: str) -> str:
    """The ELBO of one loss less that of the other, seed by seed."""
    first, second = trained[problem, loss], trained[problem, other]
    gains = [first[seed] - second[seed] for seed in sorted(first.keys() & second)]
    found = Cell(statistics.mean(gains), statistics.stdev(gains), len(gains))
    decimals = 1 if problem == VAE else 2
    return f"{found.mean:+.{decimals}f} ± {found.half:.{decimals}f}"


def _ahead(trained: Trained, losses: tuple[str, ...]) -> str:
    """`RLOO(8)` less the best of these losses, on every problem that they can take."""
    words = []
    for problem, (name, _) in PROBLEMS.items():
        elbos = {loss: trained[problem, loss] for loss in losses if (problem, loss) in trained}
        means = {loss: statistics.mean(seeds.values()) for loss, seeds in elbos.items()}
        if means:
            best = max(means, key=means.__getitem__)
            words.append(f"{name} {_apart(trained, problem, FEW, best)}")
    return listed(words)


def costs(tables: Tables) -> str:
    """Variance times time of one gradient, relative to the best of Pyro's; the best is bold."""
    rows = []
    relative = {
        loss: [_cost(tables, loss, steps, "variance x time / best of Pyro's") for steps in (0, 550)]
        for loss in ESTIMATES
    }
    # the best of Pyro's, and of ours
    best = [
        min(relative[loss][place] for loss in own)
        for own in (ESTIMATES[:3], ESTIMATES[3:])
        for place in (0, 1)
    ]
    for loss, numbers in relative.items():
        words = [f"**{short(x)}**" if x in best else short(x) for x in numbers]
        rows.append([_named(loss), f"{_cost(tables, loss, 550, 'CPU ms'):.0f}", *words])
    header = ["K = 8", "CPU ms", "cost at the start", "after an epoch"]
    return f"{markdown(header, rows)}\n{_one_variable(tables)}"


def _cost(tables: Tables, loss: str, steps: int, metric: str) -> float:
    return tables.cell("pyro", f"Pyro VAE, K = 8, {steps} steps: {loss}", metric).mean


def _one_variable(tables: Tables) -> str:
    """K = 1, where enumeration fits."""
    found = tables.cell("pyro", f"Pyro VAE, K = 1, 0 steps: {ENUMERATION}", "CPU ms")
    return (
        "- With K = 1 TraceEnum_ELBO fits, and nothing beats it: its gradient is exact at "
        f"{found.mean:.0f} ms."
    )


def in_short(tables: Tables) -> str:
    """Rows for docs/guides/your_pyro_model.md, as the code that makes them."""
    metric = "variance x time / best of Pyro's"
    rows = [["best of `Trace_ELBO` and `TraceGraph_ELBO` with baselines", "", "1", "1"]]
    for words, code in GUIDE.items():
        loss = f"{OURS}{words}"
        numbers = (_cost(tables, loss, steps, metric) for steps in (0, 550))
        milliseconds = f"{_cost(tables, loss, 550, 'CPU ms'):.0f}"
        rows.append([f"`arsm.pyro.ELBO(arsm.{code})`", milliseconds, *map(short, numbers)])
    header = ["loss", "CPU ms", "variance x time at the start", "after an epoch"]
    return markdown(header, rows)


PARTS = {"times": times, "training": training, "costs": costs}
