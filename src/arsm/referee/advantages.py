"""`audit_advantages`: do these advantages give the policy gradient? By enumeration of
all groups, without sampling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arsm.checks import describe
from arsm.options import suggests
from arsm.progress import reporter
from arsm.referee.diagnose import Finding, Interval, Means, diagnose, fitted_scale
from arsm.referee.problems import PROBLEMS, Problem, Truth, enumerate_problem
from arsm.referee.result import Audit, Row, Verdict, in_words, worst_entry

ROUNDING = 1e-4
"""Relative to the largest reward: what float32 may be off by."""
FAMILY = tuple(p for p in PROBLEMS if p.role)
GROUPS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2))
"""(groups B, samples n) of the batches that are enumerated."""
TOKEN_GROUPS = ((1, 1), (1, 2), (1, 3))
LENGTH = 3
VARIES = (
    "The function returned other advantages for the same rewards: it keeps state between calls or "
    "draws random numbers; audit it with these fixed."
)
EQUAL_REWARDS = (
    "A usual cause is a division by the standard deviation of one reward, or of equal ones."
)


@dataclass(frozen=True, eq=False)
class Outcomes:
    """All outcomes of one policy: sequences of at most T tokens, of which token 0 ends one."""

    truth: Truth
    mask: Tensor
    """[Z, T] bool: the tokens that belong to each outcome."""
    name: str
    role: str


@suggests("arsm.audit_advantages")
def audit_advantages(
    function: Callable[..., Tensor],
    *,
    tokens: bool = False,
    progress: Callable[[str, float], None] | None = None,
) -> Audit:
    r"""Compare the policy gradient that advantages give with the exact one, over all
    groups of a small policy.

        1/n sum_i sum_t A_it d ln pi(y_it) / dphi    must have the mean    dE[r] / dphi

    Groups of 1 to 4 samples are enumerated, and batches of two groups, because some
    functions mix groups. Nothing is drawn: only rounding could raise a false alarm.

    Args:
        function: `function(rewards [B, n]) -> advantages [B, n]`.
        tokens: if True, `function(rewards [B, n], mask [B, n, T]) -> [B, n, T]`, what
            each token's log-probability is multiplied by, sequences having different
            lengths; a group's loss is summed over tokens and divided by n.
        progress: hears each policy's name and the share of the audit that is done; by
            default a line on the terminal after two seconds.

    Returns:
        An `Audit`.
    """
    start = time.perf_counter()
    name = getattr(function, "__qualname__", type(function).__name__)
    # iterated once per size
    family = list(_sequences() if tokens else _choices())
    if _varies(function, family[0], tokens):
        return Audit(name, "not decided", (Finding("state", VARIES),), (), 0.0, sizes="B, n")
    judged = _judge_sizes(function, family, tokens, reporter(progress))
    biased = {each.size: each for each in judged if each.rejected}
    # asked only where something is wrong: a correct function may well read the lengths
    by_length = tokens and bool(biased) and _depends_on_length(function)
    failures = [finding for each in judged for finding in each.failures()]
    exceptions = [error for each in judged for _, error in each.raised]
    return Audit(
        name,
        _verdict(bool(biased), failures),
        # of each kind of failure, the first
        (*_causes(biased, by_length), *{f.kind: f for f in reversed(failures)}.values()),
        tuple(row for each in judged for row in each.rows),
        0.0,
        notes=tuple(note for each in judged for note in each.notes()),
        seconds=time.perf_counter() - start,
        exception=next(iter(exceptions), None),
        sizes="B, n",
    )


def _verdict(biased: bool, failures: list[Finding]) -> Verdict:
    if biased or any(finding.kind == "not finite" for finding in failures):
        return "wrong"
    return "not decided" if failures else "unbiased"


@dataclass(frozen=True, eq=False)
class Judged:
    """The audit of batches of one size."""

    size: tuple[int, int]
    means: list[Means]
    """Results on the policies on which the function could be called."""
    rows: list[Row]
    raised: list[tuple[str, Exception]]
    """Errors that the function raised, with the policy's name."""

    @property
    def rejected(self) -> bool:
        """Whether some gradient is wrong."""
        return any(means.rejected for means in self.means)

    @property
    def _alone(self) -> bool:
        return self.size == (1, 1)

    def failures(self) -> list[Finding]:
        """Values that are not finite, and errors; a group of one may be refused."""
        findings = []
        for policy, error in self.raised:
            where = f"At n = {self.size[1]} ({policy})"
            if isinstance(error, FloatingPointError):
                findings.append(Finding("not finite", f"{where}, {error}. {EQUAL_REWARDS}"))
            # an error at a group of one is a refusal, which `notes` tells
            elif not self._alone:
                raised = f"{where}, the function raised {in_words(error)}."
                findings.append(Finding("crash", raised))
        return findings

    def notes(self) -> list[str]:
        """A sentence on what becomes of a group of one sample."""
        if not self._alone:
            return []
        notes = []
        if self.means and not self.rejected:
            notes.append("Groups of one sample keep their reward: unbiased, without a baseline.")
        refused = [e for _, e in self.raised if not isinstance(e, FloatingPointError)]
        if refused:
            notes.append(f"Groups of one sample are refused ({in_words(refused[-1])}).")
        return notes


def _judge_sizes(
    function: Callable[..., Tensor],
    family: list[Outcomes],
    tokens: bool,
    tell: Callable[[str, float], None],
) -> list[Judged]:
    """Enumerate batches of every size."""
    sizes = TOKEN_GROUPS if tokens else GROUPS
    judged = []
    for position, size in enumerate(sizes):

        def tick(policy: str, share: float, position: int = position) -> None:
            tell(policy, (position + share) / len(sizes))

        judged.append(_judge_size(function, family, size, tokens, tick))
    tell("", 1.0)
    return judged


def _judge_size(
    function: Callable[..., Tensor],
    family: list[Outcomes],
    size: tuple[int, int],
    tokens: bool,
    tick: Callable[[str, float], None],
) -> Judged:
    """Enumerate all batches of B groups of n samples, for every policy."""
    judged = Judged(size, [], [], [])
    for member, policy in enumerate(family):
        tick(policy.name, member / len(family))
        label = f"{policy.name}, n = {size[1]}"
        words = f"{size[0]}, {size[1]}"
        try:
            measured, variance = _enumerate(function, policy, size, tokens)
        # somebody else's code may raise anything
        except Exception as error:
            judged.raised.append((policy.name, error))
            judged.rows.append(Row(label, words, None, 0, 0, None, error=in_words(error)))
            continue
        judged.means.append(measured)
        judged.rows.append(_row(measured, label, words, variance, size[1]))
    return judged


def _causes(biased: dict[tuple[int, int], Judged], by_length: bool) -> list[Finding]:
    """Findings from the wrong gradients of all sizes."""
    found = {size: diagnose(each.means) for size, each in biased.items()}
    scales = {size: fitted_scale(each.means).value for size, each in biased.items()}
    findings = _merge(found, scales)
    if not by_length:
        return findings
    # diagnose knows no lengths, so that its other explanations are coincidences
    sentence = (
        "The advantages depend on the lengths: a division by the length makes another "
        "objective's gradient."
    )
    return [
        Finding("length", sentence),
        *(finding for finding in findings if finding.kind == "standard deviation"),
    ]


def _choices() -> Iterator[Outcomes]:
    for problem in FAMILY:
        truth = enumerate_problem(problem)
        yield Outcomes(
            truth, torch.ones(len(truth.f), 1, dtype=torch.bool), problem.name, problem.role
        )


def _sequences() -> Iterator[Outcomes]:
    """Three tokens, each a choice of two; token 0 ends the sequence, and later ones
    count for nothing.
    """
    logits = [[[0.0, 0.0]] * LENGTH, [[-0.4, 0.6], [0.5, 0.0], [0.2, -0.3]]]
    for member in FAMILY:
        problem = Problem(
            member.name, torch.tensor(logits, dtype=torch.float64), torch.zeros(LENGTH, 2).double()
        )
        truth = enumerate_problem(problem)
        # 0 at a position whose token ends the sequence
        z = truth.points.argmax(-1)
        mask = torch.cat([torch.ones(len(z), 1), z[:, :-1]], 1).cumprod(1).bool()
        length = mask.sum(1)
        # by length, and one sequence apart, so that no token alone decides the reward
        rewards = torch.tensor([0.0, 0.3, 1.0, -0.6], dtype=torch.float64)[length] + 0.9 * (
            z * mask
        ).sum(1).eq(LENGTH)
        f = member.scale * rewards + member.constant
        # tokens behind the end are drawn all the same, and have the gradient 0 by themselves
        gradient = torch.einsum(
            "rz,rzkc->rkc", truth.q * (f - (truth.q * f).sum(-1, keepdim=True)), truth.x
        )
        yield Outcomes(replace(truth, f=f, gradient=gradient), mask, member.name, member.role)


def _enumerate(
    function: Callable[..., Tensor], policy: Outcomes, size: tuple[int, int], tokens: bool
) -> tuple[Means, float]:
    """The mean over all batches of B groups of n samples, each batch in a call of its
    own, and a group's variance.
    """
    truth = policy.truth
    groups, samples = size
    outcomes = torch.cartesian_prod(*[torch.arange(len(truth.f))] * (groups * samples)).view(
        -1, groups, samples
    )
    # one call per batch, as a trainer makes them: a function may mix what stands in one call
    advantages = torch.stack([_call(function, policy, z, tokens) for z in outcomes])
    if not bool(advantages.isfinite().all()):
        worst = outcomes[int((~advantages.isfinite()).flatten(1).any(1).nonzero()[0])]
        raise FloatingPointError(
            f"rewards {truth.f[worst].tolist()} give {float(advantages[~advantages.isfinite()][0])}"
        )
    weight = truth.q[:, outcomes].flatten(2).prod(-1)  # [R, batches]
    score = truth.x[:, outcomes] * policy.mask[outcomes].unsqueeze(-1)  # [R, batches, B, n, K, C]
    # [R, batches, K, C]
    gradients = (advantages.unsqueeze(-1) * score).sum((2, 3)) / (groups * samples)
    mean = torch.einsum("rb,rbkc->rkc", weight, gradients)
    variance = torch.einsum("rb,rbkc->r", weight, gradients.square()) - mean.square().sum((-2, -1))
    rounding = ROUNDING * max(float(truth.f.abs().max()), 1e-3)
    spread = float(truth.f.max() - truth.f.min())
    # nothing is drawn: the interval is rounding alone
    width = torch.full_like(mean, rounding)
    largest = float(advantages.abs().max()) / spread if spread > 0 else 0.0
    # an advantage may keep a constant, which is no explosion
    largest = largest if float(truth.f.abs().max()) < 50 else 0.0
    means = Means(
        policy.name, policy.role, truth, groups * samples, mean, width, width / 5, largest, rounding
    )
    return means, groups * float(variance.mean())


def _call(
    function: Callable[..., Tensor], policy: Outcomes, outcomes: Tensor, tokens: bool
) -> Tensor:
    """Advantages of one batch of outcomes [B, n], as [B, n, T] in float64."""
    dtype = torch.get_default_dtype()
    rewards = policy.truth.f[outcomes].to(dtype)
    mask = policy.mask[outcomes]
    found = function(rewards, mask) if tokens else function(rewards)
    expected = mask.shape if tokens else rewards.shape
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.shape != expected:
        raise TypeError(
            f"The function must return a floating tensor {list(expected)}, but returned "
            f"{describe(found)}."
        )
    found = found.detach().double()
    return found if tokens else found.unsqueeze(-1)


def _varies(function: Callable[..., Tensor], policy: Outcomes, tokens: bool) -> bool:
    """Whether the same rewards get other advantages after a call with different ones."""
    try:
        first, _, again = (
            _call(function, policy, torch.tensor([z]), tokens) for z in ([0, 1], [1, 1], [0, 1])
        )
    # the error is met again, where the group's size is named
    except Exception:
        return False
    return not torch.allclose(first, again, equal_nan=True)


def _row(means: Means, label: str, size: str, variance: float, samples: int) -> Row:
    s = fitted_scale([means]).value
    rejected = int(((means.mean - means.gradient).abs() > means.half_width).sum())
    rloo = float(means.truth.rloo_variance(samples).mean()) if samples > 1 else None
    scale = None if math.isnan(s) else Interval(s, s, s)
    return Row(label, size, worst_entry(means), rejected, 0, scale, variance, float(samples), rloo)


def _merge(
    found: dict[tuple[int, int], list[Finding]], scales: dict[tuple[int, int], float]
) -> list[Finding]:
    """One finding per kind; the group of one sample apart."""
    findings: list[Finding] = []
    several = {size: findings_ for size, findings_ in found.items() if size != (1, 1)}
    if several and all(f[0].kind == "scale" for f in several.values()):
        lengths = ", ".join(
            f"{scales[b, n]:.3g} (n = {n}{f', {b} groups' if b > 1 else ''})" for b, n in several
        )
        # the two agree where there is one group
        own = all(abs(scales[b, n] - (n - 1) / n) < 1e-3 for b, n in several)
        mixed = all(abs(scales[b, n] - (b * n - 1) / (b * n)) < 1e-3 for b, n in several)
        words = ""
        if own:
            words = ": (n - 1)/n, the group's mean with the sample itself in it"
        elif mixed:
            words = ": (B n - 1)/(B n), the batch's mean with the sample itself in it"
        findings.append(
            Finding("scale", f"Right direction, wrong length{words}. Lengths: {lengths}.")
        )
    else:
        by_kind = {f.kind: f for fs in several.values() for f in fs}
        findings += by_kind.values()
    # a group of one is a choice of its author's, and gets a sentence of its own
    if (1, 1) in found:
        kind = found[1, 1][0].kind
        if kind == "no gradient":
            sentence = (
                "Groups of one sample get the advantage 0: no gradient; give them their reward, "
                "or refuse them."
            )
        else:
            sentence = f"Groups of one sample get a wrong gradient. {found[1, 1][0].sentence}"
        findings.append(Finding("group of one", sentence))
    return findings


def _depends_on_length(function: Callable[..., Tensor]) -> bool:
    """Whether equal rewards get other advantages at other lengths, at the first token."""
    rewards = torch.tensor([[0.3, 1.0]])
    # first tokens, which both masks keep
    short = torch.tensor([[[True, False, False], [True, False, False]]])
    long = torch.ones_like(short)
    return not torch.allclose(function(rewards, short)[..., 0], function(rewards, long)[..., 0])
