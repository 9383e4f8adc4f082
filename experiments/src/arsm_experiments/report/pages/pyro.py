"""The generated parts of the pages of results/pyro, and the rows of the guide."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, short, with_spread
from arsm_experiments.runs import lines

OURS = "arsm.pyro.ELBO, "
SAMPLING = (
    "Trace_ELBO, 1 particle",
    "Trace_ELBO, 8 particles",
    "TraceGraph_ELBO, 8 particles",
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
    """The ELBO after equal CPU seconds; the best of a program is bold."""
    columns = []
    for problem in PROBLEMS:
        decimals = _decimals(problem)
        elbos = [_trained(tables, problem, loss) for loss in LOSSES]
        best = max(elbo.mean for elbo in elbos if elbo is not None)
        column = []
        for elbo in elbos:
            if elbo is None:
                column.append("-")
                continue
            words = with_spread(elbo, decimals)
            column.append(f"**{words}**" if elbo.mean == best else words)
        columns.append(column)
    rows = [[_named(loss), *cells] for loss, *cells in zip(LOSSES, *columns, strict=True)]
    header = [f"{name}, {seconds} s" for name, seconds in PROBLEMS.values()]
    return markdown(["ELBO per row", *header], rows)


def answer(tables: Tables) -> str:
    """Whether `RLOO(8)` ends ahead of Pyro's losses that sample, and of the exact one."""
    trained = _by_seed(tables)
    sampling = _outcomes(trained, SAMPLING)
    exact = _outcomes(trained, (ENUMERATION,))
    won = len(sampling["ahead"])
    count = sum(map(len, sampling.values()))
    others = _in_words({name: found for name, found in sampling.items() if name != "ahead"})
    rest = f", {others}" if others else ""
    many = len(_outcomes(trained, SAMPLING, MANY)["ahead"])
    return (
        "**Finding.** **At equal CPU seconds, `arsm.pyro.ELBO` with 8 samples (`RLOO(8)`) reaches "
        "a higher ELBO than the best of Pyro's sampling losses on "
        f"{won} of {count} programs**{rest}. With 32 samples it does so on {many}. Beside "
        f"`TraceEnum_ELBO`, which is exact, `RLOO(8)` is {_in_words(exact)}."
    )


def _outcomes(trained: Trained, losses: tuple[str, ...], ours: str = FEW) -> dict[str, list[str]]:
    """The programs on which ours is ahead of the best of these losses, behind, or neither."""
    found: dict[str, list[str]] = {"ahead": [], "behind": [], "undecided": []}
    for problem, best in _best(trained, losses).items():
        gain = _gain(trained, problem, ours, best)
        outcome = "ahead" if gain.mean > 0 else "behind"
        if abs(gain.mean) <= gain.half:
            outcome = "undecided"
        found[outcome].append(PROBLEMS[problem][0])
    return found


def _in_words(outcomes: Mapping[str, Sequence[str]]) -> str:
    """Outcomes as a sentence lists them: "ahead on the a and behind on the b"."""
    told = {name: programs for name, programs in outcomes.items() if programs}
    return listed(
        [
            f"{name} on {listed([f'the {program}' for program in programs])}"
            for name, programs in told.items()
        ]
    )


def details(tables: Tables) -> str:
    """Differences at equal seconds, the time of a step, a ridge, and more particles."""
    trained = _by_seed(tables)
    steps = [_step(tables, problem, FEW) for problem in PROBLEMS]
    ratios = [step[1] for step in steps if step is not None]
    ridge, chain = _step(tables, "HMM, chain guide", RIDGE), "HMM, chain guide"
    assert ridge is not None
    more = [
        f"{name} {_apart(trained, problem, MANY, FEW)}" for problem, (name, _) in PROBLEMS.items()
    ]
    return "\n".join(
        [
            "- **`RLOO(8)` less the best of Pyro's sampling losses**: "
            f"{_ahead(trained, SAMPLING)}.",
            f"- **Less `TraceEnum_ELBO`**: {_ahead(trained, (ENUMERATION,))}.",
            "- **Time.** A step of `RLOO(8)` takes "
            f"{min(ratios):.2f} to {max(ratios):.2f} times as long as one of `Trace_ELBO` with 8 "
            "particles.",
            f"- **32 samples less 8**: {listed(more)}.",
            "- **A ridge on a chain guide** draws samples of its own at every stage, and the "
            f"guide runs twice. A step takes {ridge[1]:.2f} times `Trace_ELBO`'s, and the ELBO "
            f"less `RLOO(8)`'s is {_apart(trained, chain, RIDGE, FEW)}.",
        ]
    )


def _by_seed(tables: Tables) -> Trained:
    """The ELBOs of all trainings."""
    found: Trained = {}
    for run in lines.read(tables.results / "pyro/runs.jsonl.xz"):
        if "elbo" in run:
            found.setdefault((run["problem"], run["loss"]), {})[run["seed"]] = run["elbo"]
    return found


def _gain(trained: Trained, problem: str, loss: str, other: str) -> Cell:
    """The ELBO of one loss less that of the other, seed by seed."""
    first, second = trained[problem, loss], trained[problem, other]
    gains = [first[seed] - second[seed] for seed in sorted(first.keys() & second)]
    return Cell(statistics.mean(gains), statistics.stdev(gains), len(gains))


def _apart(trained: Trained, problem: str, loss: str, other: str) -> str:
    """That difference with its 95% interval."""
    found, decimals = _gain(trained, problem, loss, other), _decimals(problem)
    return f"{found.mean:+.{decimals}f} ± {found.half:.{decimals}f}"


def _best(trained: Trained, losses: tuple[str, ...]) -> dict[str, str]:
    """The best of these losses for every problem that one of them can take."""
    found: dict[str, str] = {}
    for problem in PROBLEMS:
        elbos = {loss: trained[problem, loss] for loss in losses if (problem, loss) in trained}
        means = {loss: statistics.mean(seeds.values()) for loss, seeds in elbos.items()}
        if means:
            found[problem] = max(means, key=means.__getitem__)
    return found


def _ahead(trained: Trained, losses: tuple[str, ...]) -> str:
    """`RLOO(8)` less the best of these losses, on every problem that they can take."""
    best = _best(trained, losses)
    return listed(
        [
            f"{PROBLEMS[problem][0]} {_apart(trained, problem, FEW, loss)}"
            for problem, loss in best.items()
        ]
    )


def _decimals(problem: str) -> int:
    """Decimals of an ELBO."""
    return 1 if problem == VAE else 2


def costs(tables: Tables) -> str:
    """Variance times time of one gradient, relative to the best of Pyro's; the best is bold."""
    rows = []
    # the best of Pyro's is bold, and the best of ours
    for own in (ESTIMATES[:3], ESTIMATES[3:]):
        relative = {loss: _relative(tables, loss) for loss in own}
        best = [min(column) for column in zip(*relative.values(), strict=True)]
        for loss, numbers in relative.items():
            words = [
                f"**{short(x)}**" if x == least else short(x)
                for x, least in zip(numbers, best, strict=True)
            ]
            rows.append([_named(loss), f"{_cost(tables, loss, 550, 'CPU ms'):.0f}", *words])
    header = ["K = 8", "CPU ms", "cost at the start", "after an epoch"]
    return f"{markdown(header, rows)}\n{_one_variable(tables)}"


def _relative(tables: Tables, loss: str) -> list[float]:
    """The cost of a gradient at the start and after an epoch."""
    return [_cost(tables, loss, steps, "variance x time / best of Pyro's") for steps in (0, 550)]


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
    rows = [["best of `Trace_ELBO` and `TraceGraph_ELBO` with baselines", "", "1", "1"]]
    for words, code in GUIDE.items():
        loss = f"{OURS}{words}"
        milliseconds = f"{_cost(tables, loss, 550, 'CPU ms'):.0f}"
        rows.append(
            [f"`arsm.pyro.ELBO(arsm.{code})`", milliseconds, *map(short, _relative(tables, loss))]
        )
    header = ["loss", "CPU ms", "variance x time at the start", "after an epoch"]
    return markdown(header, rows)


PARTS = {"answer": answer, "training": training, "details": details}
HISTORY_PARTS = {"times": times, "costs": costs}
