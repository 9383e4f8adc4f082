"""Policy gradients on a task at equal tokens per update, one update at a time; and the imitation before them.

The policy is the experiments' small transformer, or any causal model of transformers, with or without LoRA.

An update's prompts come in parts. Each part has random numbers of its own, by seed, update and part: which process
computes it changes nothing, and a run that resumes needs no generator's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import arsm
from arsm import sequences
from arsm.sequences import (
    Branch,
    Decoding,
    Engine,
    Group,
    Model,
    Slots,
    Strategy,
    Transformers,
    Waves,
    by_likelihood,
    decoder,
    live_tokens,
)
from arsm.sequences.model import one_pass
from arsm_experiments.replicas import seed_of
from arsm_experiments.sequences.methods import Size, accuracy, cross_entropy, draw_rows
from arsm_experiments.sequences.pretrained import load_parts, trained_parameters
from arsm_experiments.sequences.questions import Questions
from arsm_experiments.sequences.tasks import VOCABULARY, Data
from arsm_experiments.sequences.texts import Texts
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


def as_model(policy: nn.Module) -> Model:
    """The small transformer itself; a causal model of transformers with what decoding needs."""
    return policy if isinstance(policy, Transformer) else Transformers(policy)


def most_tokens(strategy: Strategy, width: int, vocabulary: int) -> float:
    """About the most tokens that a prompt can cost, with answers of `width` tokens."""
    if not isinstance(strategy, Branch):
        return float(width * (strategy.samples or 1))
    rollouts = strategy.estimator.most_queries(torch.zeros(1, 1, vocabulary)) - 1
    return width * (1 + rollouts * width / 2)


class Trainer:
    """A policy and what makes it learn."""

    def __init__(
        self,
        policy: nn.Module,
        questions: Questions,
        strategy: Strategy,
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
            policy: the small transformer, or a causal model of transformers; parameters without gradients stay.
            questions: to learn from.
            strategy: how credit is given.
            rate: Adam's.
            seed: of everything random.
            tokens_per_update: mean number of generated tokens per update.
            kl: the cost of ln p - ln p_reference, per token.
            reference: a model like the policy to stay close to.
            parts: of an update, divided among the processes.
            max_rows: most sequences that are decoded side by side.
            micro_batch: most sequences per pass with a graph; None for max_rows.
            precision: sample with copies of the weights in this type, and compute gradients in it by autocast.
            engine: who samples; None for this process.
        """
        self.policy, self.questions, self.strategy = policy, questions, strategy
        self.model = as_model(policy)
        self.seed, self.parts, self.engine = seed, parts, engine
        self.max_rows, self.micro_batch, self.precision = max_rows, micro_batch or max_rows, precision
        self.kl, self.reference = kl, reference
        self._reference = None if reference is None else as_model(reference)
        self.parameters = list(trained_parameters(policy).values())
        self.device = self.parameters[0].device
        self.optimiser = torch.optim.Adam(self.parameters, lr=rate, betas=(0.9, 0.95))
        self.rate, self.tokens_per_update = rate, tokens_per_update
        self.updates = self.tokens = 0
        vocabulary = getattr(self.model, "vocabulary", VOCABULARY)
        self.per_prompt = most_tokens(strategy, questions.max_tokens, vocabulary)
        """Running mean of the tokens that a prompt costs; before the first update, the most."""
        several = dist.is_initialized()
        self._rank, self._processes = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._decoder: Slots | Waves | None = None

    def update(self) -> dict[str, float]:
        """One step uphill; what to record of it. An exception leaves everything as it was."""
        count = max(1, round(self.tokens_per_update / self.per_prompt / self.parts))
        self.optimiser.zero_grad()
        totals = torch.zeros(4, dtype=torch.float64)
        for part in range(self._rank, self.parts, self._processes):
            generator = torch.Generator(self.device).manual_seed(seed_of(f"part {self.seed} {self.updates} {part}"))
            rows = draw_rows(self.questions, count, generator)
            prompts, mask, reward = self.questions.ask(rows, self.device)
            with autocast(self.device, self.precision):
                out = sequences.estimate(
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
            (-out.value.sum() / (count * self.parts)).backward()
            found = [out.info["generated"], out.info["rollouts"], out.rewards.mean()]
            totals += torch.tensor([*map(float, found), float(out.info.get("kl", 0.0))], dtype=torch.float64)
        if self._processes > 1:
            self._add_up(totals)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
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

    def score(self, tested: Questions) -> float:
        """The mean reward of one sampled answer per question: of right or wrong answers, the accuracy."""
        if self._decoder is None:
            self._decoder = decoder(self.model, min(self.max_rows, len(tested)), dtype=self.precision)
        return mean_reward(self._decoder, tested, self.device)

    def _add_up(self, totals: torch.Tensor) -> None:
        """Sums over the processes, which each hold the same weights."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
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
            "policy": weights(self.policy),
            "optimiser": self.optimiser.state_dict(),
            "reference": None if self.reference is None else weights(self.reference),
            "counters": [self.updates, self.tokens, self.per_prompt],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_parts(self.policy, state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])
        if self.reference is not None:
            load_parts(self.reference, state["reference"])
        self.updates, self.tokens, self.per_prompt = state["counters"]


def weights(policy: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that learn, by name."""
    return {name: parameter.detach() for name, parameter in trained_parameters(policy).items()}


def autocast(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """Compute in this type where that is safe; with None, in the weights' own."""
    return nullcontext() if precision is None else torch.autocast(device.type, precision)


def mean_reward(sampler: Slots | Waves, tested: Questions, device: torch.device) -> float:
    """The mean reward of one sampled answer per question, with the same random numbers in every call."""
    generator = torch.Generator(device).manual_seed(1)
    prompts, mask, reward = tested.ask(torch.arange(len(tested)), device)
    row = torch.arange(len(tested), device=device)
    sampled = sampler.sample(prompts, mask, row, Decoding(tested.max_tokens, tested.eos), 1, generator)
    return float(reward(prompts, sampled.tokens[..., 0]).mean())


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


def fine_tune(
    policy: nn.Module,
    questions: Texts,
    *,
    rate: float,
    batch: int = 64,
    micro_batch: int = 16,
    precision: torch.dtype | None = None,
    seed: int = 0,
) -> Iterator[float]:
    """AdamW on the cross-entropy of right answers, without an end; yields each step's mean loss per token."""
    model = as_model(policy)
    parameters = list(trained_parameters(policy).values())
    device = parameters[0].device
    generator = torch.Generator(device).manual_seed(seed)
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARM))
    while True:
        rows = draw_rows(questions, batch, generator)
        prompts, mask, _ = questions.ask(rows, device)
        answers = questions.answers(rows, device)
        live = live_tokens(answers, questions.eos)
        optimiser.zero_grad()
        total = torch.zeros((), device=device)
        for some in torch.arange(batch, device=device).split(micro_batch):
            with autocast(device, precision):
                logits = one_pass(model, prompts[some], answers[some], None if mask is None else mask[some])
            wanted = live[some]
            summed = F.cross_entropy(logits[wanted].float(), answers[some][wanted], reduction="sum")
            loss = summed / live.sum()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        warm.step()
        yield float(total)
