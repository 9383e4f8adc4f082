"""The generated parts of results/toy/README.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Cell, Tables, large, markdown, welch
from arsm_experiments.report.toy import AT_EVERY_UPDATE, ON_THE_BEST, ON_THE_WAY

METHODS = {
    "true gradient": "true gradient",
    "ARSM": "arsm",
    "leave-one-out, 4 samples": "rloo",
    "Gumbel-Softmax (biased)": "gumbel-softmax:temperature=0.2",
    "ARS": "ars",
    "RELAX": "relax",
    "REINFORCE": "reinforce",
    "AR": "ar",
}
SECTIONS = {30: "C = 30, step 1", 1_000: "C = 1,000, step 33.33", 10_000: "C = 10,000, step 333.3"}
START = "variance / arsm's at the start"


def cell(tables: Tables, categories: int, method: str, metric: str) -> Cell:
    """A number of the toy's table, at the step that is scaled to C."""
    return tables.cell("toy", f"Toy, {SECTIONS[categories]}: {METHODS[method]}", metric)


def whole_run(tables: Tables, method: str) -> str:
    """Variance over all updates relative to ARSM's; a dash where not every update was measured."""
    found = tables.find("toy", f"Toy, {SECTIONS[30]}: {METHODS[method]}", AT_EVERY_UPDATE)
    return "-" if found is None else large(found.mean)


def rivals(tables: Tables) -> list[float]:
    """The same of the paper's rivals that have it."""
    names = ("ARS", "Gumbel-Softmax (biased)", "RELAX", "REINFORCE", "AR")
    rows = (f"Toy, {SECTIONS[30]}: {METHODS[name]}" for name in names)
    found = (tables.find("toy", row, AT_EVERY_UPDATE) for row in rows)
    return [cell.mean for cell in found if cell is not None]


def table(tables: Tables) -> str:
    """Every estimator at C = 30, and its reward and variance at larger C."""
    header = ["", "E[f], C = 30", "seeds on the best", "variance / ARSM's, start", "whole run"]
    header += ["f calls", "E[f], C = 1,000", "E[f], C = 10,000", "variance there, start"]
    rows = [
        [
            name,
            cell(tables, 30, name, "E[f]").spread,
            f"{cell(tables, 30, name, ON_THE_BEST).mean:.0f} of 10",
            large(cell(tables, 30, name, START).mean),
            whole_run(tables, name),
            f"{cell(tables, 30, name, 'f calls an update').mean:.1f}",
            cell(tables, 1_000, name, "E[f]").spread,
            cell(tables, 10_000, name, "E[f]").spread,
            large(cell(tables, 10_000, name, START).mean),
        ]
        for name in METHODS
    ]
    return markdown(header, rows)


def finding(tables: Tables) -> str:
    """ARSM, the claims of the paper that do not hold, and the rival per evaluation."""
    best = {name: cell(tables, 30, name, ON_THE_BEST).mean for name in METHODS}
    gap = cell(tables, 30, "ARSM", "gap / true gap")
    ratios = rivals(tables)
    calls = [
        cell(tables, 30, name, "f calls an update").mean
        for name in ("ARSM", "leave-one-out, 4 samples")
    ]
    behind = welch(
        cell(tables, 30, "leave-one-out, 4 samples", "gap / true gap"),
        cell(tables, 30, "ARSM", "gap / true gap"),
    )
    loo = cell(tables, 30, "leave-one-out, 4 samples", AT_EVERY_UPDATE).mean
    return (
        f"**ARSM follows the true gradient on all ten seeds** (its gap to the optimum is "
        f"{gap.mean:.2f} ± {gap.std:.2f} of the true gradient's), with {large(min(ratios))} to "
        f"{large(max(ratios))} times less variance over the run than the paper's rivals. The paper "
        f"shows ARS and Gumbel-Softmax at the optimum too; here ARS ends on the best category on "
        f"{best['ARS']:.0f} of 10 seeds and Gumbel-Softmax on "
        f"{best['Gumbel-Softmax (biased)']:.0f}. Leave-one-out, which the paper does not have, has "
        f"{loo:.1f} times ARSM's variance with {calls[1]:.1f} evaluations of f where ARSM makes "
        f"{calls[0]:.1f}; its gap is {behind.mean:.2f} ± {behind.half:.2f} larger (Welch's 95% "
        f"interval: {'decided' if behind.decided else 'undecided'})."
    )


def many(tables: Tables) -> str:
    """ARSM at larger C."""
    gaps = [cell(tables, c, "ARSM", "gap / true gap").spread for c in (1_000, 10_000)]
    calls = [cell(tables, c, "ARSM", "f calls an update").mean for c in (1_000, 10_000)]
    best = [cell(tables, c, "ARSM", ON_THE_BEST).mean for c in (1_000, 10_000)]
    return (
        f"At C = 1,000 and 10,000 ARSM comes closest to the optimum, with {calls[0]:,.0f} and "
        f"{calls[1]:,.0f} evaluations per update, but it does not follow the true gradient to the "
        f"end: its gap is {gaps[0]} and {gaps[1]} times the true gradient's, and it ends on the "
        f"best category on {best[0]:.0f} and {best[1]:.0f} of 10 seeds."
    )


def variances(tables: Tables) -> str:
    """How the variance over a run is averaged, how far seeds differ, and what fewer points say."""
    every = cell(tables, 30, "REINFORCE", AT_EVERY_UPDATE)
    some = cell(tables, 30, "REINFORCE", ON_THE_WAY).mean
    missing = any(whole_run(tables, name) == "-" for name in METHODS)
    dash = " (a dash: not measured at each)" if missing else ""
    return (
        "Variances are means over the C elements: at the start from 100 estimates, over the whole "
        f"run from four at each of the 5,000 updates{dash}. REINFORCE's depends on when a run "
        f"settles on a category: {every.mean:,.0f} ± {every.std:,.0f} over seeds. Every 50th "
        f"update alone would give {some:,.0f}."
    )


def printed(tables: Tables) -> str:
    """The paper's step at larger C: some methods, and which were not run."""
    words = []
    for categories in ("1,000", "10,000"):
        rows = {name: f"Toy, C = {categories}, step 1: {row}" for name, row in METHODS.items()}
        ends = {name: tables.find("toy", row, "E[f]") for name, row in rows.items()}
        found = {name: cell for name, cell in ends.items() if cell is not None}
        some = (name for name in ("true gradient", "ARSM", "REINFORCE", "AR") if name in found)
        text = ", ".join(f"{name} {found[name].spread}" for name in some)
        seeds = found["true gradient"].seeds
        missing = " and ".join(name for name in METHODS if name not in found)
        left_out = f"; {missing} not run" if missing else ""
        words.append(f"C = {categories}: {text} ({seeds} seeds{left_out})")
    return (
        "- With the paper's step hardly anything but noise moves E[f] from 0.5167 at large C. "
        f"{'. '.join(words)}. `table.csv` has the others."
    )


PARTS = {
    "table": table,
    "variances": variances,
    "finding": finding,
    "many": many,
    "printed": printed,
}
