"""The generated parts of results/language_model/README.md."""

from __future__ import annotations

from collections.abc import Sequence

from arsm_experiments.report.pages import language_model_candidates as candidates
from arsm_experiments.report.pages import language_model_training as training
from arsm_experiments.report.pages.language_model_levels import (
    FRESH,
    LONG,
    PLAIN,
    VALUE_HEAD,
    Level,
    above,
    below,
    best_draws,
    half,
    measured,
    measured_afresh,
    translate_at_fixed,
    with_half,
)
from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown

__all__ = ["FRESH", "PARTS", "half", "in_short", "measured"]

DRAWS = (4, 8, 16, 32)
"""Numbers of draws at fresh questions."""
RIGHT = {"chain": "{:.0%} right", "countdown": "{:.0%} right", "translate": "mean chrF {:.2f}"}
"""How well the model does a task."""
FEW = 0.2
"""The accuracy below which few answers are right."""
BRANCHING = ("branch", "coin", "value or branch")
"""How the names of the methods begin that branch in long answers."""


def finding(tables: Tables) -> str:
    """Tokens for the same noise, where nothing is saved, and how the trainings ended."""
    return f"**Finding. {_saved(tables)}** {_few_right(tables)} {training.finding(tables)}"


def _saved(tables: Tables) -> str:
    """The share of the best rival's tokens that the default needs."""
    levels = measured_afresh(tables)
    less = [level for level in levels if below(level.ratios[PLAIN + FRESH])]
    more = [level for level in levels if above(level.ratios[PLAIN + FRESH])]
    undecided = [level for level in levels if level not in less and level not in more]
    parts = []
    if less:
        parts.append(f"branching needs {_shares(less)}")
    if more:
        parts.append(f"on {_tasks(more)} it needs more")
    if undecided:
        parts.append(f"on {_tasks(undecided)} the saving is undecided")
    draws = PLAIN.removeprefix("branch ")
    return f"For the same gradient noise, with its default of {draws} draws, {'; '.join(parts)}."


def _shares(levels: Sequence[Level]) -> str:
    first, *others = levels
    told = [f"{_percent(first)} of the best group method's tokens on {_of(first)}"]
    told += [f"{_percent(level)} on {_of(level)}" for level in others]
    return listed(told)


def _percent(level: Level) -> str:
    return f"{level.ratios[PLAIN + FRESH].mean:.0%}"


def _tasks(levels: Sequence[Level]) -> str:
    return listed([training.NAMES[level.task] for level in levels])


def _of(level: Level) -> str:
    """A task with its accuracy."""
    return f"{training.NAMES[level.task]} ({RIGHT[level.task].format(level.accuracy)})"


def _few_right(tables: Tables) -> str:
    """Whether the best number of draws saves anything at fixed questions with few right answers."""
    found = [(level, best_draws(level)) for level in measured(tables) if level.accuracy < FEW]
    known = [(level, best[1]) for level, best in found if best and level.task != LONG]
    where = listed([f"{level.accuracy:.0%} on {training.NAMES[level.task]}" for level, _ in known])
    saved = [level for level, ratio in known if below(ratio)]
    told = f"saves decidedly on {_tasks(saved)} alone" if saved else "saves decidedly"
    number = "the best number of draws" if saved else "no number of draws"
    return f"With few right answers ({where}; fixed questions) {number} {told}."


def noise(tables: Tables) -> str:
    """Variance x tokens relative to the best rival at fresh questions, by number of draws."""
    rows = []
    for level in measured_afresh(tables):
        cells = [level.ratios.get(f"branch {n}{FRESH}") for n in DRAWS]
        estimates = level.ratios[PLAIN + FRESH].seeds
        rows.append([_of(level), *map(_bold_below, cells), str(estimates)])
    heads = [f"{n} draws{' (default)' if f'branch {n}' == PLAIN else ''}" for n in DRAWS]
    return markdown(["", *heads, "n"], rows)


def _bold_below(cell: Cell | None) -> str:
    """A ratio, bold where its interval lies below 1."""
    if cell is None:
        return ""
    return f"**{with_half(cell)}**" if below(cell) else with_half(cell)


GUIDE = {
    "chain": "sums in written steps",
    "countdown": "countdown",
    "translate": "short translations",
}
"""Tasks of docs/guides/your_language_model.md."""


def in_short(tables: Tables) -> str:
    """Variance x tokens at fresh questions, for the guide."""
    rows = []
    for level in measured_afresh(tables):
        cells = [level.ratios.get(f"branch {n}{FRESH}") for n in DRAWS]
        told = ["" if cell is None else with_half(cell).replace("±", " ± ") for cell in cells]
        rows.append([GUIDE[level.task], f"{level.accuracy:.2f}", *told])
    return markdown(["task", "mean reward", "4 draws", *(f"{n}" for n in DRAWS[1:])], rows)


def details(tables: Tables) -> str:
    """Training in numbers, then further measurements of the noise."""
    told = [
        *training.in_short(tables),
        more_right(tables),
        losses(tables),
        value_head(tables),
        long(tables),
    ]
    return "\n".join(f"- {each}" for each in told)


def more_right(tables: Tables) -> str:
    """The best number of draws at fixed questions, at a task's lowest and highest accuracy."""
    sentences = []
    for task in ("chain", "countdown"):
        levels = sorted(
            (level for level in measured(tables) if level.task == task),
            key=lambda level: level.accuracy,
        )
        told = [
            f"{with_half(best[1])} ({level.accuracy:.0%} right{_unsure(best[1])})"
            for level in (levels[0], levels[-1])
            if (best := best_draws(level)) is not None
        ]
        sentences.append(f"{' and '.join(told)} on {training.NAMES[task]}")
    return (
        "**On sums, the more answers are right, the more branching saves** "
        "([figure](noise.png)). With "
        f"fixed questions and the best number of draws: {', '.join(sentences)}."
    )


def _unsure(ratio: Cell) -> str:
    return "" if below(ratio) or above(ratio) else "; undecided"


def losses(tables: Tables) -> str:
    """Fixed questions at which the default has more noise than the best rival."""
    levels = [*measured(tables), translate_at_fixed(tables)]
    told = [
        _loss(level)
        for level in levels
        if level is not None and PLAIN in level.ratios and above(level.ratios[PLAIN])
    ]
    return f"**Where 8 draws lose**, with fixed questions: {listed(told) if told else 'nowhere'}."


def _loss(level: Level) -> str:
    """The default's ratio, with the value head's where that is below 1."""
    value = level.ratios.get(VALUE_HEAD)
    rest = ""
    if value is not None and below(value):
        rest = f", a value head {with_half(value)}"
    right = RIGHT[level.task].format(level.accuracy)
    ratio = with_half(level.ratios[PLAIN])
    return f"{ratio} on {training.NAMES[level.task]} ({right}{rest})"


def value_head(tables: Tables) -> str:
    """The value head at fresh questions relative to the default."""
    decided, undecided = [], []
    for level in candidates.reported(tables):
        ratio = level.ratios[VALUE_HEAD + FRESH]
        if abs(ratio.mean - 1) > ratio.half:
            decided.append(f"{candidates.by_rounds(ratio)} on {_of(level)}")
        else:
            undecided.append(ratio.mean)
    parts = [listed(decided)] if decided else []
    if undecided:
        parts.append(f"{min(undecided):.2f} to {max(undecided):.2f} elsewhere (undecided)")
    return (
        "**A value head**, as in PPO, relative to 8 draws with fresh questions: "
        f"{', '.join(parts)}. The tokens that trained it are not counted."
    )


def long(tables: Tables) -> str:
    """Long answers: the best method that branches, and the value head."""
    (level,) = (level for level in measured(tables) if level.task == LONG)
    ours = [cell for name, cell in level.ratios.items() if name.startswith(BRANCHING)]
    best = min(ours, key=lambda cell: cell.mean)
    return (
        f"**Long answers.** On sums of 24 numbers ({level.accuracy:.0%} right), the best of "
        f"{len(ours)} forms of branching has {with_half(best)}, a value head "
        f"{with_half(level.ratios[VALUE_HEAD])}."
    )


PARTS = {
    "finding": finding,
    "training": training.training,
    "noise": noise,
    "details": details,
}
