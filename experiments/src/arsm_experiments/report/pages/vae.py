"""The generated parts of results/vae/README.md and HISTORY.md."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from arsm_experiments.report.alone import step_times
from arsm_experiments.report.pages.tables import (
    Cell,
    Tables,
    listed,
    markdown,
    pooled,
    welch,
    with_spread,
)
from arsm_experiments.report.rows import CHOSE, TRIAL, TRIAL_EPOCHS
from arsm_experiments.report.vae import AS_RELEASED
from arsm_experiments.report.welch import Difference

HARD = "gumbel-softmax:hard=True"
LOO = "rloo:samples=46,live=1"
POOLED = "arsm:pooled=True"
ARSM = {
    "ARSM, f in bfloat16": "1 layer: arsm",
    "ARSM, TF32": "1 layer (tf32): arsm",
    "ARSM, float32": "1 layer (float32): arsm",
}
"""One algorithm at three precisions."""
PRECISION = dict(zip(ARSM, ("bfloat16", "TF32", "float32"), strict=True))
FREE_LOGITS = "1 layer (free-logits): arsm, first logit fixed False"
ALGORITHM_2 = "2 layers (algorithm2): arsm, first logit fixed False, afresh True"

STRAIGHT_THROUGH = "straight-through Gumbel-Softmax"
LEAVE_ONE_OUT = "leave-one-out"
POOLED_ARSM = "pooled ARSM"
ONE_LAYER = {
    STRAIGHT_THROUGH: f"1 layer: {HARD}",
    LEAVE_ONE_OUT: f"1 layer: {LOO}",
    POOLED_ARSM: f"1 layer: {POOLED}",
}
TWO_LAYERS = {
    STRAIGHT_THROUGH: f"2 layers (two-layers): {HARD}",
    LEAVE_ONE_OUT: f"2 layers (two-layers): {LOO}",
    POOLED_ARSM: f"2 layers (two-layers): {POOLED}",
}
ENDED_EARLY = {LEAVE_ONE_OUT: 460, POOLED_ARSM: 850}
"""Epochs of the two-layer trainings that ended before the others."""
EARLY = {
    TWO_LAYERS[name]: f"{TWO_LAYERS[name]}, epochs {epochs}" for name, epochs in ENDED_EARLY.items()
}
"""Their rows, until longer trainings take their place."""
RECIPE = "dropout 0.2, epochs {}, schedule cosine"
DECAY = ", weight decay 0.03"
REGULARISED = {
    STRAIGHT_THROUGH: f"1 layer (recipe): {HARD}, {RECIPE.format(600)}{DECAY}",
    LEAVE_ONE_OUT: f"1 layer (recipe): {LOO}, {RECIPE.format(600)}{DECAY}",
    POOLED_ARSM: f"1 layer (recipe): {POOLED}, {RECIPE.format(600)}{DECAY}",
}
REGULARISED_TWO_LAYERS = f"2 layers (recipe): {POOLED}, {RECIPE.format(800)}"


class MethodRows(NamedTuple):
    """A line of the page's table: its rows of table.csv, empty where it was not trained."""

    name: str
    one_layer: str
    two_layers: str = ""
    regularised: str = ""


def _with_all_settings(name: str) -> MethodRows:
    return MethodRows(name, ONE_LAYER[name], TWO_LAYERS[name], REGULARISED[name])


AUTHORS = MethodRows(
    "the same, authors' settings",
    f"1 layer (authors): {HARD}{AS_RELEASED}",
    f"2 layers: {HARD}{AS_RELEASED}",
)
MANY_SAMPLES = MethodRows("the same, 25 samples", f"1 layer: 25*{HARD}{AS_RELEASED}")
METHODS = (
    MethodRows("ARSM", ARSM["ARSM, f in bfloat16"], ALGORITHM_2),
    _with_all_settings(STRAIGHT_THROUGH),
    AUTHORS,
    MANY_SAMPLES,
    _with_all_settings(POOLED_ARSM),
    _with_all_settings(LEAVE_ONE_OUT),
    MethodRows("leave-one-out with a ridge", f"1 layer: {LOO},ridge=1.0"),
    MethodRows("RELAX", "1 layer: relax"),
    MethodRows("ARS", "1 layer: ars"),
    MethodRows("REINFORCE", "1 layer: reinforce"),
    MethodRows("AR", "1 layer: ar"),
)
TRIALS = {
    **ARSM,
    "ARSM, 200 free logits": FREE_LOGITS,
    **{method.name: method.one_layer for method in METHODS[1:]},
    "two layers: ARSM, Algorithm 2": ALGORITHM_2,
    **{f"two layers: {name}": row for name, row in TWO_LAYERS.items()},
}
"""Rows whose trials HISTORY.md shows."""


def cell(tables: Tables, row: str, metric: str = "test") -> Cell:
    """A number of the VAE's table."""
    return tables.cell("vae", f"VAE, {row}", metric)


def has_run(tables: Tables, row: str) -> bool:
    """Whether the table has a row."""
    return tables.find("vae", f"VAE, {row}", "test") is not None


def as_far_as_run(tables: Tables, row: str) -> str:
    """The row, or its shorter form if it has not been trained to the end."""
    return row if has_run(tables, row) else EARLY.get(row, row)


def two_layers(tables: Tables) -> dict[str, Cell]:
    """ARSM's rivals on two layers."""
    return {name: cell(tables, as_far_as_run(tables, row)) for name, row in TWO_LAYERS.items()}


def arsm_rows(tables: Tables) -> dict[str, str]:
    """ARSM's precisions whose seeds did not choose the rate."""
    return {name: row for name, row in ARSM.items() if not cell(tables, row, CHOSE).mean}


def all_arsm(tables: Tables) -> Cell:
    """ARSM on one layer: all seeds of these precisions."""
    return pooled(cell(tables, row) for row in arsm_rows(tables).values())


def table(tables: Tables) -> str:
    """-ELBO of every method, beside the paper's."""
    rows = []
    for method in METHODS:
        one, two, regularised = (as_far_as_run(tables, row) for row in method[1:])
        rows.append(
            [
                method.name,
                f_calls(tables, one),
                _result(tables, one),
                _paper(tables, one),
                _result(tables, two),
                _paper(tables, two),
                _result(tables, regularised),
            ]
        )
    header = ["", "f calls", "one layer", "paper", "two layers", "paper", "regularised"]
    return markdown(header, rows)


def _result(tables: Tables, row: str) -> str:
    """A row's test -ELBO with its spread and marks."""
    if not row:
        return ""
    found = all_arsm(tables) if row in ARSM.values() else cell(tables, row)
    shorter = "†" if _trial_epochs(tables, row) else ""
    ended = "‡" if row in EARLY.values() else ""
    return with_spread(found, 1) + shorter + ended


def _paper(tables: Tables, row: str) -> str:
    return cell(tables, row).paper if row else ""


def _trial_epochs(tables: Tables, row: str) -> Cell | None:
    """Epochs of the trials that chose a row's rate, if fewer than the row has."""
    return tables.find("vae", f"VAE, {row}", TRIAL_EPOCHS)


def f_calls(tables: Tables, row: str) -> str:
    """Distinct evaluations of f per image and step in the last epoch."""
    count = cell(tables, row, "evaluations, last epoch").mean
    # its steps missed equal queries
    return f"≤{math.ceil(count)}" if row == ALGORITHM_2 else f"{count:.0f}"


def note(tables: Tables) -> str:
    """Explanation of the table's ±, † and ‡."""
    told = [
        "± is the standard deviation over three seeds, for ARSM on one layer over "
        f"{all_arsm(tables).seeds}."
    ]
    rows = [as_far_as_run(tables, row) for method in METHODS for row in method[1:] if row]
    epochs = [found.mean for row in rows if (found := _trial_epochs(tables, row))]
    if epochs:
        told.append(
            f"† The rate was chosen in {min(epochs):.0f} to {max(epochs):.0f} epochs instead of "
            "1,000 ([which](HISTORY.md))."
        )
    ended = [
        f"{name} after {epochs}"
        for name, epochs in ENDED_EARLY.items()
        if EARLY[TWO_LAYERS[name]] in rows
    ]
    if ended:
        told.append(f"‡ Ended early, past the best epoch: {listed(ended)} epochs.")
    return " ".join(told)


def trials(tables: Tables) -> str:
    """The first seed's best validation at every rate that was tried, and in how many epochs."""
    names = {_without_epochs(f"VAE, {row}"): name for name, row in TRIALS.items()}
    found: dict[str, dict[str, float]] = {}
    epochs: dict[str, str] = {}
    for line in tables.lines("vae/table.csv"):
        name = names.get(_without_epochs(line["row"]))
        if name and line["metric"].startswith(TRIAL):
            found.setdefault(name, {})[line["metric"].removeprefix(TRIAL)] = float(line["mean"])
            epochs.setdefault(name, _epochs_of(line["row"]))
        elif name and line["metric"] == TRIAL_EPOCHS:
            epochs[name] = f"{float(line['mean']):.0f}"
    rates = sorted({rate for own in found.values() for rate in own}, key=float)
    rows = []
    for name in filter(found.__contains__, TRIALS):
        best = min(found[name].values())
        losses = [found[name].get(rate) for rate in rates]
        words = ["" if loss is None else f"{loss:.1f}" for loss in losses]
        marked = [f"**{w}**" if loss == best else w for w, loss in zip(words, losses, strict=True)]
        rows.append([name, epochs[name], *marked])
    return markdown(["", "epochs", *rates], rows)


def _epochs_of(row: str) -> str:
    """The epochs that a row's label names; those of the paper's protocol otherwise."""
    named = re.search(r", epochs (\d+)", row)
    return named[1] if named else "1000"


def _without_epochs(row: str) -> str:
    """A row whose trials may have had fewer epochs."""
    return re.sub(r", epochs \d+", "", row)


def finding(tables: Tables) -> str:
    """ARSM beside the paper and its closest rival, and the best models."""
    ours, straight = all_arsm(tables), cell(tables, ONE_LAYER[STRAIGHT_THROUGH])
    on_two = welch(cell(tables, ALGORITHM_2), two_layers(tables)[STRAIGHT_THROUGH])
    best, leave = (cell(tables, REGULARISED[name]) for name in (POOLED_ARSM, LEAVE_ONE_OUT))
    return (
        f"**Finding. ARSM reaches {ours.mean:.1f} nats, where the paper has 86.7. Straight-through "
        f"Gumbel-Softmax, which the paper has at {straight.paper}, reaches {straight.mean:.1f} "
        f"with one evaluation of f instead of {f_calls(tables, ARSM['ARSM, f in bfloat16'])}.** "
        f"So ARSM is {_in_words(welch(ours, straight))}. On two layers ARSM by Algorithm 2 is "
        f"{_in_words(on_two)}. With regularisation chosen for it, pooled ARSM reaches "
        f"{best.mean:.1f}; leave-one-out is {_in_words(welch(leave, best))}."
    )


def _in_words(less: Difference) -> str:
    """A difference of losses: how much worse the first one is."""
    word = "worse" if less.mean > 0 else "better"
    decided = "" if less.decided else " (undecided)"
    return f"{abs(less.mean):.1f} nats {word}{decided}"


def _told(apart: Difference) -> str:
    """A difference with its interval, and whether that contains 0."""
    return apart.text if apart.decided else apart.text.replace(")", "; undecided)")


def details(tables: Tables) -> str:
    """Side findings, with their intervals."""
    told = {
        "One layer": _one_layer(tables),
        "Two layers": _two_layers(tables),
        "Overfitting": _overfitting(tables),
        "Regularisation": _regularisation(tables),
        "Free logits": _free_logits(tables),
        "Precision": _precision(tables),
        "Time": _time(tables),
    }
    return "\n".join(f"- **{name}.** {sentence}" for name, sentence in told.items())


def _one_layer(tables: Tables) -> str:
    ours = all_arsm(tables)
    above = welch(ours, cell(tables, ONE_LAYER[STRAIGHT_THROUGH]))
    return (
        f"ARSM reaches {ours.interval}, which is {above.text} above straight-through "
        "Gumbel-Softmax. Brackets are 95% intervals, Welch's for differences."
    )


def _two_layers(tables: Tables) -> str:
    """ARSM by Algorithm 2 on two layers, and how far its rivals are below it."""
    ours = cell(tables, ALGORITHM_2)
    below = [f"{name} by {_told(welch(ours, each))}" for name, each in two_layers(tables).items()]
    return (
        f"ARSM by the paper's Algorithm 2, with all logits free, reaches {ours.interval}. With the "
        f"settings of one layer its rivals are below it: {listed(below)}."
    )


def _overfitting(tables: Tables) -> str:
    """Leave-one-out at its best epoch and at its last one."""
    row = ONE_LAYER[LEAVE_ONE_OUT]
    above = welch(cell(tables, row), all_arsm(tables))
    return (
        "Leave-one-out has less [gradient variance](1layer-state.png) than ARSM and overfits. At "
        f"its best epoch it is {above.text} above ARSM; it ends at "
        f"{cell(tables, row, 'test, last epoch').mean:.1f}."
    )


def _regularisation(tables: Tables) -> str:
    """The recipe that was chosen for pooled ARSM, and how far its rivals are above it."""
    ours = cell(tables, REGULARISED[POOLED_ARSM])
    above = [
        f"{name} by {_told(welch(cell(tables, REGULARISED[name]), ours))}"
        for name in (LEAVE_ONE_OUT, STRAIGHT_THROUGH)
    ]
    decayed = REGULARISED_TWO_LAYERS + DECAY
    with_decay = has_run(tables, decayed)
    two = cell(tables, decayed if with_decay else REGULARISED_TWO_LAYERS)
    how = "" if with_decay else " without weight decay"
    return (
        "Encoder dropout 0.2, weight decay 0.03, a cosine rate from 8e-4 and 600 epochs were "
        f"chosen for pooled ARSM, which reaches {ours.interval}. With the same recipe its rivals "
        f"are above it: {listed(above)}. On two layers pooled ARSM reaches {two.mean:.1f}, at 4e-4 "
        f"in 800 epochs{how}."
    )


def _free_logits(tables: Tables) -> str:
    """All logits free, as the paper's table of networks has them."""
    above = welch(cell(tables, FREE_LOGITS), all_arsm(tables))
    shorter = ", at a rate that shorter trials chose" * bool(_trial_epochs(tables, FREE_LOGITS))
    return (
        "With all 200 logits free, as the paper prints its network, ARSM is "
        f"{above.text} above ARSM with the first one fixed{shorter}."
    )


def _precision(tables: Tables) -> str:
    """The precisions whose seeds are shown as one, and the others."""
    rows = arsm_rows(tables)
    means = {
        name: f"{cell(tables, row).mean:.1f} ({PRECISION[name]})" for name, row in ARSM.items()
    }
    own = listed([means[name] for name in rows])
    others = listed([means[name] for name in ARSM if name not in rows])
    flattered = f"Three other seeds each, one of which chose the rate, reach {others}."
    if len(rows) == 1:
        open_end = "Whether the precision matters is open; the paper has no bfloat16."
        return f"ARSM's seeds reach {own}. {flattered} {open_end}"
    first, second = (cell(tables, row) for row in rows.values())
    return f"ARSM's seeds reach {own}, {welch(first, second).text} apart. {flattered}"


def _time(tables: Tables) -> str:
    """Milliseconds per step, from step_times.jsonl: the rows of one version of the program."""
    found = step_times(tables.results / "vae")
    arsm, many = found["arsm"], found[f"25*{HARD}{AS_RELEASED}"]
    return (
        f"On one H200 an ARSM step takes {arsm:.2f} ms (`step_times.jsonl`). With the authors' "
        f"settings 25 samples of straight-through Gumbel-Softmax take {many / arsm:.1f} times as "
        "long; in the paper they take equally long."
    )


def limits(tables: Tables) -> str:
    """What depends on the runs that there are."""
    absent = _not_run(tables)
    return f"- Runs that are planned: {listed(absent)}." if absent else ""


def _not_run(tables: Tables) -> list[str]:
    """What the plan has, and no run yet."""
    absent = []
    if "ARSM, float32" not in arsm_rows(tables):
        absent.append("float32 with seeds that chose nothing")
    if not has_run(tables, REGULARISED_TWO_LAYERS + DECAY):
        absent.append("two layers with weight decay")
    if not all(has_run(tables, row) for row in TWO_LAYERS.values()):
        absent.append("the trainings marked ‡ to the end")
    if _trial_epochs(tables, FREE_LOGITS):
        absent.append("the free logits' trials likewise")
    return absent


PARTS = {"table": table, "note": note, "finding": finding, "details": details, "limits": limits}
HISTORY_PARTS = {"trials": trials}
