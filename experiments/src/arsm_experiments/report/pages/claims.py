"""The README's three claims, with their numbers."""

from __future__ import annotations

from arsm_experiments.ecosystem.figure import kind
from arsm_experiments.report.pages import language_model
from arsm_experiments.report.pages.tables import Tables

BRANCH = "branch 16"
SURE = 0.25
"""Accuracy from which a model has something to build on."""


def claims(tables: Tables) -> str:
    """A list of three."""
    return "\n".join((language_models(tables), referee(tables), estimators()))


def language_models(tables: Tables) -> str:
    """The range of ratios from some accuracy on, task by task."""
    ratios: dict[str, list[tuple[float, float]]] = {}
    for level in language_model.measured(tables):
        if BRANCH in level.ratios and level.accuracy >= SURE:
            point = level.accuracy, level.ratios[BRANCH].mean
            ratios.setdefault(level.task, []).append(point)
    chain = sorted(ratios["chain"])
    low, high = min(ratio for _, ratio in chain), max(ratio for _, ratio in chain)
    countdown = " and ".join(f"{ratio:.0%}" for _, ratio in sorted(ratios["countdown"]))
    return (
        "- **Credit for every token of a language model.** Go back to a token, try another one, "
        "compare the rewards. On SmolLM2-135M the same gradient noise takes "
        f"{low:.0%} to {high:.0%} of the best group method's tokens on sums in written steps, if "
        f"{chain[0][0]:.0%} to {chain[-1][0]:.0%} of the answers are right, and {countdown} on "
        f"countdown{_trained(tables)} ([measurements](results/language_model/README.md); "
        "[inside TRL](docs/guides/trl.md): three lines)."
    )


def _trained(tables: Tables) -> str:
    """How training on countdown ended, once every method has finished a seed."""
    rows = language_model.results(tables).get("countdown")
    if rows is None:
        return ""
    best = language_model.best(rows)
    ours = [row for row in rows if row.method in language_model.OURS]
    ends = " and ".join(f"{row.final.mean:.3f} (`{row.method}`)" for row in ours)
    return (
        f". Trained there with equal tokens it ends at an accuracy of {ends}, the "
        f"best of {len(rows) - len(ours)} rivals ({best.method}) at {best.final.mean:.3f}"
    )


def referee(tables: Tables) -> str:
    """How many entries were judged, and how many are not as documented."""
    lines = tables.lines("audit/table.csv")
    judged = [line for line in lines if line["verdict"] in ("unbiased", "wrong")]
    others = [line for line in judged if not line["row"].startswith("arsm:")]
    packages = {line["row"].partition(":")[0].partition(" ")[0] for line in others}
    broken = sum(kind(line) == "not as documented" for line in others)
    return (
        "- **Check any gradient.** Hand over a loss: the referee says whether its gradient is "
        f"right on average, and if not, why. Of {len(others)} gradients of {len(packages)} "
        f"released packages, TRL and verl among them, {broken} are not what their documentation "
        "says "
        "([verdicts](results/audit/README.md); [yours](docs/guides/check_my_gradient.md))."
    )


def estimators() -> str:
    """How many there are, and how many claim to be unbiased."""
    import arsm

    names = arsm.estimator_names()
    return (
        f"- **One function, {len(names)} estimators.** `arsm.estimate(estimator, logits, f)`: "
        "change the estimator, keep the rest. Every claim of being unbiased is tested against "
        "enumeration ([list](docs/estimators.md); [which one?](docs/guides/choosing.md))."
    )
