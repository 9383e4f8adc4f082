"""Rewards: the function that a user gives, its values, and the sentence when it fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from arsm.checks import NotFiniteError

Reward = Callable[[Tensor, Tensor], Tensor]
"""`reward(prompts [R, P], tokens [R, T]) -> [R]`, to be maximised."""


class RewardFailure(RuntimeError):
    """A reward raised an exception, which is the cause; `prompts` and `tokens` keep
    what was sampled for it.
    """

    def __init__(self, message: str, prompts: Tensor, tokens: Tensor, row: int | None) -> None:
        super().__init__(message)
        self.prompts = prompts
        """[R, P] int64."""
        self.tokens = tokens
        """[R, T] int64."""
        self.row = row
        """The first completion for which it raises; None if it raises for none of them alone."""


def check_reward(reward: Reward) -> None:
    """Require a function of prompts and tokens."""
    if not callable(reward):
        raise TypeError(
            f"reward must be a function reward(prompts, tokens), but is a {type(reward).__name__}."
        )
    try:
        signature = inspect.signature(reward)
    except ValueError:  # a function of C that does not tell
        return
    # many published rewards have TRL's signature
    if "completions" in signature.parameters:
        raise TypeError(
            f"reward is called as reward(prompts, tokens), but takes {signature}, as TRL calls "
            "functions of text; wrap it: TextReward(reward, decode, prompts, texts)."
        )
    try:
        # asked before anything is sampled, not found out after minutes of sampling
        signature.bind("prompts", "tokens")
    except TypeError:
        raise TypeError(
            f"reward is called as reward(prompts, tokens), but takes {signature}; TextReward wraps "
            "functions of text."
        ) from None


def checked_rewards(reward: Reward, prompts: Tensor, tokens: Tensor) -> Tensor:
    """[R] float64."""
    # functions of text seldom expect an empty batch
    if tokens.shape[0] == 0:
        return torch.zeros(0, dtype=torch.float64, device=tokens.device)
    try:
        rewards = reward(prompts, tokens.clone())  # a reward may write into its own copy
    except Exception as error:
        raise _reward_failure(reward, prompts, tokens, error) from error
    if not isinstance(rewards, Tensor):
        raise TypeError(
            f"reward must return a tensor [R], but returned {type(rewards).__name__}; use "
            "torch.tensor."
        )
    if not rewards.is_floating_point():
        raise TypeError(
            f"reward must return a floating tensor, but returned {rewards.dtype}; convert with "
            ".float()."
        )
    if rewards.shape != tokens.shape[:1]:
        raise ValueError(
            f"reward must return one value per completion, [{tokens.shape[0]}], but returned "
            f"{list(rewards.shape)}."
        )
    if not bool((finite := rewards.isfinite()).all()):
        first = int((~finite).nonzero()[0])
        raise NotFiniteError(
            f"reward returned {float(rewards[first])} for tokens {tokens[first].tolist()}."
        )
    # float64: differences of nearly equal rewards are what the credit is made of
    return rewards.detach().to(tokens.device, torch.float64)


def _reward_failure(
    reward: Reward, prompts: Tensor, tokens: Tensor, error: Exception
) -> RewardFailure:
    """Find the completion that a reward cannot judge, by asking for one after the other."""
    kept = "; .prompts and .tokens of this error hold all that were sampled."
    # one by one only now: rewards of a whole batch are far faster
    for row in range(tokens.shape[0]):
        try:
            reward(prompts[row : row + 1], tokens[row : row + 1].clone())
        except Exception as alone:
            where = f"for tokens {tokens[row].tolist()} after the prompt {prompts[row].tolist()}"
            return RewardFailure(
                f"reward raised {_in_one_line(alone)} {where}{kept}", prompts, tokens, row
            )
    where = f"for {tokens.shape[0]} completions together, but for none of them alone"
    return RewardFailure(
        f"reward raised {_in_one_line(error)} {where}{kept}", prompts, tokens, None
    )


def _in_one_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__} ({message})" if message else type(error).__name__
