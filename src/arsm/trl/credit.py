"""Credit of tokens from the rewards of completions and of their branches: tensors
alone, nothing of TRL.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arsm.types import Estimator


@dataclass(frozen=True, eq=False)
class States:
    """S branched states, each the first t tokens of one completion, and the n tokens
    that were drawn there.
    """

    row: Tensor
    """[S] int64: the completion."""
    step: Tensor
    """[S] int64: t."""
    tokens: Tensor
    """[S, n] int64: the true token, then the others."""
    first: Tensor
    """[S, n] int64: the first of the n tokens that equals each. Equal tokens share one rollout."""

    @staticmethod
    def of(tokens: Tensor, chosen: Tensor) -> States:
        """From the tokens [B, T, n] of all states, and which of them are branched, bool [B, T]."""
        row, step = chosen.nonzero(as_tuple=True)
        drawn = tokens[row, step]
        # the first True of each row of the comparison with all n
        equal = drawn.unsqueeze(-1) == drawn.unsqueeze(-2)
        return States(row, step, drawn, equal.int().argmax(-1))

    def rollouts(self) -> tuple[Tensor, Tensor]:
        """State and number [R] of the tokens to play: one of every token other than the
        true one.
        """
        number = torch.arange(self.tokens.shape[-1], device=self.tokens.device)
        state, number = ((self.first == number) & (number > 0)).nonzero(as_tuple=True)
        return state, number

    def select(self, which: Tensor) -> States:
        """Some of the states."""
        return States(self.row[which], self.step[which], self.tokens[which], self.first[which])

    @property
    def true(self) -> Tensor:
        """[S, n] bool: whether each token is the true one."""
        return self.first == 0


def back_up(rewards: Tensor, length: int, states: States, returns: Tensor) -> tuple[Tensor, Tensor]:
    """The return Q_t after every token [B, T] and the value V_0 of every prompt [B].

    Q_t = V_{t+1}, where V_t is the mean return of the n tokens in a branched state and
    Q_t elsewhere.

    Args:
        rewards: [B], of the completions.
        length: T.
        states: the branched states.
        returns: [S, n], of their tokens; not read where a token is the true one.
    """
    # V_t = own_t Q_t + others_t: own is the share of the true token, whose Q_t comes from later
    own = torch.ones(rewards.shape[0], length, dtype=rewards.dtype, device=rewards.device)
    others = torch.zeros_like(own)
    own[states.row, states.step] = states.true.to(own).mean(-1)
    others[states.row, states.step] = torch.where(states.true, 0, returns).mean(-1)
    # from the end, where the return is the reward
    after = torch.empty_like(own)
    value = rewards
    for t in reversed(range(length)):
        after[:, t] = value
        value = own[:, t] * value + others[:, t]
    return after, value


def others_mean(values: Tensor, group: int) -> Tensor:
    """The mean of the other completions of the same prompt: [B] -> [B]; NaN are left
    out, NaN where all others are.
    """
    groups = values.view(-1, group)
    known = groups.isfinite()
    groups = torch.where(known, groups, 0)
    total = groups.sum(-1, keepdim=True) - groups
    count = known.sum(-1, keepdim=True) - known.int()
    # 0 / 0 is the NaN that says that there is nothing to compare with
    return (total / count).flatten()


def token_weights(estimator: Estimator, returns: Tensor) -> Tensor:
    """w of g = sum_k w_k (onehot(a_k) - p): returns [S, n] -> [S, n]."""
    return estimator.weights(returns.T).T


def with_group(
    states: States, tokens: Tensor, compared: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """The credit of all states, tokens and weights [B, T, n]: in the branched states
    `compared` [S, n], in all others the group's advantages [B, T] for the true token.
    """
    weights = torch.zeros(tokens.shape, dtype=advantages.dtype, device=advantages.device)
    # NaN: nothing to compare with
    weights[..., 0] = advantages.nan_to_num(nan=0.0)
    weights[states.row, states.step] = compared
    # elsewhere the other tokens are replaced by the true one, whose ln p costs nothing more
    branched = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    branched[states.row, states.step] = True
    return torch.where(branched.unsqueeze(-1), tokens, tokens[..., :1]), weights


def squared_lengths(states: States, weights: Tensor) -> Tensor:
    """|g|^2 [S] of weights [S, n] that sum to 0, so that g = sum_k w_k onehot(a_k)."""
    by_token = torch.zeros_like(weights).scatter_add(-1, states.first, weights)
    return by_token.square().sum(-1)


def distinct_others(tokens: Tensor) -> Tensor:
    """The number of tokens of each state that differ from the true one and from each
    other: [B, T, n] -> [B, T].
    """
    # sorted, every step up is one more distinct token
    ordered = tokens.sort(-1).values
    return (ordered[..., 1:] != ordered[..., :-1]).sum(-1)
