"""Policy gradients on a task at equal tokens per update, one update at a time; and the imitation before them.

An update's prompts come in parts. Each part has random numbers of its own, by seed, update and part: which process
computes it changes nothing, and a run that resumes needs no generator's state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import arsm
from arsm import sequences
from arsm.sequences import Branch, Engine, Group, Strategy
from arsm_experiments.engine import seed_of
from arsm_experiments.sequences.methods import Size, accuracy, cross_entropy, draw_rows
from arsm_experiments.sequences.tasks import EOS, TASKS, VOCABULARY, Data, ExactMatch
from arsm_experiments.sequences.transformer import Transformer

GROUPS: dict[str, dict[str, Any]] = {
    "group": {},
    "token-baseline": {"baseline": "token"},
    "dr-grpo": {"baseline": "mean"},
    "grpo": {"normalise": "std"},
}
RUNNING = 0.2
"""Weight of the last update in running means."""


def named_strategy(words: str) -> Strategy:
    """ "branch:ESTIMATOR", or "group:N", "grpo:N", "dr-grpo:N", "token-baseline:N" with N answers per prompt."""
    kind, _, rest = words.partition(":")
    if kind == "branch":
        return Branch(arsm.estimator(rest or "rloo:samples=8"))
    if kind not in GROUPS:
        raise ValueError(f'There is no strategy "{words}"; there are branch:ESTIMATOR, {":N, ".join(GROUPS)}:N.')
    if not (rest or "8").isdigit():
        raise ValueError(f'"{words}" must name a number of answers per prompt, as {kind}:8 does.')
    return Group(int(rest or 8), **GROUPS[kind])


@dataclass
class Spending:
    """How many prompts and rollouts an update's tokens are spent on, from what the last updates cost."""

    tokens: int
    """Of an update."""
    true_share: float
    """The part of them that true sequences get, where rollouts have a budget; 0 for no budget."""
    per_prompt: float
    """Tokens of a prompt; with a budget, those of its true sequence alone."""
    per_rollout: float

    @staticmethod
    def start(strategy: Strategy, tokens: int, true_share: float, width: int) -> Spending:
        """Before anything is known: all answers have `width` tokens."""
        if not isinstance(strategy, Branch):
            return Spending(tokens, 0.0, float(width * (strategy.samples or 1)), 1.0)
        return Spending(tokens, true_share, float(width if true_share else width * (1 + 2 * width)), width / 2)

    def prompts(self) -> float:
        """Of an update."""
        return (self.true_share or 1.0) * self.tokens / self.per_prompt

    def rollouts(self) -> float:
        """Of an update, with a budget."""
        return (1 - self.true_share) * self.tokens / self.per_rollout

    def learn(self, prompts: int, true: int, generated: int, rollouts: int) -> None:
        """Running means, which the next update is planned with."""
        self.per_prompt += RUNNING * ((true if self.true_share else generated) / prompts - self.per_prompt)
        if rollouts:
            self.per_rollout += RUNNING * ((generated - true) / rollouts - self.per_rollout)


class Trainer:
    """A policy and what makes it learn."""

    def __init__(
        self,
        policy: Transformer,
        task: str,
        questions: Data,
        strategy: Strategy,
        *,
        rate: float,
        seed: int,
        tokens_per_update: int,
        true_share: float = 0.0,
        kl: float = 0.0,
        reference: Transformer | None = None,
        parts: int = 1,
        max_rows: int = 1024,
        engine: Engine | None = None,
    ) -> None:
        self.policy, self.task, self.questions, self.strategy = policy, task, questions, strategy
        self.seed, self.parts, self.max_rows, self.engine = seed, parts, max_rows, engine
        self.kl, self.reference = kl, reference
        self.optimiser = torch.optim.Adam(policy.parameters(), lr=rate, betas=(0.9, 0.95))
        self.spending = Spending.start(strategy, tokens_per_update, true_share, TASKS[task].answer_tokens)
        self.updates = self.tokens = 0
        several = dist.is_initialized()
        self._rank, self._processes = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        if isinstance(strategy, Branch):
            state = torch.zeros(1, 1, VOCABULARY)
            self._least = max(2, strategy.estimator.most_queries(state) - 1)

    def update(self) -> dict[str, float]:
        """One step uphill; what to record of it. An exception leaves everything as it was."""
        device = self.policy.head.weight.device
        count = max(1, round(self.spending.prompts() / self.parts))
        strategy = self.strategy
        if isinstance(strategy, Branch) and self.spending.true_share:
            budget = max(self._least, round(self.spending.rollouts() / self.parts))
            strategy = replace(strategy, budget=budget)
        self.optimiser.zero_grad()
        totals = torch.zeros(5, dtype=torch.float64)
        for part in range(self._rank, self.parts, self._processes):
            generator = torch.Generator(device).manual_seed(seed_of(f"part {self.seed} {self.updates} {part}"))
            rows = draw_rows(self.questions, count, generator)
            prompts, answers = self.questions.batch(rows, str(device))
            out = sequences.estimate(
                strategy,
                self.policy,
                prompts,
                ExactMatch(prompts, answers),
                max_tokens=TASKS[self.task].answer_tokens,
                eos=EOS,
                reference=self.reference,
                kl=self.kl,
                max_rows=self.max_rows,
                engine=self.engine,
                generator=generator,
            )
            (-out.value.sum() / (count * self.parts)).backward()
            found = [out.mask.sum(), out.info["generated"], out.info["rollouts"], out.rewards.mean()]
            totals += torch.tensor([*map(float, found), float(out.info.get("kl", 0.0))], dtype=torch.float64)
        if self._processes > 1:
            self._add_up(totals)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimiser.step()
        true, generated, rollouts = (int(x) for x in totals[:3])
        self.spending.learn(count * self.parts, true, generated, rollouts)
        self.updates, self.tokens = self.updates + 1, self.tokens + generated
        reward, kl = (totals[3:] / self.parts).tolist()
        record = {"reward": reward, "prompts": count * self.parts, "rollouts": rollouts, "gradient_norm": float(norm)}
        return record | ({"kl": kl} if self.kl else {})

    def _add_up(self, totals: torch.Tensor) -> None:
        """Sums over the processes, which each hold the same weights."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        device_totals = totals.to(flat.device)
        dist.all_reduce(flat)
        dist.all_reduce(device_totals)
        totals.copy_(device_totals)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def state_dict(self) -> dict[str, Any]:
        """All that learning goes on from."""
        return {
            "policy": self.policy.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "spending": dataclasses.asdict(self.spending),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "counters": [self.updates, self.tokens],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.spending = Spending(**state["spending"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        self.updates, self.tokens = state["counters"]


def imitate(policy: Transformer, task: str, data: Data, size: Size, rate: float = 1e-3) -> Iterator[float]:
    """Cross-entropy on right answers, without an end; yields the accuracy on held-out questions every ten steps."""
    device = str(policy.head.weight.device)
    generator = torch.Generator(device).manual_seed(0)
    train, test = data.split(size.held_out)
    test = Data(test.prompts[: size.tested], test.answers[: size.tested])
    optimiser = torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 50))
    while True:
        for _ in range(10):
            loss = cross_entropy(policy, *train.batch(draw_rows(train, size.batch, generator), device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            warm.step()
        yield accuracy(policy, task, test, torch.Generator(device).manual_seed(1))
