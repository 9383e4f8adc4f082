"""The table against the paper: of results/README.md and, shorter, of the README."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from arsm_experiments.report.alone import step_times
from arsm_experiments.report.pages import conditional, control, toy, vae
from arsm_experiments.report.pages.tables import Cell, Tables, large, listed, markdown, welch
from arsm_experiments.report.toy import ON_THE_BEST
from arsm_experiments.report.welch import Difference, student_quantile

Verdict = Literal["reproduced", "better", "not reproduced"]
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
    brief: str = ""
    """Ours in the README, if shorter there."""


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
    arsm, straight = vae.all_arsm(tables), vae.ONE_LAYER[vae.STRAIGHT_THROUGH]
    lead = welch(vae.cell(tables, straight), arsm)
    one_layer = {method.name: method.one_layer for method in vae.METHODS}
    return [
        Claim(
            "VAE",
            "ARSM, test -ELBO",
            "86.7",
            _interval(arsm),
            _calls(tables, one_layer["ARSM"]),
            judged(arsm, 86.7),
            first=True,
        ),
        _free_logits(tables),
        _loss(tables, "VAE", vae.STRAIGHT_THROUGH, straight),
        _lead("VAE", "9.7", lead, _as_released(tables, vae.AUTHORS.one_layer, arsm)),
        *(
            _loss(tables, "VAE", name, one_layer[name])
            for name in ("RELAX", "ARS", "REINFORCE", "AR")
        ),
        _loss(
            tables,
            "VAE",
            "Gumbel-Softmax, 25 samples, authors' settings",
            vae.MANY_SAMPLES.one_layer,
        ),
        _time(tables),
    ]


def _free_logits(tables: Tables) -> Claim:
    """The networks as the paper's table prints them; its authors' code fixes the first logit."""
    ours = vae.cell(tables, vae.FREE_LOGITS)
    name = "the same with 200 free logits, as printed"
    calls = _calls(tables, vae.FREE_LOGITS)
    return Claim("VAE", name, "86.7", _interval(ours), calls, judged(ours, 86.7))


def _as_released(tables: Tables, row: str, arsm: Cell) -> str:
    """ARSM's lead on straight-through Gumbel-Softmax with the settings of the authors' code."""
    lead = welch(vae.cell(tables, row), arsm)
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
    task, released = "Two-layer VAE", vae.AUTHORS.two_layers
    arsm = vae.cell(tables, vae.ALGORITHM_2)
    lead = welch(vae.two_layers(tables)[vae.STRAIGHT_THROUGH], arsm)
    # the paper has its rival with the authors' settings alone
    theirs = float(vae.cell(tables, released).paper) - float(arsm.paper)
    return [
        _loss(tables, task, "ARSM, test -ELBO", vae.ALGORITHM_2, first=True),
        _lead(task, f"{theirs:.1f}", lead, _as_released(tables, released, arsm)),
        _loss(tables, task, "Gumbel-Softmax, authors' settings", released),
    ]


def _loss(tables: Tables, task: str, name: str, row: str, *, first: bool = False) -> Claim:
    """A row's test -ELBO beside the paper's."""
    ours = vae.cell(tables, row)
    paper = float(ours.paper)
    calls = _calls(tables, row)
    return Claim(task, name, f"{paper:.1f}", _interval(ours), calls, judged(ours, paper), first)


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
    """On sampled pixels, as Jang et al. have them: the paper puts its number beside theirs."""
    arsm = conditional.sampled(tables, "arsm")
    straight = conditional.sampled(tables, conditional.STRAIGHT)
    calls = conditional.sampled(tables, "arsm", conditional.CALLS)
    task, images = "Half a digit", ", sampled pixels"
    return [
        Claim(
            task,
            "ARSM, test -ln p",
            "58.3",
            _interval(arsm) + images,
            _f_calls(calls),
            judged(arsm, 58.3),
        ),
        _lead(task, "1.4", welch(straight, arsm), images),
        *(
            _jang(tables, name)
            for name in ("straight-through", "straight-through Gumbel-Softmax", "MuProp")
        ),
    ]


def _jang(tables: Tables, name: str) -> Claim:
    """A rival whose number the paper took from Jang et al."""
    words = conditional.PROTOCOL[name]
    theirs = conditional.JANG[words]
    ours = conditional.sampled(tables, words)
    calls = _f_calls(conditional.cell(tables, words, conditional.CALLS))
    claim = f"{name} (Jang et al.)"
    verdict = judged(ours, float(theirs))
    return Claim("Half a digit", claim, theirs, _interval(ours), calls, verdict)


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
        brief=f"{control.passes(tables, task, 'ARSM')} seeds pass, after "
        f"{_episodes(tables, task, 'ARSM')} episodes; "
        + ", ".join(
            f"{rival} {passed[rival]:.0f} after {_episodes(tables, task, rival)}"
            for rival in control.RIVALS
        ),
    )


def _episodes(tables: Tables, task: str, row: str) -> str:
    """Mean episodes to the line, of the seeds that pass."""
    return f"{control.cell(tables, task, row, 'episodes to the line').mean:.0f}"


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
    seconds = {name: _cpu_seconds(tables, task, name) for name in (row, *control.RIVALS)}
    return Claim(
        "LunarLander",
        "ARSM passes 200",
        "19,050 s",
        _beside(tables, task, row, seconds=True),
        _steps(tables, task, row),
        "reproduced" if median >= 200 else "not reproduced",
        first=True,
        brief=f"{control.median(tables, task, row)} in {seconds[row]}, "
        f"{control.passes(tables, task, row)} seeds passes; "
        + ", ".join(
            f"{rival} {control.median(tables, task, rival)} in {seconds[rival]}"
            for rival in control.RIVALS
        ),
    )


def _cpu_seconds(tables: Tables, task: str, row: str) -> str:
    return f"{control.cell(tables, task, row, 'CPU seconds').mean:,.0f} CPU s"


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
        time = f" ({_cpu_seconds(tables, task, row)})" if seconds else ""
        ends = control.median(tables, task, row)
        passed = control.passes(tables, task, row).replace(" of ", "/")
        told.append(f"{name}{time} {ends}, {passed}")
    return "; ".join(told)


def table(tables: Tables) -> str:
    """Every claim with our number, its cost and the verdict."""
    rows, last = [], ""
    for c in claims(tables):
        link = "" if c.task == last else f"[{c.task}]({PAGE[c.task]}/README.md): "
        rows.append([link + c.claim, c.paper, c.ours, c.cost, c.verdict])
        last = c.task
    return markdown(["the paper's claim", "its number", "ours", "cost", "verdict"], rows)


def short(tables: Tables) -> str:
    """The main claims for the README."""
    rows: list[Sequence[str]] = [
        [
            f"[{c.task}](results/{PAGE[c.task]}/README.md): {c.claim}",
            c.paper,
            c.brief or c.ours,
            c.verdict,
        ]
        for c in claims(tables)
        if c.first
    ]
    return markdown(["the paper's claim", "paper", "ours", "verdict"], rows)


def summary(tables: Tables) -> str:
    """How many claims have which verdict."""
    found = [claim.verdict for claim in claims(tables)]
    return (
        f"**Of {len(found)} claims {found.count('reproduced')} are reproduced and "
        f"{found.count('not reproduced')} are not; {found.count('better')} numbers of other "
        "methods come out better than printed.**"
    )


PARTS = {"summary": summary, "paper": table}
