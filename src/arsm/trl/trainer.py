r"""`BranchTrainer`: TRL's `GRPOTrainer` with the token credit of `sequences.Branch`.

GRPO gives all tokens of a completion the same advantage. Here a coin chooses some
states, each a prompt and the tokens before t. In a chosen state, n - 1 further tokens
are drawn from the policy, each is played to the end, and the n tokens are compared with
each other:

    g_t = sum_k w_k (onehot(a_k) - p_t),    a_0 = y_t the true token, a_1..a_{n-1} ~ p_t the others

with w from the estimator's `weights` of the n returns. All other states get the group's
leave-one-out advantage,

    g_t = (Q_t - mean value of the other completions) (onehot(y_t) - p_t)

Both have the mean dJ/dlogits_t, whatever the coin says, as long as it does not depend
on what is drawn in that state or after it. So nothing is divided by the coin's
probability. Q_t, the return after y_t, is backed up from the branches of later states,
as in `sequences.Branch`.

TRL generates, rewards, clips, normalises, logs and saves. Credit [B, T, n] reaches its
loss as B rows of T n tokens, whose ln p come from TRL's own pass and n rows of the head
(head.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import trl
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from arsm.estimators import RLOO
from arsm.trl.checks import (
    check_arguments,
    check_budget,
    check_credit,
    check_head,
    check_model,
    check_options,
    check_version,
)
from arsm.trl.credit import (
    States,
    back_up,
    distinct_others,
    others_mean,
    squared_lengths,
    token_weights,
    with_group,
)
from arsm.trl.head import TokenHead
from arsm.types import Estimator


class Played(NamedTuple):
    """R finished rollouts."""

    rewards: Tensor
    """[R]; NaN where no reward function could judge."""
    generated: int
    """Tokens from the branches on."""


class BranchTrainer(GRPOTrainer):
    """`GRPOTrainer` with credit for every token: other tokens of some states are drawn,
    played and compared.

    All arguments are those of `GRPOTrainer`, and two more. Options of `GRPOConfig` that
    token credit cannot serve are refused before the model is touched; the guide lists
    them. `scale_rewards="group"`, TRL's default, is ignored with a warning.

    Metrics: `credit/rollouts` and `credit/tokens` count the branches of one generation
    batch and the tokens they generated; `credit/states` is the share of tokens that
    were branched; `credit/zero_states` the share of branched states without credit,
    because all draws or all returns were equal; `credit/variance` and
    `credit/group_variance` are the mean |g_t|^2 at the branched states, from the
    branches and from the group's advantage.

    Args:
        model: as for `GRPOTrainer`; a text model without dropout, with relative
            positions.
        reward_funcs: as for `GRPOTrainer`. They are called for branches too, with the
            columns of their prompt.
        args: as for `GRPOTrainer`.
        train_dataset: as for `GRPOTrainer`.
        credit: how the n tokens of a state are compared: an unbiased estimator over n
            independent samples.
        budget: branch tokens per token of the completions, on average; None to branch
            in every state.
        others: further arguments of `GRPOTrainer`, by name.
    """

    args: GRPOConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    model: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        credit: Estimator | None = None,
        budget: float | None = 1.0,
        **others: Any,
    ) -> None:
        credit = RLOO(4) if credit is None else credit
        check_version(trl.__version__)
        check_credit(credit)
        check_budget(budget)
        check_options(GRPOConfig() if args is None else args)
        check_arguments(others)
        loaded: Any = model
        # a model is checked before TRL touches it, one that TRL loads by its name afterwards
        if not isinstance(model, str):
            check_model(loaded, disable_dropout=args is not None and args.disable_dropout)
        super().__init__(loaded, reward_funcs, args, train_dataset, **others)
        if isinstance(model, str):
            check_model(self.model, disable_dropout=self.args.disable_dropout)
        if self._is_vlm:
            raise ValueError("BranchTrainer takes text models only; use GRPOTrainer for images.")
        self.credit = credit
        self.budget = budget
        self._rewards = torch.empty(0, 0)
        """[B of all processes, reward functions]: what was rewarded last."""
        self._scored: Tensor | None = None
        """[B, T, n]: the tokens of the credit while TRL computes its loss."""

    # ------------------------------------------------------------------ overridden methods of
    # GRPOTrainer

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's rewards, kept: it returns only advantages."""
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch; in training with `credit_tokens` and `credit_weights` [B, T, n]."""
        batch = super()._generate_and_score_completions(inputs)
        # evaluation only rewards, and needs no credit
        if self.model.training:
            with torch.no_grad():
                batch["credit_tokens"], batch["credit_weights"] = self._find_credit(inputs, batch)
                # TRL makes old ln p only where several updates share a batch.
                if "old_per_token_logps" in batch:
                    batch["old_per_token_logps"] = self._old_log_probs(batch)
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss of B rows of T n tokens: each of a state's n tokens is a token
        with its own advantage.
        """
        if "credit_tokens" not in inputs:
            return super()._compute_loss(model, inputs)
        tokens = inputs["credit_tokens"]
        flat = {
            **inputs,
            "completion_ids": tokens.flatten(1),
            "completion_mask": inputs["completion_mask"].repeat_interleave(tokens.shape[-1], 1),
            "advantages": inputs["credit_weights"].flatten(1),
        }
        self._scored = tokens
        try:
            return super()._compute_loss(model, flat)
        finally:
            self._scored = None

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """ln p and entropies of B rows of T n tokens, from one pass over the true completions."""
        if self._scored is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        # TRL gives T n tokens after each prompt; the model reads the true ones, one in n
        tokens = self._scored
        n = tokens.shape[-1]
        prompt = input_ids.shape[1] - logits_to_keep
        ids = torch.cat([input_ids[:, :prompt], tokens[..., 0]], 1)
        mask = torch.cat([attention_mask[:, :prompt], attention_mask[:, prompt::n]], 1)
        log_p, entropies, aux_loss, hidden = self._score(
            model, ids, mask, tokens.shape[1], *args, **kwargs
        )
        log_p = self._head.log_probs(hidden, tokens, log_p)
        # the n tokens of a state share its entropy
        if entropies is not None:
            entropies = entropies.repeat_interleave(n, 1)
        return log_p.flatten(1), entropies, aux_loss

    # ------------------------------------------------------------------ ln p of other tokens

    def _score(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """TRL's ln p [B, T], entropies and auxiliary loss, and the hidden states [B, T,
        H] before each token.
        """
        caught: list[Tensor] = []

        def catch(module: nn.Module, given: Any, output: Any) -> None:
            caught.append(output[0])

        # a hook, because TRL's method returns no hidden states
        handle = self._causal_model().base_model.register_forward_hook(catch)
        try:
            log_p, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                model, *args, **kwargs
            )
        finally:
            handle.remove()
        hidden = torch.cat(caught)  # TRL may score the batch in parts
        before = hidden[:, -log_p.shape[1] - 1 : -1]  # the state before a token predicts it
        return log_p, entropies, aux_loss, before

    def _causal_model(self) -> Any:
        model: Any = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def _head(self) -> TokenHead:
        return TokenHead(self._causal_model(), self.temperature)

    def _old_log_probs(self, batch: dict[str, Any]) -> Tensor:
        """ln p [B, T n] under the policy that drew the tokens, computed as in the loss:
        its first ratios are 1.
        """
        parts = []
        for part in self._micro_batches(batch):
            log_p, hidden = self._score_batch(part)
            parts.append(self._head.log_probs(hidden, part["credit_tokens"], log_p).flatten(1))
        return torch.cat(parts)

    def _micro_batches(self, batch: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        """The batch in parts of as many rows as TRL scores at a time."""
        # the batch holds numbers too, which have no rows
        tensors = {
            key: each for key, each in batch.items() if isinstance(each, Tensor) and each.ndim > 0
        }
        size = self.args.per_device_train_batch_size
        for start in range(0, batch["completion_ids"].shape[0], size):
            yield {key: each[start : start + size] for key, each in tensors.items()}

    def _score_batch(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """ln p of the true tokens [B, T] and the hidden states before them [B, T, H],
        without a graph.
        """
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        # nothing is differentiated here, so that checkpointing would only warn
        options: Any = self.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(self.model, options):
            log_p, _, _, hidden = self._score(
                self.model, ids, mask, batch["completion_ids"].shape[1]
            )
        return log_p, hidden

    # ------------------------------------------------------------------ credit

    def _find_credit(
        self, inputs: list[dict[str, Any]], batch: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Draw, choose, play and compare: tokens and weights, [B, T, n] both."""
        everywhere = self._weighted(self._rewards)
        rewards = self._here(everywhere, len(inputs))
        mask = batch["completion_mask"].bool()
        tokens, energy = self._draw(batch)
        states = States.of(tokens, self._choose(tokens, mask))
        played, returns = self._play_states(inputs, batch, states, rewards)

        # A state with a rollout that no reward function could judge is left to the group.
        judged = returns.isfinite().all(-1)
        states = states.select(judged)
        returns = returns[judged]
        after, value = back_up(rewards, mask.shape[1], states, returns)
        returns = torch.where(states.true, after[states.row, states.step].unsqueeze(-1), returns)
        compared = token_weights(self.credit, returns)

        # Every other state has the group's leave-one-out advantage, for its true token alone.
        baseline = self._others_mean(self._gather(value), len(inputs))
        credit = with_group(states, tokens, compared, after - baseline.unsqueeze(-1))

        plain = rewards - self._others_mean(everywhere, len(inputs))
        self._log_credit(
            rollouts=played.rewards.shape[0],
            tokens=played.generated,
            true=mask.sum(),
            states=states.row.shape[0],
            zero=(compared == 0).all(-1).sum(),
            squares=squared_lengths(states, compared).sum(),
            group_squares=(plain[states.row].square() * energy[states.row, states.step]).nansum(),
        )
        return credit

    def _play_states(
        self,
        inputs: list[dict[str, Any]],
        batch: dict[str, Any],
        states: States,
        rewards: Tensor,
    ) -> tuple[Played, Tensor]:
        """Play the other tokens of S states, and the returns [S, n] of all tokens there; the
        true ones' are the rewards [B] of their completions.
        """
        # Equal tokens share one rollout, and the true token has been played.
        state, number = states.rollouts()
        tokens = states.tokens[state, number]
        played = self._play(inputs, batch, states.row[state], states.step[state], tokens)
        returns = rewards[states.row].unsqueeze(-1).repeat(1, states.tokens.shape[-1])
        returns[state, number] = played.rewards
        return played, returns.gather(-1, states.first)

    def _draw(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Tokens [B, T, n], the true one first and the others drawn from the policy;
        and |onehot(y) - p|^2 [B, T].
        """
        tokens = batch["completion_ids"].unsqueeze(-1).repeat(1, 1, self.credit.paths)
        energy = torch.zeros(tokens.shape[:2], device=tokens.device)
        start = 0
        for part in self._micro_batches(batch):
            log_p, hidden = self._score_batch(part)
            live = part["completion_mask"].bool()
            true = part["completion_ids"][live]
            drawn = self._head.draw(hidden[live], true, self.credit.paths - 1)
            # in every batch: it costs nothing beside the draws
            check_head(drawn.p.log(), log_p[live])
            rows = slice(start, start + live.shape[0])
            tokens[rows, :, 1:][live] = drawn.others
            energy[rows][live] = 1 - 2 * drawn.p + drawn.squares
            start = rows.stop
        return tokens, energy

    def _choose(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The states to branch in, bool [B, T]: one coin per state, with a probability
        that keeps to the budget.

        The cost of branching everywhere is guessed from the lengths and draws of all
        *other* completions. A guess that included the completion itself would let its
        draws decide how they are compared, which is biased.
        """
        if self.budget is None:
            return mask
        # a rollout is guessed to be as long as the rest of its completion
        left = mask.flip(-1).cumsum(-1).flip(-1)
        cost = (distinct_others(tokens) * left * mask).sum(-1).double()
        length = mask.sum(-1).double()
        other_cost = self._gather(cost).sum() - cost
        other_length = self._gather(length).sum() - length
        probability = self.budget * other_length / other_cost.clamp_min(1)
        coin = torch.rand(mask.shape, dtype=torch.float64, device=mask.device)
        return mask & (coin < probability.unsqueeze(-1))

    def _others_mean(self, everywhere: Tensor, rows: int) -> Tensor:
        """The mean of the other completions of each prompt: values of all processes ->
        [B] of this one's rows.
        """
        assert self.num_generations is not None
        return self._here(others_mean(everywhere, self.num_generations), rows)

    def _weighted(self, rewards: Tensor) -> Tensor:
        """The weighted sum of the reward functions [B, F] -> [B]; NaN where all of them
        returned None.
        """
        # nansum of nothing but NaN would be 0, a reward like any other
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(-1)
        return total.masked_fill(rewards.isnan().all(-1), math.nan)

    # ------------------------------------------------------------------ rollouts

    def _play(
        self,
        inputs: list[dict[str, Any]],
        batch: dict[str, Any],
        row: Tensor,
        step: Tensor,
        action: Tensor,
    ) -> Played:
        """Complete and reward R prefixes: the first `step` tokens of a completion, then
        `action`.
        """
        prompts = _lists(batch["prompt_ids"], batch["prompt_mask"])
        true = _lists(batch["completion_ids"], batch["completion_mask"])
        which = row.tolist()
        branches = zip(which, step.tolist(), action.tolist(), strict=True)
        completions = [[*true[i][:t], a] for i, t, a in branches]
        self._complete([prompts[i] for i in which], completions)
        generated = sum(len(ids) for ids in completions) - int(step.sum())
        read = sum(len(prompts[i]) for i in which) + int(step.sum())

        # All processes call TRL equally often: those with fewer rollouts add their first completion
        # again.
        missing = self._most(len(which)) - len(which)
        rows = which + [0] * missing
        completions += [true[0]] * missing
        rewards = [torch.empty(0, device=row.device)]
        seen = self.state.num_input_tokens_seen
        with self._apart():
            for start in range(0, len(rows), len(inputs)):
                some = rows[start : start + len(inputs)]
                own = [inputs[i] for i in some]
                ids = completions[start : start + len(inputs)]
                rewards.append(self._reward(own, [prompts[i] for i in some], ids))

        # TRL counts prompts and completions, so branches count with their prompts and prefixes.
        total = self._gather(torch.tensor([read + generated], device=row.device)).sum()
        self.state.num_input_tokens_seen = seen + int(total)
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        return Played(torch.cat(rewards)[: len(which)], generated)

    def _complete(self, prompts: list[list[int]], completions: list[list[int]]) -> None:
        """Extend completions to their end, in place, by TRL's own generation."""
        longest = self.max_completion_length
        assert longest is not None
        unfinished = []
        for i, ids in enumerate(completions):
            if len(ids) < longest and ids[-1] not in self.eos_token_ids:
                unfinished.append(i)
        # Sorted by what is left, so that the rows of one call may become about equally long.
        unfinished.sort(key=lambda i: len(completions[i]))
        # Processes generate in step: those with fewer rollouts play one more token after some
        # prompt.
        most = self._most(len(unfinished))
        missing = most - len(unfinished)
        left = [longest - len(completions[i]) for i in unfinished] + [1] * missing
        limits = []
        if most:
            everywhere = self._gather(torch.tensor([left], device=self.accelerator.device))
            limits = everywhere.amax(0).tolist()
        spare = prompts[0] if prompts else [self.eos_token_ids[0]]
        at_once = self.args.per_device_train_batch_size * (self.args.steps_per_generation or 1)
        for start in range(0, most, at_once):
            some = unfinished[start : start + at_once]
            ids = [prompts[i] + completions[i] for i in some]
            ids += [spare] * (min(at_once, most - start) - len(some))
            # the first row of a call has the most tokens left, as they are sorted
            with self._at_most(limits[start]):
                more, _ = self._generate_single_turn(ids, None, {}, 1)
            for i, tokens in zip(some, more, strict=False):
                completions[i] += tokens[: longest - len(completions[i])]

    @contextmanager
    def _at_most(self, tokens: int) -> Iterator[None]:
        """Let TRL generate at most so many tokens."""
        settings: Any = self.vllm_generation if self.use_vllm else self.generation_config
        name = "max_completion_length" if self.use_vllm else "max_new_tokens"
        before = getattr(settings, name)
        setattr(settings, name, tokens)
        try:
            yield
        finally:
            setattr(settings, name, before)

    def _reward(
        self,
        inputs: list[dict[str, Any]],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
    ) -> Tensor:
        """Rewards [R] of completions, decoded and judged by TRL."""
        prompts = [each["prompt"] for each in inputs]
        # With a rollout function, TRL's `_generate` only decodes what that function returns.
        self.rollout_func = lambda *_: {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": None,
        }
        completions = self._generate(prompts)[3]
        rewards = self._weighted(
            self._calculate_rewards(inputs, prompts, completions, completion_ids)
        )
        return self._here(rewards, len(inputs))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Keep TRL's metrics and logs as the true completions left them."""
        names = ("_metrics", "_pending_extra_logs", "_pending_metrics", "rollout_func", "_rewards")
        before = {name: getattr(self, name) for name in names}
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._pending_extra_logs = defaultdict(list)
        self._pending_metrics = defaultdict(list)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def _log_credit(self, **local: Tensor | int) -> None:
        """Add up the counts of all processes and append them to TRL's metrics."""
        counts = [float(each) for each in local.values()]
        counts = torch.tensor([counts], device=self.accelerator.device)
        total = dict(zip(local, self._gather(counts).sum(0).tolist(), strict=True))
        metrics = self._metrics["train"]
        metrics["credit/rollouts"].append(total["rollouts"])
        metrics["credit/tokens"].append(total["tokens"])
        metrics["credit/states"].append(total["states"] / total["true"])
        # means over branched states, of which a batch may have none
        if total["states"]:
            metrics["credit/zero_states"].append(total["zero"] / total["states"])
            metrics["credit/variance"].append(total["squares"] / total["states"])
            metrics["credit/group_variance"].append(total["group_squares"] / total["states"])

    # ------------------------------------------------------------------ processes

    def _gather(self, local: Tensor) -> Tensor:
        """All processes' rows."""
        everywhere: Any = self.accelerator.gather(local)
        return everywhere

    def _here(self, everywhere: Tensor, rows: int) -> Tensor:
        """This process's rows."""
        start = self.accelerator.process_index * rows
        return everywhere[start : start + rows]

    def _most(self, count: int) -> int:
        """The largest count of all processes."""
        return int(self._gather(torch.tensor([count], device=self.accelerator.device)).max())


def _lists(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Rows of token ids without their padding."""
    return [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
