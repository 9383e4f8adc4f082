"""Tokens per second of decoding in slots, beside transformers' own `generate`: `python -m
benchmarks.decoding`.

The model has the shape of SmolLM2-135M and random weights in bfloat16; on a CPU, or with --small, a
tiny one. Prompts of 40 tokens get 64 new ones. Every line is printed as soon as it is measured and
written to a JSON file at the end; a variant that fails prints its traceback and leaves the others
alone. Variants that compile run last, and are left out when the time is up.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arsm.sequences import Decoding, Prefixes, Transformers
from arsm.sequences.board import Rows, step
from arsm.sequences.draws import draw_tokens
from arsm.sequences.slots import Slots
from benchmarks.measure import hardware

PROMPT = 40
NEW = 64
PER_STATE = 0.4
"""Branches per state: an assumption, not a measurement. Random weights cannot tell how often 32
draws differ.
"""


class Bench:
    """The model, the records and the clock."""

    def __init__(self, device: str, small: bool, seconds: float) -> None:
        import transformers

        self.device = torch.device(device)
        self.small = small
        self.deadline = time.perf_counter() + seconds
        self.records: list[dict[str, Any]] = []
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=1000 if small else 49152,
            hidden_size=72 if small else 576,
            intermediate_size=96 if small else 1536,
            num_hidden_layers=3 if small else 30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        with self.device:
            self.model: Any = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        if not small:
            # parameters only: rotary frequencies stay in float32
            for parameter in self.model.parameters():
                parameter.data = parameter.data.bfloat16()
        self.vocabulary = config.vocab_size

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
        """Seconds of the first call, and the least of some more."""
        times = []
        for _ in range(repeats + 1):
            self.wait()
            begun = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - begun)
        return times[0], min(times[1:])

    def milliseconds(self, call: Callable[[], Any], repeats: int = 20) -> float:
        """Milliseconds per call of many queued ones; on a GPU, of their CUDA graph."""
        run = call
        if self.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            run = graph.replay
        run()
        self.wait()
        begun = time.perf_counter()
        for _ in range(repeats):
            run()
        self.wait()
        return 1e3 * (time.perf_counter() - begun) / repeats

    def prompts(self, rows: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1)
        return torch.randint(
            self.vocabulary, (rows, PROMPT), generator=generator, device=self.device
        )

    def record(self, name: str, measure: Callable[[], dict[str, Any]], needs: float = 0.0) -> None:
        """Measure one variant, if `needs` seconds are left."""
        left = self.deadline - time.perf_counter()
        if left < needs:
            found: dict[str, Any] = {"left out": f"{left:.0f} s left, needs about {needs:.0f}"}
        else:
            begun = time.perf_counter()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                found = measure()
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"[:400]}
            if self.device.type == "cuda":
                found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
                torch.cuda.empty_cache()
            found["seconds of this variant"] = time.perf_counter() - begun
        found = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in found.items()
        }
        self.records.append({"variant": name, **found})
        print(name, json.dumps(found), flush=True)


def plain(bench: Bench, rows: int, draws: int = 1, compiled: bool = False) -> dict[str, Any]:
    """Sample one sequence per row."""
    slots = Slots(Transformers(bench.model, compiled=compiled).slots(), rows)
    slots.timed = True
    prompts, row = bench.prompts(rows), torch.arange(rows, device=bench.device)
    generator = torch.Generator(bench.device).manual_seed(0)
    first, later = bench.seconds(
        lambda: slots.sample(prompts, None, row, Decoding(NEW), draws, generator)
    )
    calls = 4
    return {
        "rows": rows,
        "draws": draws,
        "tokens per second": rows * NEW / later,
        "milliseconds per call": 1e3 * later,
        "milliseconds per token of all rows": 1e3 * later / NEW,
        "milliseconds of prefill per call": 1e3 * slots.tally.fill_seconds / calls,
        "first call, seconds": first,
        "capture, seconds": slots.tally.capture_seconds,
        "steps per call": slots.tally.steps / calls,
        "looks per call": slots.tally.looks / calls,
    }


def parts(bench: Bench, rows: int) -> dict[str, Any]:
    """Milliseconds of a step's parts, each repeated alone."""
    model = Transformers(bench.model).slots()
    cache = model.cache(rows, PROMPT + NEW)
    found: dict[str, Any] = {"rows": rows}
    with torch.no_grad(), model.decoding():
        decode = model.decoder(cache)
        for draws in (1, 32):
            state = Rows.idle(rows, NEW, draws, torch.float32, bench.device)
            state.column.fill_(PROMPT + NEW // 2)
            state.uniform.uniform_()
            logits = decode(state.token, state.column, state.first).clone()
            if draws == 1:
                found["forward"] = bench.milliseconds(
                    lambda s=state: decode(s.token, s.column, s.first)
                )
                found["noise"] = bench.milliseconds(lambda s=state: s.uniform.mul_(0.5))
                found["softmax"] = bench.milliseconds(
                    lambda x=logits: x.softmax(-1, dtype=torch.float32)
                )
            found[f"sampling {draws}"] = bench.milliseconds(
                lambda s=state, x=logits: draw_tokens(x, s.uniform)
            )
            found[f"step {draws}"] = bench.milliseconds(lambda s=state: step(decode, s, None, 1.0))
        some = torch.arange(max(1, rows // 16), device=bench.device)
        copied = cache.clone()
        found["refill of a 16th of the rows"] = bench.milliseconds(
            lambda: copied.index_copy_(2, some, cache.index_select(2, some))
        )
    return found


def attention(bench: Bench, rows: int) -> dict[str, Any]:
    """Milliseconds of one layer's attention, by the ways to compute it."""
    width, heads, groups, size = PROMPT + NEW, 9, 3, bench.model.config.head_dim
    dtype = bench.model.dtype
    q = torch.randn(rows, heads, 1, size, device=bench.device, dtype=dtype)
    k = torch.randn(rows, groups, width, size, device=bench.device, dtype=dtype)
    mask = torch.zeros(rows, 1, 1, width, device=bench.device, dtype=dtype)
    folded = q.view(rows, groups, heads // groups, size)
    attend = torch.nn.functional.scaled_dot_product_attention

    def by_products() -> Tensor:
        scores = folded @ k.mT * size**-0.5 + mask
        return scores.softmax(-1, dtype=torch.float32).to(dtype) @ k

    def repeated() -> Tensor:
        whole = k.repeat_interleave(heads // groups, 1)
        return attend(q, whole, whole, attn_mask=mask)

    layers = bench.model.config.num_hidden_layers
    ways = {
        "folded": lambda: attend(folded, k, k, attn_mask=mask),
        "folded, products": by_products,
        "repeated heads": repeated,
        "grouped by torch": lambda: attend(q, k, k, attn_mask=mask, enable_gqa=True),
        "folded, no mask": lambda: attend(folded, k, k),
    }
    found: dict[str, Any] = {"rows": rows, "layers": layers}
    for name, way in ways.items():
        try:
            found[name] = layers * bench.milliseconds(way)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def branches(bench: Bench, rows: int, prompts: int) -> dict[str, Any]:
    """Play another token to the end in PER_STATE of the states."""
    slots = Slots(Transformers(bench.model).slots(), rows)
    slots.timed = True
    generator = torch.Generator(bench.device).manual_seed(0)
    decoding = Decoding(NEW)
    given = bench.prompts(prompts)
    true = torch.randint(bench.vocabulary, (prompts, NEW), generator=generator, device=bench.device)
    chosen = torch.rand(true.shape, generator=generator, device=bench.device) < PER_STATE
    which, at = chosen.nonzero(as_tuple=True)
    prefixes = Prefixes(which, at, (true[which, at] + 1) % bench.vocabulary, true)
    tokens = int((NEW - prefixes.step).sum())
    first, later = bench.seconds(
        lambda: slots.complete(given, None, prefixes, decoding, generator), 1
    )
    calls = 2
    return {
        "rows": rows,
        "prompts": prompts,
        "branches": which.shape[0],
        "tokens": tokens,
        "tokens per second": tokens / later,
        "seconds": later,
        "first call, seconds": first,
        "capture, seconds": slots.tally.capture_seconds,
        "prefill, seconds": slots.tally.fill_seconds / calls,
        "steps": slots.tally.steps / calls,
        "share of rows in use": calls * (tokens - which.shape[0]) / slots.tally.row_steps,
    }


def generate(bench: Bench, rows: int, **options: Any) -> dict[str, Any]:
    """transformers' own."""
    prompts = bench.prompts(rows)

    def call() -> Tensor:
        return bench.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW,
            pad_token_id=0,
            **options,
        )

    assert call().shape == (rows, PROMPT + NEW)
    first, later = bench.seconds(call, 1)
    return {
        "rows": rows,
        "tokens per second": rows * NEW / later,
        "second call, seconds": first,
        "seconds": later,
    }


def copies(bench: Bench) -> dict[str, Any]:
    """Bring bfloat16 copies of float32 weights up to date."""
    bench.model.float()
    try:
        model = Transformers(bench.model).slots(torch.bfloat16)

        def enter() -> None:
            with model.decoding():
                pass

        return {"milliseconds": 1e3 * bench.seconds(enter)[1]}
    finally:
        for parameter in bench.model.parameters():
            parameter.data = parameter.data.bfloat16()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/decoding.json"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="A tiny model, as on a CPU")
    parser.add_argument(
        "--seconds", type=float, default=230, help="Nothing is begun that would take longer in all"
    )
    parser.add_argument("--only", default="", help="Measure variants whose name contains this")
    options = parser.parse_args()
    small = options.small or options.device == "cpu"
    import transformers

    where = torch.cuda.get_device_name() if options.device == "cuda" else hardware()
    about = {"device": where, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(about), flush=True)
    bench = Bench(options.device, small, options.seconds)
    sizes = (8, 32) if small else (1024, 256, 64)
    large = max(sizes)
    few = 8 if small else 256
    variants: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {}
    for rows in sizes:
        variants[f"slots {rows}"] = (lambda rows=rows: plain(bench, rows), 0)
    variants["parts"] = (lambda: parts(bench, large), 0)
    variants["attention"] = (lambda: attention(bench, large), 0)
    variants[f"slots {large}, 32 draws"] = (lambda: plain(bench, large, 32), 0)
    variants["branches"] = (lambda: branches(bench, large, few), 0)
    variants[f"generate {large}"] = (lambda: generate(bench, large), 20)
    if not small:
        variants["copies in bfloat16"] = (lambda: copies(bench), 0)
        variants[f"slots {large}, compiled"] = (lambda: plain(bench, large, 1, True), 30)
        variants["slots 256, compiled"] = (lambda: plain(bench, 256, 1, True), 30)
        variants[f"generate {large}, static cache, compiled"] = (
            lambda: generate(bench, large, cache_implementation="static"),
            60,
        )
        variants["generate 256"] = (lambda: generate(bench, 256), 20)
    for name, (measure, needs) in variants.items():
        if options.only in name:
            bench.record(name, measure, needs)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**about, "records": bench.records}, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
