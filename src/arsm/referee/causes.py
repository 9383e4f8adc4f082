"""Why a trainer's loss does not have the gradient that it should: the first explanation
that fits what was observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from arsm.referee.diagnose import Finding, Interval, recognise
from arsm.referee.language import (
    AFTER,
    CONTEXTS,
    INSIDE,
    PROMPTS,
    Objective,
    Setting,
    TrainerBatch,
    TrainerLoss,
    World,
    mean_gradient,
)
from arsm.referee.weights import LENGTHS_2_3_1, PAIR, REWARDS, TEMPERATURES, Interrogation, Weights

NEAR = 2e-3
"""Relative difference below which two weights are the same, at float32."""


@dataclass(frozen=True, eq=False)
class Mean:
    """A loss's mean gradient in one setting, and what it should be."""

    setting: Setting
    mean: Tensor
    """[STATES, V]."""
    truth: Tensor
    """[STATES, V]."""
    rounding: float

    @property
    def scale(self) -> float:
        """The length along the truth; nan where the truth is 0."""
        square = float(self.truth.square().sum())
        return float((self.mean * self.truth).sum()) / square if square > 1e-12 else float("nan")

    @property
    def direction(self) -> float:
        """The cosine of the angle between the two; nan where either is 0."""
        sizes = float(self.mean.norm() * self.truth.norm())
        return float((self.mean * self.truth).sum()) / sizes if sizes > 1e-12 else float("nan")

    def agrees(self, prediction: Tensor) -> bool:
        return bool(((self.mean - prediction).abs() <= self.rounding).all())


class Evidence:
    """Everything that an explanation may look at; asked for only when it is."""

    def __init__(
        self, loss: TrainerLoss, objective: Objective, means: Sequence[Mean], sign: int
    ) -> None:
        self.loss = loss
        self.objective = objective
        self.means = means
        self.sign = sign
        self.ask = Interrogation(loss, objective, sign)

    @cached_property
    def base(self) -> Weights:
        return self.ask.weights()

    @cached_property
    def by_temperature(self) -> dict[float, Weights]:
        """The weights, if ln p is taken at each temperature."""
        temperatures = sorted({*TEMPERATURES, self.objective.temperature})
        return {t: self.ask.weights(temperature=t) for t in temperatures}

    @cached_property
    def slopes(self) -> Tensor:
        return self.ask.slopes()

    def differs(
        self, other: Weights, rows: Sequence[int] | slice = slice(None), factor: float = 1.0
    ) -> bool:
        """Whether first tokens of these rows have other weights than in the base batch."""
        ours, theirs = factor * self.base.tokens[rows, 0], other.tokens[rows, 0]
        return bool(((ours - theirs).abs() > NEAR * max(self.base.largest * factor, 1e-3)).any())

    @cached_property
    def padding(self) -> bool:
        """Whether columns of padding behind the answers matter."""
        return self.differs(self.ask.weights(setting=replace(PAIR, padding=2)))

    @cached_property
    def prompt_padding(self) -> bool:
        return self.differs(self.ask.weights(setting=replace(PAIR, prompt_padding=2)))

    @cached_property
    def shorter(self) -> Weights:
        """The first answer has 1 token instead of 2; its reward stays."""
        numbers = LENGTHS_2_3_1.clone()
        numbers[0, 0] = 0
        return self.ask.weights(numbers=numbers)

    @cached_property
    def own_length(self) -> bool:
        return self.differs(self.shorter, [0])

    @cached_property
    def other_lengths(self) -> bool:
        return self.differs(self.shorter, [1, 2, 3, 4, 5])

    @cached_property
    def prompt_length(self) -> bool:
        """Whether answers of the same lengths and rewards get other weights after a
        longer prompt.
        """
        numbers = torch.tensor([[1, 2, 3]])
        found = [
            self.ask.weights(
                setting=replace(PAIR, prompts=(p,)), numbers=numbers, rewards=REWARDS[:3]
            )
            for p in range(len(PROMPTS))
        ]
        if _left_out(*found):
            return False
        difference = (found[0].tokens[:, 0] - found[1].tokens[:, 0]).abs().max()
        return float(difference) > NEAR * max(found[0].largest, 1e-3)

    @cached_property
    def other_prompts(self) -> bool:
        """Whether the rewards of another prompt's answers matter."""
        rewards = REWARDS.clone()
        rewards[3:] = torch.tensor([1.5, -0.2, 0.3])
        return self.differs(self.ask.weights(rewards=rewards), [0, 1, 2])

    @cached_property
    def offset(self) -> bool:
        return self.differs(self.ask.weights(rewards=REWARDS + 1))

    @cached_property
    def not_proportional(self) -> bool:
        """Whether ten times the rewards give other weights than ten times these."""
        return self.differs(self.ask.weights(rewards=10 * REWARDS), factor=10.0)

    @cached_property
    def graph(self) -> bool:
        return self.ask.rows_share_a_graph()

    def at_ratio(self, ratio: float) -> Weights:
        """The weights where the model finds every token `ratio` times as likely as the
        sampler did.
        """
        shift = float(torch.tensor(ratio).log())

        def change(batch: TrainerBatch) -> TrainerBatch:
            return replace(batch, sampler_log_p=batch.sampler_log_p - shift * batch.mask)

        return self.ask.weights(change=change)

    def depends(self) -> Iterator[str]:
        """What the weights depend on, in words; a baseline may depend on some of it."""
        for words, found in (
            ("the answer's own length", lambda: self.own_length),
            ("the lengths of other answers", lambda: self.other_lengths),
            ("the columns of padding", lambda: self.padding or self.prompt_padding),
            ("the prompt's length", lambda: self.prompt_length),
            ("the rewards of other prompts", lambda: self.other_prompts),
            ("the reward's offset", lambda: self.offset),
            ("the reward's scale, other than in proportion", lambda: self.not_proportional),
        ):
            try:
                if found():
                    yield words
            except (
                Exception
            ):  # somebody else's code may raise anything, here at a batch of no setting
                continue


def explain(evidence: Evidence) -> list[Finding]:
    """The first explanation that fits; at least one finding."""
    hypotheses: tuple[Callable[[Evidence], Finding | None], ...] = (
        _nothing,
        _one_factor,
        _own_mean,
        _prompt,
        _mask,
        _graph,
        _temperature,
        _temperature_of_ratio,
        _clip,
        _padding,
        _prompt_length,
        _deviation,
        _length,
        _rewards,
        _mixed,
        _own_sample,
        _nothing_in_the_mean,
    )
    for hypothesis in hypotheses:
        try:
            found = hypothesis(evidence)
        except Exception:  # a batch that the loss was not made for explains nothing
            continue
        if found is not None:
            return [found]
    return [Finding("unexplained", "Wrong, cause not found: the error is none of the known ones.")]


def _scales(means: Sequence[Mean]) -> list[tuple[Setting, float]]:
    return [(m.setting, m.scale) for m in means if m.scale == m.scale]


def _nothing(evidence: Evidence) -> Finding | None:
    if _any_gradient(evidence) or evidence.base.largest > 1e-6:
        return None
    return Finding("no gradient", "Every gradient is 0: is ln p detached, or is every advantage 0?")


def _nothing_in_the_mean(evidence: Evidence) -> Finding | None:
    if _any_gradient(evidence):
        return None
    return Finding(
        "no gradient", "The gradient is 0 in the mean, although that of single batches is not."
    )


def _any_gradient(evidence: Evidence) -> bool:
    return any(bool((m.mean.abs() > m.rounding).any()) for m in evidence.means)


def _one_factor(evidence: Evidence) -> Finding | None:
    scales = _scales(evidence.means)
    if not scales:
        return None
    factor = sorted(s for _, s in scales)[len(scales) // 2]
    if abs(factor) < 1e-3:
        return None
    if not all(m.agrees(factor * m.truth) for m in evidence.means):
        by_answers = all(m.agrees(m.setting.answers * m.truth) for m in evidence.means)
        by_rows = all(
            m.agrees(m.setting.answers * len(m.setting.prompts) * m.truth) for m in evidence.means
        )
        if not by_answers and not by_rows:
            return None
        what = "answers of a prompt" if by_answers else "rows of the batch"
        return Finding(
            "scale",
            f"Right direction, wrong length: a sum over the {what} where their mean is due.",
        )
    if abs(factor + 1) < 1e-3:
        return Finding(
            "sign",
            "The sign is wrong: the gradient points the opposite way; minimise instead of "
            "maximise?",
        )
    if factor < 0:
        return Finding(
            "sign", f"The sign is wrong, and the length is {-factor:.4g} of what it should be."
        )
    near = Interval(factor, factor - 1e-3, factor + 1e-3)
    return Finding(
        "scale",
        f"Right direction, {factor:.4g} of its length in every setting{recognise(near)}. Is "
        "something divided twice, or by a constant such as the number of steps or of tokens "
        "allowed?",
    )


def _own_mean(evidence: Evidence) -> Finding | None:
    if not all(
        m.agrees((m.setting.answers - 1) / m.setting.answers * m.truth) for m in evidence.means
    ):
        return None
    return Finding(
        "own sample",
        "Right direction, (n - 1)/n of its length with n answers per prompt: the mean that is "
        "subtracted contains the answer itself. Subtract the mean of the others, or multiply by "
        "n/(n - 1).",
    )


def _prompt(evidence: Evidence) -> Finding | None:
    if evidence.base.prompt <= NEAR * max(evidence.base.largest, 1e-3):
        return None
    return Finding(
        "prompt",
        "Positions inside the prompts get a gradient: their tokens were not drawn. Mask the "
        "prompt out of the loss.",
    )


def _mask(evidence: Evidence) -> Finding | None:
    base = evidence.base
    live = torch.arange(base.tokens.shape[1]) < base.lengths.unsqueeze(-1)
    zero = base.tokens.abs() <= NEAR * max(base.largest, 1e-3)
    after = base.after > NEAR * max(base.largest, 1e-3)
    known = base.tokens.isfinite() & live
    if not bool((known & ~zero).any()):
        return None
    first = zero[:, 0].all() and bool((~zero & known)[:, 1:].any())
    if after:
        off = " The first tokens get none: the mask is one token off." if first else ""
        return Finding(
            "mask",
            f"Positions behind the end of an answer get a gradient: they are not masked out.{off}",
        )
    if first:
        return Finding(
            "mask",
            "The first token of every answer gets no gradient: the mask begins one token late.",
        )
    ended = [0, 2, 3, 4]
    ends = torch.stack(
        [zero[i, base.lengths[i] - 1] | base.tokens[i, base.lengths[i] - 1].isnan() for i in ended]
    )
    if ends.all() and bool((~zero & known)[[0, 3, 4], 0].any()):
        cut = bool(zero[1, 2] and zero[5, 2])
        if cut:
            return Finding(
                "mask",
                "The last token of every answer gets no gradient: the mask ends one token early.",
            )
        return Finding(
            "end token",
            "The end token gets no gradient, so that the length of answers is not learned: keep "
            "it in the mask.",
        )
    cut_off = (zero | ~known)[[1, 5]].all()
    if cut_off and bool((~zero & known)[ended].any()) and _moves(evidence, [1, 5]):
        return Finding(
            "mask",
            "Answers that were cut off at the limit get no gradient: the objective leaves them "
            "out. Keep them, or give them a reward of their own.",
        )
    return None


def _moves(evidence: Evidence, rows: list[int]) -> bool:
    """Whether the rows keep the weight 0 when all rewards change: no chance of an
    advantage of 0.
    """
    other = evidence.ask.weights(rewards=REWARDS.flip(0) * 1.7 + 0.3)
    known = other.tokens[rows][other.tokens[rows].isfinite()]
    return bool((known.abs() <= NEAR * max(other.largest, 1e-3)).all())


def _temperature(evidence: Evidence) -> Finding | None:
    expected = evidence.objective.temperature
    if _uneven(evidence.base) < 0.01:
        return None
    uneven = {t: _uneven(weights) for t, weights in evidence.by_temperature.items()}
    best = min(uneven, key=uneven.__getitem__)
    if uneven[best] > NEAR or abs(best - expected) < 0.05:
        return None
    return Finding(
        "temperature",
        f"ln p is taken at temperature {best:g}, but answers are drawn at {expected:g}. Divide the "
        f"logits by {expected:g} before the softmax.",
    )


def _temperature_of_ratio(evidence: Evidence) -> Finding | None:
    """Ratios p / p' of tokens with two temperatures.

    Tokens of one answer have the weights a p(y) / p'(y) then. Clipped ones have none,
    and say nothing.
    """
    expected = evidence.objective.temperature
    for new, weights in evidence.by_temperature.items():
        kept = weights.tokens.abs() > NEAR * max(weights.largest, 1e-3)
        tokens = weights.tokens.where(kept, torch.nan)
        if weights.misfit > NEAR or _spread(tokens) < 0.01:
            continue
        uneven = {
            old: _spread(tokens * (weights.log_p(old) - weights.log_p(new)).exp())
            for old in evidence.by_temperature
        }
        old = min(uneven, key=uneven.__getitem__)
        if uneven[old] > NEAR or expected not in (old, new):
            continue
        return Finding(
            "temperature",
            f"The ratio has two temperatures: its new ln p is taken at {new:g}, its old one at "
            f"{old:g}, and answers are drawn at {expected:g}. Ratios are not 1 before the first "
            f"update. Divide the logits by {expected:g} in both.",
        )
    return None


def _uneven(weights: Weights) -> float:
    """How far the tokens of one answer differ in weight, or are no multiples of the
    score at all.
    """
    return max(_spread(weights.tokens), weights.misfit)


def _spread(tokens: Tensor) -> float:
    """How far weights [N, T] of one answer differ, relative to the largest; nan is unknown."""
    low = tokens.nan_to_num(torch.inf).amin(-1)
    high = tokens.nan_to_num(-torch.inf).amax(-1)
    largest = float(tokens.nan_to_num(0.0).abs().max())
    return float((high - low).amax()) / max(largest, 1e-6)


def _padding(evidence: Evidence) -> Finding | None:
    if not evidence.padding and not evidence.prompt_padding:
        return None
    side = "behind the answers" if evidence.padding else "before the prompts"
    return Finding(
        "padding",
        f"The weights change with columns of padding {side}, which depend on the other rows: "
        "something is divided by the padded length. Divide by a constant.",
    )


def _prompt_length(evidence: Evidence) -> Finding | None:
    if not evidence.prompt_length:
        return None
    return Finding(
        "length",
        "The weights change with the length of the prompt, at equal rewards and answers: prompt "
        "tokens are counted in a mean over tokens. Sum over the answer's tokens and divide by a "
        "constant.",
    )


def _length(evidence: Evidence) -> Finding | None:
    if not evidence.own_length and not evidence.other_lengths:
        return None
    if _left_out(evidence.base, evidence.shorter):
        return None
    if evidence.own_length and not evidence.other_lengths:
        words = "an answer's weights change with its own length: a mean over its tokens"
    elif _proportional_to_tokens(evidence):
        words = (
            "all weights change with the number of tokens in the batch, the answer's own among them"
        )
    elif _proportional_to_tokens(evidence, slice(0, PAIR.answers)) and not evidence.differs(
        evidence.shorter, slice(PAIR.answers, None)
    ):
        words = (
            "the weights of a prompt's answers change with the number of their tokens, the "
            "answer's own among them"
        )
    else:
        words = "the baseline changes with lengths, the answer's own among them"
        return Finding(
            "own sample",
            f"At equal rewards {words}: the baseline saw its own sample. Leave it out of its "
            "baseline.",
        )
    return Finding(
        "length",
        f"At equal rewards {words}. That is another objective's gradient, which favours some "
        "lengths; sum over tokens and divide by a constant.",
    )


def _left_out(one: Weights, other: Weights) -> bool:
    """Whether a first token has a weight in one batch and none in the other: a mean over tokens
    makes weights smaller, and leaves none out.
    """
    limit = NEAR * max(one.largest, 1e-3)
    nothing = [weights.tokens[:, 0].abs() <= limit for weights in (one, other)]
    return bool((nothing[0] != nothing[1]).any())


def _proportional_to_tokens(evidence: Evidence, rows: slice = slice(None)) -> bool:
    """Whether one factor explains all changes of these rows when an answer gets shorter."""
    ours, theirs = evidence.base.tokens[rows, 0], evidence.shorter.tokens[rows, 0]
    use = ours.abs() > NEAR * evidence.base.largest
    ratio = theirs[use] / ours[use]
    return bool((ratio - ratio.median()).abs().max() < 0.01)


def _deviation(evidence: Evidence) -> Finding | None:
    if not evidence.not_proportional:
        return None
    tenfold = evidence.ask.weights(rewards=10 * REWARDS)
    if tenfold.largest > 3 * evidence.base.largest:
        return None
    if _shrinks(evidence):
        return Finding(
            "mean",
            "The weights do not grow with the rewards, and a constant added to these shrinks them: "
            "they are divided by the rewards' own mean, which makes another objective's gradient. "
            "Leave the division out.",
        )
    over = "the batch, other prompts included" if evidence.other_prompts else "the group"
    return Finding(
        "standard deviation",
        "The weights do not grow with the rewards: they are divided by a standard deviation over "
        f"{over}, which makes another objective's gradient. Leave the division out.",
    )


def _shrinks(evidence: Evidence) -> bool:
    """Whether a constant added to the rewards divides all weights of a group by one number."""
    ours = evidence.base.tokens[:, 0].view(len(PROMPTS), -1)
    theirs = evidence.ask.weights(rewards=REWARDS + 1).tokens[:, 0].view_as(ours)
    known = ours.abs() > 0.1 * max(evidence.base.largest, 1e-3)
    for group, live in zip(theirs / ours, known, strict=True):
        ratio = group[live]
        if len(ratio) < 2 or float(ratio.max() - ratio.min()) > 0.02 * float(ratio.abs().max()):
            return False
        if float((ratio.mean() - 1).abs()) < 0.02:  # a standard deviation does not see a constant
            return False
    return True


def _rewards(evidence: Evidence) -> Finding | None:
    slopes = evidence.slopes
    own = slopes.diagonal()
    others = slopes - torch.diag(own)
    lost = [
        i for i in range(len(own)) if abs(float(own[i])) < 1e-2 and float(others[i].max()) > 0.05
    ]
    if not lost:
        return None
    taken = sorted({int(others[i].argmax()) for i in lost})
    return Finding(
        "rewards",
        f"Rows {lost} of six do not depend on their own reward but on that of rows {taken}: "
        "rewards and answers are not in the same order, or one micro-batch's are used for all.",
    )


def _clip(evidence: Evidence) -> Finding | None:
    zero = evidence.base.tokens[:, 0].abs() <= NEAR * max(evidence.base.largest, 1e-3)
    if not bool(zero.any()):
        return None
    for ratio in (0.7, 1.5):
        moved = evidence.at_ratio(ratio).tokens[:, 0].abs() > NEAR * max(
            evidence.base.largest, 1e-3
        )
        if bool((zero & moved).any()):
            return Finding(
                "clip",
                "Where the sampler and the model agree, some answers get no gradient, and at "
                "other ratios they do: clipping cuts at ratio 1. Check the clipping range; it "
                "must hold 1 inside.",
            )
    return None


def _graph(evidence: Evidence) -> Finding | None:
    if not evidence.graph:
        return None
    return Finding(
        "graph",
        "A row's gradient depends on the ln p of other rows: a baseline or a normalisation is not "
        "detached. Detach everything that ln p is multiplied by.",
    )


def _mixed(evidence: Evidence) -> Finding | None:
    if not evidence.other_prompts:
        return None
    return Finding(
        "prompts mixed",
        "The weights depend on the rewards of other prompts, and not as an independent baseline "
        "would: a mean is taken over all prompts, the answer's own reward in it. Take it over the "
        "other answers to the same prompt.",
    )


def _own_sample(evidence: Evidence) -> Finding | None:
    own = evidence.slopes.diagonal()
    again = evidence.ask.slopes(REWARDS.flip(0)).diagonal()
    size = float(torch.cat([own, again]).abs().max())
    # an answer that never counts is left out, whatever its reward
    if bool(((own.abs() < 1e-3 * size) & (again.abs() < 1e-3 * size)).any()):
        return None
    if (
        size < 1e-3
        or float((own - own[0]).abs().max() + (again - again[0]).abs().max()) < 0.02 * size
    ):
        return None
    return Finding(
        "own sample",
        "The weight of an answer is not a linear function of its own reward: its baseline saw it "
        "(a maximum, a rank, a fit). Leave the answer itself out of its baseline.",
    )


# ---------------------------------------------------------------- divergences


def explain_divergence(
    loss: TrainerLoss, objective: Objective, settings: Sequence[Setting], sign: int
) -> Finding:
    """Which gradient the divergence has instead of its own, given that everything else is right."""
    world = World(objective)
    setting = settings[0]
    with_ = mean_gradient(loss, world, setting, sign)
    free = World(replace(objective, beta=0.0))
    without = mean_gradient(loss, free, replace(setting, own_reference=True), sign)
    found = (without - with_) / objective.beta  # should be the gradient of the divergence
    truth = (
        world.truth(replace(setting, own_reference=True)) - world.truth(setting)
    ) / objective.beta
    rounding = 1e-4 / abs(objective.beta)
    if float(found.abs().max()) < rounding:
        return Finding(
            "divergence",
            "The divergence from the reference has no gradient in the mean: that of k1 in the "
            "loss is 0, and a detached one is a constant. Subtract it from the reward.",
        )
    for words, prediction in _divergences(world, setting, truth):
        square = float(prediction.square().sum())
        factor = float((found * prediction).sum()) / square if square > 1e-12 else 0.0
        if (
            float((found - factor * prediction).abs().max()) < rounding * max(1.0, abs(factor))
            and factor
        ):
            times = "" if abs(factor - 1) < 1e-3 else f", times {factor:.4g}"
            return Finding(
                "divergence", f"Instead of the divergence's gradient it has {words}{times}."
            )
    return Finding(
        "divergence",
        "The rewards' part is right, and the divergence's is not: its gradient is none of the "
        "known ones.",
    )


def _divergences(world: World, setting: Setting, truth: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Gradients that usual estimators have in the mean."""
    table = world.table.clone().requires_grad_()
    with torch.enable_grad():
        log_p = world.answer_log_p(table)[list(setting.prompts)]  # [B, answers, T]
        reference = world.answer_log_p(world.reference)[list(setting.prompts)]
        q = world.answer_log_p(world.sampler)[list(setting.prompts)].sum(-1).exp()
        r = log_p - reference
        live = (log_p != 0).to(log_p.dtype)
        length = live.sum(-1).clamp_min(1)
        whole = log_p.sum(-1)
        k3 = ((-r).exp() - 1 + r) * live
        ways: list[tuple[str, Tensor]] = [
            (
                "that of k3 or of another term that autograd alone differentiates, which is the "
                "gradient of the divergence the other way round, KL(reference || model), token by "
                "token. Multiply by the ratio of probabilities, or subtract k1 from the reward",
                k3.sum(-1),
            ),
            (
                "the gradient token by token: what a token does to the divergence of later ones, "
                "through the sampler, is left out. Subtract k1 from the reward, or square the sum "
                "over the answer",
                (r.square() / 2 * live).sum(-1),
            ),
            (
                "that of k3 in the reward without k3's own gradient. Use k1 there",
                k3.sum(-1).detach() * whole,
            ),
            (
                "that of k2 in the reward without its own gradient. Use k1 there",
                (r.square() / 2).sum(-1).detach() * whole,
            ),
            ("that of |k1| in the loss. Subtract k1 from the reward", r.abs().sum(-1)),
            ("that of |k1| in the reward. Use k1 there", r.abs().sum(-1).detach() * whole),
            (
                "that of the divergence divided by the answer's length",
                (r.sum(-1) / length).detach() * whole,
            ),
            (
                "the gradient token by token, divided by the answer's length",
                (r.square() / 2 * live).sum(-1) / length,
            ),
            ("k3's, divided by the answer's length", k3.sum(-1) / length),
            ("k1's in the loss, divided by the answer's length", r.sum(-1) / length),
            ("that of |k1| in the loss, divided by the answer's length", r.abs().sum(-1) / length),
        ]
        gradients = [
            (words, torch.autograd.grad((q * value).sum(-1).mean(), table, retain_graph=True)[0])
            for words, value in ways
        ]
    yield "its opposite or a multiple of it", truth
    yield from gradients


# ---------------------------------------------------------------- where


def where(means: Sequence[Mean], factor: float = 1.0) -> str:
    """The share of the squared error by position, in words."""
    error = sum(
        (m.mean - factor * m.truth).square().sum(-1) for m in means if m.setting.role in ("", "f")
    )
    if not isinstance(error, Tensor) or not float(error.sum()):
        return ""
    shares: dict[str, float] = {}
    names = ("first token", "second token", "third token")
    for context, row in CONTEXTS.items():
        if row in INSIDE:
            name = "inside the prompt"
        else:
            prompt = next(p for p in PROMPTS if context[: len(p)] == p)
            name = names[len(context) - len(prompt)]
        shares[name] = shares.get(name, 0.0) + float(error[row])
    shares["behind the end"] = float(error[AFTER])
    total = sum(shares.values())
    return ", ".join(
        f"{name} {share / total:.0%}" for name, share in shares.items() if share / total >= 0.005
    )
