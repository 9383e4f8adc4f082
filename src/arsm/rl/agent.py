"""`PolicyGradient`: an agent that learns by trying the actions it might have taken."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from arsm import policy
from arsm.categorical import entropy
from arsm.checks import check_estimator, legal_rows
from arsm.diagnostics import MovingVariance
from arsm.estimators import ARSM
from arsm.noise import dirichlet
from arsm.rl.branching import Array
from arsm.rl.environments import make_environment
from arsm.rl.learners import ActionConditioned, ActorCritic, Batch, Critic, Learner, Relax, TryAndSee, mlp
from arsm.rl.play import Branches, Episode, Policy, play_episodes, race_units
from arsm.rl.rollouts import make_engine
from arsm.rl.settings import Settings
from arsm.rl.stepped import Encoder, Stepped
from arsm.types import Estimator

DECAY = 0.99
CHECKED_STEPS = 50


@dataclass(frozen=True)
class Iteration:
    """What one iteration did."""

    iteration: int
    episodes: int
    """True episodes so far."""
    steps: int
    """Environment steps so far, rollouts counted, but not the way back to where they begin."""
    replayed: int
    """Steps of this iteration that were played again on that way."""
    returns: tuple[float, ...]
    """Undiscounted, of this iteration's true episodes."""
    rollouts: int
    pseudo_actions: float
    """A step, those that the budget left out counted."""
    entropy: float
    """Of the policy, averaged over steps and actions, in nats."""
    log_variance: float
    """Of the policy's gradient: moving averages with decay 0.99, averaged over all parameters."""
    seconds: float
    """Of this iteration."""
    cpu_seconds: float
    """Of this iteration, those of worker processes counted."""


class PolicyGradient:
    """A policy that learns from true episodes and from rollouts of the actions that it might have taken.

        agent = PolicyGradient("CartPole-v1", estimator=arsm.ARSM())
        agent.learn(episodes=300)
        action = agent.predict(observation)

    Args:
        environment: the name of a Gymnasium environment, or a function that makes one.
        estimator: one that `arsm.policy.plan` takes, such as ARSM or RLOO; or `ActorCritic()` or `ActionConditioned()`
            for a learned critic.
        settings: what to learn with; single ones may be given by name.
        horizon: the step at which an episode ends at the latest; a limit of the environment's own holds besides.
        encoder: makes a vector of an observation that is none, such as an image.
        engine: who plays the rollouts: "in-process", "pool" (worker processes) or "ray" (a cluster).
        workers: how many there are of them; as many as processors if None.
        address: of the Ray cluster; a local one if None.
    """

    def __init__(
        self,
        environment: str | Callable[[], gymnasium.Env[Any, Any]],
        estimator: Estimator | ActorCritic | ActionConditioned | None = None,
        *,
        settings: Settings | None = None,
        horizon: int | None = None,
        encoder: Encoder | None = None,
        engine: str = "in-process",
        workers: int | None = None,
        address: str | None = None,
        **changes: Any,
    ) -> None:
        self.settings = replace(settings or Settings(), **changes)
        self.environment = make_environment(environment, horizon, encoder)
        choices = self.environment.choices
        hidden = self.settings.hidden
        generator = torch.Generator().manual_seed(self.settings.seed)
        self.network = mlp(self.environment.observations, hidden, len(choices) * max(choices), generator)
        self.learner = self._learner(estimator or ARSM(), hidden, generator)
        kinds = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}
        self._optimizers = [
            kinds[self.settings.optimizer](parameters, lr=self.settings.learning_rate, foreach=True)
            for parameters in (list(self.network.parameters()), self.learner.parameters())
            if parameters
        ]
        self._variance = MovingVariance(DECAY)
        self.iteration = self.episodes = self.steps = 0
        self._check_budget()
        self._engine = make_engine(engine, self.environment, workers, address)

    def _learner(
        self,
        estimator: Estimator | ActorCritic | ActionConditioned,
        hidden: tuple[int, ...],
        generator: torch.Generator,
    ) -> Learner:
        inputs, choices = self.environment.observations, self.environment.choices
        if isinstance(estimator, ActorCritic):
            return Critic(estimator, inputs, hidden, self.settings.gamma, generator)
        if isinstance(estimator, ActionConditioned):
            return Relax(estimator, inputs + len(choices) * max(choices), hidden, generator)
        check_estimator(estimator)
        if len(estimator.learned):
            raise ValueError(
                f"{type(estimator).__name__} learns a control variate of relaxed samples, which an episode does not "
                'have; use ActionConditioned(), the method "relax" of `arsm control`.'
            )
        return TryAndSee(estimator)

    @property
    def _learning_rate(self) -> float:
        over = self.settings.decay_over
        left = 1.0 if over is None else max(0.0, 1.0 - self.episodes / over)
        return left * self.settings.learning_rate

    def _check_budget(self) -> None:
        """Refuse what a plan would refuse, before anything is played."""
        logits = self._mask(torch.zeros(1, CHECKED_STEPS, *self._logits_shape, dtype=torch.float64))
        first = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        policy.plan(self.learner.estimator, logits, first, budget=self._budget, generator=torch.Generator())

    @property
    def _logits_shape(self) -> tuple[int, int]:
        return len(self.environment.choices), max(self.environment.choices)

    @property
    def _budget(self) -> int | None:
        return None if self.settings.budget is None else self.settings.budget * self.settings.episodes_an_iteration

    @property
    def policy(self) -> Policy:
        """The policy in NumPy, as it is now."""
        linear = (layer for layer in self.network if isinstance(layer, torch.nn.Linear))
        layers = tuple((x.weight.detach().clone().numpy().T, x.bias.detach().clone().numpy()) for x in linear)
        return Policy(layers, self.environment.choices)

    def predict(self, observation: Any, *, deterministic: bool = True) -> Any:
        """The action for one observation: the likeliest, or a sample."""
        world = self.environment
        seen = world.encode(observation) if isinstance(world, Stepped) else np.asarray(observation, dtype=np.float64)
        if seen.shape != (world.observations,):
            raise ValueError(f"An observation must have {world.observations} numbers, but this has {list(seen.shape)}.")
        logits = self.policy.logits(seen[None])
        noise = np.zeros_like(logits)
        if not deterministic:
            noise = race_units(np.log(np.random.default_rng().standard_exponential(logits.shape)))
        actions = self.policy.act(logits, noise)
        return world.native(actions)[0] if isinstance(world, Stepped) else int(actions[0, 0])

    def learn(self, episodes: int) -> list[Iteration]:
        """Play this many true episodes more and learn from each iteration's."""
        return list(self.iterations(episodes))

    def iterations(self, episodes: int) -> Iterator[Iteration]:
        """As `learn`, one iteration at a time. What was learned before an error stays."""
        target = self.episodes + episodes
        while self.episodes < target:
            yield self._iterate()

    def _iterate(self) -> Iteration:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        settings, world, estimator = self.settings, self.environment, self.learner.estimator
        count, horizon = settings.episodes_an_iteration, world.horizon
        # every iteration has random numbers of its own, so that one that resumes needs no generator's state
        streams = np.random.SeedSequence([settings.seed, self.iteration]).generate_state(2 + count, np.uint64)
        generator = torch.Generator().manual_seed(int(streams[0] >> np.uint64(1)))
        log_pi = dirichlet(torch.zeros(count, horizon, *self._logits_shape, dtype=torch.float64), generator)
        units = race_units(log_pi.numpy())
        current = self.policy
        seeds = [int(stream >> np.uint64(33)) for stream in streams[2:]]
        played = play_episodes(world, current, seeds, units)

        batch = self._batch(played)
        if not bool(legal_rows(batch.logits).all()):
            raise FloatingPointError(
                f"The policy's logits are not finite after episode {self.episodes}; try a smaller learning rate than "
                f"{settings.learning_rate:g}."
            )
        plan = policy.plan(
            estimator,
            batch.logits.unsqueeze(0),
            torch.from_numpy(np.concatenate([one.actions for one in played])).unsqueeze(0),
            budget=self._budget,
            generator=generator,
            weighted=settings.weighted,
        )
        common = units if settings.common_random_numbers else None
        branches = self._branches(plan, played, int(streams[1]), common)
        rollouts = self._engine.play(current, branches)
        mean_entropy = self._update(batch, plan, torch.from_numpy(settings.reward_scale * rollouts.returns))

        self.iteration += 1
        self.episodes += count
        self.steps += sum(batch.lengths) + rollouts.steps
        return Iteration(
            iteration=self.iteration,
            episodes=self.episodes,
            steps=self.steps,
            replayed=rollouts.replayed,
            returns=tuple(float(one.rewards.sum()) for one in played),
            rollouts=len(branches),
            pseudo_actions=float(plan.pseudo_actions.sum()) / sum(batch.lengths),
            entropy=mean_entropy,
            log_variance=math.log(max(float(self._variance.mean()), sys.float_info.min)),
            seconds=time.perf_counter() - begin,
            cpu_seconds=time.process_time() - begin_cpu + rollouts.cpu_seconds,
        )

    def _branches(self, plan: policy.Rollouts, played: list[Episode], key: int, noise: Array | None) -> Branches:
        """The plan's steps, which are numbered through all episodes, as steps of each."""
        offset = np.cumsum([0, *(len(one.rewards) for one in played)])
        step = plan.step.numpy()
        episode = np.searchsorted(offset, step, "right") - 1
        return Branches(
            trails=tuple(one.trail for one in played),
            episode=episode,
            step=step - offset[episode],
            action=plan.action.numpy(),
            key=key,
            number=np.arange(len(step)),
            gamma=self.settings.gamma,
            noise=noise,
        )

    def _batch(self, played: list[Episode]) -> Batch:
        gamma, scale = self.settings.gamma, self.settings.reward_scale

        def join(parts: list[Array]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts))

        lengths = tuple(len(one.rewards) for one in played)
        discount = None
        if self.settings.discounting == "gamma^t":
            discount = gamma ** torch.cat([torch.arange(length, dtype=torch.float64) for length in lengths])
        return Batch(
            observations=join([one.observations for one in played]),
            logits=self._mask(join([one.logits for one in played])),
            rewards=scale * join([one.rewards for one in played]),
            returns=scale * join([one.returns(gamma) for one in played]),
            discount=discount,
            lengths=lengths,
            last_observations=torch.from_numpy(np.stack([one.last_observation for one in played])),
            terminated=tuple(one.terminated for one in played),
        )

    def _mask(self, logits: Tensor) -> Tensor:
        masked = Policy((), self.environment.choices).masked
        return logits if masked is None else logits.masked_fill(torch.from_numpy(masked), -torch.inf)

    def _update(self, batch: Batch, plan: policy.Rollouts, rollout_returns: Tensor) -> float:
        """One step uphill; returns the policy's entropy."""
        grad, loss = self.learner.gradient(batch, plan, rollout_returns)
        logits = self._mask(self.network(batch.observations).view_as(batch.logits))
        total_entropy = entropy(logits).sum()
        scale = 1 / len(batch.lengths)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        objective = (logits.masked_fill(logits == -torch.inf, 0) * grad).sum()
        if self.settings.entropy:
            objective = objective + self.settings.entropy * total_entropy
        (-scale * objective).backward()
        if loss is not None:
            (scale * loss).backward()
        self._variance.update([p.grad for p in self.network.parameters() if p.grad is not None])
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate
            optimizer.step()
        return float(total_entropy.detach()) / (batch.logits.shape[0] * batch.logits.shape[1])

    def state_dict(self) -> dict[str, Any]:
        """All that learning goes on from."""
        return {
            "network": self.network.state_dict(),
            "learner": [parameter.detach().clone() for parameter in self.learner.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "variance": self._variance.state_dict(),
            "counters": [self.iteration, self.episodes, self.steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        with torch.no_grad():
            for parameter, saved in zip(self.learner.parameters(), state["learner"], strict=True):
                parameter.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._variance.load_state_dict(state["variance"])
        self.iteration, self.episodes, self.steps = state["counters"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the agent to a file, whole or not at all."""
        path = Path(path)
        beside = path.with_name(f".{path.name}.tmp")
        torch.save({"agent": self._identity(), "state": self.state_dict()}, beside)
        beside.replace(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that an agent of the same environment and networks wrote."""
        saved = torch.load(path, weights_only=True)
        if not isinstance(saved, dict) or "agent" not in saved:
            raise ValueError(f"{path} was not written by PolicyGradient.save.")
        mine = self._identity()
        if saved["agent"] != mine:
            differ = ", ".join(
                f"{key} ({saved['agent'].get(key)})" for key in mine if saved["agent"].get(key) != mine[key]
            )
            raise ValueError(f"{path} holds an agent with another {differ}; make this one like it.")
        self.load_state_dict(saved["state"])

    def _identity(self) -> dict[str, Any]:
        return {
            "environment": self.environment.name,
            "observations": self.environment.observations,
            "choices": list(self.environment.choices),
            "hidden": list(self.settings.hidden),
            "optimizer": self.settings.optimizer,
            "learner": type(self.learner).__name__,
        }

    def close(self) -> None:
        """End the engine's workers, and close the environments."""
        self._engine.close()
        self.environment.close()
