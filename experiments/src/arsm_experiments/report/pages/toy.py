"""The generated parts of results/toy/README.md and results/toy/HISTORY.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import (
    Cell,
    Part,
    Tables,
    large,
    listed,
    markdown,
    welch,
)
from arsm_experiments.report.toy import AT_EVERY_UPDATE, ON_THE_BEST, ON_THE_WAY
from arsm_experiments.report.welch import Difference

LEAVE_ONE_OUT = "leave-one-out, 4 samples"
GUMBEL = "Gumbel-Softmax (biased)"
METHODS = {
    "true gradient": "true gradient",
    "ARSM": "arsm",
    LEAVE_ONE_OUT: "rloo",
    GUMBEL: "gumbel-softmax:temperature=0.2",
    "ARS": "ars",
    "RELAX": "relax",
    "REINFORCE": "reinforce",
    "AR": "ar",
}
ESTIMATORS = tuple(METHODS)[1:]
RIVALS = ("ARS", GUMBEL, "RELAX", "REINFORCE", "AR")
"""The paper's."""
SECTIONS = {30: "C = 30, step 1", 1_000: "C = 1,000, step 33.33", 10_000: "C = 10,000, step 333.3"}
LARGE = (1_000, 10_000)
START = "variance / arsm's at the start"
REWARD, GAP, CALLS = "E[f]", "gap / true gap", "f calls an update"


def cell(tables: Tables, categories: int, method: str, metric: str) -> Cell:
    """A number of the toy's table, at the step that is scaled to C."""
    return tables.cell("toy", f"Toy, {SECTIONS[categories]}: {METHODS[method]}", metric)


def rivals(tables: Tables) -> list[float]:
    """Variance over the whole run, relative to ARSM's, of the paper's rivals."""
    return [cell(tables, 30, name, AT_EVERY_UPDATE).mean for name in RIVALS]


def level(tables: Tables, categories: int) -> dict[str, bool]:
    """Whether an estimator's final reward is not decidedly below the best one's."""
    ends = {name: cell(tables, categories, name, REWARD) for name in ESTIMATORS}
    best = max(ends.values(), key=lambda end: end.mean)
    return {name: end is best or not welch(best, end).decided for name, end in ends.items()}


def finding(tables: Tables) -> str:
    """ARSM beside the true gradient and the rivals, at 30 categories and at more."""
    own, other = (cell(tables, 30, name, CALLS).mean for name in ("ARSM", LEAVE_ONE_OUT))
    return (
        "**Finding.** **With 30 categories ARSM follows the true gradient: "
        f"{on_the_best(tables, 30, 'ARSM')} seeds end on the best category, with at least "
        f"{large(min(rivals(tables)))} times less gradient variance than the paper's rivals.** "
        f"Leave-one-out makes {other:.1f} evaluations of f per update instead of {own:.1f}, and "
        f"{behind_in_words(behind(tables))}. {_larger(tables)}"
    )


def on_the_best(tables: Tables, categories: int, method: str) -> str:
    """The seeds that end on the best category, of how many."""
    seeds = cell(tables, categories, method, REWARD).seeds
    return f"{cell(tables, categories, method, ON_THE_BEST).mean:.0f} of {seeds}"


def behind(tables: Tables) -> Difference:
    """How much farther from the optimum than ARSM leave-one-out ends, in the true gap."""
    return welch(*(cell(tables, 30, name, GAP) for name in (LEAVE_ONE_OUT, "ARSM")))


def behind_in_words(gap: Difference) -> str:
    """Whether leave-one-out ends farther from the optimum."""
    if not gap.decided:
        return "whether it ends farther from the optimum is undecided"
    return "it ends farther from the optimum" if gap.mean > 0 else "it ends nearer to the optimum"


def _larger(tables: Tables) -> str:
    """ARSM at larger C, where it does not follow the true gradient to the end."""
    alone = all(level(tables, c) == {name: name == "ARSM" for name in ESTIMATORS} for c in LARGE)
    gaps = listed([f"{cell(tables, c, 'ARSM', GAP).mean:.0f}" for c in LARGE])
    far = f"{gaps} times as far from"
    end = f"nearest to the optimum, but {far} it" if alone else f"{far} the optimum"
    sizes = listed([f"{c:,}" for c in LARGE])
    return f"With {sizes} categories ARSM ends {end} as the true gradient."


def table(tables: Tables) -> str:
    """Every estimator at C = 30, and its reward at C = 1,000."""
    header = ["", "E[f], C = 30", "seeds on the best", "variance", "f calls", "E[f], C = 1,000"]
    rows = [
        [
            name,
            reward(tables, 30, name),
            on_the_best(tables, 30, name).replace(" of ", "/"),
            large(cell(tables, 30, name, AT_EVERY_UPDATE).mean),
            f"{cell(tables, 30, name, CALLS).mean:.1f}",
            reward(tables, 1_000, name),
        ]
        for name in METHODS
    ]
    return markdown(header, rows)


def reward(tables: Tables, categories: int, name: str) -> str:
    """E[f] at the end, in bold if it is not decidedly below the best estimator's."""
    text = cell(tables, categories, name, REWARD).spread
    return f"**{text}**" if level(tables, categories).get(name) else text


def details(tables: Tables) -> str:
    """Gaps to the optimum, and a claim of the paper that does not hold."""
    loo = cell(tables, 30, LEAVE_ONE_OUT, AT_EVERY_UPDATE).mean
    gap = behind(tables)
    low, high = gap.mean - gap.half, gap.mean + gap.half
    gaps = listed([cell(tables, c, "ARSM", GAP).spread for c in SECTIONS])
    calls = listed([f"{cell(tables, c, 'ARSM', CALLS).mean:,.0f}" for c in LARGE])
    best = listed([f"{cell(tables, c, 'ARSM', ON_THE_BEST).mean:.0f}" for c in LARGE])
    bullets = [
        f"ARSM's distance to the optimum at C = 30, 1,000 and 10,000 is {gaps} times the true "
        "gradient's.",
        f"At C = 1,000 and 10,000 it makes {calls} evaluations of f per update, and {best} of "
        f"{cell(tables, 30, 'ARSM', REWARD).seeds} seeds end on the best category.",
        f"Leave-one-out has {loo:.1f} times ARSM's variance at C = 30. Its distance, in units of "
        f"the true gradient's, is {gap.mean:.2f} larger ({low:.2f} to {high:.2f}).",
        "The paper shows ARS and Gumbel-Softmax at the optimum too. Here "
        f"{on_the_best(tables, 30, 'ARS')} seeds of ARS end on the best category, and "
        f"{on_the_best(tables, 30, GUMBEL)} of Gumbel-Softmax.",
    ]
    return "\n".join(f"- {bullet}" for bullet in bullets)


def more(tables: Tables) -> str:
    """The final reward at C = 10,000, and variances at the start relative to ARSM's."""
    header = ["", "variance at the start, C = 30", "variance at the start, C = 10,000"]
    rows = [
        [
            name,
            large(cell(tables, 30, name, START).mean),
            large(cell(tables, 10_000, name, START).mean),
            reward(tables, 10_000, name),
        ]
        for name in METHODS
    ]
    return markdown([*header, "E[f], C = 10,000"], rows)


def variances(tables: Tables) -> str:
    """How variances are averaged, how far seeds differ, and what fewer points say."""
    every = cell(tables, 30, "REINFORCE", AT_EVERY_UPDATE)
    some = cell(tables, 30, "REINFORCE", ON_THE_WAY).mean
    return (
        "The variance at the start is measured with 100 estimates, the variance over the whole "
        "run with four at each of the 5,000 updates. REINFORCE's variance over the run depends on "
        f"when it settles on a category: {every.mean:,.0f} ± {every.std:,.0f} times ARSM's over "
        f"seeds. Every 50th update alone would give {some:,.0f}."
    )


def printed(tables: Tables) -> str:
    """E[f] at larger C with the paper's step."""
    header, columns = [""], []
    for categories in ("1,000", "10,000"):
        labels = {name: f"Toy, C = {categories}, step 1: {row}" for name, row in METHODS.items()}
        ends = {name: tables.cell("toy", label, REWARD) for name, label in labels.items()}
        header.append(f"C = {categories} ({ends['ARSM'].seeds} seeds)")
        columns.append(ends)
    return markdown(header, [[name, *(ends[name].spread for ends in columns)] for name in METHODS])


PARTS: dict[str, Part] = {"finding": finding, "table": table, "details": details}
HISTORY_PARTS: dict[str, Part] = {"more": more, "variances": variances, "printed": printed}
