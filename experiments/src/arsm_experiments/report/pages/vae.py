"""The generated parts of results/vae/README.md and HISTORY.md."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from arsm_experiments.report.alone import step_times
from arsm_experiments.report.pages.tables import Cell, Tables, listed, markdown, pooled, welch
from arsm_experiments.report.rows import CHOSE, TRIAL, TRIAL_EPOCHS, TRIED
from arsm_experiments.report.vae import AS_RELEASED

ARSM = {
    "ARSM, f in bfloat16": "1 layer: arsm",
    "ARSM, TF32": "1 layer (tf32): arsm",
    "ARSM, float32": "1 layer (float32): arsm",
}
"""One algorithm at three precisions."""
PRECISION = dict(zip(ARSM, ("bfloat16", "TF32", "float32"), strict=True))
STRAIGHT = "1 layer: gumbel-softmax:hard=True"
LEAVE_ONE_OUT = "1 layer: rloo:samples=46,live=1"
RECIPE = "arsm:pooled=True, dropout 0.2, epochs {}, schedule cosine"
HARD = "gumbel-softmax:hard=True"
REGULARISED = f"1 layer (recipe): {RECIPE.format(600)}, weight decay 0.03"
RIVALS = "dropout 0.2, epochs 600, schedule cosine, weight decay 0.03"
"""The recipe of the regularised row, for other estimators."""
ALGORITHM_2 = "2 layers (algorithm2): arsm, first logit fixed False, afresh True"
FREE_LOGITS = "1 layer (free-logits): arsm, first logit fixed False"
TWO_LAYERS = {
    "straight-through Gumbel-Softmax": f"2 layers (two-layers): {HARD}",
    "leave-one-out": "2 layers (two-layers): rloo:samples=46,live=1",
    "pooled ARSM": "2 layers (two-layers): arsm:pooled=True",
}
"""Rivals on two layers, with the settings of the one-layer rows."""
ENDED_EARLY = {"leave-one-out": ", epochs 460", "pooled ARSM": ", epochs 850"}
"""How the rows of those are named that have not been trained to the end."""


def _two_layer_rows() -> dict[str, str]:
    """The rivals on two layers, each before its end and at its end."""
    rows = {}
    for name, row in TWO_LAYERS.items():
        if early := ENDED_EARLY.get(name):
            epochs = early.removeprefix(", epochs ")
            rows[f"two layers: {name}, {epochs} epochs"] = row + early
        rows[f"two layers: {name}"] = row
    return rows


RIVALS_REGULARISED = {
    "straight-through Gumbel-Softmax": f"1 layer (recipe): {HARD}, {RIVALS}",
    "leave-one-out": f"1 layer (recipe): rloo:samples=46,live=1, {RIVALS}",
}
RIVALS_PLAIN = dict(zip(RIVALS_REGULARISED, (STRAIGHT, LEAVE_ONE_OUT), strict=True))
"""The same without the recipe."""
AUTHORS = "straight-through, authors' settings"
TWO_LAYER_RECIPE = "regularised, two layers: pooled ARSM"
TWO_LAYER_DECAY = f"{TWO_LAYER_RECIPE}, weight decay"
ROWS = {
    **ARSM,
    "ARSM, 200 free logits": FREE_LOGITS,
    "straight-through Gumbel-Softmax": STRAIGHT,
    "RELAX": "1 layer: relax",
    "leave-one-out, ridge": f"{LEAVE_ONE_OUT},ridge=1.0",
    "pooled ARSM": "1 layer: arsm:pooled=True",
    "leave-one-out, 46 samples": LEAVE_ONE_OUT,
    "25 straight-through samples, authors' settings": f"1 layer: 25*{HARD}{AS_RELEASED}",
    AUTHORS: f"1 layer (authors): {HARD}{AS_RELEASED}",
    "ARS": "1 layer: ars",
    "REINFORCE": "1 layer: reinforce",
    "AR": "1 layer: ar",
    "two layers: ARSM, Algorithm 2": ALGORITHM_2,
    f"two layers: {AUTHORS}": f"2 layers: {HARD}{AS_RELEASED}",
    **_two_layer_rows(),
    "regularised: pooled ARSM": REGULARISED,
    **{f"regularised: {name}": row for name, row in RIVALS_REGULARISED.items()},
    TWO_LAYER_RECIPE: f"2 layers (recipe): {RECIPE.format(800)}",
    TWO_LAYER_DECAY: f"2 layers (recipe): {RECIPE.format(800)}, weight decay 0.03",
}
"""Rows of the page's table; those that have not been run are left out."""
NOT_MERGED = {
    ALGORITHM_2,
    *(TWO_LAYERS[name] + early for name, early in ENDED_EARLY.items()),
    RIVALS_REGULARISED["leave-one-out"],
    ROWS[TWO_LAYER_RECIPE],
    ROWS[TWO_LAYER_DECAY],
}
"""Rows whose count of distinct evaluations missed equal queries: it is an upper bound."""


def cell(tables: Tables, row: str, metric: str = "test") -> Cell:
    """A number of the VAE's table."""
    return tables.cell("vae", f"VAE, {row}", metric)


def ran(tables: Tables, rows: Mapping[str, str]) -> dict[str, Cell]:
    """The test results of those rows that have been run; a single seed is a trial."""
    found = {name: tables.find("vae", f"VAE, {row}", "test") for name, row in rows.items()}
    return {name: each for name, each in found.items() if each is not None and each.seeds > 1}


def two_layers(tables: Tables) -> dict[str, Cell]:
    """The rivals on two layers that have been run; as far as they came, if not to the end."""
    early = {name: TWO_LAYERS[name] + epochs for name, epochs in ENDED_EARLY.items()}
    found = ran(tables, early) | ran(tables, TWO_LAYERS)
    return {name: found[name] for name in TWO_LAYERS if name in found}


def arsm_rows(tables: Tables) -> dict[str, str]:
    """ARSM's precisions: those whose seeds did not choose the rate or, without any, all."""
    fresh = {name: row for name, row in ARSM.items() if not cell(tables, row, CHOSE).mean}
    return fresh or ARSM


def all_arsm(tables: Tables) -> Cell:
    """ARSM on one layer: all seeds of these precisions."""
    return pooled(cell(tables, row) for row in arsm_rows(tables).values())


def _superseded(tables: Tables) -> set[str]:
    """Rows that better ones replace: a precision without fresh seeds, which would be flattered
    beside those that have some, and the recipe without weight decay.
    """
    flattered = {name for name in ARSM if name not in arsm_rows(tables)}
    decayed = ran(tables, {TWO_LAYER_RECIPE: ROWS[TWO_LAYER_DECAY]})
    return flattered | decayed.keys()


def table(tables: Tables) -> str:
    """-ELBO of every row, beside the paper's."""
    rows = []
    for name in shown(tables):
        row = ROWS[name]
        test = cell(tables, row)
        chose = "*" if cell(tables, row, CHOSE).mean else ""
        shorter = "†" if tables.find("vae", f"VAE, {row}", TRIAL_EPOCHS) else ""
        rows.append(
            [
                name,
                f"{test.seeds}{chose}{shorter}",
                f_calls(tables, row),
                f"{test.mean:.1f} ± {test.std:.1f}",
                test.paper,
            ]
        )
    header = ["", "seeds", "f calls", "test", "paper"]
    return markdown(header, rows)


def f_calls(tables: Tables, row: str) -> str:
    """Distinct evaluations of f per image and step in the last epoch."""
    count = cell(tables, row, "evaluations, last epoch").mean
    return f"≤{math.ceil(count)}" if row in NOT_MERGED else f"{count:.0f}"


def shown(tables: Tables) -> list[str]:
    """The names of the table's rows."""
    return [name for name in ran(tables, ROWS) if name not in _superseded(tables)]


def note(tables: Tables) -> str:
    """What the table's ±, * and † mean."""
    told = ["± is the standard deviation over seeds."]
    if any(cell(tables, ROWS[name], CHOSE).mean for name in shown(tables)):
        told.append("\\* One of the seeds chose the rate.")
    else:
        told.append("No seed chose a rate.")
    shorter = [
        found.mean
        for name in shown(tables)
        if (found := tables.find("vae", f"VAE, {ROWS[name]}", TRIAL_EPOCHS))
    ]
    if shorter:
        told.append(
            f"† The rate was chosen in {min(shorter):.0f} to {max(shorter):.0f} epochs instead of "
            "1,000 ([which](HISTORY.md))."
        )
    if any(ROWS[name] in NOT_MERGED for name in shown(tables)):
        told.append("≤: an upper bound, which counts equal evaluations too.")
    return " ".join(told)


def trials(tables: Tables) -> str:
    """The first seed's best validation at every rate that was tried, and in how many epochs."""
    names = {_without_epochs(f"VAE, {row}"): name for name, row in ROWS.items()}
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
    for name in filter(found.__contains__, ROWS):
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
    """ARSM beside the paper and its closest rival, and the regularised model."""
    ours, straight = all_arsm(tables), cell(tables, STRAIGHT)
    apart = welch(ours, straight)
    word = "decided" if apart.decided else "undecided"
    recipe = cell(tables, REGULARISED)
    return (
        f"**ARSM reaches {ours.interval} nats, the paper 86.7; straight-through "
        f"Gumbel-Softmax, which the paper has at {straight.paper}, reaches {straight.mean:.1f} "
        "with one evaluation of f.** They differ by "
        f"{apart.text} nats (Welch's 95% interval): {word}. {_precisions(tables)} With "
        f"regularisation pooled ARSM reaches {recipe.interval}{_also_regularised(tables)}."
    )


def _precisions(tables: Tables) -> str:
    """The precisions whose seeds are shown as one."""
    rows = arsm_rows(tables)
    means = {
        name: f"{cell(tables, row).mean:.1f} ({PRECISION[name]})" for name, row in ARSM.items()
    }
    own = listed([means[name] for name in rows])
    if rows == ARSM:
        # rivals have bfloat16
        apart = welch(cell(tables, ARSM["ARSM, f in bfloat16"]), cell(tables, STRAIGHT))
        return (
            f"ARSM's seeds are those of three precisions, whose means are {own}; with "
            f"bfloat16 in both rows it is {apart.text}."
        )
    if len(rows) == 1:
        (only,) = rows
        others = listed([means[name] for name in ARSM if name not in rows])
        return (
            f"ARSM's seeds ({PRECISION[only]}) chose nothing; at other precisions, where one seed "
            f"of three chose the rate, it has {others}."
        )
    first, second = (cell(tables, row) for row in rows.values())
    return (
        f"ARSM's seeds, which chose nothing, are those of two precisions, {own}: "
        f"{welch(first, second).text} apart."
    )


def _also_regularised(tables: Tables) -> str:
    """Rivals with the recipe that was chosen for pooled ARSM, and without it."""
    recipe = cell(tables, REGULARISED)
    plain = {name: cell(tables, row) for name, row in RIVALS_PLAIN.items()}
    words = [
        f"{name} {each.mean:.1f} ({plain[name].mean:.1f} without), {welch(each, recipe).text} more"
        for name, each in ran(tables, RIVALS_REGULARISED).items()
    ]
    return f"; with the recipe chosen for it {'; '.join(words)}" if words else ""


def others(tables: Tables) -> str:
    """Leave-one-out, the paper's logits, and two layers."""
    ours, leave = all_arsm(tables), cell(tables, LEAVE_ONE_OUT)
    last = cell(tables, LEAVE_ONE_OUT, "test, last epoch").mean
    return (
        "Plain leave-one-out has the smaller gradient variance and overfits: "
        f"{leave.mean:.1f}, {welch(leave, ours).text} above ARSM, and {last:.1f} in the end."
        f"{_free_logits(tables)}\n\n{_two_layers(tables)}"
    )


def _free_logits(tables: Tables) -> str:
    found = ran(tables, {"free": FREE_LOGITS})
    if not found:
        return ""
    apart = welch(found["free"], all_arsm(tables))
    return (
        " With all 200 logits free, at a rate that short trials chose, ARSM reaches "
        f"{found['free'].mean:.1f}, {apart.text} more."
    )


def _two_layers(tables: Tables) -> str:
    """ARSM by Algorithm 2 on two layers, beside its rivals."""
    arsm = cell(tables, ALGORITHM_2)
    ours = f"Algorithm 2, all logits free, reaches {arsm.interval}, the paper {arsm.paper}"
    found = two_layers(tables)
    if not found:
        return f"On two layers ARSM by {ours}."
    reached = listed([f"{name} {each.mean:.1f}" for name, each in found.items()])
    more = listed([welch(arsm, each).text for each in found.values()])
    return (
        f"**On two layers, with the settings of one: {reached}. ARSM by {ours};** it is {more} "
        "above these."
    )


def limits(tables: Tables) -> str:
    """What depends on the runs that there are."""
    told = [
        "Which of ARSM's three precisions is the best: they come from different versions of the "
        "program, and the best mean is the luckiest. The paper has no bfloat16."
        if arsm_rows(tables) == ARSM
        else "The effect of the precision; the paper has no bfloat16."
    ]
    absent = [name for name in TWO_LAYERS if name not in two_layers(tables)]
    if len(absent) == len(TWO_LAYERS):
        told.append(
            "Rivals at equal settings on two layers. Straight-through Gumbel-Softmax has the "
            "authors' settings there (learned temperature, exact KL, free logits, one sample for "
            "encoder and decoder), which on one layer cost it about ten nats."
        )
    elif absent:
        told.append(f"On two layers, at the settings of one layer: {listed(absent)}.")
    absent = _not_run(tables)
    if absent:
        told.append(f"Planned, not run: {listed(absent)}.")
    return "\n".join(f"- {line}" for line in told)


def _not_run(tables: Tables) -> list[str]:
    """What the plan has besides rivals on two layers, and no run yet."""
    found = ran(tables, ROWS)
    absent = [
        f"{name} with the regularised recipe"
        for name, row in RIVALS_REGULARISED.items()
        if not ran(tables, {name: row})
    ]
    precisions = arsm_rows(tables)
    if precisions != ARSM and len(precisions) == 1:
        absent.append("float32 with seeds that chose nothing")
    if TWO_LAYER_DECAY not in found:
        absent.append("two layers with weight decay")
    if "ARSM, 200 free logits" not in found:
        absent.append("one layer with the paper's 200 free logits")
    if cell(tables, ALGORITHM_2, TRIED).mean == 1:
        absent.append("Algorithm 2 at other rates than 1e-4")
    if any(cell(tables, ROWS[name], CHOSE).mean for name in shown(tables)):
        absent.append("other seeds for the rows with \\*")
    if two_layers(tables) != ran(tables, TWO_LAYERS):
        absent.append("the short two-layer rows to the end")
    if tables.find("vae", f"VAE, {FREE_LOGITS}", TRIAL_EPOCHS):
        absent.append("the free logits' trials likewise")
    return absent


def times(tables: Tables) -> str:
    """Milliseconds per step, from step_times.jsonl: the rows of one version of the program."""
    found = step_times(tables.results / "vae")
    arsm, many = found["arsm"], found[f"25*gumbel-softmax:hard=True{AS_RELEASED}"]
    return (
        f"On one H200 an ARSM step takes {arsm:.2f} ms; 25 Gumbel-Softmax samples, as long in the "
        f"paper, take {many / arsm:.1f} times that as the authors train them "
        "(`step_times.jsonl`)."
    )


PARTS = {
    "table": table,
    "note": note,
    "finding": finding,
    "others": others,
    "times": times,
    "limits": limits,
}
HISTORY_PARTS = {"trials": trials}
