"""Policy gradients on a task at equal tokens per update, and their loop.

It is the one trainer of the command, of the demo and of the comparison on a pretrained model.

The policy is the experiments' small transformer, or any causal model of transformers, with or
without LoRA.

An update's prompts come in parts. Each part has random numbers of its own, by seed, update and
part: which process computes it changes nothing, and a run that resumes needs no generator's state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from arsm import sequences
from arsm.sequences import (
    Decoding,
    Engine,
    Model,
    Slots,
    Strategy,
    Transformers,
    Waves,
    live_tokens,
)
from arsm.sequences.sampler import TokenSampler
from arsm_experiments.replicas import seed_of
from arsm_experiments.sequences.methods import draw_rows, estimate_by
from arsm_experiments.sequences.named import Method, most_tokens
from arsm_experiments.sequences.pretrained import load_parts, trained_parameters
from arsm_experiments.sequences.questions import Questions
from arsm_experiments.sequences.tasks import VOCABULARY
from arsm_experiments.sequences.transformer import Transformer

if TYPE_CHECKING:
    from arsm_experiments.runs.writer import Run

WARM = 10
"""Updates over which the rate rises."""
GROWTH = 4
"""An update has at most so many times the prompts of the one before."""
CLIP = 0.2
"""PPO's, where a batch is used several times."""
LOST = 0.5
"""A run that is asked to stops when its accuracy falls below this share of its first."""


def as_model(policy: nn.Module) -> Model:
    """The small transformer itself; a causal model of transformers with what decoding needs."""
    return policy if isinstance(policy, Transformer) else Transformers(policy)


class _Part(NamedTuple):
    """What one part of an update found."""

    totals: torch.Tensor
    """[4]: generated tokens, rollouts, mean reward and mean KL."""
    again: Callable[[], torch.Tensor] | None
    """The value for a further epoch."""
    learn: Callable[[], None]
    """The critic's steps."""


class Trainer:
    """A policy and what makes it learn."""

    def __init__(
        self,
        policy: nn.Module | Transformers,
        questions: Questions,
        strategy: Strategy | Method,
        *,
        rate: float,
        seed: int,
        tokens_per_update: int,
        kl: float = 0.0,
        reference: nn.Module | None = None,
        parts: int = 1,
        max_rows: int = 1024,
        micro_batch: int | None = None,
        precision: torch.dtype | None = None,
        engine: Engine | None = None,
    ) -> None:
        """Make one.

        Args:
            policy: the small transformer, or a causal model of transformers; parameters without
                gradients stay. Wrapped as `Transformers`, its slots serve several trainers.
            questions: to learn from.
            strategy: how credit is given, and how often a batch is used.
            rate: Adam's.
            seed: of everything random.
            tokens_per_update: mean number of generated tokens per update.
            kl: the cost of ln p - ln p_reference, per token.
            reference: a model like the policy to stay close to.
            parts: of an update, divided among the processes.
            max_rows: most sequences that are decoded side by side.
            micro_batch: most sequences per pass with a graph; None for max_rows.
            precision: sample with copies of the weights in this type, and compute gradients in it
                by autocast.
            engine: who samples; None for this process.
        """
        self.method = strategy if isinstance(strategy, Method) else Method(strategy)
        self.model: Model = policy if isinstance(policy, Transformers) else as_model(policy)
        policy = policy.model if isinstance(policy, Transformers) else policy
        self.policy, self.questions, self.strategy = policy, questions, self.method.strategy
        self.seed, self.parts, self.engine = seed, parts, engine
        self.max_rows, self.micro_batch, self.precision = (
            max_rows,
            micro_batch or max_rows,
            precision,
        )
        self.kl, self.reference = kl, reference
        self._reference = None if reference is None else as_model(reference)
        self.parameters = list(trained_parameters(policy).values())
        self.device = self.parameters[0].device
        self.optimiser = torch.optim.Adam(self.parameters, lr=rate, betas=(0.9, 0.95))
        self.rate, self.tokens_per_update = rate, tokens_per_update
        self.updates = self.tokens = 0
        self.prompts = 0
        """Of each part of the last update."""
        vocabulary = getattr(self.model, "vocabulary", VOCABULARY)
        self.vocabulary = vocabulary
        self.per_prompt = most_tokens(self.strategy, questions.max_tokens, vocabulary)
        """Running mean of the tokens that a prompt costs; before the first update, the most."""
        several = dist.is_initialized()
        self._rank, self._processes = (
            (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        )
        if self.method.critic is not None and self.parts > 1:
            raise ValueError("A value head learns in one process and one part; leave --parts out.")

    def update(self) -> dict[str, float]:
        """One step uphill; what to record of it. An exception leaves everything as it was."""
        count = self._next_count()
        self.optimiser.zero_grad()
        parts = [self._part(part, count) for part in range(self._rank, self.parts, self._processes)]
        totals = torch.zeros(4, dtype=torch.float64)
        for part in parts:
            totals += part.totals
        if self._processes > 1:
            self._add_up(totals)
        norm = self._step()
        for part in parts:
            part.learn()
        for _ in range(self.method.epochs - 1):
            self._further_epoch(parts, count)
        return self._recorded(totals, count) | {"gradient_norm": float(norm)}

    def _next_count(self) -> int:
        """Prompts per part of the next update."""
        count = max(1, round(self.tokens_per_update / self.per_prompt / self.parts))
        if self.updates:
            # one lucky prompt without rollouts must not make the next update a hundred times larger
            count = min(count, GROWTH * self.prompts)
        return count

    def _part(self, part: int, count: int) -> _Part:
        """Estimate and backward of one part of an update."""
        seed = seed_of(f"part {self.seed} {self.updates} {part}")
        generator = torch.Generator(self.device).manual_seed(seed)
        rows = draw_rows(self.questions, count, generator)
        prompts, mask, reward = self.questions.ask(rows, self.device)
        again = None
        with autocast(self.device, self.precision):
            out = estimate_by(
                self.strategy,
                self.model,
                prompts,
                reward,
                max_tokens=self.questions.max_tokens,
                eos=self.questions.eos,
                mask=mask,
                reference=self._reference,
                kl=self.kl,
                rows=self.max_rows,
                micro_batch=self.micro_batch,
                sampling_dtype=self.precision,
                engine=self.engine,
                generator=generator,
            )
            if self.method.epochs > 1:
                assert out.clipped is not None
                again = out.clipped(CLIP)
        (-out.value.sum() / (count * self.parts)).backward()
        found = [
            out.info["generated"],
            out.info.get("rollouts", 0),
            out.rewards.mean(),
            out.info.get("kl", 0.0),
        ]
        totals = torch.tensor([float(x) for x in found], dtype=torch.float64)
        return _Part(totals, again, partial(self._learn, prompts, mask, out))

    def _learn(
        self, prompts: torch.Tensor, mask: torch.Tensor | None, out: sequences.SequenceEstimate
    ) -> None:
        """The critic's steps on a part's sequences, and on its rollouts where they tell of single
        tokens.
        """
        critic = self.method.critic
        if critic is None:
            return
        most = self.method.critic_rows or prompts.shape[0]
        for rows in torch.arange(prompts.shape[0], device=prompts.device).split(most):
            own = None if mask is None else mask[rows]
            critic.fit(prompts[rows], out.tokens[rows], out.mask[rows], out.rewards[rows], mask=own)
        branches = out.branches
        if branches is None or branches.row.shape[0] == 0:
            return
        step = torch.arange(branches.tokens.shape[1], device=prompts.device)
        after = step >= branches.step.unsqueeze(-1)
        after = after & live_tokens(branches.tokens, self.questions.eos)
        own = None if mask is None else mask[branches.row]
        critic.fit(prompts[branches.row], branches.tokens, after, branches.rewards, mask=own)

    def _further_epoch(self, parts: list[_Part], count: int) -> None:
        """One more step on the same sequences, with clipped ratios."""
        self.optimiser.zero_grad()
        for part in parts:
            assert part.again is not None
            with autocast(self.device, self.precision):
                value = part.again()
            (-value.sum() / (count * self.parts)).backward()
        if self._processes > 1:
            self._add_up(torch.zeros(1, dtype=torch.float64))
        self._step()
        for part in parts:
            part.learn()

    def _recorded(self, totals: torch.Tensor, count: int) -> dict[str, float]:
        """Count the update; what to record of it."""
        generated, rollouts = (int(x) for x in totals[:2])
        last = generated / (count * self.parts)
        self.per_prompt = 0.8 * self.per_prompt + 0.2 * last if self.updates else last
        self.updates += 1
        self.tokens += generated
        self.prompts = count
        reward, kl = (totals[2:] / self.parts).tolist()
        record = {"reward": reward, "prompts": count * self.parts, "rollouts": rollouts}
        return record | ({"kl": kl} if self.kl else {})

    def _step(self) -> torch.Tensor:
        """One step of the optimiser; the gradient's norm before it was clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if not bool(norm.isfinite()):
            # a step would make every weight NaN, and the next sampling would be the first to say so
            raise FloatingPointError(
                f"The gradient of update {self.updates + 1} is not finite; the step was not taken."
            )
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * min(1.0, (self.updates + 1) / WARM)
        self.optimiser.step()
        return norm

    def score(self, tested: Questions) -> float:
        """The mean reward of one sampled answer per question: of right or wrong answers, the
        accuracy.
        """
        return float(self.scores(tested).mean())

    def scores(self, tested: Questions) -> torch.Tensor:
        """The reward [Q] of one sampled answer per question."""
        decoding = Decoding(tested.max_tokens, tested.eos, rows=self.max_rows)
        sampler = TokenSampler(self.model, decoding, None, self.vocabulary, self.precision, None)
        # the slots of the estimates: others would hold weights and caches a second time
        return sampled_rewards(sampler.slots(len(tested)), tested, self.device)

    def _add_up(self, totals: torch.Tensor) -> None:
        """Sums over the processes, which each hold the same weights."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        device_totals = totals.to(flat.device)
        dist.all_reduce(flat)
        dist.all_reduce(device_totals)
        totals.copy_(device_totals)
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def state_dict(self) -> dict[str, Any]:
        """All that learning goes on from."""
        return {
            "policy": weights(self.policy),
            "optimiser": self.optimiser.state_dict(),
            "reference": None if self.reference is None else weights(self.reference),
            "counters": [self.updates, self.tokens, self.per_prompt, self.prompts],
            "critic": None if self.method.critic is None else self.method.critic.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts(self.policy, state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])
        if self.reference is not None:
            load_parts(self.reference, state["reference"])
        self.updates, self.tokens, self.per_prompt, self.prompts = state["counters"]
        if self.method.critic is not None:
            self.method.critic.load_state_dict(state["critic"])


class Learning:
    """The loop: updates, measurements and checkpoints of one seed until its tokens are spent.

    Iterate over it for the tokens done so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        tested: Questions,
        run: Run | None,
        *,
        seed: int,
        tokens: int,
        measure_every: int,
        number: int = 0,
        saved: dict[str, Any] | None = None,
        checkpoints: bool = True,
        may_stop: bool = False,
    ) -> None:
        """Make one.

        Args:
            trainer: what learns.
            tested: questions to measure it on.
            run: where records and checkpoints go; None for nowhere, as on other ranks.
            seed: of the records.
            tokens: to generate in all.
            measure_every: updates between measurements.
            number: how many seeds of this run came before.
            saved: the state to go on from.
            checkpoints: write one with every measurement; else only `save` does.
            may_stop: end when the accuracy has fallen below LOST of its first.
        """
        self.trainer, self.tested, self.run = trainer, tested, run
        self.seed, self.tokens, self.measure_every = seed, tokens, measure_every
        self.number, self.checkpoints, self.may_stop = number, checkpoints, may_stop
        self.seconds = 0.0
        """Of learning, without measurements."""
        self.first: float | None = None
        """The first accuracy."""
        self.scores: torch.Tensor | None = None
        """The last measurement's rewards by question."""
        self._fresh = saved is None
        if saved is not None:
            trainer.load_state_dict(saved["trainer"])
            self.seconds, self.first = saved["seconds"], saved.get("first")

    def __iter__(self) -> Iterator[int]:
        trainer = self.trainer
        if self._fresh:
            self.measure({})
        while trainer.tokens < self.tokens:
            begun = time.monotonic()
            found = trainer.update()
            self.seconds += time.monotonic() - begun
            last = trainer.tokens >= self.tokens
            if last or trainer.updates % self.measure_every == 0:
                reached = self.measure(found)
                if self.may_stop and reached < LOST * (self.first or 0.0):
                    yield self.tokens
                    return
            yield min(trainer.tokens, self.tokens)

    def measure(self, found: dict[str, float]) -> float:
        """Record the accuracy and what the last update found."""
        if self.run is None:
            return float("nan")
        self.scores = self.trainer.scores(self.tested)
        reached = float(self.scores.mean())
        self.first = reached if self.first is None else self.first
        speed = {
            "learning_seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.trainer.tokens / (self.seconds or 1)),
        }
        metrics = {"accuracy": reached, "tokens": self.trainer.tokens, **found, **speed}
        self.run.log(self.trainer.updates, metrics, self.seed)
        if self.checkpoints:
            self.save()
        return reached

    def save(self) -> None:
        """Write a checkpoint."""
        if self.run is None:
            return
        done = self.number * self.tokens + min(self.trainer.tokens, self.tokens)
        state = {
            "number": self.number,
            "seconds": self.seconds,
            "first": self.first,
            "trainer": self.trainer.state_dict(),
        }
        self.run.save(done, state)


def weights(policy: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that learn, by name."""
    return {name: parameter.detach() for name, parameter in trained_parameters(policy).items()}


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """Compute in this type where that is safe; with None, in the weights' own."""
    return nullcontext() if precision is None else torch.autocast(device.type, precision)


def sampled_rewards(
    sampler: Slots | Waves, tested: Questions, device: torch.device
) -> torch.Tensor:
    """The reward [Q] of one sampled answer per question, with the same random numbers in every
    call.
    """
    generator = torch.Generator(device).manual_seed(1)
    prompts, mask, reward = tested.ask(torch.arange(len(tested)), device)
    row = torch.arange(len(tested), device=device)
    sampled = sampler.sample(
        prompts, mask, row, Decoding(tested.max_tokens, tested.eos), 1, generator
    )
    return reward(prompts, sampled.tokens[..., 0])
