"""Policy gradients on a task at equal tokens per update, one update at a time; and the imitation before them.

An update's prompts come in parts. Each part has random numbers of its own, by seed, update and part: which process
computes it changes nothing, and a run that resumes needs no generator's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import arsm
from arsm import sequences
from arsm.sequences import Branch, Engine, Group, Strategy, by_likelihood
from arsm_experiments.replicas import seed_of
from arsm_experiments.sequences.methods import Size, accuracy, cross_entropy, draw_rows
from arsm_experiments.sequences.tasks import EOS, TASKS, VOCABULARY, Data, ExactMatch
from arsm_experiments.sequences.transformer import Transformer

GROUPS = {"group": "rloo", "token-baseline": "otb", "dr-grpo": "dr-grpo", "grpo": "grpo"}
"""The estimator of each kind of group."""
WARM = 10
"""Updates over which the rate rises."""


def named_strategy(words: str) -> Strategy:
    """ "branch:ESTIMATOR" or "chance:ESTIMATOR", or "group:N", "grpo:N", "dr-grpo:N", "token-baseline:N"."""
    kind, _, rest = words.partition(":")
    if kind == "branch":
        return Branch(arsm.estimator(rest or "rloo:samples=8"))
    if kind == "chance":
        return Branch(arsm.estimator(rest or "local-expectation"), chance=by_likelihood())
    if kind not in GROUPS:
        raise ValueError(
            f'There is no strategy "{words}"; there are branch:ESTIMATOR, chance:ESTIMATOR, {":N, ".join(GROUPS)}:N.'
        )
    if not (rest or "8").isdigit() or int(rest or 8) < 2:
        raise ValueError(f'"{words}" must name a number of answers per prompt, at least 2, as {kind}:8 does.')
    return Group(arsm.estimator(f"{GROUPS[kind]}:samples={rest or 8}"))


def most_tokens(strategy: Strategy, width: int) -> float:
    """About the most tokens that a prompt can cost, with answers of `width` tokens."""
    if not isinstance(strategy, Branch):
        return float(width * (strategy.samples or 1))
    rollouts = strategy.estimator.most_queries(torch.zeros(1, 1, VOCABULARY)) - 1
    return width * (1 + rollouts * width / 2)


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
        self.rate, self.tokens_per_update = rate, tokens_per_update
        self.updates = self.tokens = 0
        self.per_prompt = most_tokens(strategy, TASKS[task].answer_tokens)
        """Running mean of the tokens that a prompt costs; before the first update, the most."""
        several = dist.is_initialized()
        self._rank, self._processes = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)

    def update(self) -> dict[str, float]:
        """One step uphill; what to record of it. An exception leaves everything as it was."""
        device = self.policy.head.weight.device
        count = max(1, round(self.tokens_per_update / self.per_prompt / self.parts))
        self.optimiser.zero_grad()
        totals = torch.zeros(4, dtype=torch.float64)
        for part in range(self._rank, self.parts, self._processes):
            generator = torch.Generator(device).manual_seed(seed_of(f"part {self.seed} {self.updates} {part}"))
            rows = draw_rows(self.questions, count, generator)
            prompts, answers = self.questions.batch(rows, str(device))
            out = sequences.estimate(
                self.strategy,
                self.policy,
                prompts,
                ExactMatch(prompts, answers),
                max_tokens=TASKS[self.task].answer_tokens,
                eos=EOS,
                reference=self.reference,
                kl=self.kl,
                rows=self.max_rows,
                micro_batch=self.max_rows,
                engine=self.engine,
                generator=generator,
            )
            (-out.value.sum() / (count * self.parts)).backward()
            found = [out.info["generated"], out.info["rollouts"], out.rewards.mean()]
            totals += torch.tensor([*map(float, found), float(out.info.get("kl", 0.0))], dtype=torch.float64)
        if self._processes > 1:
            self._add_up(totals)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * min(1.0, (self.updates + 1) / WARM)
        self.optimiser.step()
        generated, rollouts = (int(x) for x in totals[:2])
        last = generated / (count * self.parts)
        self.per_prompt = 0.8 * self.per_prompt + 0.2 * last if self.updates else last
        self.updates, self.tokens = self.updates + 1, self.tokens + generated
        reward, kl = (totals[2:] / self.parts).tolist()
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
            "reference": None if self.reference is None else self.reference.state_dict(),
            "counters": [self.updates, self.tokens, self.per_prompt],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        self.updates, self.tokens, self.per_prompt = state["counters"]


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
