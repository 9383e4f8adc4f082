"""Policies as the runs of `arsm sequences` begin with them, and their questions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from arsm_experiments.runs.files import RunError
from arsm_experiments.runs.reader import load_checkpoint
from arsm_experiments.sequences.imitation import fine_tune, imitate
from arsm_experiments.sequences.methods import Size, load_policy, new_policy, save_policy
from arsm_experiments.sequences.pretrained import (
    Pretrained,
    load_parts,
    load_pretrained,
    save_parts,
)
from arsm_experiments.sequences.tasks import Data, load
from arsm_experiments.sequences.texts import Texts, load_texts
from arsm_experiments.sequences.transformer import Transformer

if TYPE_CHECKING:
    from arsm_experiments.sequences.command import Sequences

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


def held_out(questions: Data | Texts) -> int:
    """The number of questions that are kept for testing."""
    return min(4096, max(1, len(questions) // 5))


@dataclass(frozen=True, eq=False)
class Learner:
    """A policy as every run begins with it, and its questions."""

    policy: nn.Module
    questions: Data | Texts
    tested: Data | Texts
    pretrained: Pretrained | None = None

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device


Bar = Callable[..., Callable[[float], None]]
"""bar(words, total) makes a bar of progress, and returns what moves it."""


def first_learner(command: Sequences, device: torch.device, bar: Bar) -> Learner:
    """What every run starts from."""
    if command.model is not None:
        return pretrained_learner(command, command.model, device, bar)
    data = load(command.data / f"{command.task}.pt", str(device))
    policy = first_policy(command, data, str(device), bar)
    questions, others = data.split(held_out(data))
    return Learner(policy, questions, others.first(command.tested))


def pretrained_learner(command: Sequences, model: str, device: torch.device, bar: Bar) -> Learner:
    """A model of transformers, fine-tuned if asked to; a fine-tuning is kept for the next
    command.
    """
    try:
        pretrained = load_pretrained(model, device, lora=command.lora)
        texts = load_texts(
            pretrained.tokenizer,
            command.task,
            command.data,
            prompts=command.prompts,
            reward=command.reward,
            max_tokens=command.max_tokens,
        )
        module = pretrained.module
        questions, others = texts.split(held_out(texts))
        if command.start is not None:
            load_weights(module, command.start)
        if command.imitate:
            load_weights(module, _imitation(command, model, module, questions, bar))
    except ValueError as error:
        raise RunError(str(error)) from error
    return Learner(module, questions, others.first(command.tested), pretrained)


def _imitation(
    command: Sequences, model: str, module: nn.Module, questions: Texts, bar: Bar
) -> Path:
    """The file of a fine-tuning; the first process makes it if it is not there."""
    name = f"{_imitation_name(command, model)}.safetensors"
    path = command.root / "sequences" / "starts" / name
    if not path.exists() and rank() == 0:
        show = bar("imitation", command.imitate)
        steps = fine_tune(
            module,
            questions,
            rate=command.imitation_rate,
            micro_batch=command.micro_batch,
            precision=PRECISIONS[command.precision],
        )
        for step, _ in zip(range(command.imitate), steps, strict=False):
            show(step + 1)
        save_parts(module, path)
    if dist.is_initialized():
        dist.barrier()
    return path


def load_weights(module: nn.Module, path: Path) -> None:
    """The weights of a run folder, or of a file that `save_parts` wrote."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.is_dir():
            found = load_checkpoint(path / "checkpoint.pt")["state"]["trainer"]["policy"]
        else:
            found = load_file(path)
        load_parts(module, found)
    except (ValueError, KeyError, SafetensorError):
        raise RunError(
            f"{path} holds no weights of this --model with this --lora; give its own options."
        ) from None


def _imitation_name(command: Sequences, model: str) -> str:
    """Tells apart all that a fine-tuning depends on."""
    start = "" if command.start is None else str(command.start)
    about = [
        str(Path(model).resolve()),
        command.task,
        start,
        command.max_tokens,
        command.imitation_rate,
        command.lora,
    ]
    about += [command.precision, "" if command.prompts is None else command.prompts.read_text()]
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:12]
    return f"{Path(model).resolve().name}-{command.imitate}-{digest}"


def first_policy(command: Sequences, data: Data, device: str, bar: Bar) -> Transformer:
    """The small transformer that every run starts from; an imitation is kept for later commands
    that ask for it.
    """
    size = command.size(data)
    torch.manual_seed(0)
    if command.start is not None:
        return start_from(command.start, command.task, size, device)
    if not command.warm_up:
        return new_policy(command.task, size, device)
    shape = f"{size.width}x{size.layers}x{size.heads}"
    path = command.root / "sequences" / "starts" / f"{command.task}-{shape}-{command.warm_up:g}.pt"
    if not path.exists() and rank() == 0:
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
            f"{path} holds no weights of a transformer for {task} with --width {size.width}, "
            f"--layers {size.layers} and --heads {size.heads}; give the options that it was made "
            "with."
        ) from None


def rank() -> int:
    """The number of this process; 0 where there is one."""
    return dist.get_rank() if dist.is_initialized() else 0
