"""The table against the paper: of results/README.md and, shorter, of the README."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from arsm_experiments.report.alone import step_times
from arsm_experiments.report.pages import conditional, control, toy, vae
from arsm_experiments.report.pages.tables import Cell, Tables, large, listed, markdown, welch
from arsm_experiments.report.rows import CHOSE, TRIED
from arsm_experiments.report.toy import ON_THE_BEST
from arsm_experiments.report.welch import Difference, student_quantile

Verdict = Literal["reproduced", "better", "not reproduced", "not comparable"]
NEAR = 0.02
"""The largest relative difference that counts as reproduced."""
SEEDS = 3
"""Seeds of a row that says nothing else."""
PAGE = {
    "Toy": "toy",
    "VAE": "vae",
    "Two-layer VAE": "vae",
    "Half a digit": "conditional",
    "CartPole": "control",
    "Acrobot": "control",
    "LunarLander": "control",
    "Control": "control",
}


class Claim(NamedTuple):
    """A claim of the paper beside ours."""

    task: str
    claim: str
    paper: str
    ours: str
    cost: str
    verdict: Verdict
    first: bool = False
    """Whether the README shows it too."""


def judged(ours: Cell, paper: float) -> Verdict:
    """Whether the paper's number, taken as one more run, lies where 95% of single runs would, and
    is near ours. Lower is better.

    Such a run differs from our mean with variance std^2 (1 + 1/n). Three seeds leave that range so
    wide that a difference of more than NEAR never counts as reproduced.
    """
    half = student_quantile(ours.seeds - 1) * ours.std * math.sqrt(1 + 1 / ours.seeds)
    if abs(ours.mean - paper) <= min(half, NEAR * paper):
        return "reproduced"
    return "better" if ours.mean < paper else "not reproduced"


def _interval(cell: Cell) -> str:
    """The mean with its 95% interval, and the number of seeds where it is not the usual one."""
    return cell.interval.replace(f"; n = {SEEDS}", "")


def claims(tables: Tables) -> list[Claim]:
    """All claims, in the paper's order."""
    return [*_toy(tables), *_vae(tables), *_conditional(tables), *_control(tables)]


def _toy(tables: Tables) -> list[Claim]:
    gap = toy.cell(tables, 30, "ARSM", "gap / true gap")
    calls = toy.cell(tables, 30, "ARSM", "f calls an update").mean
    rivals = ("ARS", "Gumbel-Softmax (biased)", "RELAX", "REINFORCE", "AR")
    ratios = toy.rivals(tables)
    on_best = [toy.cell(tables, 30, name, ON_THE_BEST).mean for name in rivals[:2]]
    theirs = [toy.cell(tables, 30, name, "f calls an update").mean for name in rivals[:2]]
    return [
        Claim(
            "Toy",
            "ARSM follows the true gradient, C = 30",
            "figure",
            f"{gap.mean:.2f} "
            f"({gap.mean - gap.half:.2f} to {gap.mean + gap.half:.2f}; n = {gap.seeds}) times "
            "the true gradient's gap",
            f"{calls:.0f} f calls",
            "reproduced" if abs(gap.mean - 1) <= gap.half else "not reproduced",
            first=True,
        ),
        Claim(
            "Toy",
            "the others' variance, in ARSM's",
            "10 to 1e4",
            f"{large(min(ratios))} to {large(max(ratios))} (n = 10)",
            "",
            "reproduced" if min(ratios) >= 10 else "not reproduced",
        ),
        Claim(
            "Toy",
            "ARS and Gumbel-Softmax reach the optimum too",
            "figure",
            f"{on_best[0]:.0f} and {on_best[1]:.0f} of 10 seeds",
            f"{theirs[0]:.2g} and {theirs[1]:.2g} f calls",
            "reproduced" if min(on_best) == 10 else "not reproduced",
        ),
    ]


def _vae(tables: Tables) -> list[Claim]:
    return [*_one_layer(tables), *_two_layers(tables)]


def _one_layer(tables: Tables) -> list[Claim]:
    arsm, straight = vae.all_arsm(tables), vae.cell(tables, vae.STRAIGHT)
    shown = list(vae.arsm_rows(tables).values())
    chose = any(vae.cell(tables, row, CHOSE).mean for row in shown)
    return [
        Claim(
            "VAE",
            "ARSM, test -ELBO",
            "86.7",
            _interval(arsm) + "*" * chose,
            _calls(tables, shown[-1]),
            judged(arsm, 86.7),
            first=True,
        ),
        *_free_logits(tables),
        _loss(tables, "VAE", "straight-through Gumbel-Softmax", vae.STRAIGHT),
        _lead("VAE", "9.7", welch(straight, arsm), _as_released(tables, vae.AUTHORS, arsm)),
        *(
            _loss(tables, "VAE", name, vae.ROWS[name])
            for name in ("RELAX", "ARS", "REINFORCE", "AR")
        ),
        _loss(
            tables,
            "VAE",
            "Gumbel-Softmax, 25 samples, authors' settings",
            vae.ROWS["25 straight-through samples, authors' settings"],
        ),
        _time(tables),
    ]


def _free_logits(tables: Tables) -> list[Claim]:
    """The networks as the paper's table prints them; its authors' code fixes the first logit."""
    row = vae.FREE_LOGITS
    found = vae.ran(tables, {"ours": row})
    if not found:
        return []
    ours = found["ours"]
    name = "the same with 200 free logits, as printed"
    return [Claim("VAE", name, "86.7", _interval(ours), _calls(tables, row), judged(ours, 86.7))]


def _as_released(tables: Tables, row: str, arsm: Cell) -> str:
    """ARSM's lead on straight-through Gumbel-Softmax with the settings of the authors' code."""
    lead = welch(vae.cell(tables, vae.ROWS[row]), arsm)
    return f"; {lead.text} as released"


def _time(tables: Tables) -> Claim:
    """25 Gumbel-Softmax samples take as long as one ARSM step."""
    times = step_times(tables.results / "vae")
    many = times[f"25*gumbel-softmax:hard=True{vae.AS_RELEASED}"] / times["arsm"]
    return Claim(
        "VAE",
        "time of 25 Gumbel-Softmax samples, in ARSM steps",
        "1",
        f"{many:.1f}",
        f"ARSM {times['arsm']:.2f} ms",
        "reproduced" if abs(many - 1) <= NEAR else "not reproduced",
    )


def _two_layers(tables: Tables) -> list[Claim]:
    task = "Two-layer VAE"
    arsm = vae.cell(tables, vae.ALGORITHM_2)
    released = f"two layers: {vae.AUTHORS}"
    authors = vae.ROWS[released]
    ours = _loss(tables, task, "ARSM, test -ELBO", vae.ALGORITHM_2, first=True)
    # the paper chose among five
    one_rate = ", one rate" * (vae.cell(tables, vae.ALGORITHM_2, TRIED).mean == 1)
    found = [ours._replace(ours=ours.ours + one_rate)]
    straight = vae.two_layers(tables).get("straight-through Gumbel-Softmax")
    if straight is not None:
        # the paper has its rival with the authors' settings alone
        theirs = float(vae.cell(tables, authors).paper) - float(arsm.paper)
        lead = welch(straight, arsm)
        found.append(_lead(task, f"{theirs:.1f}", lead, _as_released(tables, released, arsm)))
    return [*found, _loss(tables, task, "Gumbel-Softmax, authors' settings", authors)]


def _loss(tables: Tables, task: str, name: str, row: str, *, first: bool = False) -> Claim:
    """A row's test -ELBO beside the paper's."""
    ours = vae.cell(tables, row)
    paper = float(ours.paper)
    mark = "*" * bool(vae.cell(tables, row, CHOSE).mean)
    verdict = judged(ours, paper)
    text = _interval(ours) + mark
    return Claim(task, name, f"{paper:.1f}", text, _calls(tables, row), verdict, first)


def _calls(tables: Tables, row: str) -> str:
    return _counted(vae.f_calls(tables, row))


def _f_calls(calls: Cell) -> str:
    return _counted(f"{calls.mean:.0f}")


def _counted(calls: str) -> str:
    """E.g. 1 f call, or ≤91 f calls."""
    return f"{calls} f call{'s' * (calls != '1')}"


def _lead(task: str, paper: str, lead: Difference, besides: str) -> Claim:
    """How far ARSM is ahead of straight-through Gumbel-Softmax with the same settings."""
    return Claim(
        task,
        "ARSM's lead on straight-through Gumbel-Softmax, nats",
        paper,
        lead.text + besides,
        "rival: 1 f call",
        "reproduced" if lead.decided and lead.mean > 0 else "not reproduced",
        first=True,
    )


def _conditional(tables: Tables) -> list[Claim]:
    arsm, tuned = conditional.cell(tables, "arsm"), conditional.cell(tables, conditional.TUNED)
    straight = conditional.cell(tables, "gumbel-softmax:hard=True")
    metric = "evaluations, last epoch"
    calls = conditional.cell(tables, "arsm", metric)
    ours, verdict = f"{_interval(arsm)}; {tuned.mean:.1f} with a better start and rate", None
    images = "same images"
    drawn = conditional.sampled(tables, "arsm")
    if drawn is not None:
        # the paper puts its number beside those of Jang et al., whose pixels are sampled
        ours, verdict = f"{_interval(drawn)}, sampled pixels", judged(drawn, 58.3)
        drawn_calls = conditional.sampled(tables, "arsm", metric)
        calls = calls if drawn_calls is None else drawn_calls
    rival = conditional.sampled(tables, "gumbel-softmax:hard=True")
    if drawn is not None and rival is not None:
        arsm, straight, images = drawn, rival, "sampled pixels"
    found = [
        Claim(
            "Half a digit",
            "ARSM, test -ln p",
            "58.3",
            ours,
            _f_calls(calls),
            verdict or "not comparable",
        ),
        _lead("Half a digit", "1.4", welch(straight, arsm), f", {images}"),
    ]
    names = {words: name for name, words in conditional.PROTOCOL.items()}
    for words in ("straight-through", "gumbel-softmax:hard=True", "muprop"):
        theirs, drawn = conditional.JANG[words], conditional.sampled(tables, words)
        ours = conditional.cell(tables, words) if drawn is None else drawn
        found.append(
            Claim(
                "Half a digit",
                f"{names[words]} (Jang et al.)",
                theirs,
                _interval(ours) + ", thresholded pixels" * (drawn is None),
                _f_calls(conditional.cell(tables, words, metric)),
                "not comparable" if drawn is None else judged(drawn, float(theirs)),
            )
        )
    return found


def _control(tables: Tables) -> list[Claim]:
    return [
        *(_passing(tables, task) for task in ("CartPole-v0", "Acrobot-v1")),
        _lander(tables),
        *(_less_variance(tables, rival) for rival in control.RIVALS),
    ]


def _passing(tables: Tables, task: str) -> Claim:
    """More seeds pass, and in fewer episodes, with ARSM than with its rivals."""
    passed = {
        name: control.cell(tables, task, name, "seeds at the line").mean
        for name in ("ARSM", *control.RIVALS)
    }
    more = all(passed["ARSM"] > passed[rival] for rival in control.RIVALS)
    # one seed more is no difference: the episodes to the line must be decidedly fewer
    ahead = more and all(_sooner(tables, task, rival) for rival in control.RIVALS if passed[rival])
    return Claim(
        control.NAMES[task],
        "more seeds pass, in fewer episodes",
        "figure",
        _beside(tables, task),
        _steps(tables, task, "ARSM"),
        "reproduced" if ahead else "not reproduced",
        first=True,
    )


def _sooner(tables: Tables, task: str, rival: str) -> bool:
    """Whether ARSM's seeds need decidedly fewer episodes to the line than a rival's."""
    later = welch(
        control.cell(tables, task, rival, "episodes to the line"),
        control.cell(tables, task, "ARSM", "episodes to the line"),
    )
    return later.decided and later.mean > 0


def _lander(tables: Tables) -> Claim:
    """ARSM passes 200 on LunarLander, read in its longest runs."""
    task, row = "LunarLander-v3", control.LONGEST
    median = control.cell(tables, task, row, "its median").mean
    return Claim(
        "LunarLander",
        "ARSM passes 200",
        "figure, 19,050 s",
        _beside(tables, task, row, seconds=True),
        _steps(tables, task, row),
        "reproduced" if median >= 200 else "not reproduced",
        first=True,
    )


def _steps(tables: Tables, task: str, row: str) -> str:
    """Simulator steps relative to the rivals'."""
    own, *others = (
        control.cell(tables, task, name, "simulator steps").mean for name in (row, *control.RIVALS)
    )
    return f"{own / max(others):.0f} to {own / min(others):.0f} times their steps"


def _less_variance(tables: Tables, rival: str) -> Claim:
    """ARSM's gradient has less variance than a rival's, on all tasks."""
    lower = {
        task: welch(*(control.cell(tables, task, each, "log variance") for each in (rival, "ARSM")))
        for task in control.ROWS
    }
    words = listed([f"{each.short} ({control.NAMES[task]})" for task, each in lower.items()])
    less = all(each.decided and each.mean > 0 for each in lower.values())
    return Claim(
        "Control",
        f"its gradient has less variance than {rival}'s",
        "figure",
        f"ln variance {words} lower",
        "",
        "reproduced" if less else "not reproduced",
    )


def _beside(tables: Tables, task: str, own: str = "ARSM", *, seconds: bool = False) -> str:
    """ARSM's and its rivals' medians, and the seeds that pass; with CPU seconds, if wanted."""
    rows = {"ARSM": own, "A2C": "A2C", "RELAX": "RELAX"}
    told = []
    for name, row in rows.items():
        spent = control.cell(tables, task, row, "CPU seconds").mean
        time = f" ({spent:,.0f} CPU s)" if seconds else ""
        ends = control.median(tables, task, row)
        told.append(f"{name}{time} {ends}, {control.passes(tables, task, row)}")
    return "; ".join(told)


def table(tables: Tables) -> str:
    """Every claim with our number, its cost and the verdict."""
    rows, last = [], ""
    for c in claims(tables):
        link = "" if c.task == last else f"[{c.task}]({PAGE[c.task]}/README.md): "
        rows.append([link + c.claim, c.paper, c.ours, c.cost, c.verdict])
        last = c.task
    header = ["the paper's claim", "its number", "ours", "cost", "verdict"]
    return f"{markdown(header, rows)}\n{_summary(tables)}"


def short(tables: Tables) -> str:
    """The main claims for the README."""
    rows: list[Sequence[str]] = [
        [f"[{c.task}](results/{PAGE[c.task]}/README.md): {c.claim}", c.paper, c.ours, c.verdict]
        for c in claims(tables)
        if c.first
    ]
    return markdown(["the paper's claim", "paper", "ours", "verdict"], rows)


def _summary(tables: Tables) -> str:
    """How many claims have which verdict."""
    found = [claim.verdict for claim in claims(tables)]
    kinds: tuple[Verdict, ...] = ("reproduced", "better", "not reproduced", "not comparable")
    counts = [f"{found.count(kind)} {kind}" for kind in kinds if kind in found]
    return f"Of {len(found)} claims {listed(counts)}."


PARTS = {"paper": table}
