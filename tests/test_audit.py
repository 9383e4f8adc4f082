"""The referee: planted defects are named, correct surrogates pass, and a loss that cannot be judged
is told why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

import arsm
from arsm.referee import PROBLEMS
from arsm.referee.measure import Loss
from tests.surrogates import CORRECT, by_estimator, group, leave_one_out

SAMPLES = 1 << 11
"""Draws per row in these tests, a 32nd of the default."""
FEW = [p for p in PROBLEMS if p.role in ("f", "f+100") or p.learns or "masked" in p.name]

# ---------------------------------------------------------------- losses


def own_standard_deviation_left_out(values: Tensor) -> Tensor:
    """Leave-one-out, divided by the standard deviation of the others: [n, B] -> [n, B]."""
    n = len(values)
    mean = (values.sum(0) - values) / (n - 1)
    square = (values.square().sum(0) - values.square()) / (n - 1)
    return (values - mean) / ((square - mean.square()).clamp_min(0).sqrt() + 1e-6)


def shifted(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """An extra d ln q, of a q that is not normalised."""
    distribution = Categorical(logits=logits)
    z = distribution.sample()
    score = (f(z).detach() * distribution.log_prob(z).sum(-1)).sum()
    return score - logits.gather(-1, z.unsqueeze(-1)).sum()


def detached(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    distribution = Categorical(logits=logits)
    z = distribution.sample()
    return (f(z) * distribution.log_prob(z).sum(-1).detach()).sum()


DEFECTS: dict[str, tuple[Loss, str, str]] = {
    "an extra d ln q": (shifted, "shift", "does not depend on f"),
    "the group's mean, the sample in it": (
        group(lambda f: f - f.mean(0)),
        "scale",
        "(n - 1)/n with n = 4",
    ),
    "division by the standard deviation": (
        group(lambda f: (f - f.mean(0)) / (f.std(0) + 1e-4)),
        "standard deviation",
        "does not grow with f",
    ),
    "a standard deviation of 0": (
        group(own_standard_deviation_left_out),
        "standard deviation",
        "a number near 0",
    ),
    "the maximum as the baseline": (
        group(lambda f: f - f.amax(0)),
        "own sample",
        "saw its own sample",
    ),
    "the sign": (group(lambda f: -leave_one_out(f)), "sign", "opposite"),
    "a detached log-probability": (detached, "no gradient", "exactly zero"),
    "a temperature in the sampler": (
        group(leave_one_out, temperature=1.5),
        "temperature",
        "drawn at temperature 1.",
    ),
    "the same without a baseline": (
        group(lambda f: f, 1, 0.7),
        "temperature",
        "drawn at temperature 0.",
    ),
    "a group of one sample": (group(lambda f: f - f.mean(0), 1), "no gradient", "exactly zero"),
    "a mean over the rows": (
        lambda x, f: group(leave_one_out)(x, f) / len(x),
        "mean over rows",
        "mean over rows",
    ),
    "the batch's mean, the row in it": (
        group(lambda f: f - f.mean(), 1),
        "batch baseline",
        "(B - 1)/B",
    ),
    "a relaxation": (
        lambda x, f: f(torch.nn.functional.gumbel_softmax(x, 0.5)).sum(),
        "relaxation",
        "relaxed points",
    ),
    "straight-through": (by_estimator("straight-through"), "relaxation", "relaxed points"),
    "reinmax": (by_estimator("reinmax"), "relaxation", "relaxed points"),
    "a sum over samples": (
        lambda x, f: 4 * group(leave_one_out)(x, f),
        "scale",
        "a sum over 4 samples",
    ),
}


SUBTLE = {
    "the batch's mean, the row in it": [p for p in PROBLEMS if p.small or p.role == "f"],
    "a mean over the rows": [p for p in PROBLEMS if p.name in ("one variable", "two categories")],
    "reinmax": [p for p in PROBLEMS if p.learns or p.role == "f"],
}
"""These need more draws, or batches of different sizes."""
TELLING = [p for p in PROBLEMS if p.role or p.learns or p.name == "a batch of 2"]


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_named(name: str) -> None:
    loss, kind, words = DEFECTS[name]
    if name in SUBTLE:
        found = arsm.audit(loss, samples=1 << 14, problems=SUBTLE[name])
    else:
        found = arsm.audit(loss, samples=SAMPLES, problems=TELLING)
    assert found.verdict == "wrong"
    assert not found.passed
    assert found.diagnosis == kind, str(found)
    assert words in found.findings[0].sentence
    assert words in " ".join(str(found).split())


def test_a_gradient_that_is_fixed_in_one_problem_is_noted_for_that_problem_alone() -> None:
    """Straight-through is exact for a linear f of one variable, and noisy elsewhere."""
    found = arsm.audit(by_estimator("straight-through"), samples=SAMPLES, problems=TELLING)
    assert any(row.variance for row in found.rows)
    assert "In 'one variable' the gradient is the same in every call" in " ".join(found.notes)


def test_there_are_twenty_correct_surrogates() -> None:
    assert len(CORRECT) == 20


@pytest.mark.parametrize("name", CORRECT)
def test_correct_surrogates_pass(name: str) -> None:
    found = arsm.audit(CORRECT[name], samples=1024, problems=FEW)
    assert found.passed, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_correct_surrogates_pass_at_the_default_size(name: str) -> None:
    found = arsm.audit(CORRECT[name])
    assert found.passed, str(found)


# ---------------------------------------------------------------- losses that cannot be judged


def fixed_seed(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(3)
    return group(leave_one_out)(logits, f)


def own_fixed_seed(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    uniform = torch.rand(
        logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype
    )
    z = (logits - (-uniform.log()).log()).argmax(-1)
    return (f(z).detach() * Categorical(logits=logits).log_prob(z).sum(-1)).sum()


class Cycle:
    """A seed that repeats after three calls."""

    def __init__(self) -> None:
        self.call = 0

    def __call__(self, logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        self.call += 1
        torch.manual_seed(self.call % 3)
        return group(leave_one_out)(logits, f)


class MovingAverage:
    """A baseline that remembers earlier calls."""

    def __init__(self) -> None:
        self.baseline = 0.0

    def __call__(self, logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        distribution = Categorical(logits=logits)
        z = distribution.sample()
        values = f(z).detach()
        loss = ((values - self.baseline) * distribution.log_prob(z).sum(-1)).sum()
        self.baseline = 0.9 * self.baseline + 0.1 * float(values.mean())
        return loss


def calls_backward(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    loss = group(leave_one_out)(logits, f)
    loss.backward()
    return loss.detach()


class Remembered:
    """f's values by sample, from whatever f came first."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, ...], float] = {}

    def __call__(self, logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        def known(z: Tensor) -> Tensor:
            rows = [tuple(row) for row in z.flatten(0, -2).tolist()]
            for row in sorted(set(rows) - self.values.keys()):
                self.values[row] = float(f(torch.tensor([row])))
            return torch.tensor([self.values[row] for row in rows]).view(z.shape[:-1])

        return group(leave_one_out)(logits, known)


def shared_noise(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """One uniform number for all rows."""
    below = logits.softmax(-1).cumsum(-1) < torch.rand(1, logits.shape[1], 1)
    z = below.sum(-1).clamp_max(logits.shape[-1] - 1)
    return (f(z).detach() * Categorical(logits=logits).log_prob(z).sum(-1)).sum()


def normalises_in_place(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        logits -= logits.logsumexp(-1, keepdim=True)
    return group(leave_one_out)(logits, f)


def vector_at_one_row(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    loss = group(leave_one_out)(logits, f)
    return loss.expand(2) if len(logits) == 1 else loss


@pytest.mark.parametrize(
    ("loss", "kind", "words"),
    [
        (fixed_seed, "fixed seed", "sets a seed"),
        (shared_noise, "shared noise", "draw fresh ones for every row"),
        (normalises_in_place, "in place", "work on a copy"),
        (lambda x, f: x.sub_(1).sum(), "crash", "in-place operation"),
        (vector_at_one_row, "not scalar", "(Seen in 'a batch of 1'.)"),
        (
            lambda x, f: f(Categorical(logits=x).sample() > 0).sum(),
            "crash",
            "called with torch.bool",
        ),
        (lambda x, f: f(Categorical(logits=x).sample().float()).sum(), "crash", "torch.float32"),
        (own_fixed_seed, "fixed seed", "sets a seed"),
        (MovingAverage(), "state", "keeps state between calls"),
        (lambda x, f: f(Categorical(logits=x).sample()), "not scalar", "sum over rows"),
        (lambda x, f: 1.0, "not scalar", "float"),
        (lambda x, f: f(x.argmax(-1)).sum().long(), "not scalar", "int64"),
        (calls_backward, "backward", "called backward itself"),
        (lambda x, f: x.no_such_method(), "crash", "no_such_method"),
        (lambda x, f: f(Categorical(logits=x).sample() + 1).sum(), "crash", "categories 0.."),
        (lambda x, f: f(Categorical(logits=x).sample()[..., 0]).sum(), "crash", "f takes int64"),
    ],
)
def test_losses_that_cannot_be_judged_are_told_why(loss: Loss, kind: str, words: str) -> None:
    found = arsm.audit(loss, samples=1024)
    assert found.verdict == "not decided"
    assert found.diagnosis == kind, str(found)
    assert words in found.findings[0].sentence


def test_a_seed_that_repeats_later_is_seen() -> None:
    found = arsm.audit(Cycle(), samples=1 << 14)
    assert not found.passed
    assert found.diagnosis in ("fixed seed", "state")


@pytest.mark.parametrize(
    ("loss", "kind", "words"),
    [
        (
            lambda x, f: (x * torch.nan).nansum() + 0 * f(x.argmax(-1)).sum() * torch.nan,
            "not finite",
            "In every problem, the loss returned nan",
        ),
        (
            lambda x, f: group(leave_one_out)(x, f) + 0 * (x - x.detach()).abs().sqrt().sum(),
            "not finite",
            "In every problem, the gradient in the logits is not finite",
        ),
        (
            lambda x, f: (x.softmax(-1) * x.log_softmax(-1)).sum() + group(leave_one_out)(x, f),
            "not finite",
            "In 'masked categories', the loss returned nan",
        ),
        (
            lambda x, f: torch.zeros((), requires_grad=True) + f(x.argmax(-1)).sum(),
            "no gradient",
            "does not depend on",
        ),
        (lambda x, f: f(x.argmax(-1)).sum(), "no gradient", "does not depend on the logits"),
        (
            lambda x, f: group(leave_one_out)(x, f).detach(),
            "no gradient",
            "does not depend on the logits",
        ),
        (Remembered(), "f unused", "or they come from earlier calls"),
        (lambda x, f: x.softmax(-1)[..., 0].sum(), "f unused", "the values of f are not in it"),
    ],
)
def test_wrong_whatever_the_samples(loss: Loss, kind: str, words: str) -> None:
    found = arsm.audit(loss, samples=1024, problems=FEW)
    assert found.verdict == "wrong"
    (sentence,) = (finding.sentence for finding in found.findings if finding.kind == kind)
    assert words in sentence


def test_a_length_that_depends_on_the_problem() -> None:
    def reversed_at_one_row(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return (1 if len(logits) > 1 else -1) * group(leave_one_out)(logits, f)

    problems = [p for p in PROBLEMS if p.role == "f" or p.name == "a batch of 1"]
    found = arsm.audit(reversed_at_one_row, samples=1 << 14, problems=problems)
    assert found.verdict == "wrong"
    assert found.diagnosis == "scale"
    assert "depends on the problem: -1" in found.findings[0].sentence
    assert "('a batch of 1')." in found.findings[0].sentence


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, f: group(leave_one_out)(x.double(), f),
        lambda x, f: group(leave_one_out)(x, f).view(1),
        lambda x, f: group(leave_one_out)(
            x, lambda z: f(torch.nn.functional.one_hot(z, x.shape[-1]).float())
        ),
    ],
    ids=["float64", "a vector of length 1", "f at one-hot points"],
)
def test_odd_but_right(loss: Loss) -> None:
    found = arsm.audit(loss, samples=1024, problems=FEW)
    assert found.passed, str(found)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    with mode():
        assert arsm.audit(group(leave_one_out), samples=2048, problems=PROBLEMS[:2]).passed


def test_a_crash_in_one_problem_is_no_pass() -> None:
    def unmasked(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        if bool((logits == -torch.inf).any()):
            raise ValueError("no masks, please")
        return group(leave_one_out)(logits, f)

    found = arsm.audit(unmasked, samples=1024, problems=FEW)
    assert found.verdict == "not decided"
    assert "no masks, please" in str(found)
    assert isinstance(found.exception, ValueError)
    assert found.diagnosis == "crash"
    without = [p for p in FEW if p.name != "masked categories"]
    assert arsm.audit(unmasked, samples=1024, problems=without).passed


def test_a_generator_of_its_own_is_allowed_and_noted() -> None:
    generator = torch.Generator().manual_seed(0)

    def loss(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        return arsm.estimate(arsm.RLOO(2), logits, f, generator=generator).value.sum()

    found = arsm.audit(loss, samples=1024, problems=FEW)
    assert found.passed, str(found)
    assert "from its own generator" in str(found)


def test_global_generators_and_threads_are_left_alone() -> None:
    seen = set()

    def loss(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        seen.add(torch.get_num_threads())
        return group(leave_one_out)(logits, f)

    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arsm.audit(loss, samples=1024, problems=PROBLEMS[:1])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == {1}
    assert torch.equal(before, torch.get_rng_state())
