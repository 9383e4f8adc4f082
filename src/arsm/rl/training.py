"""One iteration of learning: play true episodes and their branches, assign credit, take a step
uphill.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from arsm import policy as rollouts
from arsm.categorical import entropy
from arsm.checks import legal_rows
from arsm.diagnostics import MovingVariance
from arsm.rl.credit import Credit, TrueEpisodes, make_credit
from arsm.rl.environment import Array, Environment
from arsm.rl.networks import TeamNetwork, mlp, perceptron
from arsm.rl.play import Episode, EpisodeBranches, check_repeats, play_episodes
from arsm.rl.policies import ModulePolicy, Policy
from arsm.rl.settings import Settings
from arsm.rl.spaces import exists
from arsm.rl.streams import Tape

DECAY = 0.99
FEWEST = 4
"""True episodes of an iteration whose number is chosen."""
CHECKED_STEPS = 50
KINDS = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}


@dataclass(frozen=True, repr=False)
class Iteration:
    """The record of one iteration.

    Attributes:
        episodes: True episodes so far.
        steps: Environment steps so far, rollouts included, but not the way back to
            where they begin.
        replayed: Steps of this iteration that were played again on that way.
        returns: Undiscounted, of this iteration's true episodes.
        pseudo_actions: Mean pseudo actions per step, before the budget.
        entropy: Of the policy, averaged over steps and actions, in nats.
        log_variance: Of the policy's gradient: moving averages with decay 0.99,
            averaged over all parameters.
        seconds: Of this iteration.
        cpu_seconds: Of this iteration, worker processes included.
    """

    iteration: int
    episodes: int
    steps: int
    replayed: int
    returns: tuple[float, ...]
    rollouts: int
    pseudo_actions: float
    entropy: float
    log_variance: float
    seconds: float
    cpu_seconds: float

    def __repr__(self) -> str:
        mean = sum(self.returns) / max(len(self.returns), 1)
        return (
            f"Iteration({self.iteration}: {self.episodes:,} episodes, {self.steps:,} steps, "
            f"mean return {mean:.4g})"
        )


class _Randomness(NamedTuple):
    """The random numbers of one iteration."""

    generator: torch.Generator
    """For the plan."""
    true: int
    """The key of the true episodes' noise."""
    branched: int
    """The key of the branches' noise."""
    seeds: list[int]
    """The environments' seeds."""


class Training(ABC):
    """A policy's network and what makes it learn."""

    def __init__(
        self,
        environment: Environment,
        credit: Credit,
        policy: nn.Module | None,
        settings: Settings,
        *,
        shared_policy: bool,
    ) -> None:
        self.environment = environment
        self.settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        self.network = self._mlp(shared_policy, generator) if policy is None else policy.eval()
        self._made = policy is None
        self.credit = make_credit(
            credit,
            environment.observations,
            environment.choices,
            settings.hidden,
            settings.gamma,
            generator,
        )
        self._optimizers = [
            KINDS[settings.optimizer](
                parameters, lr=settings.learning_rate, eps=self.credit.epsilon, foreach=True
            )
            for parameters in (list(self.network.parameters()), self.credit.parameters())
            if parameters
        ]
        self._variance = MovingVariance(DECAY)
        # sums of squares and of weights: the quotient is an average without a start at 0
        self._returns = torch.zeros(2, dtype=torch.float64)
        self.iteration = self.episodes = self.steps = self.replayed = 0
        self._length = self.credit.iteration[0]  # of the last iteration's episodes, on average
        self._left = 1.0  # the share that is left of what `learn` was asked for
        self._check_policy()

    @abstractmethod
    def _play(self, policy: Policy, branches: EpisodeBranches) -> EpisodeBranches:
        """Play rollouts."""

    def _mlp(self, shared: bool, generator: torch.Generator) -> nn.Module:
        world = self.environment
        hidden = self.settings.hidden
        inputs = world.observations // world.agents
        outputs = len(world.choices) * max(world.choices) // world.agents
        # a single agent's network stays a plain Sequential, which users may look into
        if world.agents == 1:
            return mlp(inputs, hidden, outputs, generator)
        if len(world.choices) % world.agents:
            raise ValueError(
                f"The {world.agents} agents of {world.name} have {len(world.choices)} actions "
                "together, but an MLP per agent needs as many for each; give a policy of your own."
            )
        # one network for all learns from all agents' steps; one each may take different parts
        count = 1 if shared else world.agents
        return TeamNetwork(
            [mlp(inputs, hidden, outputs, generator) for _ in range(count)], world.agents
        )

    @property
    def _decay(self) -> float:
        """The factor of the learning rate and of the entropy's weight, which falls from 1 to 0."""
        over = self.settings.decay_over
        if over == "learn":
            return self._left
        return 1.0 if over is None else max(0.0, 1.0 - self.episodes / over)

    def _check_policy(self) -> None:
        """Refuse a budget or a module that would fail later, before anything is played."""
        world = self.environment
        # zeros are an observation of any space; only shapes and counts matter here
        seen = np.zeros((CHECKED_STEPS, world.observations))
        if world.masks:
            seen = np.concatenate(
                [seen, np.ones((CHECKED_STEPS, math.prod(self._logits_shape)))], 1
            )
            seen[:, world.observations :] *= exists(world.choices).reshape(-1)
        try:
            like = self.policy.logits(seen)
        except (RuntimeError, TypeError, IndexError) as error:
            raise ValueError(
                f"The policy does not take observations [N, {', '.join(map(str, world.shape))}] of "
                f"{world.name} ({' '.join(str(error).split())}); let its first layer read them."
            ) from error
        if self.credit.estimator is None:
            return
        # uniform, as the first policy nearly is
        logits = torch.from_numpy(np.where(like > -np.inf, 0.0, -np.inf)).unsqueeze(0)
        first = torch.zeros(logits.shape[:-1], dtype=torch.int64)
        rollouts.plan(
            self.credit.estimator,
            logits,
            first,
            budget=self._budget(self._count()),
            generator=torch.Generator(),
        )

    @property
    def _logits_shape(self) -> tuple[int, int]:
        return len(self.environment.choices), max(self.environment.choices)

    def _budget(self, episodes: int) -> int | None:
        return None if self.settings.budget is None else self.settings.budget * episodes

    def _count(self) -> int:
        """Number of true episodes in the next iteration; earlier ones decide it, which
        keeps the gradient unbiased.
        """
        steps, most = self.credit.iteration
        return self.settings.episodes_an_iteration or min(max(steps // self._length, FEWEST), most)

    @property
    def policy(self) -> Policy:
        """The policy as it is now: a copy that plays."""
        world = self.environment
        if self._made:
            assert isinstance(self.network, nn.Sequential | TeamNetwork)
            return perceptron(self.network, world.choices)
        # a copy: the updates must not change a policy that workers still play
        return ModulePolicy(copy.deepcopy(self.network), world.shape, world.choices)

    def _iterate(self) -> Iteration:
        """Play true episodes and their branches, and learn from them."""
        begin = time.perf_counter()
        begin_cpu = time.process_time()
        count = self._count()
        random = self._randomness(count)
        # one policy for the true episodes and for all their branches
        current = self.policy
        noise = Tape(random.true, count, self._logits_shape)
        played = play_episodes(self.environment, current, random.seeds, noise)
        self._check_isolation(played)
        batch = self._batch(played)
        self._check_logits(batch)

        plan = self._plan(batch, random.generator)
        branches = self._play(current, self._branches(plan, played, random))
        # after playing, as the first iteration measures itself
        scale = self._measure_scale(batch.returns.numpy(), branches.returns)
        batch = replace(batch, rewards=scale * batch.rewards, returns=scale * batch.returns)
        branches = replace(branches, returns=scale * branches.returns)
        mean_entropy = self._update(batch, branches)

        steps = sum(batch.lengths)
        self._count_up(count, steps, branches)
        pseudo_actions = 0.0 if plan is None else float(plan.pseudo_actions.sum()) / steps
        return Iteration(
            iteration=self.iteration,
            episodes=self.episodes,
            steps=self.steps,
            replayed=branches.replayed,
            returns=tuple(float(one.rewards.sum()) for one in played),
            rollouts=len(branches),
            pseudo_actions=pseudo_actions,
            entropy=mean_entropy,
            log_variance=math.log(max(float(self._variance.mean()), sys.float_info.min)),
            seconds=time.perf_counter() - begin,
            cpu_seconds=time.process_time() - begin_cpu + branches.cpu_seconds,
        )

    def _randomness(self, count: int) -> _Randomness:
        """The random numbers of this iteration alone: resuming needs no generator's state."""
        streams = np.random.SeedSequence([self.settings.seed, self.iteration]).generate_state(
            3 + count, np.uint64
        )
        return _Randomness(
            generator=torch.Generator().manual_seed(int(streams[0] >> np.uint64(1))),
            true=int(streams[1]),
            branched=int(streams[2]),
            # 31 bits, as some simulators refuse larger seeds
            seeds=[int(stream >> np.uint64(33)) for stream in streams[3:]],
        )

    def _check_logits(self, batch: TrueEpisodes) -> None:
        """Refuse a policy that is lost: its branches would take minutes to play."""
        if not bool(legal_rows(batch.logits).all()):
            raise FloatingPointError(
                f"The policy's logits are not finite after episode {self.episodes}; try a smaller "
                f"learning rate than {self.settings.learning_rate:g}."
            )

    def _count_up(self, count: int, steps: int, branches: EpisodeBranches) -> None:
        """Count the episodes and steps of an iteration."""
        self.iteration += 1
        self.episodes += count
        # decides the next iteration's episodes, never this one's
        self._length = max(1, steps // count)
        self.steps += steps + branches.steps
        self.replayed += branches.replayed

    def _check_isolation(self, played: list[Episode]) -> None:
        """Play one of the episodes again, alone: in iterations 1, 2, 4, 8 and so on,
        which costs little.
        """
        # all binary digits are ones: 0, 1, 3, 7
        due = self.iteration & (self.iteration + 1) == 0
        if due:
            check_repeats(self.environment, played[self.iteration % len(played)].trail)

    def _plan(self, batch: TrueEpisodes, generator: torch.Generator) -> rollouts.Rollouts | None:
        """The rollouts to play, if any: all true episodes are one of T steps."""
        if self.credit.estimator is None:
            return None
        # the episodes share one budget, so that long ones may have more rollouts than short ones
        budget = self._budget(len(batch.lengths))
        steps = self.credit.branching(batch, budget, generator)
        return rollouts.plan(
            self.credit.estimator,
            batch.logits.unsqueeze(0),
            batch.actions.unsqueeze(0),
            mask=None if steps is None else steps.unsqueeze(0),
            budget=budget if steps is None else None,
            generator=generator,
            weighted=self.settings.weighted,
        )

    def _branches(
        self, plan: rollouts.Rollouts | None, played: list[Episode], random: _Randomness
    ) -> EpisodeBranches:
        """The plan's steps, which are numbered through all episodes, as steps of each."""
        # the plan sees all episodes as one long one
        offset = np.cumsum([0, *(len(one.rewards) for one in played)])
        step = np.zeros(0, int) if plan is None else plan.step.numpy()
        action = played[0].actions[:0] if plan is None else plan.action.numpy()
        episode = np.searchsorted(offset, step, "right") - 1
        return EpisodeBranches(
            trails=tuple(one.trail for one in played),
            episode=episode,
            step=step - offset[episode],
            action=action,
            key=random.branched,
            number=np.arange(len(step)),
            gamma=self.settings.gamma,
            shared=random.true if self.settings.common_random_numbers else None,
            cut=self.credit.cut,
            plan=plan,
        )

    def _measure_scale(self, returns: Array, tried: Array) -> float:
        """The factor of the rewards; a measured one comes from earlier iterations, the
        first measures itself.
        """
        if self.settings.reward_scale is not None:
            return self.settings.reward_scale
        # this batch's own returns would make the factor depend on its actions: a bias
        earlier = self._returns.clone()
        square = float(np.var(returns))
        self._returns = DECAY * self._returns + (1 - DECAY) * torch.tensor(
            [square, 1.0], dtype=torch.float64
        )
        total, weight = (earlier if earlier[0] > 0 else self._returns).tolist()
        if total > 0:
            return 1 / math.sqrt(total / weight)
        # no true return differs from another yet, but those of rollouts may
        return 1 / (float(np.abs(np.concatenate([returns, tried])).max()) or 1.0)

    def _batch(self, played: list[Episode]) -> TrueEpisodes:
        gamma = self.settings.gamma

        def join(parts: list[Array]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts))

        # episodes have different lengths, so all steps lie one after the other
        lengths = tuple(len(one.rewards) for one in played)
        discount = None
        if self.settings.discounting == "gamma^t":
            discount = gamma ** torch.cat(
                [torch.arange(length, dtype=torch.float64) for length in lengths]
            )
        return TrueEpisodes(
            observations=join([one.observations for one in played])[
                :, : self.environment.observations
            ],
            logits=join([one.logits for one in played]),
            actions=join([one.actions for one in played]),
            rewards=join([one.rewards for one in played]),
            returns=join([one.returns(gamma) for one in played]),
            discount=discount,
            lengths=lengths,
            last_observations=torch.from_numpy(np.stack([one.last_observation for one in played]))[
                :, : self.environment.observations
            ],
            terminated=tuple(one.terminated for one in played),
        )

    def _logits(self, batch: TrueEpisodes) -> Tensor:
        """[T, K, C]: the network's logits with their graph, masked as the batch's."""
        world = self.environment
        # our own networks read vectors
        shape = (world.observations,) if self._made else world.shape
        module = ModulePolicy(self.network, shape, world.choices)
        return (
            module.outputs(batch.observations)
            .cpu()
            .masked_fill(batch.logits == -torch.inf, -torch.inf)
        )

    def _update(self, batch: TrueEpisodes, branches: EpisodeBranches) -> float:
        """The updates; returns the entropy of the policy that played."""
        grad, loss = self.credit.gradient(batch, branches)
        played_entropy = entropy(batch.logits).sum()
        scale = 1 / len(batch.lengths)
        decay = self._decay
        # set anew each time: the decay may follow the clock, which no scheduler knows
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = decay * self.settings.learning_rate
        self._update_policy(batch, grad, scale, decay)
        # only now: a value that has seen these returns would bias their credit
        if loss is not None:
            for _ in range(self.credit.own_updates):
                self._optimizers[1].zero_grad()
                (scale * loss()).backward()
                self._optimizers[1].step()
        return float(played_entropy) / (batch.logits.shape[0] * batch.logits.shape[1])

    def _update_policy(self, batch: TrueEpisodes, grad: Tensor, scale: float, decay: float) -> None:
        """Steps uphill along the gradient [T, K, C] of the logits, until the policy is too far
        from the one that played.
        """
        for number in range(self.credit.updates):
            # the logits' gradient stays, and the network is the one of this update
            logits = self._logits(batch)
            if number and divergence(batch.logits, logits.detach()) > self.credit.divergence:
                break
            # an action that is masked has no gradient, and -inf times 0 would be NaN
            objective = (logits.masked_fill(logits == -torch.inf, 0) * grad).sum()
            if self.settings.entropy:
                bonus = entropy(logits).mean(-1).sum()
                objective = objective + decay * self.settings.entropy * bonus
            self._optimizers[0].zero_grad()
            (-scale * objective).backward()
            # later updates repeat the same draw: only the first says how noisy it is
            if not number:
                self._variance.update(
                    [p.grad.cpu() for p in self.network.parameters() if p.grad is not None]
                )
            self._optimizers[0].step()

    def state_dict(self) -> dict[str, Any]:
        """Everything that learning continues from."""
        return {
            "network": self.network.state_dict(),
            "credit": [parameter.detach().clone() for parameter in self.credit.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "variance": self._variance.state_dict(),
            "returns": self._returns.clone(),
            "counters": [self.iteration, self.episodes, self.steps, self.replayed, self._length],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state; one that does not fit leaves the agent unchanged."""
        # a state that fits in part would leave half an agent
        before = copy.deepcopy(self.state_dict())
        try:
            self._set_state(state)
        except Exception:
            self._set_state(before)
            raise

    def _set_state(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        with torch.no_grad():
            for parameter, saved in zip(self.credit.parameters(), state["credit"], strict=True):
                parameter.copy_(saved)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._variance.load_state_dict(state["variance"])
        self._returns = state["returns"].clone()
        counters = map(int, state["counters"])
        self.iteration, self.episodes, self.steps, self.replayed, self._length = counters


def divergence(played: Tensor, logits: Tensor) -> float:
    """KL(played || now), summed over the actions of a step and averaged over the steps:
    logits [T, K, C] each.
    """
    before = played.log_softmax(-1)
    now = logits.log_softmax(-1)
    # a masked action is masked in both, and -inf less -inf would be NaN
    ratio = (before - now).masked_fill(before == -torch.inf, 0)
    return float((before.exp() * ratio).sum()) / len(played)
