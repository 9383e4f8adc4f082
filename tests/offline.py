"""Compile the Triton kernels for GPUs that are not there: what PyTorch's launches would compile, at
sizes that differ.

A program of its own, since it replaces how kernels are launched: `python -m tests.offline`. The
functions that launch kernels run on tensors without memory; each launch is compiled down to machine
code instead.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from arsm.kernels import gpu_few, gpu_merge, gpu_noise, gpu_order, gpu_pairs, gpu_queries, gpu_tell
from arsm_experiments import gpu_decoder, gpu_perceptron

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
SHARED = 99 * 1024
"""Bytes of shared memory that a program may use on every GPU since the A100; the RTX 30 and 40 have
no more.
"""
ARCHITECTURES = (80, 90)

Launch = tuple[Any, tuple[tuple[str, Any], ...], tuple[tuple[str, int], ...], tuple[int, ...]]


def launches(call: Any) -> set[Launch]:
    """Kernel, types or values of its arguments, options and aligned arguments of every launch that
    the call makes.
    """
    found: set[Launch] = set()

    def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **given: Any) -> None:
            assert all(0 < size < 2**31 for size in grid)
            options = tuple(
                sorted((name, given.pop(name)) for name in OPTIONS if given.get(name) is not None)
            )
            given.pop("maxnreg", None)
            values = {**dict(zip(kernel.arg_names, args, strict=False)), **given}
            assert values.keys() == set(kernel.arg_names)
            described, aligned = [], []
            for place, name in enumerate(kernel.arg_names):
                x = values[name]
                if isinstance(x, torch.Tensor):
                    described.append((name, "*" + TYPES[x.dtype]))
                    aligned.append(place)
                elif isinstance(x, TensorDescriptor):
                    described.append(
                        (name, f"tensordesc<{TYPES[x.base.dtype]}{list(x.block_shape)}>")
                    )
                elif (
                    kernel.params[place].is_constexpr or x == 1
                ):  # Triton compiles an argument of 1 as a constant
                    described.append((name, x))
                else:
                    assert isinstance(x, int)
                    assert abs(x) < 2**31
                    described.append((name, "i32"))
                    aligned += [place] * (x % 16 == 0)
            found.add((kernel, tuple(described), options, tuple(aligned)))

        return run

    with mock.patch.object(JITFunction, "__getitem__", launch):
        call()
    return found


def build(launch: Launch, architecture: int) -> None:
    """Compile one launch down to machine code."""
    kernel, described, options, aligned = launch
    constants = {name: x for name, x in described if not isinstance(x, str)}
    signature = {name: x if isinstance(x, str) else "constexpr" for name, x in described}
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options=dict(options)
    )
    assert compiled.metadata.shared <= SHARED
    assert len(compiled.asm["cubin"]) > 0


def one_variable(shape: tuple[int, ...], dtype: torch.dtype, values: torch.dtype) -> None:
    """Noise, order and merge."""
    logits = torch.empty(shape, dtype=dtype, device="meta")
    many = shape[-1] > 32
    noise = torch.empty(
        shape, dtype=torch.float64 if shape[-1] >= 100_000 else torch.float32, device="meta"
    )
    f = torch.empty(shape, dtype=values, device="meta")
    gpu_noise.log_dirichlet(noise, None)
    if many:
        ahead, _, state, starts, members = gpu_order.order(logits, noise)
        gpu_merge.merge(logits, noise, ahead, state, starts, members, f)
    else:
        gpu_few.order(logits, noise)
        gpu_few.merge(logits, noise, f)


def queries(logits: torch.Tensor) -> None:
    """Samples, references and gradients."""
    batch, variables, categories = logits.shape[:-2], *logits.shape[-2:]
    uniform = logits.new_empty((*batch, 4, variables), dtype=torch.float64)
    points = gpu_queries.inverse_sample(logits, uniform).movedim(-2, 0)
    references = logits.new_empty((*batch, 2, variables), dtype=torch.int64)
    z, pseudo, weight = gpu_few.swap_references(logits, logits.float(), references)
    if variables == 1:
        gpu_queries.by_category(z, torch.empty_like(logits, dtype=torch.bool))
    gpu_tell.compare_swaps(
        weight.new_empty((1 + 2 * categories, *batch)), pseudo, weight, logits.dtype
    )
    gpu_tell.leave_one_out(points, weight.new_empty(points.shape[:-1]), categories, logits.dtype)


def all_launches() -> set[Launch]:
    """At one chunk, at many, with one warp per program and with eight; every dtype."""
    found: set[Launch] = set()
    for shape in (
        (64, 1, 10),
        (300, 4, 20),
        (64, 1, 100),
        (8, 1, 50_257),
        (256, 1, 50_257),
        (1, 1, 1_000_000),
    ):
        found |= launches(lambda shape=shape: one_variable(shape, torch.float32, torch.float32))
    for dtype, values in (
        (torch.float16, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        found |= launches(lambda x=(dtype, values): one_variable((256, 1, 32_000), *x))
        found |= launches(lambda x=(dtype, values): one_variable((5, 1, 3), *x))
    for shape, dtype in (
        ((64, 1, 10), torch.float32),
        ((5, 3, 500), torch.float64),
        ((1, 1, 2), torch.bfloat16),
        ((3_000, 1, 20), torch.float16),
    ):
        found |= launches(
            lambda x=(shape, dtype): queries(torch.empty(x[0], dtype=x[1], device="meta"))
        )
    for shape, dtype in itertools.product(
        ((200, 20, 10), (15, 200, 20, 10), (7, 2, 2), (4, 64, 16), (3, 2, 1)),
        (torch.float32, torch.float64),
    ):
        x = torch.empty(shape, dtype=dtype, device="meta")
        found |= launches(lambda x=x: gpu_pairs.pairs(x, x))
        f = torch.empty(
            (1 + shape[-1] * (shape[-1] - 1) // 2, *shape[:-2]), dtype=dtype, device="meta"
        )
        found |= launches(lambda f=f, x=x: gpu_pairs.merge_pairs(f, x))
    for replicas, hidden in ((1, (256, 512)), (15, (104,)), (2, ())):

        def size(*shape, r=replicas, dtype=torch.float32):
            return torch.empty(r, *shape, dtype=dtype, device="meta")

        sizes = (*hidden, 784)
        weights = [size(o, i, dtype=torch.bfloat16) for i, o in itertools.pairwise((200, *sizes))]
        given = (
            size(9200, 20, dtype=torch.int64),
            size(200, 20, 10),
            weights,
            [size(o) for o in sizes],
            size(200, 784),
        )
        found |= launches(lambda given=given: gpu_decoder.log_weight(*given))
        weights = [weight.float() for weight in weights]
        given = size(200, 200), weights, [size(o) for o in sizes]
        found |= launches(lambda given=given: gpu_perceptron.perceptron(*given))
        inputs = [size(200, weight.shape[-1]) for weight in weights]
        given_backward = size(200, 784), inputs, weights
        found |= launches(lambda given=given_backward: gpu_perceptron.backward(*given))
    return found


def main() -> None:
    """Compile all of them."""
    found = all_launches()
    for architecture in ARCHITECTURES:
        for launch in found:
            build(launch, architecture)
    print(f"{len(found)} launches of {len({launch[0] for launch in found})} kernels compile")


if __name__ == "__main__":
    main()
