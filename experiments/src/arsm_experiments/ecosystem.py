"""Released packages under `arsm.audit`, unchanged from PyPI: what each claims and what was found.

    python -m arsm_experiments.ecosystem                 # all entries whose package is installed
    python -m arsm_experiments.ecosystem "pyro: *"       # some of them
    python -m arsm_experiments.ecosystem --export results/audit

Every entry runs in a process of its own, because some packages change torch when they are imported.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import arsm
from arsm.audit import PROBLEMS, Audit, Problem
from arsm.audit.bounds import bernstein, student
from arsm.audit.measure import Loss
from arsm.audit.problems import Function

SAMPLES = 1 << 14
RATE = 1e-6
BINARY = [p for p in PROBLEMS if p.weights.shape[1] == 2]
SOME = [p for p in PROBLEMS if p.role in ("f", "f+100") or p.learns or p.name in ("masked categories", "a batch of 2")]
"""For packages whose calls take long: an f with and without a constant, several variables, masks, a small batch."""
ONE_VARIABLE = [p for p in SOME if len(p.weights) == 1]


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    entry: str
    version: str
    claim: str
    verdict: str
    finding: str
    scale: str
    draws: str
    seconds: str
    command: str


@dataclass(frozen=True)
class Entry:
    """Somebody's estimator, and what its documentation claims."""

    name: str
    package: str
    """Its distribution on PyPI."""
    module: str
    claim: str
    run: Callable[[], tuple[str, str, str, str]]
    """Verdict, finding, scale and draws."""


def from_package(name: str) -> Any:
    """The module; imported by name, since none of them is a requirement of this package."""
    return importlib.import_module(name)


def from_gradient(gradient: Callable[[Tensor, Function], Tensor]) -> Loss:
    """A loss for code that computes the gradient itself: gradient(logits, f) -> shaped like the logits."""

    def loss(logits: Tensor, f: Any) -> Tensor:
        with torch.enable_grad():
            found = gradient(logits.detach().clone().requires_grad_(), f)
        f.theta.grad = None
        return (logits.masked_fill(logits == -torch.inf, 0) * found.detach()).sum()

    return loss


def judged(audit: Audit, draws: str) -> tuple[str, str, str, str]:
    """An audit as columns."""
    scale = "" if audit.scale is None else f"{audit.scale.value:.3f} [{audit.scale.low:.3f}, {audit.scale.high:.3f}]"
    finding = " ".join(f"[{f.kind}] {f.sentence}" for f in audit.findings)
    return audit.verdict, finding, scale, draws


def audited(
    make: Callable[[], Loss], problems: Sequence[Problem] = SOME, samples: int = SAMPLES
) -> Callable[[], tuple[str, str, str, str]]:
    """An entry that `arsm.audit` judges."""

    def run() -> tuple[str, str, str, str]:
        return judged(arsm.audit(make(), problems=problems, samples=samples), f"{samples:,}")

    return run


# ---------------------------------------------------------------- torch and reinmax


def torch_surrogate() -> Loss:
    """f times the log-probability of a sample."""

    def loss(logits: Tensor, f: Any) -> Tensor:
        q = torch.distributions.Categorical(logits=logits)
        z = q.sample()
        return (f(z).detach() * q.log_prob(z).sum(-1)).sum()

    return loss


def gumbel(hard: bool) -> Callable[[], Loss]:
    """f at torch's relaxed sample."""
    return lambda: lambda logits, f: f(torch.nn.functional.gumbel_softmax(logits, tau=1.0, hard=hard)).sum()


def reinmax_loss() -> Loss:
    """f at reinmax's hard sample."""
    reinmax = from_package("reinmax").reinmax
    return lambda logits, f: f(reinmax(logits, 1.0)[0]).sum()


# ---------------------------------------------------------------- storchastic


def storchastic(make: Callable[[Any], Any], kind: str = "one-hot", relaxed: bool = False) -> Callable[[], Loss]:
    """A method of storchastic on rows [B] of K variables; f is each row's cost."""

    def build() -> Loss:
        storch = from_package("storch")
        methods = from_package("storch.method")
        distributions = torch.distributions

        def gradient(logits: Tensor, f: Function) -> Tensor:
            storch.reset()
            method = make(methods)
            phi = storch.denote_independent(logits, 0, "rows")
            if kind == "bernoulli":
                q = distributions.Bernoulli(logits=phi[..., 1] - phi[..., 0])
            elif kind == "probs":
                q = distributions.OneHotCategorical(probs=phi.softmax(-1))
            else:
                q = distributions.OneHotCategorical(logits=phi)

            @storch.deterministic
            def cost(sample: Tensor) -> Tensor:
                if kind == "bernoulli":
                    return f(sample.long())
                return f(sample if relaxed else sample.argmax(-1))

            storch.add_cost(cost(method(q)), "f")
            storch.backward()
            assert logits.grad is not None
            return logits.grad * len(logits)  # storchastic averages over independent rows

        return from_gradient(gradient)

    return build


# ---------------------------------------------------------------- Pyro and NumPyro


def pyro_elbo(name: str, enumerate_: bool = False) -> Callable[[], Loss]:
    """The ELBO whose prior is the guide's own distribution, detached: its gradient is that of E[f]."""

    def build() -> Loss:
        pyro, infer = from_package("pyro"), from_package("pyro.infer")
        distributions = from_package("pyro.distributions")

        def gradient(logits: Tensor, f: Function) -> Tensor:
            def sample(phi: Tensor) -> list[Tensor]:
                return [pyro.sample(f"z{k}", distributions.Categorical(logits=phi[:, k])) for k in range(phi.shape[1])]

            def model() -> None:
                with pyro.plate("rows", len(logits)):
                    z = sample(logits.detach())
                    pyro.factor("f", f(torch.stack(torch.broadcast_tensors(*z), -1)))

            def guide() -> None:
                with pyro.plate("rows", len(logits)):
                    sample(logits)

            if enumerate_:
                guide = infer.config_enumerate(guide, "parallel")
            elbo = getattr(infer, name)(max_plate_nesting=1)
            if name != "TraceGraph_ELBO":  # loss_and_grads of the others looks for pyro.param sites
                return torch.autograd.grad(-elbo.differentiable_loss(model, guide), logits)[0]
            elbo.loss_and_grads(model, guide)
            assert logits.grad is not None
            return -logits.grad

        return from_gradient(gradient)

    return build


def numpyro_elbo(name: str, enumerate_: bool = False) -> Callable[[], Loss]:
    """The same in NumPyro; the key of each call comes from torch's generator."""

    def build() -> Loss:
        jax = from_package("jax")
        numpyro, infer = from_package("numpyro"), from_package("numpyro.infer")
        distributions = from_package("numpyro.distributions")
        jnp = jax.numpy

        def value(z: Any, weights: Any, bend: Any, scale: Any, constant: Any) -> Any:
            u = sum(weights[k][z[..., k]] for k in range(weights.shape[0]))
            return scale * (u + bend * jnp.cos(3 * u)) + constant

        def objective(logits: Any, key: Any, *f: Any) -> Any:
            rows, variables, _ = logits.shape

            def sample(phi: Any, **options: Any) -> list[Any]:
                return [
                    numpyro.sample(f"z{k}", distributions.Categorical(logits=phi[:, k]), **options)
                    for k in range(variables)
                ]

            def model() -> None:
                with numpyro.plate("rows", rows):
                    z = sample(jax.lax.stop_gradient(logits))
                    numpyro.factor("f", value(jnp.stack(jnp.broadcast_arrays(*z), -1), *f))

            def guide() -> None:
                with numpyro.plate("rows", rows):
                    sample(logits, **({"infer": {"enumerate": "parallel"}} if enumerate_ else {}))

            elbo = getattr(infer, name)(**({"max_plate_nesting": 1} if enumerate_ else {}))
            return elbo.loss(key, {}, model, guide)

        compiled = jax.jit(jax.grad(objective))

        def gradient(logits: Tensor, f: Function) -> Tensor:
            key = jax.random.PRNGKey(int(torch.randint(2**31 - 1, ())))
            numbers = (f.weights.numpy(), f.bend, f.scale, f.constant)
            f.rows += len(logits)
            return torch.tensor([-1.0]) * torch.from_numpy(_numpy(compiled(logits.detach().numpy(), key, *numbers)))

        return from_gradient(gradient)

    return build


def _numpy(x: Any) -> Any:
    return from_package("numpy").array(x)


# ---------------------------------------------------------------- TRL


def trl_advantages(kind: str, **options: Any) -> Callable[[], tuple[str, str, str, str]]:
    """The advantages of TRL's trainer, for given rewards, by its own code: a tiny model writes one token.

    Without a penalty for leaving a reference model (beta = 0), which would have to be downloaded.
    """

    def run() -> tuple[str, str, str, str]:
        trl, transformers = from_package("trl"), from_package("transformers")
        tokenizers, datasets = from_package("tokenizers"), from_package("datasets")
        config_class, trainer_class = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
        words = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "go": 2, "on": 3}, unk_token="<pad>")
        )
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
        )
        given: list[float] = []
        trainers: dict[int, Any] = {}

        def trainer(n: int) -> Any:
            if n not in trainers:
                model = transformers.GPT2LMHeadModel(
                    transformers.GPT2Config(
                        vocab_size=4, n_positions=8, n_embd=4, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1
                    )
                )
                config = config_class(
                    output_dir="/tmp/arsm-trl",
                    num_generations=n,
                    per_device_train_batch_size=n,
                    max_completion_length=1,
                    report_to=[],
                    use_cpu=True,
                    bf16=False,
                    **options,
                )
                trainers[n] = trainer_class(
                    model,
                    reward_funcs=lambda completions, **_: list(given),
                    args=config,
                    train_dataset=datasets.Dataset.from_dict({"prompt": ["go"] * 8}),
                    processing_class=tokenizer,
                )
                trainers[n].model.train()
            return trainers[n]

        def advantages(rewards: Tensor) -> Tensor:
            given[:] = rewards.flatten().tolist()
            rows = [{"prompt": "go"} for _ in given]
            return trainer(rewards.shape[1])._generate_and_score_completions(rows)["advantages"].view(rewards.shape)

        return judged(arsm.audit_advantages(advantages), "enumerated")

    return run


# ---------------------------------------------------------------- Stable-Baselines3


def a2c(discount: float) -> Callable[[], tuple[str, str, str, str]]:
    """A2C's gradient of its policy on a decision process of two steps, against the enumerated one.

    In state 0 an action leads to state 1 or 2, there another one ends the episode; both steps are rewarded. The
    policy is a table (one-hot observations, one linear layer). The loss is a mean over steps, hence half the sum.
    """

    def run() -> tuple[str, str, str, str]:
        np, gym, sb3 = from_package("numpy"), from_package("gymnasium"), from_package("stable_baselines3")
        first, second = [0.2, -0.5], [[1.0, -0.3], [0.4, 0.9]]

        class TwoSteps(gym.Env):
            observation_space = gym.spaces.Box(0, 1, (3,), np.float32)
            action_space = gym.spaces.Discrete(2)

            def _see(self) -> Any:
                return np.eye(3, dtype=np.float32)[self.state]

            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
                self.state = 0
                return self._see(), {}

            def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
                if self.state == 0:
                    reward, self.state, done = first[action], 1 + int(action), False
                else:
                    reward, done = second[self.state - 1][action], True
                return self._see(), reward, done, False, {}

        agent = sb3.A2C(
            "MlpPolicy",
            TwoSteps(),
            n_steps=64,
            gamma=discount,
            gae_lambda=1.0,
            ent_coef=0.0,
            vf_coef=0.0,
            max_grad_norm=math.inf,
            use_rms_prop=False,
            seed=0,
            policy_kwargs={"net_arch": [], "ortho_init": False},
        )
        agent.policy.optimizer = torch.optim.SGD(agent.policy.parameters(), lr=0.0)
        agent.lr_schedule = lambda _: 0.0
        weight = agent.policy.action_net.weight
        with torch.no_grad():
            agent.policy.action_net.bias.zero_()
            weight.copy_(torch.tensor([[0.4, -0.3, 0.1], [-0.4, 0.3, -0.1]]))
            agent.policy.value_net.weight.copy_(torch.tensor([[0.3, 0.1, -0.2]]))
        _, callback = agent._setup_learn(10**9, None)
        draws = []
        for _ in range(400):
            agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, n_rollout_steps=64)
            agent.train()
            draws.append(-weight.grad.T.flatten().double())
        logits = weight.detach().double().T.clone().requires_grad_()
        p = logits.softmax(-1)
        later = (p[1:] * torch.tensor(second, dtype=p.dtype)).sum(-1)
        value = (p[0] * (torch.tensor(first, dtype=p.dtype) + discount * later)).sum()
        truth = torch.autograd.grad(value, logits)[0].flatten() / 2
        return compared(torch.stack(draws), truth)

    return run


def compared(draws: Tensor, truth: Tensor) -> tuple[str, str, str, str]:
    """Independent draws [n, entries] against their mean: the columns of an audit."""
    n, failure = len(draws), RATE / (truth.numel() + 1)
    error = draws.mean(0) - truth
    spread = draws.amax(0) - draws.amin(0)
    width = torch.maximum(
        bernstein(draws.var(0), spread, n, failure), student(failure, n - 1) * draws.std(0) / n**0.5
    ).clamp_min(1e-6)
    along = (draws * truth).sum(1) / truth.square().sum()
    half = float(bernstein(along.var(), along.amax() - along.amin(), n, failure))
    s = float(along.mean())
    wrong = bool((error.abs() > width).any()) or abs(s - 1) > half
    entries = ", ".join(f"{a:.4f} for {b:.4f}" for a, b in zip(draws.mean(0).tolist(), truth.tolist(), strict=True))
    finding = f"Means and what they should be: {entries}." if wrong else ""
    return "wrong" if wrong else "unbiased", finding, f"{s:.3f} [{s - half:.3f}, {s + half:.3f}]", f"{n:,}"


def removed(module: str, attribute: str) -> Callable[[], tuple[str, str, str, str]]:
    """An entry that its package may no longer have."""

    def run() -> tuple[str, str, str, str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                getattr(from_package(module), attribute)
            except (AttributeError, ImportError) as error:
                return "not in this version", f"{type(error).__name__}: {' '.join(str(error).split())[:150]}", "", ""
        return "not audited", "it is there again; write an entry for it", "", ""

    return run


UNBIASED = "unbiased"
RELAXED = "a relaxation; no claim of being unbiased"
ENTRIES: tuple[Entry, ...] = (
    Entry("torch: Categorical.log_prob x f", "torch", "torch", UNBIASED, audited(torch_surrogate, PROBLEMS)),
    Entry("torch: gumbel_softmax", "torch", "torch", RELAXED, audited(gumbel(False), PROBLEMS)),
    Entry("torch: gumbel_softmax, hard", "torch", "torch", RELAXED, audited(gumbel(True), PROBLEMS)),
    Entry(
        "reinmax: reinmax", "reinmax", "reinmax", "second-order accurate, not unbiased", audited(reinmax_loss, PROBLEMS)
    ),
    Entry(
        "storchastic: ScoreFunction",
        "storchastic",
        "storch",
        UNBIASED,
        audited(storchastic(lambda m: m.ScoreFunction("z"))),
    ),
    Entry(
        "storchastic: ScoreFunction, batch_average, 4 samples",
        "storchastic",
        "storch",
        UNBIASED,
        audited(storchastic(lambda m: m.ScoreFunction("z", n_samples=4, baseline_factory="batch_average"))),
    ),
    Entry(
        "storchastic: REBAR",
        "storchastic",
        "storch",
        UNBIASED,
        audited(storchastic(lambda m: m.REBAR("z"), "probs", relaxed=True)),
    ),
    Entry(
        "storchastic: ARM, 2 categories",
        "storchastic",
        "storch",
        UNBIASED,
        audited(storchastic(lambda m: m.ARM("z"), "bernoulli"), BINARY),
    ),
    Entry(
        "storchastic: DisARM, 2 categories",
        "storchastic",
        "storch",
        UNBIASED,
        audited(storchastic(lambda m: m.DisARM("z"), "bernoulli"), BINARY),
    ),
    Entry(
        "storchastic: Expect, one variable",
        "storchastic",
        "storch",
        "exact",
        audited(storchastic(lambda m: m.Expect("z")), ONE_VARIABLE),
    ),
    Entry(
        "storchastic: UnorderedSetEstimator, 2 samples, one variable",
        "storchastic",
        "storch",
        UNBIASED,
        audited(storchastic(lambda m: m.UnorderedSetEstimator("z", k=2)), ONE_VARIABLE),
    ),
    Entry(
        "storchastic: GumbelSoftmax",
        "storchastic",
        "storch",
        RELAXED,
        audited(storchastic(lambda m: m.GumbelSoftmax("z", initial_temperature=1.0), relaxed=True)),
    ),
    Entry("pyro: Trace_ELBO", "pyro-ppl", "pyro", UNBIASED, audited(pyro_elbo("Trace_ELBO"))),
    Entry("pyro: TraceGraph_ELBO", "pyro-ppl", "pyro", UNBIASED, audited(pyro_elbo("TraceGraph_ELBO"))),
    Entry(
        "pyro: TraceEnum_ELBO, enumerated guide",
        "pyro-ppl",
        "pyro",
        "exact",
        audited(pyro_elbo("TraceEnum_ELBO", True)),
    ),
    Entry(
        "numpyro: Trace_ELBO",
        "numpyro",
        "numpyro",
        "reparameterised latents only; discrete ones are not supported",
        audited(numpyro_elbo("Trace_ELBO")),
    ),
    Entry("numpyro: TraceGraph_ELBO", "numpyro", "numpyro", UNBIASED, audited(numpyro_elbo("TraceGraph_ELBO"))),
    Entry(
        "numpyro: TraceEnum_ELBO, enumerated guide, one variable",
        "numpyro",
        "numpyro",
        "exact",
        audited(numpyro_elbo("TraceEnum_ELBO", True), ONE_VARIABLE),
    ),
    Entry("trl: RLOO advantages", "trl", "trl", "leave-one-out: unbiased", trl_advantages("RLOO", beta=0.0)),
    Entry(
        "trl: RLOO advantages, normalize_advantages",
        "trl",
        "trl",
        "normalised; no claim of being unbiased",
        trl_advantages("RLOO", beta=0.0, normalize_advantages=True),
    ),
    Entry(
        "trl: GRPO advantages, scale_rewards=group (default)",
        "trl",
        "trl",
        "normalised; no claim of being unbiased",
        trl_advantages("GRPO"),
    ),
    Entry(
        "trl: GRPO advantages, scale_rewards=none",
        "trl",
        "trl",
        "Dr. GRPO: without the bias of the standard deviation",
        trl_advantages("GRPO", scale_rewards="none"),
    ),
    Entry(
        "stable-baselines3: A2C, two steps, gamma = 1",
        "stable-baselines3",
        "stable_baselines3",
        "the policy gradient",
        a2c(1.0),
    ),
    Entry(
        "stable-baselines3: A2C, two steps, gamma = 0.7",
        "stable-baselines3",
        "stable_baselines3",
        "the policy gradient",
        a2c(0.7),
    ),
    Entry("optax: monte_carlo", "optax", "optax", UNBIASED, removed("optax", "monte_carlo")),
)


def run_entry(entry: Entry) -> Result:
    """One entry, here and now."""
    command = f'python -m arsm_experiments.ecosystem "{entry.name}"'
    if importlib.util.find_spec(entry.module) is None:
        return Result(entry.name, "", entry.claim, "not installed", f"pip install {entry.package}", "", "", "", command)
    version = importlib.metadata.version(entry.package)
    start = time.perf_counter()
    try:
        verdict, finding, scale, draws = entry.run()
    except Exception as error:  # another package may raise anything
        verdict, finding, scale, draws = "does not run", f"{type(error).__name__}: {error}"[:300], "", ""
    seconds = f"{time.perf_counter() - start:.0f}"
    return Result(
        entry.name, f"{entry.package} {version}", entry.claim, verdict, finding, scale, draws, seconds, command
    )


def run_apart(entry: Entry) -> Result:
    """One entry in a process of its own."""
    code = f"from arsm_experiments.ecosystem import main; main(['--json', {entry.name!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"entry"')]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Result(entry.name, entry.package, entry.claim, "does not run", last[:300], "", "", "", "")
    return Result(**json.loads(lines[-1]))


def export(results: Sequence[Result], folder: Path) -> None:
    """Write table.csv, keeping the rows of entries that were not run this time."""
    target = folder / "table.csv"
    rows: dict[str, dict[str, str]] = {}
    if target.exists():
        rows = {row["entry"]: row for row in csv.DictReader(io.StringIO(target.read_text()))}
    rows |= {result.entry: asdict(result) for result in results if result.verdict != "not installed"}
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[entry.name] for entry in ENTRIES if entry.name in rows)
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_text(text.getvalue())
    os.replace(part, target)


def main(arguments: list[str] | None = None) -> None:
    """Run the entries that match, print a line each, and export them if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m arsm_experiments.ecosystem", description="Released packages under arsm.audit."
    )
    parser.add_argument("names", nargs="*", default=["*"], help="entries, with wildcards (default: all)")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write FOLDER/table.csv")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    chosen = [e for e in ENTRIES if any(fnmatch.fnmatch(e.name, name) for name in given.names)]
    if not chosen:
        parser.error(f"no entry matches {given.names}; known are: {'; '.join(e.name for e in ENTRIES)}.")
    if given.json:
        print(json.dumps(asdict(run_entry(chosen[0]))))
        return
    results, start = [], time.perf_counter()
    for done, entry in enumerate(chosen):
        result = run_apart(entry)
        results.append(result)
        left = (time.perf_counter() - start) / (done + 1) * (len(chosen) - done - 1)
        print(f"{entry.name}: {result.verdict}. {result.finding}".rstrip(), flush=True)
        print(f"{done + 1} of {len(chosen)}, about {left:.0f} s left", file=sys.stderr, flush=True)
        if given.export:
            export(results, given.export)


if __name__ == "__main__":
    main()
