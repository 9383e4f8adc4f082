"""Overhead of an estimator: forward and backward with an f that costs nothing, compared with other
libraries.

Storchastic replaces functions of torch when it is imported, which slows everything down, so it runs
in its own process, alternating with torch's `gumbel_softmax` there. Times are CPU times of one
thread.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical

import arsm
from benchmarks.measure import Table, Timing, in_subprocess, interleaved, table

ROWS, VARIABLES, CATEGORIES = 200, 20, 10
REPETITIONS = 30
BASE = "torch: gumbel_softmax"
ESTIMATORS = (
    *arsm.estimator_names(),
    "arsm:pooled=True",
    "rloo:samples=46",
    "rloo:samples=46,live=1",
)
SMALL = (64, 1, 10)
MISSING = "not installed; `pip install -e '.[benchmarks]'` adds it"

Call = Callable[[], object]


def nothing(z: Tensor) -> Tensor:
    """An f that costs nothing: [N] zeros."""
    return (z[:, 0, 0] if z.is_floating_point() else z[:, 0]) * 0.0


def estimate(estimator: arsm.Estimator, logits: Tensor) -> arsm.Estimate:
    """Forward and backward, including learned parts."""
    out = arsm.estimate(estimator, logits.clone().requires_grad_(), nothing, max_rows=None)
    loss = out.value.sum()
    (loss if out.estimator_loss is None else loss + out.estimator_loss).backward()
    return out


def relax(draw: Callable[[Tensor], Tensor], logits: Tensor) -> None:
    """The same for a library whose draws are differentiable."""
    draw(logits.clone().requires_grad_()).sum().backward()


def leave_one_out(logits: Tensor, samples: int = 4) -> None:
    """RLOO written by hand with torch.distributions."""
    q = Categorical(logits=logits.clone().requires_grad_())
    z = q.sample((samples,))
    f = nothing(z.flatten(0, -2)).view(z.shape[:-1])
    advantage = f - (f.sum(0) - f) / (samples - 1)
    (advantage * q.log_prob(z).sum(-1)).mean(0).sum().backward()


def torch_calls(logits: Tensor) -> dict[str, Call]:
    return {
        BASE: partial(relax, partial(F.gumbel_softmax, tau=0.5), logits),
        "torch: gumbel_softmax, hard": partial(
            relax, partial(F.gumbel_softmax, tau=0.5, hard=True), logits
        ),
    }


def reinmax_calls(logits: Tensor) -> dict[str, Call]:
    from reinmax import reinmax  # pyright: ignore[reportMissingImports]

    return {"reinmax: reinmax": partial(relax, lambda phi: reinmax(phi, 1.0)[0], logits)}


def storchastic_calls(logits: Tensor) -> dict[str, Call]:
    import storch  # pyright: ignore[reportMissingImports]
    from storch.method import GumbelSoftmax, ScoreFunction  # pyright: ignore[reportMissingImports]
    from torch.distributions import OneHotCategorical

    methods = {
        "storchastic: GumbelSoftmax": GumbelSoftmax("z", initial_temperature=0.5),
        "storchastic: ScoreFunction, 4 samples": ScoreFunction(
            "z", n_samples=4, baseline_factory="batch_average"
        ),
    }

    def run(method: Callable[..., Tensor]) -> None:
        phi = storch.denote_independent(logits.clone().requires_grad_(), 0, "rows")
        storch.add_cost(method(OneHotCategorical(logits=phi))[..., 0, 0], "f")
        storch.backward()

    return {name: partial(run, method) for name, method in methods.items()}


def problem() -> Tensor:
    """Logits [B, K, C]."""
    return torch.randn(ROWS, VARIABLES, CATEGORIES, generator=torch.Generator().manual_seed(0))


def ours(logits: Tensor) -> tuple[dict[str, Call], dict[str, int], dict[str, str]]:
    """Calls and evaluations that they ask for, by name, and why the others cannot run here."""
    calls: dict[str, Call] = {}
    asked, refused = {}, {}
    for words in ESTIMATORS:
        estimator = arsm.estimator(words)
        try:
            asked[f"arsm: {words}"] = int(estimate(estimator, logits).info["asked"])
        except ValueError as error:
            refused[f"arsm: {words}"] = str(error)
        else:
            calls[f"arsm: {words}"] = partial(estimate, estimator, logits)
    return calls, asked, refused


def storchastic() -> tuple[dict[str, Timing], Timing]:
    """Timings in a separate process, with torch's `gumbel_softmax` for comparison."""
    times = {
        name: Timing.of(values)
        for name, values in json.loads(in_subprocess("benchmarks.overhead")).items()
    }
    return times, times.pop(BASE)


def time_storchastic() -> None:
    """Print as JSON what `storchastic` reads."""
    torch.set_num_threads(1)
    logits = problem()
    calls = {BASE: torch_calls(logits)[BASE], **storchastic_calls(logits)}
    print(
        json.dumps(
            {
                name: timing.each
                for name, timing in interleaved(calls, REPETITIONS, time.process_time).items()
            }
        )
    )


def small() -> Table:
    """A problem so small that only the number of kernels matters."""
    logits = torch.randn(SMALL, generator=torch.Generator().manual_seed(0))
    by_hand = "leave-one-out by hand, 4 samples"
    calls: dict[str, Call] = {by_hand: partial(leave_one_out, logits)}
    for words in ("reinforce", "rloo", "arsm", "ars"):
        calls[f"arsm: {words}"] = partial(estimate, arsm.estimator(words), logits)
    times = interleaved(calls, 300, time.process_time)
    rows = [[name, str(t), f"{t.median / times[by_hand].median:.2f}"] for name, t in times.items()]
    title = f"Forward and backward without f, logits {list(SMALL)}, one thread"
    return table(title, ["estimator", "median (range)", "times by hand"], rows, times)


def main() -> list[Table]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    first = small()
    print(first)
    logits = problem()
    calls, asked, lines = ours(logits)
    calls |= torch_calls(logits)
    try:
        others = reinmax_calls(logits)
        for call in others.values():
            call()
    except ModuleNotFoundError:
        lines["reinmax"] = MISSING
    except Exception as error:  # another library may raise anything on an unsupported torch
        lines["reinmax"] = f"does not run here: {type(error).__name__}: {error}"
    else:
        calls |= others
    times = interleaved(calls, REPETITIONS, time.process_time)
    relative = {name: timing.median / times[BASE].median for name, timing in times.items()}
    if importlib.util.find_spec("storch") is None:
        lines["storchastic"] = MISSING
    else:
        try:
            apart, base = storchastic()
        except subprocess.CalledProcessError as error:
            lines["storchastic"] = f"does not run here: {error.stderr.strip().splitlines()[-1]}"
        else:
            times |= apart
            relative |= {name: timing.median / base.median for name, timing in apart.items()}
    rows = [
        [name, str(asked.get(name, "")), str(timing), f"{relative[name]:.1f}"]
        for name, timing in sorted(times.items(), key=lambda item: relative[item[0]])
    ]
    title = (
        f"Forward and backward without f, B = {ROWS}, K = {VARIABLES}, C = {CATEGORIES}, one thread"
    )
    header = ["estimator", "evaluations asked", "median (range)", "times gumbel_softmax"]
    second = table(title, header, rows, times)
    print(second, end="")
    print(*(f"{name}: {line}" for name, line in lines.items()), sep="\n", end="\n\n")
    torch.set_num_threads(threads)
    return [first, second]


if __name__ == "__main__":
    sys.exit(time_storchastic())
