"""One update of a language model, by stage: `python -m benchmarks.update`.

The model has the shape of SmolLM2-135M and random weights in float32; on a CPU, or with --small, a
tiny one. Its last normalisation is scaled so that 32 draws of a state hold 0.4 others than the true
token on average, as SmolLM2's do at an accuracy of about 0.8 on sums of four numbers. Sampling runs
in bfloat16 copies on a GPU, the credit in bfloat16 by autocast. Prompts have 40 tokens and answers
64. The memory is what an update needs beyond weights, gradients and the optimiser's state. The
target for an update is generated tokens / 50,000 + 0.4 seconds.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Branch, Group
from benchmarks.decoding import NEW, PROMPT
from benchmarks.measure import hardware

OTHERS = 0.4
GB = 1e9


def make(device: str, small: bool) -> Any:
    import transformers

    shape: dict[str, Any] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    shape |= {"num_key_value_heads": 3, "vocab_size": 49152, "rope_theta": 100000.0}
    if small:
        shape = {
            "hidden_size": 36,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
        }
        shape |= {"num_key_value_heads": 1, "vocab_size": 300}
    config = transformers.LlamaConfig(
        **shape, tie_word_embeddings=True, max_position_embeddings=2048
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    return model.to(device).eval()


def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
    """The share of even tokens: costs nothing to compute."""
    return (tokens % 2 == 0).double().mean(-1)


def others_per_state(
    model: sequences.Transformers, prompts: Tensor, options: dict[str, Any]
) -> float:
    draws = 32
    # samples everything, plays hardly anything
    strategy = Branch(arsm.RLOO(draws), budget=draws - 1)
    shorter: dict[str, Any] = options | {"max_tokens": 16}
    out = sequences.estimate(strategy, model, prompts[:64], reward, **shorter)
    assert out.credit is not None
    tokens = out.credit.tokens.sort(-1).values
    return float((tokens[..., 1:] != tokens[..., :-1]).double().sum(-1).mean())


def calibrate(
    module: Any, model: sequences.Transformers, prompts: Tensor, options: dict[str, Any]
) -> float:
    """Scale the last normalisation until states are as sure as they should be; return the others
    per state.
    """
    weight = module.model.norm.weight
    low, high = 0.0, 12.0  # of the logarithm of the scale
    found = 0.0
    for _ in range(10):
        middle = (low + high) / 2
        with torch.no_grad():
            weight.fill_(torch.tensor(middle).exp().item())
        found = others_per_state(model, prompts, options)
        low, high = (middle, high) if found > OTHERS else (low, middle)
        if abs(found - OTHERS) < 0.05:
            break
    return found


def device_allocations(cuda: bool) -> int:
    """How often PyTorch's allocator has asked the device for memory, which takes its time."""
    return int(torch.cuda.memory_stats()["num_device_alloc"]) if cuda else 0


def update(
    strategy: Any,
    model: sequences.Transformers,
    optimiser: Any,
    prompts: Tensor,
    options: dict[str, Any],
    cuda: bool,
    judge: sequences.Reward = reward,
) -> dict[str, float]:
    """One update; the time of the reward `judge` is reported apart."""
    judged = 0.0

    def timed(prompts: Tensor, tokens: Tensor) -> Tensor:
        nonlocal judged
        wait()
        begun = time.perf_counter()
        rewards = judge(prompts, tokens)
        wait()
        judged += time.perf_counter() - begun
        return rewards

    wait = torch.cuda.synchronize if cuda else lambda: None
    held = 0
    asked = device_allocations(cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    autocast = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
    wait()
    start = time.perf_counter()
    with autocast:
        out = sequences.estimate(strategy, model, prompts, timed, **options)
    wait()
    played = time.perf_counter()
    start += judged
    (-out.value.mean()).backward()
    wait()
    credited = time.perf_counter()
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)
    wait()
    end = time.perf_counter()
    tokens = int(out.info["generated"])
    found: dict[str, float] = {
        "tokens": tokens,
        "rollouts": int(out.info["rollouts"]),
        "rewards, seconds": judged,
        "sample and play, seconds": played - start,
        "tokens per second": tokens / (played - start),
        "credit, seconds": credited - played,
        "optimiser, seconds": end - credited,
        "update, seconds": end - start,
        "target, seconds": tokens / 50_000 + 0.4,
        "mean mismatch": float(out.info["mean_mismatch"]),
    }
    if cuda:
        found["allocations on the device"] = device_allocations(cuda) - asked
        found["peak above weights, gradients and optimiser, GB"] = (
            torch.cuda.max_memory_allocated() - held
        ) / GB
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/update.json"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--micro-batch", type=int, default=32)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    small = arguments.small or not cuda
    device = "cuda" if cuda else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    module = make(device, small)
    model = sequences.Transformers(module)
    prompts = torch.randint(module.config.vocab_size, (16 if small else 256, PROMPT), device=device)
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {
        "max_tokens": 8 if small else NEW,
        "micro_batch": arguments.micro_batch,
        "sampling_dtype": torch.bfloat16 if cuda else None,
        "generator": generator,
    }
    records: dict[str, Any] = {"hardware": hardware(), "torch": torch.__version__}
    records["others per state"] = calibrate(module, model, prompts, options)
    print("others per state", records["others per state"], flush=True)
    # measures, and changes nothing
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.0, fused=cuda)
    cases = {
        "Branch(RLOO(32)), all prompts": (Branch(arsm.RLOO(32)), prompts),
        "Branch(RLOO(8)), all prompts": (Branch(arsm.RLOO(8)), prompts),
        "Group(8), a quarter of the prompts": (Group(8), prompts[: len(prompts) // 4]),
    }
    for name, (strategy, some) in cases.items():
        try:
            runs = [update(strategy, model, optimiser, some, options, cuda) for _ in range(4)]
        except Exception:
            print(name, traceback.format_exc(), flush=True)
            continue
        records[name] = {"first": runs[0], "later": runs[1:]}
        print(name, json.dumps({"first": runs[0]["update, seconds"], **runs[-1]}), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
