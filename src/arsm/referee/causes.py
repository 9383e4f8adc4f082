"""Why a trainer's loss does not have the gradient that it should: the first explanation
that fits what was observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from arsm.referee.diagnose import Finding, Interval, recognise
from arsm.referee.evidence import Evidence, Mean
from arsm.referee.language import PROMPTS
from arsm.referee.weights import NEAR, PAIR, REWARDS, Weights


def explain(evidence: Evidence) -> list[Finding]:
    """The first explanation that fits; at least one finding."""
    # The order matters, since one defect has several traces: exact fits of all means come first,
    # then defects that show in one place (a mask, a graph), then what these also cause: a standard
    # deviation over the batch mixes prompts, and its baseline saw its own sample.
    hypotheses: tuple[Callable[[Evidence], Finding | None], ...] = (
        _nothing,
        _one_factor,
        _own_mean,
        _prompt,
        _mask,
        _graph,
        _temperature,
        _temperature_of_ratio,
        _other_term,
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


def _scales(means: Sequence[Mean]) -> list[float]:
    return [m.scale for m in means if not math.isnan(m.scale)]


def _nothing(evidence: Evidence) -> Finding | None:
    # means may vanish although single batches have a gradient: that is `_nothing_in_the_mean`
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
    scales = sorted(_scales(evidence.means))
    if not scales:
        return None
    # the median: a single setting with another error must not move the factor
    factor = scales[len(scales) // 2]
    if abs(factor) < 1e-3:
        return None
    if not all(m.agrees(factor * m.truth) for m in evidence.means):
        return _sum_for_mean(evidence)
    if factor < 0:
        return _wrong_sign(factor)
    near = Interval(factor, factor - 1e-3, factor + 1e-3)
    return Finding(
        "scale",
        f"Right direction, {factor:.4g} of its length in every setting{recognise(near)}. Is "
        "something divided twice, or by a constant such as the number of steps or of tokens "
        "allowed?",
    )


def _sum_for_mean(evidence: Evidence) -> Finding | None:
    """A factor that is a number of rows, other in every setting."""
    by_answers = all(m.agrees(m.setting.answers * m.truth) for m in evidence.means)
    by_rows = all(
        m.agrees(m.setting.answers * len(m.setting.prompts) * m.truth) for m in evidence.means
    )
    if not by_answers and not by_rows:
        return None
    what = "answers of a prompt" if by_answers else "rows of the batch"
    return Finding(
        "scale", f"Right direction, wrong length: a sum over the {what} where their mean is due."
    )


def _wrong_sign(factor: float) -> Finding:
    if abs(factor + 1) < 1e-3:
        return Finding(
            "sign",
            "The sign is wrong: the gradient points the opposite way; minimise instead of "
            "maximise?",
        )
    return Finding(
        "sign", f"The sign is wrong, and the length is {-factor:.4g} of what it should be."
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
    if evidence.base.prompt <= evidence.base.nothing:
        return None
    return Finding(
        "prompt",
        "Positions inside the prompts get a gradient: their tokens were not drawn. Mask the "
        "prompt out of the loss.",
    )


ENDED = [0, 2, 3, 4]
"""Rows of the base batch whose answers have an end token."""
CUT_OFF = [1, 5]
"""Rows whose answers were cut off at the limit."""


def _mask(evidence: Evidence) -> Finding | None:
    base = evidence.base
    positions = torch.arange(base.tokens.shape[1])
    live = positions < base.lengths.unsqueeze(-1)
    zero = base.tokens.abs() <= base.nothing
    # certain tokens have no score, so that nothing is known about their weights
    known = base.tokens.isfinite() & live
    has_weight = known & ~zero
    if not bool(has_weight.any()):
        return None
    no_first = zero[:, 0].all() and bool(has_weight[:, 1:].any())
    if base.after > base.nothing:
        off = " The first tokens get none: the mask is one token off." if no_first else ""
        return Finding(
            "mask",
            f"Positions behind the end of an answer get a gradient: they are not masked out.{off}",
        )
    if no_first:
        return Finding(
            "mask",
            "The first token of every answer gets no gradient: the mask begins one token late.",
        )
    if _no_last(base, zero, has_weight):
        return _last_token(zero)
    # one reward may give an advantage of 0 by chance, so that other rewards are tried as well
    none_cut_off = (zero | ~known)[CUT_OFF].all()
    if none_cut_off and bool(has_weight[ENDED].any()) and _stay_zero(evidence, CUT_OFF):
        return Finding(
            "mask",
            "Answers that were cut off at the limit get no gradient: the objective leaves them "
            "out. Keep them, or give them a reward of their own.",
        )
    return None


def _no_last(base: Weights, zero: Tensor, has_weight: Tensor) -> bool:
    """Whether no end token has a weight, although the answers' first tokens have."""
    last = base.lengths - 1
    ends = torch.stack([zero[i, last[i]] | base.tokens[i, last[i]].isnan() for i in ENDED])
    # row 2 is its end token alone: its first token says nothing
    longer = [i for i in ENDED if i != 2]
    return bool(ends.all()) and bool(has_weight[longer, 0].any())


def _last_token(zero: Tensor) -> Finding:
    # the last token of an answer that was cut off is an ordinary one
    if all(bool(zero[i, 2]) for i in CUT_OFF):
        return Finding(
            "mask",
            "The last token of every answer gets no gradient: the mask ends one token early.",
        )
    return Finding(
        "end token",
        "The end token gets no gradient, so that the length of answers is not learned: keep it in "
        "the mask.",
    )


def _stay_zero(evidence: Evidence, rows: list[int]) -> bool:
    """Whether the rows keep the weight 0 when all rewards change: no chance of an
    advantage of 0.
    """
    other = evidence.ask.weights(rewards=REWARDS.flip(0) * 1.7 + 0.3)
    known = other.tokens[rows][other.tokens[rows].isfinite()]
    return bool((known.abs() <= other.nothing).all())


def _temperature(evidence: Evidence) -> Finding | None:
    expected = evidence.objective.temperature
    # weights that are already even at the expected temperature need no other one
    if _uneven(evidence.base) < 0.01:
        return None
    # at the right temperature all tokens of an answer have the same weight
    uneven = {t: _uneven(weights) for t, weights in evidence.by_temperature.items()}
    best = min(uneven, key=uneven.__getitem__)
    # half a step of the grid: the expected temperature is on it as well
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
        kept = weights.tokens.abs() > weights.nothing
        tokens = weights.tokens.where(kept, torch.nan)
        # scores of another temperature do not fit at all, and even weights have no ratio in them
        if weights.misfit > NEAR or _spread(tokens) < 0.01:
            continue
        uneven = {
            old: _spread(tokens * (weights.log_p(old) - weights.log_p(new)).exp())
            for old in evidence.by_temperature
        }
        old = min(uneven, key=uneven.__getitem__)
        # one of the two must be right: with both free, other errors would fit as well
        if uneven[old] > NEAR or expected not in (old, new):
            continue
        return Finding(
            "temperature",
            f"The ratio has two temperatures: its new ln p is taken at {new:g}, its old one at "
            f"{old:g}, and answers are drawn at {expected:g}. Ratios are not 1 before the first "
            f"update. Divide the logits by {expected:g} in both.",
        )
    return None


def _other_term(evidence: Evidence) -> Finding | None:
    """A term beside the rewards': it is there without rewards, in other sizes at other tokens."""
    if all(m.agrees(m.truth) for m in evidence.means if m.setting.role == "0"):
        return None
    # a baseline alone would leave all tokens of an answer the same weight
    without = evidence.ask.weights(rewards=torch.zeros_like(REWARDS))
    if without.largest <= evidence.base.nothing or _spread(without.tokens) < 0.01:
        return None
    return Finding(
        "other term",
        "With all rewards 0 there is a gradient, which differs between the tokens of an answer: "
        "the loss has another term, such as a bonus for entropy. Leave it out, or give the "
        "objective that it belongs to as `documented`.",
    )


def _uneven(weights: Weights) -> float:
    """The largest difference in weight between tokens of one answer, or their distance
    from any multiple of the score, if larger.
    """
    return max(_spread(weights.tokens), weights.misfit)


def _spread(tokens: Tensor) -> float:
    """The range of one answer's weights [N, T], relative to the largest; nan is unknown."""
    # unknown weights are neither the least nor the largest
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
    # a mask, not a division by the length, drops an answer altogether
    if evidence.base.left_out(evidence.shorter):
        return None
    if evidence.own_length and not evidence.other_lengths:
        # a mean over the answer's tokens does not touch other answers
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
        # nothing was divided by a number of tokens: lengths came in by a fit or an average
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


def _proportional_to_tokens(evidence: Evidence, rows: slice = slice(None)) -> bool:
    """Whether one factor explains all changes of these rows when an answer gets shorter."""
    ours = evidence.base.tokens[rows, 0]
    theirs = evidence.shorter.tokens[rows, 0]
    # a ratio of two weights near 0 is rounding
    use = ours.abs() > NEAR * evidence.base.largest
    ratio = theirs[use] / ours[use]
    return bool((ratio - ratio.median()).abs().max() < 0.01)


def _deviation(evidence: Evidence) -> Finding | None:
    if not evidence.not_proportional:
        return None
    tenfold = evidence.ask.weights(rewards=10 * REWARDS)
    # divided by a deviation, weights stay as they are; other nonlinear baselines let them grow
    if tenfold.largest > 3 * evidence.base.largest:
        return None
    if float(evidence.slopes.abs().max()) < NEAR * evidence.base.largest:
        return Finding(
            "ranks",
            "The weights depend on the order of the rewards alone: ranks make another objective's "
            "gradient. Use the rewards themselves.",
        )
    tenth = evidence.ask.weights(rewards=REWARDS / 10)
    # a standard deviation makes small rewards as large as others, a limit leaves them small
    if tenth.largest < 0.5 * evidence.base.largest:
        return Finding(
            "limits",
            "The weights grow with small rewards, and not with large ones: rewards or advantages "
            "are cut off at a limit, which makes another objective's gradient. Leave it out.",
        )
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
    # ratios of small weights are mostly rounding
    known = ours.abs() > 0.1 * max(evidence.base.largest, 1e-3)
    for group, live in zip(theirs / ours, known, strict=True):
        ratio = group[live]
        if len(ratio) < 2 or float(ratio.max() - ratio.min()) > 0.02 * float(ratio.abs().max()):
            return False
        # a standard deviation does not see a constant, a mean does
        if float((ratio.mean() - 1).abs()) < 0.02:
            return False
    return True


def _rewards(evidence: Evidence) -> Finding | None:
    slopes = evidence.slopes
    own = slopes.diagonal()
    others = slopes - torch.diag(own)
    # a reward that its own answer does not notice, and another answer does, was misplaced
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
    nothing = evidence.base.nothing
    zero = evidence.base.tokens[:, 0].abs() <= nothing
    if not bool(zero.any()):
        return None
    # both sides of 1: which one is cut depends on the sign of the advantage
    for ratio in (0.7, 1.5):
        moved = evidence.at_ratio(ratio).tokens[:, 0].abs() > nothing
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
    # a baseline that saw its sample may be linear by chance around one set of rewards; in the
    # others, different answers are the best, the worst and the middle of their prompts
    others = [evidence.ask.slopes(r) for r in (REWARDS.flip(0), REWARDS.roll(2))]
    own = torch.stack([slopes.diagonal() for slopes in (evidence.slopes, *others)])
    size = float(own.abs().max())
    # an answer that never counts is left out, whatever its reward
    if bool((own.abs() < 1e-3 * size).all(0).any()):
        return None
    # an independent baseline leaves every answer the same slope, in its own reward
    if size < 1e-3 or float((own - own[:, :1]).abs().max()) < 0.02 * size:
        return None
    return Finding(
        "own sample",
        "The weight of an answer is not a linear function of its own reward: its baseline saw it "
        "(a maximum, a rank, a fit). Leave the answer itself out of its baseline.",
    )
