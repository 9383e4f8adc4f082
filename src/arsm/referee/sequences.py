"""`audit_sequences`: is this the policy gradient of an autoregressive model? On a model
small enough to enumerate.

The model is a table: one choice of two tokens after every prefix of at most two tokens,
seven choices in all. Drawing all seven and walking along them is the same as drawing
token by token: a sequence model is a problem of seven variables, of which f reads those
on the path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from arsm.options import suggests
from arsm.referee.losses import audit
from arsm.referee.measure import Sign
from arsm.referee.problems import Function, Problem
from arsm.referee.result import Audit
from arsm.referee.trainers import audit_batches
from arsm.referee.worlds import Objective, TrainerLoss

LENGTH = 3
REWARDS = (0.5, -0.4, 0.9, 0.1, -0.7, 0.8, 0.3, -0.2)
"""Rewards of the eight sequences of three tokens, in lexicographic order."""
ENDED = {(0,): 0.6, (1, 0): -0.5}
"""Rewards of shorter sequences, where token 0 ends one."""


class SequenceLoss(Protocol):
    """The loss that is audited: it draws completions and returns what it would call
    backward on, summed over the prompts.
    """

    def __call__(
        self,
        model: Callable[[Tensor], Tensor],
        prompts: Tensor,
        reward: Callable[[Tensor, Tensor], Tensor],
        max_tokens: int,
        eos: int | None,
        /,
    ) -> Tensor: ...


class PathReward(Function):
    """The reward of the sequence that the seven choices spell."""

    ends: bool = False

    def __call__(self, z: Tensor) -> Tensor:
        first = z[..., :1]
        # choice 0 is the first token; 1 and 2 follow on it, 3 to 6 on the first two
        second = z.gather(-1, 1 + first)
        third = z.gather(-1, 3 + 2 * first + second)
        return self.of_tokens(torch.cat([first, second, third], -1))

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """[..., 3] int64 -> [...]; tokens after the end do not count."""
        number = (tokens * torch.tensor([4, 2, 1], device=tokens.device)).sum(-1)
        u = torch.tensor(REWARDS, dtype=self.weights.dtype, device=tokens.device)[number]
        if self.ends:
            # shorter sequences overwrite the reward of what follows their end
            for prefix, reward in ENDED.items():
                ended = (
                    tokens[..., : len(prefix)] == torch.tensor(prefix, device=tokens.device)
                ).all(-1)
                u = torch.where(ended, torch.full_like(u, reward), u)
        self.rows += u.numel()
        return self.scale * u + self.constant


@dataclass(frozen=True, eq=False, repr=False)
class SequenceProblem(Problem):
    """Tables of seven choices [R, 7, 2]."""

    ends: bool = False
    """Whether token 0 ends a sequence."""

    def function(self, dtype: torch.dtype) -> PathReward:
        weights = self.weights.to(dtype)
        theta = torch.ones(len(self.weights), dtype=dtype)
        reward = PathReward(weights, theta, 0.0, self.scale, self.constant)
        reward.ends = self.ends
        return reward


class Table:
    """A causal model from a table of choices: tokens [N, L], the prompt's number first,
    to logits [N, L, 2].
    """

    def __init__(self, choices: Tensor) -> None:
        self.choices = choices  # [rows, 7, 2]

    def __call__(self, tokens: Tensor) -> Tensor:
        # the tree of prefixes as in a heap: children of node i are 2 i + 1 and 2 i + 2
        place = torch.zeros_like(tokens[:, 0])
        nodes = [place]
        for t in range(1, min(tokens.shape[1], LENGTH)):
            place = 2 * place + 1 + tokens[:, t]
            nodes.append(place)
        # whatever stands behind the last token that counts has logits that nobody may use
        nodes += [torch.zeros_like(place)] * (tokens.shape[1] - len(nodes))
        return self.choices[tokens[:, 0].unsqueeze(-1), torch.stack(nodes, -1)]


def _problems() -> tuple[SequenceProblem, ...]:
    generator = torch.Generator().manual_seed(0)
    logits = 0.7 * torch.randn(2, 7, 2, dtype=torch.float64, generator=generator)
    # a wrong p does not show where all are equal: one prompt of that kind, one of the other
    logits[0] = 0
    p = logits.softmax(-1)
    second = p[:, 0].unsqueeze(-1) * p[:, 1:3]  # [R, 2, 2]: the probability of the first two tokens
    reach = torch.cat([torch.ones(2, 1, dtype=torch.float64), p[:, 0], second.flatten(1)], 1)
    # token 0 ends: only the choices after (), (1) and (1, 1) are met
    ends = reach * torch.tensor([1, 0, 1, 0, 0, 0, 1])
    base = SequenceProblem(
        "three tokens", logits, torch.zeros(7, 2, dtype=torch.float64), role="f", reach=reach
    )
    return (
        base,
        replace(base, name="the same reward / 20", scale=0.05, role="f/20"),
        replace(base, name="the same 20 rewards", scale=20.0, role="20f"),
        replace(base, name="the same reward + 100", constant=100.0, role="f+100"),
        replace(base, name="the same with reward 0", scale=0.0, role="0"),
        replace(base, name="at most three tokens", ends=True, role="", reach=ends),
        replace(base, name="two prompts", role="", small=True),
    )


SEQUENCE_PROBLEMS = _problems()


@suggests("arsm.audit_sequences")
def audit_sequences(
    loss: SequenceLoss | TrainerLoss,
    *,
    target: Objective | None = None,
    documented: TrainerLoss | None = None,
    up_to_scale: bool = False,
    sign: Sign = 1,
    samples: int = 1 << 14,
    false_alarm: float = 1e-6,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Audit:
    """Compare the gradient of a loss on completions with that of the objective it
    claims, by enumeration.

    With a `target`, the loss is a trainer's: it gets batches of answers that somebody
    else drew. All batches of a small language model are enumerated, with prompts and
    answers of several lengths, an end token, padding, a reference and, if asked for, a
    stale sampler; nothing is drawn, and only rounding could raise a false alarm.
    Without one, the loss draws completions itself, and its mean is measured from
    samples.

    Args:
        loss: with a target, `loss(batch: arsm.referee.TrainerBatch) -> scalar`, a mean
            over the rows of the batch. Without one, `loss(model, prompts, reward,
            max_tokens, eos) -> scalar`, summed over the prompts. `model(tokens [N, L])
            -> logits [N, L, 2]` is causal, the prompt's one token first; `prompts` is
            [N, 1] int64; `reward(prompts [R, 1], tokens [R, max_tokens]) -> [R]`
            ignores tokens after the first `eos`; most problems have none.
        target: the objective of which the loss claims the gradient.
        documented: instead, the objective that the loss's documentation states, as a
            loss in your own words, to be maximised: both are averaged over all batches
            of `target`'s sampler and compared.
        up_to_scale: whether a factor is allowed that depends on the numbers of prompts
            and of answers alone.
        sign: -1 if the loss is to be minimised.
        samples: draws per prompt, without a target.
        false_alarm: the probability with which a correct loss may be called wrong,
            without a target.
        seed: of the global generators.
        progress: hears each problem's name and the share of the audit that is done.

    Returns:
        An `Audit`. Its entries are [prompt, prefix, token]; with a target, [context,
        token]. Its notes say what the error depends on and where it is.
    """
    if target is not None:
        return audit_batches(
            cast(TrainerLoss, loss), target, documented, up_to_scale, sign, seed, progress
        )
    if documented is not None or up_to_scale:
        raise ValueError(
            "documented and up_to_scale belong to losses of given batches; give a target, too."
        )
    name = getattr(loss, "__qualname__", type(loss).__name__)

    def on_table(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        # the problems below have no other function
        assert isinstance(f, PathReward)
        prompts = torch.arange(len(logits)).unsqueeze(-1)
        return cast(SequenceLoss, loss)(
            Table(logits),
            prompts,
            lambda _, tokens: f.of_tokens(tokens),
            LENGTH,
            0 if f.ends else None,
        )

    # the report names the user's loss
    on_table.__qualname__ = name
    return audit(
        on_table,
        sign=sign,
        problems=SEQUENCE_PROBLEMS,
        samples=samples,
        false_alarm=false_alarm,
        seed=seed,
        progress=progress,
    )
