"""What could differ on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import arsm
from arsm import kernels
from arsm.noise import dirichlet
from arsm.sampling import inverse_sample, uniforms
from arsm.swap import pair_table, run_race
from arsm.univariate import merge, swap_all
from tests.problems import PROBLEMS
from tests.roster import ROSTER, Entry
from tests.statistics import deviations
from tests.test_compile import Loss, fitting_loss, gradients, inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WORDS = [entry for entry in ROSTER if isinstance(entry.how, str)]
"""Those whose learned parts, if any, follow the logits to the GPU."""
LAUNCHED = ((64, 10, 0), (64, 10, 1), (1, 10, 0), (7, 16, 0), (64, 10, 0), (900, 10, 0), (9, 1, 1))
"""Rows, categories, and the place in memory where the logits start."""


def to_cuda(x, device: str = "cuda"):
    """A tensor, or a tuple of tensors, on a GPU."""
    return x.to(device) if isinstance(x, Tensor) else type(x)(*(part.to(device) for part in x))


def to_gpu(loss: Loss) -> Loss:
    """The model and the estimator's learned parts."""
    loss.estimator.learned.cuda()
    return loss.cuda()


@pytest.mark.parametrize("entry", WORDS, ids=lambda entry: entry.label)
def test_the_gpu_gives_the_numbers_of_the_cpu(entry: Entry) -> None:
    for problem in (p for p in PROBLEMS if entry.fits(*p.size)):
        noise = entry.make(*problem.size).noise(problem.logits, torch.Generator().manual_seed(0))
        results = []
        for move in (lambda x: x, to_cuda):
            estimator = entry.make(*problem.size)
            estimator.learned.to(move(problem.logits).device)
            logits, theta = (
                move(x).requires_grad_() for x in (problem.logits.clone(), problem.theta.clone())
            )
            out = arsm.estimate(estimator, logits, problem.f, theta, noise=move(noise))
            by_logits, by_theta = torch.autograd.grad(out.value.sum(), (logits, theta))
            results.append([x.detach().cpu() for x in (out.value, out.z, by_logits, by_theta)])
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("words", ["rloo:samples=46,live=1", "arsm:pooled=True"])
def test_a_compiled_stack_finds_equal_queries(words: str, replicas: int) -> None:
    """Two layers whose samples hardly differ: a few of 46 queries are distinct, in a compiled step
    of several replicas too, where most of them once went unnoticed.
    """
    estimator = arsm.estimator(words)
    rows, variables, categories = 200, 20, 10
    generator = torch.Generator().manual_seed(0)
    top = 60 * torch.randn(replicas, rows, variables, categories, generator=generator).cuda()
    size = variables * categories
    weights = 15 * torch.randn(replicas, size, size, generator=generator).cuda()

    def distinct(top: Tensor, weights: Tensor) -> Tensor:
        def below(zs: list[Tensor], top: Tensor) -> Tensor:
            one_hot = arsm.one_hot(zs[0], categories).flatten(1)
            return (one_hot @ weights).unflatten(-1, (variables, categories))

        made = arsm.estimate_layers(
            estimator,
            [lambda zs, top: top, below],
            lambda zs, logits, top: zs[1].sum(-1).float(),
            top,
            evaluation="dense",
            max_rows=None,
        )
        return torch.stack([layer.info["distinct"].float().mean() for layer in made.layers])

    stacked = torch.vmap(distinct, randomness="different")
    compiled = torch.compile(stacked, fullgraph=True, dynamic=False)
    found = compiled(top, weights)
    assert found.max() < 10
    torch.testing.assert_close(found, stacked(top, weights), rtol=0.1, atol=0.3)


def test_pseudo_actions_are_the_same_on_both() -> None:
    logits = torch.randn(300, 4, 20, generator=torch.Generator().manual_seed(0))
    log_pi = dirichlet(logits, torch.Generator().manual_seed(1))
    here, there = run_race(logits, log_pi), run_race(logits.cuda(), log_pi.cuda())
    assert torch.equal(pair_table(here), pair_table(there).cpu())
    logits, log_pi = logits[..., :10].contiguous(), log_pi[..., :10].contiguous()
    for expected, found in zip(
        kernels.pairs(logits, log_pi), kernels.pairs(logits.cuda(), log_pi.cuda()), strict=True
    ):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("shape", [(7, 3, 16), (5, 6, 2), (200, 20, 10), (3, 8, 20, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairs_are_summed_alike_on_both(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    log_pi = dirichlet(torch.zeros(shape))
    f = torch.randn(1 + shape[-1] * (shape[-1] - 1) // 2, *shape[:-2], dtype=dtype)
    found = kernels.merge_pairs(f.cuda(), log_pi.cuda()).cpu()
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), kernels.merge_pairs(f.double(), log_pi), rtol=0, atol=1e-5
    )


def test_the_likelihood_of_choices_is_the_same_on_both() -> None:
    from arsm_experiments.decoder import log_weight
    from tests.experiments.test_decoder import drawn

    z, log_q, weights, biases, x = drawn(3, 46, 20, 20, 10, 256, 512, 784)
    weights = [weight.bfloat16() for weight in weights]
    given = (
        z.cuda(),
        log_q.cuda(),
        [w.cuda() for w in weights],
        [b.cuda() for b in biases],
        x.cuda(),
    )
    expected = log_weight(z, log_q, weights, biases, x)
    for _ in range(20):  # a race between loads and products would not show every time
        torch.testing.assert_close(log_weight(*given).cpu(), expected, rtol=2e-3, atol=0.5)


@pytest.mark.parametrize("sizes", [(784, 512, 256, 180), (200, 256, 512, 784), (40, 20)])
@pytest.mark.parametrize("replicas", [1, 15])
def test_a_perceptron_and_its_gradient_are_the_same_on_both(
    replicas: int, sizes: tuple[int, ...]
) -> None:
    from arsm_experiments import gpu_perceptron, perceptron
    from tests.experiments.test_perceptron import drawn

    x, weights, biases = drawn(replicas, 200, *sizes)
    flat = torch.cat(
        [each.flatten(1) for pair in zip(weights, biases, strict=True) for each in pair], 1
    ).cuda()
    there = flat.split(
        [each[0].numel() for pair in zip(weights, biases, strict=True) for each in pair], 1
    )
    views = [part.view(each.shape) for part, each in zip(there[::2], weights, strict=True)]
    expected = perceptron._by_pytorch(x, weights, biases)
    grad_out = torch.randn(expected[-1].shape, generator=torch.Generator().manual_seed(1))
    inputs = [x, *expected[:-1]]
    expected += perceptron._backward_by_pytorch(grad_out, inputs, weights)
    for _ in range(20):  # a race between loads and products would not show every time
        found = gpu_perceptron.perceptron(x.cuda(), views, list(there[1::2]))
        found += gpu_perceptron.backward(grad_out.cuda(), [each.cuda() for each in inputs], views)
        for one, other in zip(found, expected, strict=True):  # products are in TF32, with 10 bits
            assert (one.cpu() - other).abs().max() < 5e-3 * other.abs().max()


@pytest.mark.parametrize("replicas", [1, 15])
def test_products_of_a_perceptron_round_and_do_not_cut_off(replicas: int) -> None:
    from arsm_experiments import gpu_perceptron

    size = lambda *shape: torch.rand(replicas, *shape, device="cuda")  # noqa: E731
    x, weight, grad_out = size(200, 512), size(256, 512), size(200, 256)
    (out,) = gpu_perceptron.perceptron(x, [weight], [torch.zeros_like(weight[..., 0])])
    grad_weight, _, grad_x = gpu_perceptron.layer_backward(grad_out, x, weight, hidden=True)
    for found, a, b in (
        (out, x, weight.mT),
        (grad_weight, grad_out.mT, x),
        (grad_x, grad_out, weight),
    ):
        # cut off: 7e-4 less
        assert abs(float((found / (a.double() @ b.double())).mean()) - 1) < 2e-5


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("shape", [(300, 4, 20), (64, 1, 1_000), (3, 1, 50_257), (1, 1, 1_000_000)])
def test_swaps_of_one_variable_are_the_same_on_both_and_repeat_to_the_bit(
    shape: tuple[int, ...], scale: float
) -> None:
    logits = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    log_pi = dirichlet(logits, torch.Generator().manual_seed(1))
    here, there = swap_all(logits, log_pi), swap_all(logits.cuda(), log_pi.cuda())
    assert torch.equal(here.can_win, there.can_win.cpu())
    f = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    f = torch.where(here.can_win, f, f.gather(-1, here.z.unsqueeze(-1)))
    found = merge(there, f.cuda())
    torch.testing.assert_close(found.cpu(), merge(here, f), rtol=0, atol=1e-11)
    assert torch.equal(found, merge(swap_all(logits.cuda(), log_pi.cuda()), f.cuda()))


@pytest.mark.parametrize("words", ["arsm", "ars", "rloo"])
def test_a_kernel_launched_again_fits_other_sizes_and_alignments(words: str) -> None:
    estimator = arsm.estimator(words)
    for rows, categories, offset in LAUNCHED:
        generator = torch.Generator().manual_seed(rows)
        logits = torch.randn(offset + rows * categories, dtype=torch.float64, generator=generator)
        noise = estimator.noise(logits[offset:].view(rows, 1, categories), generator)
        here, there = (
            arsm.estimate(
                estimator,
                x[offset:].view(rows, 1, categories),
                lambda z: z[:, 0].double(),
                noise=given,
            )
            for x, given in ((logits, noise), (logits.cuda(), to_cuda(noise)))
        )
        for name in ("value", "z", "grad"):
            torch.testing.assert_close(
                getattr(there, name).cpu(), getattr(here, name), rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize("samples", [1, 4, 5, 40])
@pytest.mark.parametrize("categories", [2, 10, 16, 17, 100, 500])
def test_samples_by_cumulative_sums_are_those_of_the_cpu(categories: int, samples: int) -> None:
    """A warp has more threads than some rows have categories."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 3, categories, generator=generator, dtype=torch.float64)
    u = uniforms(logits, samples, generator)
    expected = inverse_sample(logits, u)
    assert torch.equal(inverse_sample(logits.cuda(), u.cuda()).cpu(), expected)


def test_noise_drawn_on_the_gpu_has_the_right_distribution() -> None:
    logits = torch.tensor([[0.5, -1.0, 1.5, 0.0]], dtype=torch.float64, device="cuda")
    many = logits.expand(40_000, 1, 4)
    z = run_race(many, dirichlet(many, torch.Generator("cuda").manual_seed(0))).z
    won = (z == torch.arange(4, device="cuda")).double()
    assert float(deviations(won, logits.softmax(-1).squeeze(0)).max()) <= 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("categories", [600, 200_000])
def test_noise_of_many_categories_has_the_right_distribution(
    categories: int, compiled: bool
) -> None:
    draw = torch.compile(dirichlet, fullgraph=True) if compiled else dirichlet
    torch.manual_seed(0)
    pi = draw(torch.zeros(4_000_000 // categories, 1, categories, device="cuda")).double().exp()
    torch.testing.assert_close(pi.sum(-1), torch.ones_like(pi[..., 0]), rtol=0, atol=1e-4)
    # C pi has the distribution function 1 - (1 - x/C)^(C-1)
    below = torch.stack([(categories * pi < x).double().flatten() for x in (0.01, 0.5, 2.0)], -1)
    expected = torch.tensor(
        [1 - (1 - x / categories) ** (categories - 1) for x in (0.01, 0.5, 2.0)], device="cuda"
    )
    assert float(deviations(below, expected.double()).max()) <= 1


@pytest.mark.parametrize("categories", [100, 600, 200_000])
def test_noise_follows_the_seed_and_is_new_in_every_replay(categories: int) -> None:
    logits = torch.zeros(3, 1, categories, device="cuda")
    generator = torch.Generator("cuda")
    one, again = (dirichlet(logits, generator.manual_seed(1)) for _ in range(2))
    assert torch.equal(one, again)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dirichlet(logits)
    drawn = [one, dirichlet(logits, generator)]
    for seed in (0, None, 0, None):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        drawn.append(captured.clone())
    assert torch.equal(torch.stack(drawn[2:4]), torch.stack(drawn[4:]))
    assert torch.stack(drawn[:4]).unique().numel() > 0.99 * 4 * one.numel()


@pytest.mark.parametrize("entry", WORDS, ids=lambda entry: entry.label)
def test_dense_evaluation_never_waits_for_the_gpu(entry: Entry) -> None:
    loss = to_gpu(fitting_loss(entry))
    x, noise = (to_cuda(part) for part in inputs(loss, 0))
    gradients(loss, loss, x, noise)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(loss, loss, x, noise)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("entry", WORDS, ids=lambda entry: entry.label)
def test_a_captured_graph_replays_the_estimate(entry: Entry) -> None:
    loss = to_gpu(fitting_loss(entry))
    x, noise = (to_cuda(part) for part in inputs(loss, 0))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(loss, loss, x, noise)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(loss, loss, x, noise)
    fresh_x, fresh_noise = inputs(loss, 1)
    x.copy_(fresh_x)
    for static, fresh in zip(
        *((n,) if isinstance(n, Tensor) else n for n in (noise, fresh_noise)), strict=True
    ):
        static.copy_(fresh)
    graph.replay()
    torch.testing.assert_close(captured, gradients(loss, loss, x, noise), rtol=1e-9, atol=1e-10)


def test_compiled_on_the_gpu() -> None:
    loss = Loss(arsm.ARSM(), 3, 4).cuda()
    compiled = torch.compile(loss, fullgraph=True)
    for seed in range(2):
        x, noise = (to_cuda(part) for part in inputs(loss, seed))
        expected = gradients(loss, loss, x, noise)
        torch.testing.assert_close(
            gradients(loss, compiled, x, noise), expected, rtol=1e-9, atol=1e-10
        )


@pytest.mark.parametrize("words", ["arsm", "ars", "rloo"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_are_checked_before_f_is_called(words: str, value: float) -> None:
    logits = torch.zeros(5, 1, 4, device="cuda")
    logits[2, 0, 1] = value
    with pytest.raises(arsm.NotFiniteError, match=r"logits\[2, 0, 1\]"):
        arsm.estimate(arsm.estimator(words), logits, lambda z: pytest.fail("f was called"))
    logits[2] = -torch.inf
    with pytest.raises(ValueError, match="every category"):
        arsm.estimate(arsm.estimator(words), logits, lambda z: pytest.fail("f was called"))


@pytest.mark.parametrize("categories", [2, 10, 32])
def test_the_race_of_nan_names_existing_categories(categories: int) -> None:
    """An index beyond the last would stop the GPU before anybody can say what is wrong."""
    logits = torch.full((64, categories), torch.nan, device="cuda")
    swaps = swap_all(logits, dirichlet(torch.zeros_like(logits)))
    assert int(swaps.z.min()) >= 0
    assert int(swaps.z.max()) < categories


def test_values_are_checked() -> None:
    logits = torch.zeros(5, 1, 4, device="cuda")
    with pytest.raises(arsm.NotFiniteError, match=r"z = \[2\]"):
        arsm.estimate(arsm.Exact(), logits, lambda z: torch.where(z[:, 0] == 2, torch.inf, 1.0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("words", ["arsm", "ars", "rloo", "arsm:pooled=True"])
@pytest.mark.parametrize("shape", [(6, 1, 10), (6, 3, 10), (2, 1, 5_000)])
def test_logits_may_be_on_another_gpu_than_the_current_one(
    words: str, shape: tuple[int, ...]
) -> None:
    estimator, logits = arsm.estimator(words), torch.randn(shape)
    noise = estimator.noise(logits, torch.Generator().manual_seed(0))
    here, there = (
        arsm.estimate(estimator, x, lambda z: z.double().sum(-1), noise=given)
        for x, given in ((logits, noise), (logits.to("cuda:1"), to_cuda(noise, "cuda:1")))
    )
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(torch.as_tensor(there.grad).cpu(), torch.as_tensor(here.grad))
