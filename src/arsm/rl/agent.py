"""`PolicyGradient`: an agent with credit from branches, from a learned value, or from both."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from torch import nn

from arsm.capabilities import require
from arsm.options import suggests
from arsm.progress import Progress
from arsm.rl import files
from arsm.rl.callbacks import Callback, TensorBoard, call_all, listed_callbacks
from arsm.rl.credit import ActionConditioned, Credit, Value
from arsm.rl.environment import Array, check_finite
from arsm.rl.environments import make_environment
from arsm.rl.play import EpisodeBranches, play_episodes
from arsm.rl.policies import Policy, act
from arsm.rl.rollouts import make_engine
from arsm.rl.settings import Settings, changed, check_count, check_seed
from arsm.rl.snapshots import Snapshot
from arsm.rl.spaces import Encoder, exists, full_mask
from arsm.rl.streams import Still, Tape, race_units
from arsm.rl.training import Iteration, Training

TOGETHER = 32
"""Episodes of an evaluation that are played at once."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Returns of a policy that does not learn.

    Attributes:
        mean: Mean undiscounted return.
        standard_error: Of the mean; NaN for one episode.
        returns: Of each episode.
    """

    mean: float
    standard_error: float
    returns: tuple[float, ...]

    def __repr__(self) -> str:
        return (
            f"Evaluation(mean={self.mean:.4g}, standard_error={self.standard_error:.2g}, "
            f"{len(self.returns)} episodes)"
        )


class PolicyGradient(Training):
    """A policy that learns from episodes, with credit from branches (rollouts of the
    actions that it might have taken), from a learned value, or from both.

        agent = PolicyGradient("CartPole-v1")
        agent.learn(seconds=20)
        print(agent.evaluate(episodes=100).mean)
        action = agent.predict(observation)

    Args:
        environment: the name of a Gymnasium environment, or a function that makes one,
            or a PettingZoo parallel one, or an `arsm.rl.Environment`.
        credit: an estimator that `arsm.policy.plan` takes, such as `arsm.RLOO(2)` or
            `arsm.ARSM()`: branches, played to the end, whose gradient is unbiased. Or
            `Value()`, the default: generalized advantages from a learned value and no
            branches, biased as far as the value is wrong. Or both,
            `Value(branch=arsm.RLOO(2))`. Or `ActionConditioned()`.
        policy: a module from observations [N, *shape] to the logits [N, K C] of K
            actions; by default an MLP in NumPy. It is used in evaluation mode and on
            its own device.
        settings: all settings of learning; single ones may be given by name instead.
        horizon: maximum steps per episode; the environment's own limit applies as well.
        encoder: a function from an observation to a vector, used instead of the
            encoding for its space.
        snapshot: (get, set), the fastest way to branch: get(environment) returns its
            state, set(environment, state) puts it back.
        randomness: whether rollouts in a stochastic environment see the "same" random
            numbers as the true episode, or "fresh" ones.
        options: arguments of gymnasium.make, for an environment by name.
        shared_policy: whether the agents of a team share one network or have one each.
        engine: where rollouts are played: "in-process", "pool" (worker processes) or
            "ray" (a cluster).
        workers: number of workers (default: one per processor).
        address: of the Ray cluster; a local one if None.
    """

    def __init__(
        self,
        environment: str | Callable[[], Any],
        credit: Credit | None = None,
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
        credit = Value() if credit is None else credit
        # before the environment, which may take seconds to be tested
        _check_parts(credit, policy)
        settings = changed(settings or Settings(), changes)
        world = make_environment(
            environment, horizon, encoder, snapshot=snapshot, randomness=randomness, options=options
        )
        super().__init__(world, credit, policy, settings, shared_policy=shared_policy)
        self._arguments = {
            "environment": environment if isinstance(environment, str) else None,
            "horizon": horizon,
            "randomness": randomness,
            "options": options,
            "shared_policy": shared_policy,
            "encoder": encoder is not None,
            "snapshot": snapshot is not None,
            "policy": policy is not None,
            "settings": asdict(settings),
            "credit": files.describe_credit(credit),
        }
        self._engine = make_engine(engine, world, workers, address)
        self._given = credit

    def __repr__(self) -> str:
        return (
            f"PolicyGradient({self.environment.name}, {self._given!r}, {self.episodes:,} episodes)"
        )

    def _play(self, policy: Policy, branches: EpisodeBranches) -> EpisodeBranches:
        return self._engine.play(policy, branches)

    # ---------------------------------------------------------------- playing

    def predict(
        self, observation: Any, *, deterministic: bool = True, mask: Any = None, batch: bool = False
    ) -> Any:
        """The action for an observation: the likeliest, or a sample.

        Args:
            observation: one as the environment gives it; of a team, {agent:
                observation}.
            deterministic: False samples.
            mask: the action mask, as the environment gives it; None allows all actions.
            batch: True takes a sequence of observations (and of masks) and gives the
                list of their actions.
        """
        if not batch:
            return self.predict(
                [observation], deterministic=deterministic, mask=[mask], batch=True
            )[0]
        world = self.environment
        # one mask per observation: those of two games differ
        masks = [None] * len(observation) if mask is None else list(mask)
        seen = [self._vector(each, own) for each, own in zip(observation, masks, strict=True)]
        logits = self.policy.logits(np.stack(seen))
        # a race without noise is won by the likeliest action
        noise = np.zeros_like(logits)
        if not deterministic:
            noise = race_units(np.log(np.random.default_rng().standard_exponential(logits.shape)))
        return world.decode(act(logits, noise))

    def _vector(self, observation: Any, mask: Any) -> Array:
        world = self.environment
        seen = world.encode(observation)
        if seen.shape != (world.observations,):
            raise ValueError(
                f"An observation must have {world.observations} numbers, but this has "
                f"{list(seen.shape)}."
            )
        check_finite(world.name, "an observation", seen)
        # a mask may be given where the environment has none: the caller forbids something
        if not world.masks and mask is None:
            return seen
        allowed = (
            exists(world.choices).reshape(-1) if mask is None else full_mask(mask, world.choices)
        )
        return np.concatenate([seen, allowed])

    @suggests("PolicyGradient.evaluate")
    def evaluate(
        self, episodes: int = 100, *, deterministic: bool = True, seed: int = 0
    ) -> Evaluation:
        """Play episodes without learning: the mean undiscounted return and its standard error.

        Args:
            episodes: number of episodes.
            deterministic: take the likeliest actions; False samples.
            seed: of the episodes, which training does not see.
        """
        check_count("episodes", episodes)
        check_seed(seed)
        # three numbers, as training has two: no episode of an evaluation was trained on
        seeds = np.random.SeedSequence([seed, 0, 0]).generate_state(episodes + 1, np.uint64)
        current = self.policy
        returns = []
        # not all at once: every lane may be an environment of its own
        for first in range(1, episodes + 1, TOGETHER):
            own = [int(each >> np.uint64(33)) for each in seeds[first : first + TOGETHER]]
            noise = (
                Still()
                if deterministic
                else Tape(int(seeds[0]) + first, len(own), self._logits_shape)
            )
            returns += [
                float(one.rewards.sum())
                for one in play_episodes(self.environment, current, own, noise)
            ]
        # one episode says nothing about its error, and 0 would be a lie
        error = float(np.std(returns, ddof=1)) / math.sqrt(episodes) if episodes > 1 else math.nan
        return Evaluation(float(np.mean(returns)), error, tuple(returns))

    def video(
        self,
        path: str | os.PathLike[str],
        environment: Any = None,
        *,
        seed: int = 0,
        every: int = 2,
    ) -> int:
        """Write an episode of the likeliest actions as an animation; returns its number of steps.

        Args:
            path: a .gif, .webp or .png.
            environment: one that was made with render_mode="rgb_array"; by default the
                agent's own by its name.
            seed: of the episode.
            every: steps per frame.
        """
        from arsm.rl.video import film  # Pillow

        check_count("every", every)
        if environment is not None:
            return film(self, path, environment, seed, every)
        # a function's environment cannot be asked to draw
        if (name := self._arguments["environment"]) is None:
            raise ValueError(
                'Give video an environment that was made with render_mode="rgb_array".'
            )
        options = self._arguments["options"] or {}
        with closing(
            gymnasium.make(name, render_mode="rgb_array", max_episode_steps=-1, **options)
        ) as env:
            return film(self, path, env, seed, every)

    # ---------------------------------------------------------------- learning

    @suggests("PolicyGradient.learn")
    def learn(
        self,
        limit: object = None,
        /,
        *,
        episodes: int | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        callback: Callback | Sequence[Callback] = (),
        tensorboard_log: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> list[Iteration]:
        """Learn until the first of these limits is reached, each counted from now.

        Args:
            limit: refused: a number alone does not say what it counts.
            episodes: true episodes.
            steps: all steps of the environment, those of rollouts and of the way back
                to them included.
            seconds: wall-clock seconds.
            callback: called with each iteration, or several of them, such as
                `Evaluate` and `Checkpoint`; if one returns False, learning ends.
            tensorboard_log: a folder for TensorBoard's curves.
            progress: show a line with the time left, if the standard error is a
                terminal and it takes over two seconds.
        """
        _check_named("learn", limit)
        callbacks = listed_callbacks(callback)
        history = []
        with Progress(enabled=progress) as line, TensorBoard(tensorboard_log) as board:

            def show(share: float, iteration: Iteration) -> None:
                mean = sum(iteration.returns) / len(iteration.returns)
                line(f"episode {iteration.episodes:,}, return {mean:.1f}", share)

            for iteration in self.iterations(
                episodes=episodes, steps=steps, seconds=seconds, report=show
            ):
                history.append(iteration)
                numbers, ends = call_all(callbacks, iteration)
                board.write(iteration, numbers)
                if ends:
                    break
        return history

    def iterations(
        self,
        limit: object = None,
        /,
        *,
        episodes: int | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        report: Callable[[float, Iteration], object] | None = None,
    ) -> Iterator[Iteration]:
        """As `learn`, one iteration at a time. An error keeps what was learned before it.

        `report` is called with the share of the way to the nearest limit.
        """
        _check_named("iterations", limit)
        limits = {"episodes": episodes, "steps": steps, "seconds": seconds}
        # no default: what is long for one task is short for another
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
            # the nearest limit counts; one of 0 is reached before the first iteration
            shares = ((now[name] - begin[name]) / limit for name, limit in limits.items() if limit)
            return 1.0 if 0 in limits.values() else max(shares)

        while (share := spent()) < 1:
            # learning rates that fall must know how far the way is
            self._left = 1 - share
            iteration = self._iterate()
            if report is not None:
                report(spent(), iteration)
            yield iteration

    def _clock(self) -> dict[str, float]:
        return {
            "episodes": self.episodes,
            "steps": self.steps + self.replayed,
            "seconds": time.perf_counter(),
        }

    # ---------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the agent to a file, whole or not at all."""
        files.save(self, path)

    def load(self, path: str | os.PathLike[str] | None = None) -> None:
        """Continue from a file written by an agent with the same environment and networks."""
        # other libraries load by the class, and then the path is `self` here
        if path is None:
            raise TypeError(
                "load goes on with an agent, as in agent.load(path); "
                "PolicyGradient.from_file(path) makes one."
            )
        files.load_agent(self, path)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **arguments: Any) -> PolicyGradient:
        """Make the agent that a file holds.

        Arguments of `PolicyGradient` that a file cannot hold must be given: an
        environment that was not made by its name, an encoder, a snapshot, a policy.
        """
        return files.make(cls, path, arguments)

    def description(self) -> dict[str, Any]:
        """Properties that must match those of a file to load."""
        world = self.environment
        return {
            "environment": world.name,
            "observations": world.observations,
            "choices": list(world.choices),
            "hidden": list(self.settings.hidden),
            "optimizer": self.settings.optimizer,
            "credit": type(self.credit).__name__,
            "parameters": [list(parameter.shape) for parameter in self.network.parameters()],
        }

    def arguments(self) -> dict[str, Any]:
        """The arguments that `from_file` makes the agent with."""
        return self._arguments

    def close(self) -> None:
        """End the engine's workers, and close the environments."""
        self._engine.close()
        self.environment.close()


def _check_named(call: str, limit: object) -> None:
    if limit is not None:
        raise TypeError(
            f"{call}({limit!r}) does not say what it counts; write {call}(steps={limit!r}) for "
            f"steps of the environment or {call}(episodes={limit!r}) for episodes."
        )


def _check_parts(credit: Credit, policy: object) -> None:
    if isinstance(credit, str):
        raise TypeError(
            f"credit must be an object such as Value() or arsm.RLOO(2), but is {credit!r}."
        )
    # without an estimator there is nothing to require
    estimator = credit.branch if isinstance(credit, Value) else credit
    if estimator is not None and not isinstance(estimator, ActionConditioned):
        relax = 'use ActionConditioned(), the method "relax" of `arsm control`'
        require(estimator, "PolicyGradient", "nothing_learned", instead=relax)
    if policy is not None and not (isinstance(policy, nn.Module) and list(policy.parameters())):
        raise TypeError(f"policy must be a torch.nn.Module with parameters, but is {policy!r}.")
    if isinstance(policy, nn.Module) and not any(
        parameter.requires_grad for parameter in policy.parameters()
    ):
        raise ValueError(
            "All parameters of the policy are frozen, so it cannot learn; call "
            "policy.requires_grad_()."
        )
