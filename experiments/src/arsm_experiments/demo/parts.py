"""The parts of the demo. Each one really runs, and its sentences are written from its own
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm.referee import PROBLEMS
from arsm_experiments.data import load_mnist
from arsm_experiments.demo.part import Part, Tick
from arsm_experiments.demo.pictures import cart_pole, sheet
from arsm_experiments.demo.sequence import sequence_task
from arsm_experiments.labels import readable
from arsm_experiments.report.figures import COLOURS, Figure, Level, Panel, Series, band

# ---------------------------------------------------------------- one choice

CATEGORIES, RUNS = 30, 10


def one_choice(scale: float, tick: Tick) -> Part:
    """The paper's first problem: 30 categories with almost equal rewards, ten runs per
    estimator.
    """
    updates = max(20, int(3000 * scale))
    reward = 0.5 + torch.arange(1, CATEGORIES + 1, dtype=torch.float64) / CATEGORIES**2
    series: dict[str, list[Series]] = {"update": [], "evaluation of f": []}
    reached: dict[str, tuple[int, float]] = {}
    words = ("arsm", "rloo", "reinforce")
    for place, (name, colour) in enumerate(zip(words, COLOURS, strict=False)):
        estimator, generator = arsm.estimator(name), torch.Generator().manual_seed(0)
        logits = torch.zeros(RUNS, 1, CATEGORIES, dtype=torch.float64)
        curve, cost, spent = [], [], 0.0
        for update in range(updates):
            out = arsm.estimate(
                estimator, logits.requires_grad_(), lambda z: reward[z[:, 0]], generator=generator
            )
            assert out.grad is not None
            logits = logits.detach() + out.grad
            spent += float(out.info["distinct"].double().mean())
            if update % max(1, updates // 60) == 0 or update == updates - 1:
                curve.append((logits.softmax(-1) @ reward).flatten().tolist())
                cost.append(spent)
                tick((place + update / updates) / len(words))
        seeds = list(zip(*curve, strict=True))
        steps = [float(step) for step in range(updates) if step % max(1, updates // 60) == 0]
        steps += [updates - 1.0] * (len(curve) - len(steps))
        for axis, x in (("update", steps), ("evaluation of f", cost)):
            series[axis].append(band(readable(name), colour, x, seeds))
        best = sum(int(row.argmax()) == CATEGORIES - 1 for row in logits[:, 0])
        reached[readable(name)] = best, spent / updates
    found = "; ".join(
        f"{name} ends with the best category on top in {best} of {RUNS} runs, at {cost:.1f} "
        "evaluations per update"
        for name, (best, cost) in reached.items()
    )
    panel = Panel("expected reward", series, levels=[Level("optimum", float(reward[-1]))])
    return Part(
        "One choice",
        f"Thirty categories, almost equal rewards. {found[0].upper() + found[1:]}.",
        "out = arsm.estimate(arsm.ARSM(), logits, lambda z: reward[z[:, 0]])\nout.value.backward()",
        [
            Figure(
                "Expected reward",
                f"Means of {RUNS} runs and their 10th to 90th percentile.",
                [panel],
                {},
            )
        ],
    )


# ---------------------------------------------------------------- one latent code

K, C = 20, 10


class Autoencoder(nn.Module):
    """x [B, 784] -> logits [B, K, C]; z [N, K] -> pixels' logits [N, 784]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(), nn.Linear(256, K * C))
        self.decoder = nn.Sequential(nn.Linear(K * C, 256), nn.LeakyReLU(), nn.Linear(256, 784))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).unflatten(-1, (K, C))

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(arsm.one_hot(z, C).flatten(-2))

    def log_likelihood(self, z: Tensor, x: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="none").sum(-1)

    def elbo(self, estimator: arsm.Estimator, x: Tensor, generator: torch.Generator) -> Tensor:
        """E[ln p(x | z)] - KL(q || uniform), [B]; the divergence is exact."""
        logits = self.encode(x)
        divergence = K * math.log(C) - arsm.entropy(logits).sum(-1)
        return (
            arsm.estimate(estimator, logits, self.log_likelihood, x, generator=generator).value
            - divergence
        )


def latent_code(scale: float, tick: Tick) -> Part:
    """A categorical VAE on MNIST, for about a minute."""
    steps = max(5, int(1400 * scale))
    data = load_mnist()
    test = data.test[:1000].float()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model, estimator = Autoencoder(), arsm.RLOO(8, ridge=1.0)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    places, curve = [], []
    for step in range(steps + 1):
        if step % max(1, steps // 20) == 0:
            with torch.no_grad():
                curve.append(-float(model.elbo(arsm.Reinforce(), test, generator).mean()))
            places.append(float(step))
        x = data.train[torch.randint(len(data.train), (100,), generator=generator)].float()
        loss = -model.elbo(estimator, x, generator).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        tick(step / steps)
    with torch.no_grad():
        shown = test[:12]
        again = model.decode(model.encode(shown).argmax(-1)).sigmoid()
        prior = model.decode(torch.randint(C, (12, K), generator=generator)).sigmoid()
    caption = "Rows: test images, their reconstructions, and images decoded from random codes."
    panel = Panel(
        "-ELBO of 1,000 test images, nats", {"step": [Series("VAE", COLOURS[0], places, curve)]}
    )
    return Part(
        "One latent code",
        f"Each image becomes {K} choices among {C}. After {steps:,} steps the test -ELBO has gone "
        f"from {curve[0]:.0f} to {curve[-1]:.0f} nats.",
        "logits = encoder(x)  # [B, 20, 10]\n"
        "out = arsm.estimate(arsm.RLOO(8, ridge=1.0), logits, log_likelihood, x)\n"
        "(kl - out.value).mean().backward()",
        [Figure("Learning", "Lower is better.", [panel], {})],
        [
            (
                sheet(
                    torch.stack([shown, again, prior]), "digits, their reconstructions, and samples"
                ),
                caption,
            )
        ],
    )


# ---------------------------------------------------------------- one agent


def one_agent(scale: float, tick: Tick) -> Part:
    """CartPole, by trying the actions that were nearly taken; the pole before and after."""
    from arsm.rl import PolicyGradient

    agent = PolicyGradient("CartPole-v1", arsm.RLOO(2), horizon=300)
    before = watch(agent.predict)
    steps = max(2000, int(400_000 * scale))
    history = list(agent.iterations(steps=steps, report=lambda share, _: tick(min(1.0, share))))
    after = watch(agent.predict)
    agent.close()
    played = list(accumulate(len(record.returns) for record in history))
    means = [sum(record.returns) / len(record.returns) for record in history]
    panel = Panel(
        "return per episode, at most 300", {"episode": [Series("mean", COLOURS[0], played, means)]}
    )
    captions = (
        f"before learning: {len(before)} steps until it falls",
        f"after {played[-1]} episodes: {len(after)} steps"
        + (", the maximum" if len(after) == 300 else ""),
    )
    return Part(
        "One agent",
        "The agent goes back to a state, takes the action that it nearly took, plays on from "
        "there and compares the two returns; it needs no critic. "
        f"After {played[-1]} episodes ({history[-1].steps:,} simulator steps with rollouts) the "
        f"pole stays up for {len(after)} steps instead of {len(before)}.",
        f'agent = arsm.rl.PolicyGradient("CartPole-v1", arsm.RLOO(2), '
        f"horizon=300)\nagent.learn(steps={steps:_})",
        [Figure("Learning", "Mean return of the episodes in each update.", [panel], {})],
        [
            (cart_pole(path, words), words)
            for path, words in zip((before, after), captions, strict=True)
        ],
    )


def watch(act: Callable[..., int]) -> list[tuple[float, float]]:
    """The cart's position and the pole's angle during one episode of at most 300 steps."""
    import gymnasium

    world = gymnasium.make("CartPole-v1", max_episode_steps=300)
    seen, _ = world.reset(seed=7)
    path = []
    for _ in range(300):
        path.append((float(seen[0]), float(seen[2])))
        seen, _, ended, cut, _ = world.step(act(seen))
        if ended or cut:
            break
    world.close()
    return path


# ---------------------------------------------------------------- the referee


def surrogate(logits: Tensor, f: Callable[[Tensor], Tensor], share: float = 1.0) -> Tensor:
    """REINFORCE with the mean of four samples as its baseline, which includes the sample itself."""
    q = torch.distributions.Categorical(logits=logits)
    z = q.sample((4,))
    value = f(z).detach()
    return share * ((value - value.mean(0)) * q.log_prob(z).sum(-1)).sum() / 4


def mended(logits: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """The same, but divided by n - 1."""
    return surrogate(logits, f, 4 / 3)


def referee(scale: float, tick: Tick) -> Part:
    """A common mistake, a baseline that includes the sample itself, and what the audit says about
    it.
    """
    samples = max(1024, int(4096 * scale))
    problems = [problem for problem in PROBLEMS if problem.role]
    torch.manual_seed(0)
    wrong = arsm.audit(surrogate, samples=samples, problems=problems)
    tick(0.5)
    better = arsm.audit(mended, samples=samples, problems=problems)
    tick(1.0)
    series = [
        Series(
            name,
            colour,
            [row.worst.relative for row in audit.rows if row.worst],
            range(len(audit.rows)),
            mark="dots",
        )
        for name, colour, audit in (
            ("as written", COLOURS[1], wrong),
            ("corrected", COLOURS[0], better),
        )
    ]
    names = [row.problem for row in wrong.rows]
    axis = "bias / half-width of its interval"
    caption = (
        "The worst entry of each problem, compared with enumeration; outside -1 to 1 is wrong."
    )
    finding = wrong.findings[0].sentence if wrong.findings else "Nothing found."
    return Part(
        "A wrong gradient, caught",
        f"REINFORCE with the mean of four samples as its baseline: {wrong.verdict}. With the "
        f"factor 4/3: {better.verdict}.",
        "def loss(logits, f):\n"
        "    q = torch.distributions.Categorical(logits=logits)\n"
        "    z = q.sample((4,))\n"
        "    value = f(z).detach()\n"
        "    return ((value - value.mean(0)) * q.log_prob(z).sum(-1)).sum() / 4\n\n"
        "print(arsm.audit(loss))",
        [
            Figure(
                "Bias on small problems", caption, [Panel("bias", {axis: series}, names=names)], {}
            )
        ],
        printed=finding,
    )


PARTS: dict[str, Callable[[float, Tick], Part]] = {
    "one choice": one_choice,
    "one latent code": latent_code,
    "one sequence task": sequence_task,
    "one agent": one_agent,
    "the referee": referee,
}
