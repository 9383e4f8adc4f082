"""The README's three claims, with their numbers."""

from __future__ import annotations

from collections.abc import Mapping

from arsm_experiments.ecosystem.figure import kind
from arsm_experiments.report.pages import language_model
from arsm_experiments.report.pages.language_model_training import OURS, best, results
from arsm_experiments.report.pages.tables import Tables, listed

BRANCH = f"branch 8{language_model.FRESH}"
"""The default of `Branch`, with questions drawn as in training."""
TASKS = {
    "chain": "sums ({:.0%} right)",
    "countdown": "countdown ({:.0%})",
    "translate": "translation",
}


def claims(tables: Tables) -> str:
    """A list of three."""
    return "\n".join((language_models(tables), referee(tables), estimators()))


def language_models(tables: Tables) -> str:
    """Noise per token on every task, and how training ended."""
    levels = {
        level.task: level for level in language_model.measured(tables) if BRANCH in level.ratios
    }
    told = []
    for task, name in TASKS.items():
        ratio = levels[task].ratios[BRANCH]
        half = language_model.half(ratio)
        told.append(f"{ratio.mean:.0%} ± {half:.0%} on {name.format(levels[task].accuracy)}")
    return (
        "- **Credit for every token of a language model.** Go back to a token, try another one, "
        "compare the rewards. For the same gradient noise SmolLM2-135M takes this share of the "
        f"best group method's tokens (95% intervals): {listed(told)}. Where few answers are "
        f"right, it saves little or nothing. {_trained(tables)} "
        "([measurements](results/language_model/README.md); "
        "[inside TRL](docs/guides/trl.md): three lines)."
    )


def _trained(tables: Tables) -> str:
    """How training on countdown ended."""
    rows = results(tables)["countdown"]
    rival = best(rows)
    ours = max(
        (row for row in rows if row.method in OURS),
        key=lambda row: row.final.mean,
    )
    return (
        f"Training on countdown, the better of its two forms ends at a reward of "
        f"{ours.final.mean:.3f} after {ours.seconds:.0f} s, {rival.method.upper()} at "
        f"{rival.final.mean:.3f} after {rival.seconds:.0f} s"
    )


def referee(tables: Tables) -> str:
    """How many entries were judged, and how many are not as documented."""
    lines = tables.lines("audit/table.csv")
    judged = [line for line in lines if line["verdict"] in ("unbiased", "wrong")]
    others = [line for line in judged if package(line) not in ("arsm", None)]
    packages = {package(line) for line in others}
    broken = sum(kind(line) == "not as documented" for line in others)
    return (
        "- **Check any gradient.** Hand over a loss: the referee says whether its gradient is "
        f"right on average, and if not, why. Of {len(others)} gradients of {len(packages)} "
        f"released packages, TRL and verl among them, {broken} are not what their documentation "
        "says "
        "([verdicts](results/audit/README.md); [yours](docs/guides/check_my_gradient.md))."
    )


def package(line: Mapping[str, str]) -> str | None:
    """The package of an entry; None for one of an earlier release, such as "trl 1.9.2: ..."."""
    name = line["row"].partition(":")[0]
    return None if " " in name else name


def estimators() -> str:
    """How many there are."""
    import arsm

    names = arsm.estimator_names()
    return (
        f"- **One function, {len(names)} estimators.** `arsm.estimate(estimator, logits, f)`: "
        "change the estimator, keep the rest ([list](docs/estimators.md); "
        "[which one?](docs/guides/choosing.md))."
    )
