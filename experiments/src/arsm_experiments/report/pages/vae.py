"""The generated parts of results/vae/README.md."""

from __future__ import annotations

import json

from arsm_experiments.report.pages.tables import Cell, Tables, markdown, pooled, welch
from arsm_experiments.report.training import CHOSE
from arsm_experiments.report.vae import AS_RELEASED

ARSM = {
    "ARSM, f in bfloat16": "1 layer: arsm",
    "ARSM, TF32": "1 layer (tf32): arsm",
    "ARSM, float32": "1 layer (float32): arsm",
}
"""One algorithm at three precisions."""
STRAIGHT = "1 layer: gumbel-softmax:hard=True"
LEAVE_ONE_OUT = "1 layer: rloo:samples=46,live=1"
RECIPE = "arsm:pooled=True, dropout 0.2, epochs {}, schedule cosine"
HARD = "gumbel-softmax:hard=True"
REGULARISED = f"1 layer (recipe): {RECIPE.format(600)}, weight decay 0.03"
RIVALS = "dropout 0.2, epochs 600, schedule cosine, weight decay 0.03"
"""The recipe of the regularised row, for other estimators."""
ALGORITHM_2 = "2 layers (algorithm2): arsm, first logit fixed False, afresh True"
ROWS = {
    **ARSM,
    "ARSM, 200 free logits": "1 layer (free-logits): arsm, first logit fixed False",
    "straight-through Gumbel-Softmax": STRAIGHT,
    "RELAX": "1 layer: relax",
    "leave-one-out, ridge": f"{LEAVE_ONE_OUT},ridge=1.0",
    "pooled ARSM": "1 layer: arsm:pooled=True",
    "leave-one-out, 46 samples": LEAVE_ONE_OUT,
    "25 straight-through samples, authors' settings": f"1 layer: 25*{HARD}{AS_RELEASED}",
    "straight-through, authors' settings": f"1 layer (authors): {HARD}{AS_RELEASED}",
    "ARS": "1 layer: ars",
    "REINFORCE": "1 layer: reinforce",
    "AR": "1 layer: ar",
    "two layers: ARSM, Algorithm 2": ALGORITHM_2,
    "two layers: straight-through, authors' settings": f"2 layers: {HARD}{AS_RELEASED}",
    "two layers: straight-through Gumbel-Softmax": f"2 layers (two-layers): {HARD}",
    "two layers: leave-one-out, 46 samples": "2 layers (two-layers): rloo:samples=46,live=1",
    "two layers: pooled ARSM": "2 layers (two-layers): arsm:pooled=True",
    "regularised: pooled ARSM": REGULARISED,
    "regularised: straight-through": f"1 layer (recipe): gumbel-softmax:hard=True, {RIVALS}",
    "regularised: leave-one-out": f"1 layer (recipe): rloo:samples=46,live=1, {RIVALS}",
    "regularised, two layers: pooled ARSM": f"2 layers (recipe): {RECIPE.format(800)}",
    "the same, weight decay": f"2 layers (recipe): {RECIPE.format(800)}, weight decay 0.03",
}
"""Rows of the page's table; those that have not been run are left out."""


def cell(tables: Tables, row: str, metric: str = "test") -> Cell:
    """A number of the VAE's table."""
    return tables.cell("vae", f"VAE, {row}", metric)


def all_arsm(tables: Tables) -> Cell:
    """ARSM on one layer: all seeds of all precisions."""
    return pooled(cell(tables, row) for row in ARSM.values())


def table(tables: Tables) -> str:
    """-ELBO of every row, beside the paper's."""
    rows = []
    for name, row in ROWS.items():
        if tables.find("vae", f"VAE, {row}", "test") is None:
            continue
        test = cell(tables, row)
        chose = "*" if cell(tables, row, CHOSE).mean else ""
        rows.append(
            [
                name,
                f"{cell(tables, row, 'learning rate').mean:g}",
                f"{test.seeds}{chose}",
                f"{cell(tables, row, 'evaluations, last epoch').mean:.0f}",
                f"{test.mean:.1f} ± {test.std:.1f}",
                test.paper,
            ]
        )
    header = ["", "rate", "seeds", "f calls", "test", "paper"]
    return markdown(header, rows)


def finding(tables: Tables) -> str:
    """ARSM beside the paper and its closest rival, and the regularised model."""
    ours = all_arsm(tables)
    means = [f"{cell(tables, row).mean:.1f}" for row in ARSM.values()]
    straight = cell(tables, STRAIGHT)
    apart = welch(ours, straight)
    word = "undecided" if not apart.decided else "decided"
    recipe = cell(tables, REGULARISED)
    return (
        f"**ARSM reaches {ours.interval} nats in the test, the paper 86.7; straight-through "
        f"Gumbel-Softmax, which the paper has at {straight.paper}, reaches {straight.mean:.1f} "
        "with one evaluation of f (and a backward pass) per image.** The difference between the "
        f"two is {apart.text} nats by Welch's 95% interval: {word}. ARSM's seeds are those of "
        f"three precisions, whose means are {means[0]} (bfloat16), {means[1]} (TF32) and "
        f"{means[2]} (float32). With regularisation pooled ARSM reaches {recipe.interval}."
    )


def others(tables: Tables) -> str:
    """The rivals that the paper understates, and two layers."""
    gains = {
        name: float(cell(tables, row).paper) - cell(tables, row).mean
        for name, row in (
            ("REINFORCE", ROWS["REINFORCE"]),
            ("RELAX", ROWS["RELAX"]),
            ("ARS", ROWS["ARS"]),
            ("AR", ROWS["AR"]),
        )
    }
    ours, leave = all_arsm(tables), cell(tables, LEAVE_ONE_OUT)
    last = cell(tables, LEAVE_ONE_OUT, "test, last epoch").mean
    two = cell(tables, ALGORITHM_2)
    return (
        f"REINFORCE is {gains['REINFORCE']:.1f}, RELAX {gains['RELAX']:.1f} and ARS "
        f"{gains['ARS']:.1f} nats better than in the paper, AR {-gains['AR']:.1f} worse. Plain "
        f"leave-one-out has the smaller gradient variance and the worse test result, "
        f"{leave.mean:.1f}, {welch(leave, ours).text} above ARSM: it overfits, and ends at "
        f"{last:.1f}. Two layers by Algorithm 2 reach {two.interval}, the paper {two.paper}."
    )


def times(tables: Tables) -> str:
    """Milliseconds per step, from step_times.jsonl."""
    lines = (tables.results / "vae" / "step_times.jsonl").read_text().splitlines()
    found = {line["label"]: line["milliseconds"] for line in map(json.loads, lines)}
    arsm = found["arsm"]
    plain, learned = found["25*gumbel-softmax"], found[f"25*gumbel-softmax:hard=True{AS_RELEASED}"]
    return (
        "The paper says that 25 Gumbel-Softmax samples take the time of one ARSM step. On one "
        f"H200 an ARSM step takes {arsm:.2f} ms and 25 samples {plain / arsm:.1f} times that, "
        f"{learned / arsm:.1f} times as the authors train them; one straight-through sample takes "
        f"{found['gumbel-softmax:hard=True'] / arsm:.2f} times, leave-one-out with 46 samples "
        f"{found['rloo:samples=46,live=1'] / arsm:.2f} times (`step_times.jsonl`)."
    )


PARTS = {"table": table, "finding": finding, "others": others, "times": times}
