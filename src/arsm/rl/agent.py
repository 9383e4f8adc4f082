"""`PolicyGradient`: an agent that learns by trying the actions it might have taken."""

from __future__ import annotations

import copy
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from arsm import policy as rollouts
from arsm.categorical import entropy
from arsm.checks import check_estimator, legal_rows
from arsm.diagnostics import MovingVariance
from arsm.estimators import RLOO
from arsm.rl import files
from arsm.rl.branching import Array
from arsm.rl.environments import make_environment
from arsm.rl.learners import ActionConditioned, ActorCritic, Batch, Critic, Learner, Relax, TryAndSee
from arsm.rl.networks import TeamNetwork, mlp, perceptron
from arsm.rl.play import Branches, Episode, play_episodes
from arsm.rl.policies import ModulePolicy, Policy, act
from arsm.rl.progress import Progress
from arsm.rl.rollouts import make_engine
from arsm.rl.settings import Settings, check_count, check_seed
from arsm.rl.snapshots import Snapshot
from arsm.rl.spaces import Encoder, exists, full_mask
from arsm.rl.stepped import Stepped
from arsm.rl.streams import Still, Tape, race_units
from arsm.types import Estimator

DECAY = 0.99
CHECKED_STEPS = 50
TOGETHER = 32
"""Episodes of an evaluation that are played at once."""
KINDS = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}


@dataclass(frozen=True)
class Iteration:
    """The record of one iteration."""

    iteration: int
    episodes: int
    """True episodes so far."""
    steps: int
    """Environment steps so far, rollouts included, but not the way back to where they begin."""
    replayed: int
    """Steps of this iteration that were played again on that way."""
    returns: tuple[float, ...]
    """Undiscounted, of this iteration's true episodes."""
    rollouts: int
    pseudo_actions: float
    """Mean pseudo actions per step, before the budget."""
    entropy: float
    """Of the policy, averaged over steps and actions, in nats."""
    log_variance: float
    """Of the policy's gradient: moving averages with decay 0.99, averaged over all parameters."""
    seconds: float
    """Of this iteration."""
    cpu_seconds: float
    """Of this iteration, worker processes included."""


@dataclass(frozen=True)
class Evaluation:
    """Returns of a policy that does not learn."""

    mean: float
    standard_error: float
    returns: tuple[float, ...]


class PolicyGradient:
    """A policy that learns from true episodes and from rollouts of the actions that it might have taken.

        agent = PolicyGradient("CartPole-v1")
        agent.learn(seconds=20)
        print(agent.evaluate(episodes=100).mean)
        action = agent.predict(observation)

    Args:
        environment: the name of a Gymnasium environment, or a function that makes one, or a PettingZoo parallel one.
        estimator: one that `arsm.policy.plan` takes, such as ARSM or RLOO, by default RLOO(2); or `ActorCritic()` or
            `ActionConditioned()` for a learned critic.
        policy: a module from observations [N, *shape] to the logits [N, K C] of K actions; by default an MLP in NumPy.
            It is used in evaluation mode and on its own device.
        settings: what to learn with; single settings may be given by name.
        horizon: the step at which an episode ends at the latest; a limit of the environment's own holds besides.
        encoder: makes a vector of an observation, instead of the encoding for its space.
        snapshot: (get, set), the fastest way to branch: get(environment) returns its state, set(environment, state)
            puts it back.
        randomness: whether rollouts in a stochastic environment see the "same" random numbers as the true episode, or
            "fresh" ones.
        options: arguments of gymnasium.make, for an environment by name.
        shared_policy: whether the agents of a team share one network or have one each.
        engine: who plays the rollouts: "in-process", "pool" (worker processes) or "ray" (a cluster).
        workers: number of workers (default: one per processor).
        address: of the Ray cluster; a local one if None.
    """

    def __init__(
        self,
        environment: str | Callable[[], Any],
        estimator: Estimator | ActorCritic | ActionConditioned | None = None,
        *,
        policy: nn.Module | None = None,
        settings: Settings | None = None,
        horizon: int | None = None,
        encoder: Encoder | None = None,
        snapshot: Snapshot | None = None,
        randomness: Literal["same", "fresh"] = "same",
        options: dict[str, Any] | None = None,
        shared_policy: bool = True,
        engine: str = "in-process",
        workers: int | None = None,
        address: str | None = None,
        **changes: Any,
    ) -> None:
        self.settings = replace(settings or Settings(), **changes)
        estimator = estimator or RLOO(2)
        if isinstance(estimator, Estimator):
            _check_learned(estimator)
        elif not isinstance(estimator, ActorCritic | ActionConditioned):
            check_estimator(estimator)
        if policy is not None and not (isinstance(policy, nn.Module) and list(policy.parameters())):
            raise TypeError(f"policy must be a torch.nn.Module with parameters, but is {policy!r}.")
        self.environment = make_environment(
            environment, horizon, encoder, snapshot=snapshot, randomness=randomness, options=options
        )
        generator = torch.Generator().manual_seed(self.settings.seed)
        self.network = self._mlp(shared_policy, generator) if policy is None else policy.eval()
        self._made = policy is None
        self.learner = self._learner(estimator, self.settings.hidden, generator)
        self._optimizers = [
            KINDS[self.settings.optimizer](parameters, lr=self.settings.learning_rate, foreach=True)
            for parameters in (list(self.network.parameters()), self.learner.parameters())
            if parameters
        ]
        self._variance = MovingVariance(DECAY)
        self.iteration = self.episodes = self.steps = self.replayed = 0
        self._arguments = {
            "environment": environment if isinstance(environment, str) else None,
            "horizon": horizon,
            "randomness": randomness,
            "options": options,
            "shared_policy": shared_policy,
            "encoder": encoder is not None,
            "snapshot": snapshot is not None,
            "policy": policy is not None,
        }
        self._kind = estimator
        self._check_policy()
        self._engine = make_engine(engine, self.environment, workers, address)

    def _mlp(self, shared: bool, generator: torch.Generator) -> nn.Module:
        world, hidden = self.environment, self.settings.hidden
        inputs, outputs = world.observations // world.agents, len(world.choices) * max(world.choices) // world.agents
        if world.agents == 1:
            return mlp(inputs, hidden, outputs, generator)
        if len(world.choices) % world.agents:
            raise ValueError(
                f"The {world.agents} agents of {world.name} have {len(world.choices)} actions together, but an MLP per "
                "agent needs as many for each; give a policy of your own."
            )
        count = 1 if shared else world.agents
        return TeamNetwork([mlp(inputs, hidden, outputs, generator) for _ in range(count)], world.agents)

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
        return TryAndSee(estimator)

    @property
    def _learning_rate(self) -> float:
        over = self.settings.decay_over
        left = 1.0 if over is None else max(0.0, 1.0 - self.episodes / over)
        return left * self.settings.learning_rate

    def _check_policy(self) -> None:
        """Refuse a budget or a module that would fail later, before anything is played."""
        world = self.environment
        seen = np.zeros((CHECKED_STEPS, world.observations))
        if world.masks:
            seen = np.concatenate([seen, np.ones((CHECKED_STEPS, math.prod(self._logits_shape)))], 1)
            seen[:, world.observations :] *= exists(world.choices).reshape(-1)
        like = self.policy.logits(seen)
        logits = torch.from_numpy(np.where(like > -np.inf, 0.0, -np.inf)).unsqueeze(0)
        first = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        rollouts.plan(self.learner.estimator, logits, first, budget=self._budget, generator=torch.Generator())

    @property
    def _logits_shape(self) -> tuple[int, int]:
        return len(self.environment.choices), max(self.environment.choices)

    @property
    def _budget(self) -> int | None:
        return None if self.settings.budget is None else self.settings.budget * self.settings.episodes_an_iteration

    @property
    def policy(self) -> Policy:
        """The policy as it is now: a copy that plays."""
        world = self.environment
        if self._made:
            assert isinstance(self.network, nn.Sequential | TeamNetwork)
            return perceptron(self.network, world.choices)
        return ModulePolicy(copy.deepcopy(self.network), world.shape, world.choices)

    # ---------------------------------------------------------------- playing

    def predict(self, observation: Any, *, deterministic: bool = True, mask: Any = None, batch: bool = False) -> Any:
        """The action for an observation: the likeliest, or a sample.

        Args:
            observation: one as the environment gives it; of a team, {agent: observation}.
            deterministic: False samples.
            mask: the action mask, as the environment gives it; None allows all actions.
            batch: True takes a sequence of observations (and of masks) and gives the list of their actions.
        """
        if not batch:
            return self.predict([observation], deterministic=deterministic, mask=[mask], batch=True)[0]
        world, current = self.environment, self.policy
        masks = [None] * len(observation) if mask is None else list(mask)
        seen = [self._vector(each, own) for each, own in zip(observation, masks, strict=True)]
        logits = current.logits(np.stack(seen))
        noise = np.zeros_like(logits)
        if not deterministic:
            noise = race_units(np.log(np.random.default_rng().standard_exponential(logits.shape)))
        actions = act(logits, noise)
        if not isinstance(world, Stepped):
            return actions[:, 0].tolist()
        team = world.team()
        return world.native(actions) if team is None else [team.split(joint) for joint in actions]

    def _vector(self, observation: Any, mask: Any) -> Array:
        world = self.environment
        if isinstance(world, Stepped) and (team := world.team()) is not None:
            observation = team.join(observation)
        seen = world.encode(observation) if isinstance(world, Stepped) else np.asarray(observation, dtype=np.float64)
        if seen.shape != (world.observations,):
            raise ValueError(f"An observation must have {world.observations} numbers, but this has {list(seen.shape)}.")
        if not world.masks and mask is None:
            return seen
        allowed = exists(world.choices).reshape(-1) if mask is None else full_mask(mask, world.choices)
        return np.concatenate([seen, allowed])

    def evaluate(self, episodes: int = 100, *, deterministic: bool = True, seed: int = 0) -> Evaluation:
        """Play episodes without learning: the mean undiscounted return and its standard error.

        Args:
            episodes: how many.
            deterministic: take the likeliest actions; False samples.
            seed: of the episodes, which training does not see.
        """
        check_count("episodes", episodes)
        check_seed(seed)
        seeds = np.random.SeedSequence([seed, 0, 0]).generate_state(episodes + 1, np.uint64)
        current, returns = self.policy, []
        for first in range(1, episodes + 1, TOGETHER):
            own = [int(each >> np.uint64(33)) for each in seeds[first : first + TOGETHER]]
            noise = Still() if deterministic else Tape(int(seeds[0]) + first, len(own), self._logits_shape)
            returns += [float(one.rewards.sum()) for one in play_episodes(self.environment, current, own, noise)]
        error = float(np.std(returns, ddof=1)) / math.sqrt(episodes) if episodes > 1 else math.nan
        return Evaluation(float(np.mean(returns)), error, tuple(returns))

    # ---------------------------------------------------------------- learning

    def learn(
        self,
        episodes: int | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        *,
        callback: Callable[[Iteration], object] | None = None,
        progress: bool = True,
    ) -> list[Iteration]:
        """Learn until the first of these limits is reached, each counted from now.

        Args:
            episodes: true episodes.
            steps: all steps of the environment, those of rollouts and of the way back to them included.
            seconds: by the clock on the wall.
            callback: called with each iteration; if it returns False, learning ends.
            progress: show a line with the time left, if the standard error is a terminal and it takes over two seconds.
        """
        history = []
        with Progress(enabled=progress) as line:
            for iteration in self.iterations(episodes, steps, seconds, line.update):
                history.append(iteration)
                if callback is not None and callback(iteration) is False:
                    break
        return history

    def iterations(
        self,
        episodes: int | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        report: Callable[[float, Iteration], object] | None = None,
    ) -> Iterator[Iteration]:
        """As `learn`, one iteration at a time. What was learned before an error stays.

        `report` is called with the share of the way to the nearest limit.
        """
        limits = {"episodes": episodes, "steps": steps, "seconds": seconds}
        if all(limit is None for limit in limits.values()):
            raise ValueError("Say how long to learn: episodes, steps or seconds.")
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be finite and not negative, but is {seconds}.")
        for name, limit in (("episodes", episodes), ("steps", steps)):
            if limit:
                check_count(name, limit)
        begin = self._clock()

        def spent() -> float:
            now = self._clock()
            shares = ((now[name] - begin[name]) / limit for name, limit in limits.items() if limit)
            return 1.0 if 0 in limits.values() else max(shares)

        while spent() < 1:
            iteration = self._iterate()
            if report is not None:
                report(spent(), iteration)
            yield iteration

    def _clock(self) -> dict[str, float]:
        return {"episodes": self.episodes, "steps": self.steps + self.replayed, "seconds": time.perf_counter()}

    def _iterate(self) -> Iteration:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        settings, world, estimator = self.settings, self.environment, self.learner.estimator
        count = settings.episodes_an_iteration
        # every iteration has random numbers of its own, so that one that resumes needs no generator's state
        streams = np.random.SeedSequence([settings.seed, self.iteration]).generate_state(3 + count, np.uint64)
        generator = torch.Generator().manual_seed(int(streams[0] >> np.uint64(1)))
        true, branched = int(streams[1]), int(streams[2])
        current = self.policy
        seeds = [int(stream >> np.uint64(33)) for stream in streams[3:]]
        played = play_episodes(world, current, seeds, Tape(true, count, self._logits_shape))

        batch = self._batch(played)
        if not bool(legal_rows(batch.logits).all()):
            raise FloatingPointError(
                f"The policy's logits are not finite after episode {self.episodes}; try a smaller learning rate than "
                f"{settings.learning_rate:g}."
            )
        plan = rollouts.plan(
            estimator,
            batch.logits.unsqueeze(0),
            torch.from_numpy(np.concatenate([one.actions for one in played])).unsqueeze(0),
            budget=self._budget,
            generator=generator,
            weighted=settings.weighted,
        )
        branches = self._branches(plan, played, branched, true if settings.common_random_numbers else None)
        tried = self._engine.play(current, branches)
        mean_entropy = self._update(batch, plan, torch.from_numpy(settings.reward_scale * tried.returns))

        self.iteration += 1
        self.episodes += count
        self.steps += sum(batch.lengths) + tried.steps
        self.replayed += tried.replayed
        number = torch.arange(plan.queries.same_as.shape[0]).unsqueeze(-1)
        return Iteration(
            iteration=self.iteration,
            episodes=self.episodes,
            steps=self.steps,
            replayed=tried.replayed,
            returns=tuple(float(one.rewards.sum()) for one in played),
            rollouts=len(branches),
            pseudo_actions=float(((plan.queries.same_as == number) & (number > 0)).sum()) / sum(batch.lengths),
            entropy=mean_entropy,
            log_variance=math.log(max(float(self._variance.mean()), sys.float_info.min)),
            seconds=time.perf_counter() - begin,
            cpu_seconds=time.process_time() - begin_cpu + tried.cpu_seconds,
        )

    def _branches(self, plan: rollouts.Rollouts, played: list[Episode], key: int, shared: int | None) -> Branches:
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
            shared=shared,
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
            observations=join([one.observations for one in played])[:, : self.environment.observations],
            logits=join([one.logits for one in played]),
            rewards=scale * join([one.rewards for one in played]),
            returns=scale * join([one.returns(gamma) for one in played]),
            discount=discount,
            lengths=lengths,
            last_observations=torch.from_numpy(np.stack([one.last_observation for one in played]))[
                :, : self.environment.observations
            ],
            terminated=tuple(one.terminated for one in played),
        )

    def _logits(self, batch: Batch) -> Tensor:
        """[T, K, C]: the network's logits with their graph, masked as the batch's."""
        world = self.environment
        module = ModulePolicy(self.network, world.shape, world.choices)
        return module.outputs(batch.observations).cpu().masked_fill(batch.logits == -torch.inf, -torch.inf)

    def _update(self, batch: Batch, plan: rollouts.Rollouts, rollout_returns: Tensor) -> float:
        """One step uphill; returns the policy's entropy."""
        grad, loss = self.learner.gradient(batch, plan, rollout_returns)
        logits = self._logits(batch)
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
        self._variance.update([p.grad.cpu() for p in self.network.parameters() if p.grad is not None])
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate
            optimizer.step()
        return float(total_entropy.detach()) / (batch.logits.shape[0] * batch.logits.shape[1])

    # ---------------------------------------------------------------- files

    def state_dict(self) -> dict[str, Any]:
        """All that learning goes on from."""
        return {
            "network": self.network.state_dict(),
            "learner": [parameter.detach().clone() for parameter in self.learner.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "variance": self._variance.state_dict(),
            "counters": [self.iteration, self.episodes, self.steps, self.replayed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; a state that does not fit leaves the agent as it was."""
        before = copy.deepcopy(self.state_dict())
        try:
            self._set_state(state)
        except Exception:
            self._set_state(before)
            raise

    def _set_state(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        with torch.no_grad():
            for parameter, saved in zip(self.learner.parameters(), state["learner"], strict=True):
                parameter.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._variance.load_state_dict(state["variance"])
        self.iteration, self.episodes, self.steps, self.replayed = map(int, state["counters"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the agent to a file, whole or not at all."""
        files.save(self, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that an agent of the same environment and networks wrote."""
        files.load(self, path)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **arguments: Any) -> PolicyGradient:
        """Make the agent that a file holds.

        Arguments of `PolicyGradient` that a file cannot hold must be given: an environment that was not made by its
        name, an encoder, a snapshot, a policy.
        """
        return files.make(cls, path, arguments)

    def description(self) -> dict[str, Any]:
        """What an agent must have in common with a file that it loads."""
        world = self.environment
        return {
            "environment": world.name,
            "observations": world.observations,
            "choices": list(world.choices),
            "hidden": list(self.settings.hidden),
            "optimizer": self.settings.optimizer,
            "learner": type(self.learner).__name__,
            "parameters": [list(parameter.shape) for parameter in self.network.parameters()],
        }

    def arguments(self) -> dict[str, Any]:
        """What `from_file` makes the agent from."""
        return {**self._arguments, "settings": asdict(self.settings), "estimator": files.in_words(self._kind)}

    def close(self) -> None:
        """End the engine's workers, and close the environments."""
        self._engine.close()
        self.environment.close()


def _check_learned(estimator: Estimator) -> None:
    if len(estimator.learned):
        raise ValueError(
            f"{type(estimator).__name__} learns a control variate of relaxed samples, which an episode does not "
            'have; use ActionConditioned(), the method "relax" of `arsm control`.'
        )
