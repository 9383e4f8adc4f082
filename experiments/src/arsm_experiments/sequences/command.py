"""`arsm sequences`: a small language model learns a task from right or wrong, with credit token by token or answer by
answer.

The model first imitates right answers up to an accuracy, then learns by policy gradients. Each strategy and rate has a
run folder, with all seeds one after the other.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from rich.console import Console

from arsm.cluster import import_ray
from arsm.sequences import Cluster, Engine, EngineFailure, Server
from arsm_experiments.checks import check_least, check_name, check_positive, check_some
from arsm_experiments.progress import progress_bars
from arsm_experiments.runs.files import RunError, plain_name
from arsm_experiments.runs.reader import load_checkpoint
from arsm_experiments.runs.writer import Run, open_run
from arsm_experiments.sequences.methods import Size, accuracy, load_policy, new_policy, save_policy
from arsm_experiments.sequences.tasks import TASKS, VOCABULARY, Data, load
from arsm_experiments.sequences.trainer import Trainer, imitate, named_strategy
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
]
SMALLEST = {"tokens": 1, "tokens_per_update": 1, "parts": 1, "width": 1, "layers": 1, "heads": 1, "tested": 1}
FOLDER_WORDS = ("kl", "warm_up", "parts", "tokens_per_update", "engine")
"""Settings that a run folder's name and label tell where they are not the default."""


@dataclass(frozen=True)
class Sequences:
    """Train a small language model on right or wrong answers, by policy gradients with credit for every token.

    Writes one run folder per strategy and learning rate, with all seeds in it. Run it under torchrun to split each
    update over several processes.
    """

    task: TaskName = "digit_sorting"
    """digit_sorting needs no files; the others are reasoning-gym's, with files in the folder --data."""
    strategies: tuple[str, ...] = ("chance:local-expectation",)
    """branch:ESTIMATOR gives credit token by token, with an estimator in words.
    chance:ESTIMATOR does the same with rollouts that are played as often as they are likely.
    group:N, grpo:N, dr-grpo:N and token-baseline:N give credit to whole answers, N per prompt."""
    rates: tuple[float, ...] = (3e-4,)
    """Adam's learning rates."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of independent runs, one after the other."""
    tokens: int = 300_000
    """Generated tokens per run, including rollouts."""
    tokens_per_update: int = 2_000
    """Mean number of generated tokens per update."""
    kl: float = 0.0
    """Penalty per token on ln p minus ln p under the initial model."""
    warm_up: float = 0.4
    """First imitate right answers until this accuracy is reached; 0 for no imitation."""
    start: Path | None = None
    """Start from these weights instead: a run folder of this command, or a file of weights."""
    width: int = 64
    """Width of the transformer."""
    layers: int = 2
    """Number of layers."""
    heads: int = 4
    """Number of attention heads."""
    parts: int = 1
    """Parts of an update, computed one after the other, or by several processes with the same result."""
    max_rows: int = 4096
    """Maximum sequences per call of the model."""
    engine: str = "in-process"
    """Where rollouts are sampled: in-process, ray (a Ray cluster), or a server such as http://localhost:8000."""
    workers: int | None = None
    """Number of Ray actors; None for one per CPU."""
    address: str | None = None
    """Address of the Ray cluster, HOST:PORT; None starts a local one."""
    tested: int = 512
    """Number of held-out questions for measuring accuracy."""
    measure_every: int = 10
    """Updates between measurements and checkpoints."""
    data: Path = Path("runs/sequences/data")
    """Folder with reasoning-gym's tasks, as `python -m arsm_experiments.sequences.tasks FOLDER` writes them."""
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
        check_least(self, **SMALLEST, measure_every=1, max_rows=2, workers=1, kl=0, warm_up=0)
        check_some(strategies=self.strategies, rates=self.rates, seeds=self.seeds)
        check_positive(rates=self.rates)
        if self.warm_up >= 1:
            raise ValueError(f"--warm-up must be below 1, but is {self.warm_up}.")
        for words in self.strategies:
            named_strategy(words).check(torch.zeros(1, VOCABULARY))
        if self.width % self.heads:
            raise ValueError(f"--width must be a multiple of the {self.heads} heads, but is {self.width}.")
        if self.parts % (processes := int(os.environ.get("WORLD_SIZE", "1"))):
            raise ValueError(f"--parts must be a multiple of the {processes} processes, but is {self.parts}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU, but torch finds none; leave the option out.")
        if self.engine == "ray":
            import_ray()
        elif self.engine != "in-process":
            Server(self.engine, torch.nn.Module())
        if TASKS[self.task].own is None and not (path := self.data / f"{self.task}.pt").exists():
            raise ValueError(
                f"There is no {path}; make it with `pip install reasoning-gym` and "
                f"`python -m arsm_experiments.sequences.tasks {self.data}`."
            )
        if self.start is not None and not self.start.exists():
            raise ValueError(f"--start must be a run folder or a file of weights, but there is none at {self.start}.")

    def run(self, console: Console) -> None:
        """Train all combinations, one after the other."""
        if not self.resume and (there := [folder for folder in self.runs() if folder.exists()]):
            raise RunError(f"{there[0]} exists; pass --resume to continue it, or choose another --root.")
        best = "cuda" if torch.cuda.is_available() else "cpu"
        with process_group(torch.device(best if self.device == "auto" else self.device)) as device:
            if device.type == "cpu":
                torch.set_num_threads(1)  # these matrices are too small to share among threads
            data = load(self.data / f"{self.task}.pt", str(device))
            with progress_bars(console) as progress:

                def bar(words: str, total: int, **unit: Any) -> Callable[[float], None]:
                    task = progress.add_task(words, total=total, **unit)
                    return lambda done: progress.update(task, completed=int(done))

                policy = first_policy(self, data, str(device), bar)
                with contextlib.closing(Sampling(self, policy)) as sampling:
                    for folder, config in self.runs().items():
                        words = config["strategy"] + (f" {config['rate']:g}" if len(self.rates) > 1 else "")
                        show = bar(words, self.tokens * len(self.seeds), unit="tokens")
                        for done in train(self, config, folder.name, policy, data, sampling.engine):
                            show(done)

    def runs(self) -> dict[Path, dict[str, Any]]:
        """The run folders of this command, each with the settings that determine its results."""
        pairs = itertools.product(self.strategies, self.rates)
        configs = [self.config(*pair) for pair in pairs]
        return {self.root / "sequences" / self.folder_name(config): config for config in configs}

    def config(self, strategy: str, rate: float) -> dict[str, Any]:
        """The settings that determine the results of one run folder."""
        apart = ("strategies", "rates", "workers", "address", "data", "device", "root", "name", "resume")
        everything = {key: value for key, value in dataclasses.asdict(self).items() if key not in apart}
        everything["start"] = None if self.start is None else str(self.start)
        everything["engine"] = self.engine if self.engine in ("in-process", "ray") else "server"
        return {"strategy": strategy, "rate": rate, **everything}

    def size(self, data: Data) -> Size:
        """The transformer's, and how many questions are held out."""
        held_out = min(4096, len(data.prompts) // 5)
        return Size(self.width, self.layers, self.heads, batch=128, held_out=held_out, tested=512)

    def folder_name(self, config: dict[str, Any]) -> str:
        """E.g. digit_sorting-branch-rloo-samples=8-rate0.0003, then what is not the default."""
        seed = [f"seed-{self.seeds[0]}"] if self.seeds[0] else []
        words = (self.task, plain_name(config["strategy"]), f"rate{config['rate']:g}", *variant(config, ""), *seed)
        return "-".join(filter(None, (self.name, *words)))


def variant(config: dict[str, Any], between: str = " ") -> list[str]:
    """The settings of a run that are not the default, in words."""
    defaults = Sequences().config("", 0.0)
    changed = [key for key in FOLDER_WORDS if config[key] != defaults[key]]
    return [f"{key.replace('_', between)}{between}{config[key]}" for key in changed]


def first_policy(
    command: Sequences, data: Data, device: str, bar: Callable[[str, int], Callable[[float], None]]
) -> Transformer:
    """The model that every run starts from; an imitation is kept for the next command that asks for the same."""
    size = command.size(data)
    torch.manual_seed(0)
    if command.start is not None:
        return start_from(command.start, command.task, size, device)
    if not command.warm_up:
        return new_policy(command.task, size, device)
    shape = f"{size.width}x{size.layers}x{size.heads}"
    path = command.root / "sequences" / "starts" / f"{command.task}-{shape}-{command.warm_up:g}.pt"
    if not path.exists() and _rank() == 0:
        policy = new_policy(command.task, size, device)
        show = bar("imitation, % right", round(100 * command.warm_up))
        for reached in imitate(policy, command.task, data, size):
            show(100 * min(reached, command.warm_up))
            if reached >= command.warm_up:
                break
        save_policy(policy, path)
    if dist.is_initialized():
        dist.barrier()
    return start_from(path, command.task, size, device)


def start_from(path: Path, task: str, size: Size, device: str) -> Transformer:
    """The policy of a run folder, or of a file that `save_policy` wrote."""
    try:
        if not path.is_dir():
            return load_policy(task, size, path, device)
        policy = new_policy(task, size, device)
        saved = load_checkpoint(path / "checkpoint.pt")["state"]
        policy.load_state_dict(saved["trainer"]["policy"])
        return policy
    except RunError:
        raise
    except Exception:  # torch.load has no one exception for files that it cannot read
        raise RunError(
            f"{path} holds no weights of a transformer for {task} with --width {size.width}, --layers {size.layers} "
            f"and --heads {size.heads}; give the options that it was made with."
        ) from None


class Sampling:
    """Who samples for a command."""

    def __init__(self, command: Sequences, policy: Transformer) -> None:
        self.engine: Engine | None = None
        self._cluster = None
        if command.engine == "ray":
            self.engine = self._cluster = Cluster(policy, policy, workers=command.workers, address=command.address)
        elif command.engine != "in-process":
            self.engine = Server(command.engine, policy)

    def close(self) -> None:
        """Let a cluster go."""
        if self._cluster is not None:
            self._cluster.close()


def train(
    command: Sequences, config: dict[str, Any], name: str, policy: Transformer, data: Data, engine: Engine | None
) -> Iterator[int]:
    """Train all seeds one after the other, in one run folder; yields the tokens done."""
    start = copy.deepcopy(policy.state_dict())
    words = {"group": command.name, "label": ", ".join((config["strategy"], *variant(config)))}
    questions, held_out = data.split(command.size(data).held_out)
    tested = Data(held_out.prompts[: command.tested], held_out.answers[: command.tested])
    with contextlib.ExitStack() as stack:
        run = None
        if _rank() == 0:
            options = {**words, "resume": command.resume, "device": policy.head.weight.device}
            run = stack.enter_context(open_run(command.root, "sequences", name, config, **options))
        done, state = share_checkpoint(run)
        yield done
        for number in range(done // command.tokens, len(command.seeds)):
            policy.load_state_dict(start)
            strategy = named_strategy(config["strategy"])
            trainer = Trainer(
                policy,
                command.task,
                questions,
                strategy,
                rate=config["rate"],
                seed=command.seeds[number],
                tokens_per_update=command.tokens_per_update,
                kl=command.kl,
                reference=copy.deepcopy(policy) if command.kl else None,
                parts=command.parts,
                max_rows=command.max_rows,
                engine=engine,
            )
            saved = state if state is not None and state["number"] == number else None
            for tokens in train_seed(command, run, trainer, tested, number, saved):
                yield number * command.tokens + tokens
        policy.load_state_dict(start)


def train_seed(
    command: Sequences, run: Run | None, trainer: Trainer, tested: Data, number: int, saved: dict[str, Any] | None
) -> Iterator[int]:
    """Train one seed, from its checkpoint where there is one; yields its tokens done."""
    seconds = 0.0
    if saved is not None:
        trainer.load_state_dict(saved["trainer"])
        seconds = saved["seconds"]

    def save() -> None:
        if run is not None:
            done = number * command.tokens + min(trainer.tokens, command.tokens)
            run.save(done, {"number": number, "seconds": seconds, "trainer": trainer.state_dict()})

    def record(found: dict[str, float]) -> None:
        if run is not None:
            generator = torch.Generator(trainer.policy.head.weight.device).manual_seed(1)
            reached = accuracy(trainer.policy, command.task, tested, generator)
            speed = {"learning_seconds": round(seconds, 3), "tokens_per_second": round(trainer.tokens / (seconds or 1))}
            metrics = {"accuracy": reached, "tokens": trainer.tokens, **found, **speed}
            run.log(trainer.updates, metrics, command.seeds[number])
        save()

    if saved is None:
        record({})
    while trainer.tokens < command.tokens:
        begun = time.monotonic()
        try:
            found = trainer.update()
        except EngineFailure as error:
            save()
            kept = (
                ""
                if run is None
                else f" The {trainer.updates} updates until then are kept in {run.folder}; --resume goes on."
            )
            raise RunError(f"{error}{kept}") from error
        seconds += time.monotonic() - begun
        if trainer.updates % command.measure_every == 0 or trainer.tokens >= command.tokens:
            record(found)
        yield min(trainer.tokens, command.tokens)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
