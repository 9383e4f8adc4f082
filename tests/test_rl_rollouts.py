"""Episodes, rollouts and the engines that play them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import arsm
from arsm.rl import EnvironmentFailure, PolicyGradient, WorkerFailure, make_environment
from arsm.rl.environment import Environment
from arsm.rl.play import Episode, EpisodeBranches, play_episodes, play_rollouts
from arsm.rl.policies import FEW_ROWS, Perceptron, act
from arsm.rl.rollouts import InProcess, Pool, make_engine, share_out
from arsm.rl.stepped import Stepped
from arsm.rl.streams import BLOCK, OwnNoise, Tape, race_units
from arsm.swap import run_race
from tests.test_rl_environments import Walk, WalkWithHiddenState


def random_policy(environment: Environment, seed: int = 0) -> Perceptron:
    generator = np.random.default_rng(seed)
    sizes = (environment.observations, 10, len(environment.choices) * max(environment.choices))
    layers = tuple(
        (generator.normal(size=(a, b)), generator.normal(size=b)) for a, b in pairwise(sizes)
    )
    return Perceptron(layers, environment.choices)


def noise(environment: Environment, episodes: int, seed: int = 0) -> Tape:
    return Tape(seed, episodes, (len(environment.choices), max(environment.choices)))


def branches(environment: Environment, episodes: list[Episode], count: int) -> EpisodeBranches:
    """Branches at random steps of several episodes."""
    generator = np.random.default_rng(1)
    episode = np.sort(generator.integers(len(episodes), size=count))
    step = np.array([generator.integers(len(episodes[e].rewards)) for e in episode])
    order = np.lexsort((step, episode))
    action = generator.integers(environment.choices, size=(count, len(environment.choices)))
    trails = tuple(one.trail for one in episodes)
    return EpisodeBranches(
        trails, episode, step[order], action, key=11, number=np.arange(count), gamma=0.97
    )


def test_the_numpy_race_is_the_librarys() -> None:
    generator = np.random.default_rng(0)
    logits = 3 * generator.normal(size=(5000, 2, 4))
    logits[::10] *= 1000
    log_pi = np.log(generator.standard_exponential(logits.shape))
    ties = slice(1, None, 10)  # where only the rounding to the race's resolution decides
    logits[ties], log_pi[ties] = (
        -generator.integers(6, size=(500, 2, 4)) * 2.0**-42 for _ in range(2)
    )
    ours = act(logits, race_units(log_pi))
    np.testing.assert_array_equal(
        ours, run_race(torch.from_numpy(logits), torch.from_numpy(log_pi)).z.numpy()
    )


def test_masked_actions_are_never_taken() -> None:
    policy = Perceptron(((np.zeros((1, 8)), np.zeros(8)),), (2, 4))
    logits = policy.logits(np.zeros((1000, 1)))
    actions = act(
        logits, race_units(np.log(np.random.default_rng(0).standard_exponential(logits.shape)))
    )
    assert actions.max(0).tolist() == [1, 3]


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "LunarLander-v3"])
def test_a_rollout_that_repeats_the_true_actions_repeats_the_true_return(name: str) -> None:
    """With the true episode's noise, taking the true action again must follow the true episode to
    its end.
    """
    environment = make_environment(name, 60)
    policy = random_policy(environment)
    units = noise(environment, 2)
    episodes = play_episodes(environment, policy, [3, 4], units)
    # more than an environment has lanes
    steps = [np.arange(0, len(one.rewards), 2) for one in episodes]
    episode = np.repeat(np.arange(2), [len(x) for x in steps])
    step = np.concatenate(steps)
    action = np.concatenate([one.actions[x] for one, x in zip(episodes, steps, strict=True)])
    trails = tuple(one.trail for one in episodes)
    again = EpisodeBranches(trails, episode, step, action, 0, np.arange(len(step)), 0.9, units.key)
    played = play_rollouts(environment, policy, again)
    expected = np.concatenate([one.returns(0.9)[x] for one, x in zip(episodes, steps, strict=True)])
    np.testing.assert_allclose(played.returns, expected, rtol=1e-12)
    lengths = np.array([len(one.rewards) for one in episodes])
    assert played.steps == (lengths[episode] - step).sum()
    assert played.replayed == (step.sum() if name == "LunarLander-v3" else 0)


def test_a_rollout_ends_at_the_episodes_own_time_limit() -> None:
    environment = make_environment(Walk, horizon=30)
    policy = random_policy(environment)
    episodes = play_episodes(environment, policy, [0], noise(environment, 1))
    assert len(episodes[0].rewards) == 30
    assert not episodes[0].terminated
    late = replace(branches(environment, episodes, 5), step=np.full(5, 28))
    assert play_rollouts(environment, policy, late).steps == 5 * 2


class Stopped(Walk):
    """Truncates itself."""

    steps = 0

    def reset(self, **options: Any) -> Any:
        self.steps = 0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.steps += 1
        seen, reward, terminated, _, info = super().step(action)
        return seen, reward, terminated, self.steps == 10, info


def test_what_is_truncated_is_over_but_did_not_terminate() -> None:
    environment = make_environment(Stopped, horizon=30)
    policy = random_policy(environment)
    episodes = play_episodes(environment, policy, [0], noise(environment, 1))
    assert (len(episodes[0].rewards), episodes[0].terminated) == (10, False)
    late = replace(branches(environment, episodes, 5), step=np.full(5, 8))
    assert play_rollouts(environment, policy, late).steps == 5 * 2


class WalkWithoutCopies(WalkWithHiddenState):
    def __deepcopy__(self, memo: dict[int, Any]) -> Walk:
        raise TypeError("no copies")


@pytest.mark.parametrize("kind", [Walk, WalkWithHiddenState, WalkWithoutCopies])
def test_environments_are_made_once_and_closed(kind: type[Walk]) -> None:
    made: list[Walk] = []
    closed: list[Walk] = []

    class Counted(kind):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def close(self) -> None:
            closed.append(self)

    agent = PolicyGradient(Counted, arsm.ARSM(), horizon=20, budget=64, episodes_an_iteration=2)
    assert set(map(id, made)) == set(map(id, closed))
    made.clear()
    closed.clear()
    agent.learn(episodes=2)
    before = len(made)
    agent.learn(episodes=6)
    assert before == len(made) <= 33
    agent.close()
    assert set(map(id, made)) == set(map(id, closed))


@pytest.mark.parametrize("name", ["CartPole-v1", "LunarLander-v3"])
def test_a_rollout_does_not_depend_on_its_company(name: str) -> None:
    environment = make_environment(name, 100)
    policy = random_policy(environment)
    episodes = play_episodes(environment, policy, [0, 1], noise(environment, 2))
    many = branches(environment, episodes, 40)
    together = play_rollouts(environment, policy, many).returns
    alone = [
        play_rollouts(environment, policy, many.part(np.array([r]))).returns[0] for r in (0, 17, 39)
    ]
    assert together[[0, 17, 39]].tolist() == alone
    assert len(np.unique(together)) > 10


@pytest.mark.parametrize("restarted", [0, 5, BLOCK - 2, BLOCK - 1, BLOCK])
def test_a_rollouts_noise_is_its_own_stream_from_its_second_step_on(restarted: int) -> None:
    many = EpisodeBranches(
        (),
        np.zeros(4, int),
        np.zeros(4, int),
        np.zeros((4, 2), int),
        7,
        np.array([3, 5, 8, 9]),
        0.9,
    )

    def stream(number: int) -> Any:
        generator = np.random.Generator(np.random.Philox(key=7 << 64 | number))
        return race_units(np.log(generator.standard_exponential((3 * BLOCK, 2, 3))))

    ahead = OwnNoise(many.key, many.number, 3, (2, 3))
    before = [ahead.next() for _ in range(restarted)]
    ahead.drop(np.array([0, 2]))
    ahead.restart(0, 3)
    first, *after = [ahead.next() for _ in range(BLOCK + 10)]
    np.testing.assert_array_equal(
        np.reshape([x[1] for x in before], (-1, 2, 3)), stream(5)[:restarted]
    )
    np.testing.assert_array_equal([x[0] for x in after], stream(9)[: len(after)])
    np.testing.assert_array_equal(
        [x[1] for x in (first, *after)], stream(8)[restarted : restarted + 1 + len(after)]
    )


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_the_numpy_policy_is_the_network(rows: int) -> None:
    agent = PolicyGradient("CartPole-v1", hidden=(FEW_ROWS + 10, 3))
    torch.nn.init.normal_(list(agent.network.parameters())[1])
    seen = np.random.default_rng(0).normal(size=(rows, 4))
    held, expected = agent.policy, agent.network(torch.from_numpy(seen)).detach().numpy()
    np.testing.assert_allclose(held.logits(seen)[:, 0], expected, rtol=1e-12)
    agent.learn(episodes=1)
    np.testing.assert_allclose(held.logits(seen)[:, 0], expected, rtol=1e-12)


@pytest.fixture(scope="module")
def pool() -> Any:
    engine = Pool(make_environment(WalkWithHiddenState, horizon=60), workers=2)
    yield engine
    engine.close()


def test_the_pool_gives_what_one_process_gives(pool: Pool) -> None:
    environment = pool.environment
    policy = random_policy(environment)
    episodes = play_episodes(environment, policy, [0, 1], noise(environment, 2))
    many = branches(environment, episodes, 30)
    here, there = InProcess(environment).play(policy, many), pool.play(policy, many)
    assert here.returns.tolist() == there.returns.tolist()
    assert here.steps == there.steps
    copied_once = [many.step[many.episode == number].max() for number in range(2)]
    assert here.replayed == sum(copied_once)
    parts = [many.part(index) for index in share_out(environment, many, 2)]
    assert there.replayed == sum(
        play_rollouts(environment, policy, part).replayed for part in parts
    )
    assert here.cpu_seconds == 0 < there.cpu_seconds
    assert pool.play(policy, many.part(np.arange(0))).returns.shape == (0,)


class Counted(Walk):
    """Counts its resets, which take long in Atari games."""

    resets: ClassVar[list[int | None]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets.append(seed)
        return super().reset(seed=seed, options=options)


def test_environments_that_are_there_branch_without_a_reset() -> None:
    environment = make_environment(Counted, 30)
    policy = random_policy(environment)
    many = branches(
        environment, play_episodes(environment, policy, [0, 1], noise(environment, 2)), 20
    )
    first = play_rollouts(environment, policy, many)
    before = len(Counted.resets)
    assert play_rollouts(environment, policy, many).returns.tolist() == first.returns.tolist()
    assert len(Counted.resets) == before
    from_seeds = replace(many, trails=tuple(replace(trail, states=()) for trail in many.trails))
    assert play_rollouts(environment, policy, from_seeds).returns.tolist() == first.returns.tolist()
    assert len(Counted.resets) == before + 2


def test_a_cut_rollout_is_the_beginning_of_the_whole() -> None:
    environment = make_environment("CartPole-v1", 40)
    policy = random_policy(environment)
    many = branches(
        environment, play_episodes(environment, policy, [0, 1], noise(environment, 2)), 50
    )
    whole = play_rollouts(environment, policy, many)
    # every step pays 1
    lengths = np.round(np.log(1 - whole.returns * (1 - 0.97)) / np.log(0.97)).astype(int)
    assert lengths.min() <= 6 < lengths.max()
    # the others ended by themselves
    assert (whole.left > 0).tolist() == (lengths + many.step == 40).tolist()
    cut = play_rollouts(environment, policy, replace(many, cut=6))
    np.testing.assert_allclose(cut.returns, (1 - 0.97 ** np.minimum(lengths, 6)) / (1 - 0.97))
    np.testing.assert_allclose(cut.left, np.where(lengths > 6, 0.97**6, whole.left))
    assert cut.steps == np.minimum(lengths, 6).sum()
    short = lengths <= 6
    assert (cut.ends[short] == whole.ends[short]).all()
    assert (cut.ends[~short] != whole.ends[~short]).all()


def test_cut_rollouts_of_workers_come_back_in_order(pool: Pool) -> None:
    environment = pool.environment
    policy = random_policy(environment)
    many = replace(
        branches(environment, play_episodes(environment, policy, [0], noise(environment, 1)), 20),
        cut=4,
    )
    here, there = play_rollouts(environment, policy, many), pool.play(policy, many)
    for name in ("returns", "ends", "left"):
        assert getattr(there, name).tolist() == getattr(here, name).tolist()
    nothing = pool.play(policy, many.part(np.arange(0)))
    assert nothing.returns.shape == (0,)
    assert nothing.ends.shape == (0, environment.observations)


def test_a_worker_that_dies_is_replaced(pool: Pool) -> None:
    environment = pool.environment
    policy = random_policy(environment)
    many = branches(environment, play_episodes(environment, policy, [0], noise(environment, 1)), 20)
    expected = play_rollouts(environment, policy, many).returns
    process = pool._workers[0][0]
    os.kill(process.pid, signal.SIGKILL)
    assert pool.play(policy, many).returns.tolist() == expected.tolist()
    assert process.exitcode == -signal.SIGKILL


def test_an_interrupted_play_leaves_no_answer_to_the_next(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = pool.environment
    policy = random_policy(environment)
    many = branches(environment, play_episodes(environment, policy, [0], noise(environment, 1)), 20)

    def interrupt(pipes: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("arsm.rl.rollouts.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.play(random_policy(environment, 1), many)
    assert (
        pool.play(policy, many).returns.tolist()
        == play_rollouts(environment, policy, many).returns.tolist()
    )


def test_ctrl_c_is_the_main_processs_to_answer() -> None:
    environment = make_environment("CartPole-v1", 20)
    policy = random_policy(environment)
    many = branches(environment, play_episodes(environment, policy, [0], noise(environment, 1)), 3)
    engine = Pool(environment, workers=1)
    engine.play(policy, many)
    process = engine._workers[0][0]
    os.kill(process.pid, signal.SIGINT)
    engine.play(policy, many)
    assert engine._workers[0][0] is process
    engine.close()
    with pytest.raises(RuntimeError, match=r"ended by close\(\); make another agent"):
        engine.play(policy, many)


class Unknown:
    """Makes a walk, but not where it is unpickled, as a class of a notebook."""

    def __call__(self) -> Walk:
        return Walk()

    def __reduce__(self) -> Any:
        return int, ("a class of __main__",)


def test_an_environment_that_workers_cannot_import_is_an_error() -> None:
    environment = make_environment(Unknown(), horizon=20)
    policy = random_policy(environment)
    many = branches(environment, play_episodes(environment, policy, [0], noise(environment, 1)), 3)
    engine = Pool(environment, workers=1)
    with pytest.raises(WorkerFailure, match="could not import Unknown; define it in a module"):
        engine.play(policy, many)
    engine.close()


class Deadly(Walk):
    """Ends its process where the walk has gone on for a while; in the main process it does not."""

    def step(self, action: Any) -> Any:
        if os.environ.get("ARSM_TEST_DEADLY") != str(os.getpid()):
            os._exit(3)
        return super().step(action)


def test_a_worker_that_always_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARSM_TEST_DEADLY", str(os.getpid()))
    environment = make_environment(Deadly, horizon=20)
    policy = random_policy(environment)
    many = branches(environment, play_episodes(environment, policy, [0], noise(environment, 1)), 3)
    engine = Pool(environment, workers=1)
    with pytest.raises(WorkerFailure, match=r"died 3 times over the same rollouts \(exit code 3\)"):
        engine.play(policy, many)
    engine.close()


class Failing(Walk):
    """Raises, or gives no number, once the walk has gone on for a while."""

    reward: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def reset(self, **options: Any) -> Any:
        self.steps = 0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        seen, reward, *rest = super().step(action)
        self.steps += 1
        if self.steps > 250:
            if self.reward is None:
                raise ZeroDivisionError("no ground")
            reward = self.reward
        return seen, reward, *rest


class Nameless(Failing):
    reward = float("nan")


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Failing, "Failing raised ZeroDivisionError"), (Nameless, "Nameless gave a reward of nan")],
)
def test_an_environment_that_fails_midway(kind: type[Failing], message: str) -> None:
    environment = make_environment(kind, horizon=300)
    assert isinstance(environment, Stepped)
    policy = Perceptron(((np.zeros((2, 2)), np.zeros(2)),), (2,))
    with pytest.raises(EnvironmentFailure, match=message):
        play_episodes(environment, policy, [0], noise(environment, 1))
    short = replace(environment, horizon=200)
    many = branches(short, play_episodes(short, policy, [0], noise(short, 1)), 6)
    with pytest.raises(EnvironmentFailure, match=message):
        play_rollouts(environment, policy, many)
    engine = Pool(environment, workers=1)
    for _ in range(2):  # the worker survives what its environment does
        with pytest.raises(EnvironmentFailure, match=message):
            engine.play(policy, many)
    engine.close()


def test_ray_gives_what_one_process_gives() -> None:
    pytest.importorskip("ray")
    environment = make_environment("CartPole-v1", 60)
    policy = random_policy(environment)
    many = branches(environment, play_episodes(environment, policy, [0], noise(environment, 1)), 12)
    engine = make_engine("ray", environment, workers=2)
    try:
        assert (
            engine.play(policy, many).returns.tolist()
            == play_rollouts(environment, policy, many).returns.tolist()
        )
    finally:
        engine.close()


def test_refusals() -> None:
    environment = make_environment("CartPole-v1", 60)
    with pytest.raises(ValueError, match='There is no engine "gpu"'):
        make_engine("gpu", environment)
    with pytest.raises(ValueError, match="workers must be at least 1, but is -1"):
        make_engine("pool", environment, workers=-1)
    with pytest.raises(ValueError, match='2 workers need the engine "pool" or "ray": "in-process"'):
        make_engine("in-process", environment, workers=2)
    with pytest.raises(
        ValueError, match='The engine "pool" has no address; choose the engine "ray"'
    ):
        make_engine("pool", environment, address="localhost:1")
    with pytest.raises(
        ValueError, match=r"<lambda> cannot be sent to worker processes \(.*\); give its name"
    ):
        make_engine("pool", make_environment(lambda: Walk(), horizon=5), workers=1)
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match="Nothing answers at localhost:1 "):
        make_engine("ray", environment, address="localhost:1")
    with pytest.raises(ValueError, match="write HOST:PORT"):
        make_engine("ray", environment, address="somewhere")
