"""The equal-cost comparison measures what it says."""

from __future__ import annotations

import csv
import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import arsm
from arsm import comparison
from arsm.comparison import best_additive, fit_budget, reference_gradient
from arsm.ranking import with_error
from arsm_experiments.cli import main
from arsm_experiments.compare import vae
from arsm_experiments.data import load_mnist
from arsm_experiments.report.compare import compare_sections
from arsm_experiments.runs.reader import load_checkpoint, read_run
from arsm_experiments.runs.writer import open_run
from arsm_experiments.training.loop import train
from arsm_experiments.vae import Vae, VaeNetwork

LOGITS = torch.tensor([[0.3, -0.8, 0.5], [1.0, 0.0, -0.4]], dtype=torch.float64)  # K = 2, C = 3


def f(z: Tensor) -> Tensor:
    """Not linear in one-hot z, so that relaxations are biased."""
    x = arsm.one_hot(z, 3, torch.float64) @ torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    return 1 + x[:, 0] * x[:, 1] + x[:, 0].square()


def relaxed_square(z: Tensor) -> Tensor:
    """With a slope in one-hot z."""
    return z.double().flatten(1).cumsum(-1).square().sum(-1)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def reinforce_moments() -> tuple[Tensor, float]:
    """Mean and trace of the covariance of one REINFORCE estimate, by enumeration."""
    z = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    log_q = LOGITS.log_softmax(-1)
    q = arsm.log_prob(log_q.expand(9, 2, 3), z).sum(-1).exp()
    g = f(z)[:, None, None] * (arsm.one_hot(z, 3, torch.float64) - log_q.exp())
    mean = (q[:, None, None] * g).sum(0)
    return mean, float((q[:, None, None] * (g - mean).square()).sum())


def test_variance_bias_and_cost_agree_with_enumeration() -> None:
    mean, variance = reinforce_moments()
    torch.testing.assert_close(reference_gradient(LOGITS, f).mean, mean)
    (row,) = arsm.compare(
        LOGITS, f, estimators=["reinforce"], samples=20_000, generator=generator()
    )
    # the standard deviation of a trace from 20,000 draws of bounded g lies below 2% here; 10% is
    # beyond 5 of them
    assert row.variance == pytest.approx(variance, rel=0.1)
    assert row.evaluations == 1
    assert row.bias < 3 * row.bias_error
    assert row.cost == pytest.approx(row.variance, rel=1e-2)


def test_draws_and_samples_fill_the_budget() -> None:
    single, averaged = (
        arsm.compare(
            LOGITS, f, budget=budget, estimators=["reinforce"], samples=4000, generator=generator()
        )[0]
        for budget in (None, 8)
    )
    assert single.variance / averaged.variance == pytest.approx(8, rel=0.25)
    assert fit_budget(arsm.RLOO(4), 46, 4) == arsm.RLOO(46)
    assert fit_budget(arsm.ExactPlusSampled(exact=2, samples=1), 6, 3) == arsm.ExactPlusSampled(
        exact=2, samples=4
    )
    assert fit_budget(arsm.ARSM(), 10, 4) == arsm.Average(arsm.ARSM(), 2)
    assert fit_budget(arsm.ARSM(), 3, 4) == arsm.ARSM()
    assert fit_budget(arsm.UnorderedSet(4), 16, 4) == arsm.Average(arsm.UnorderedSet(4), 4)
    assert isinstance(fit_budget(arsm.GumbelRao(samples=10), 5, 1), arsm.Average)


def test_a_biased_estimator_is_seen_and_ranked_by_its_error() -> None:
    rows = arsm.compare(
        LOGITS,
        f,
        estimators=["straight-through", "rloo:samples=8", "exact"],
        samples=2000,
        generator=generator(),
    )
    assert [row.cost for row in rows] == sorted(row.cost for row in rows)
    found = {row.label: row for row in rows}
    assert found["straight-through"].bias > 6 * found["straight-through"].bias_error
    # one evaluation: the rest is bias
    assert found["straight-through"].cost > 1.2 * found["straight-through"].variance
    assert found["rloo:samples=8"].bias < 3 * found["rloo:samples=8"].bias_error
    assert found["exact"].variance < 1e-20
    assert found["exact"].bias < 1e-12


def test_the_noise_of_the_measurement_is_taken_off_the_bias() -> None:
    """Left on, its mean square would be that of `bias_error`."""
    rows = [
        arsm.compare(
            LOGITS,
            f,
            estimators=["rloo"],
            samples=50,
            generator=torch.Generator().manual_seed(seed),
        )[0]
        for seed in range(40)
    ]
    assert sum(row.bias**2 for row in rows) < 0.7 * sum(row.bias_error**2 for row in rows)


def test_a_long_run_stands_in_for_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = reference_gradient(LOGITS, f).mean
    monkeypatch.setattr("arsm.comparison.ENUMERABLE", 1)
    mean, variance = reference_gradient(LOGITS, f, samples=200, generator=generator())
    assert float(((mean - exact) / variance.sqrt()).abs().max()) < 6
    assert float(variance.max()) > 0


def test_learned_parts_are_trained_before_they_are_measured() -> None:
    torch.manual_seed(0)
    raw, trained = (
        arsm.compare(
            LOGITS,
            f,
            estimators=[arsm.RELAX(control=arsm.RELAX().control)],
            training=steps,
            samples=2000,
            generator=generator(),
        )[0].variance
        for steps in (0, 300)
    )
    assert trained < 0.8 * raw


def test_a_control_variate_that_is_fixed_is_compared_as_it_is() -> None:
    fixed = arsm.RELAX()
    arsm.estimate(fixed, LOGITS, f)  # learns its sizes
    fixed.control.requires_grad_(False)
    trained, raw = (
        arsm.compare(
            LOGITS, f, estimators=[fixed], training=steps, samples=100, generator=generator()
        )[0].variance
        for steps in (2, 0)
    )
    assert trained == raw


def rloo_variance(h: Tensor, samples: int) -> float:
    """Of leave-one-out on f - h.x, as `best_additive` prints it, by enumeration."""
    z = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    p = LOGITS.softmax(-1)
    q = arsm.log_prob(p.log().expand(9, 2, 3), z).sum(-1).exp()
    x = arsm.one_hot(z, 3, torch.float64) - p
    e = f(z) - (x * h).sum((-2, -1))
    e = e - (q * e).sum()
    square = x.square().sum((-2, -1))
    first = (q * e.square() * square).sum() + (q * e.square()).sum() * (q * square).sum() / (
        samples - 1
    )
    mean = (q[:, None, None] * e[:, None, None] * x).sum(0)
    return float(first - (samples - 2) / (samples - 1) * mean.square().sum()) / samples


@pytest.mark.parametrize("budget", [2, 4, 46])
def test_the_best_additive_control_variate_is_the_best(budget: int) -> None:
    h = best_additive(LOGITS, f, budget=budget, generator=generator())
    least = rloo_variance(h, budget)
    zero = torch.zeros_like(h)
    (row,) = arsm.compare(
        LOGITS, f, budget=budget, estimators=["rloo"], samples=4000, generator=generator()
    )
    assert row.variance == pytest.approx(rloo_variance(zero, budget), rel=0.2)
    assert least < 0.9 * rloo_variance(zero, budget)
    for seed in range(20):
        step = 0.3 * torch.randn(
            h.shape, dtype=h.dtype, generator=torch.Generator().manual_seed(seed)
        )
        assert least < rloo_variance(h + step, budget)


def test_nothing_is_left_of_an_additive_f() -> None:
    w = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 1.0]], dtype=torch.float64)
    h = best_additive(LOGITS, lambda z: w[torch.arange(2), z].sum(-1) + 7, budget=4, samples=500)
    p = LOGITS.softmax(-1)
    difference = (h - w) - (p * (h - w)).sum(-1, keepdim=True)
    assert float(difference.abs().max()) < 1e-9


def test_the_floor_is_a_row_without_bias(tmp_path: Path) -> None:
    words = [
        "compare",
        "--root",
        str(tmp_path),
        "--problems",
        "binary-1",
        "--estimators",
        "floor",
        "rloo",
    ]
    assert main([*words, "--samples", "50"]) == 0
    floor, rloo = read_run(tmp_path / "compare" / "binary-1").metrics
    assert floor["cost"] < 0.5 * rloo["cost"]
    assert floor["bias"] < 3 * floor["bias_error"]
    assert floor["evaluations"] == pytest.approx(12, abs=0.5)


def test_the_command_records_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "compare",
        "--root",
        str(tmp_path),
        "--problems",
        "toy-30",
        "--estimators",
        "arsm",
        "rloo",
    ]
    words += ["--samples", "10"]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("rloo ") for line in printed)
    assert max(map(len, printed)) <= 80
    record = read_run(tmp_path / "compare" / "toy-30")
    assert [line["step"] for line in record.metrics] == [1, 2]
    assert main(words) == 2
    assert main([*words, "--resume"]) == 0
    assert read_run(tmp_path / "compare" / "toy-30").metrics == record.metrics
    assert main(["compare", "--problems", "nothing"]) == 2


def test_a_second_run_of_a_problem_adds_to_its_table(tmp_path: Path) -> None:
    words = ["compare", "--root", str(tmp_path), "--problems", "toy-30", "--samples", "10"]
    assert main([*words, "--estimators", "rloo", "arsm"]) == 0
    assert main([*words, "--estimators", "ars", "rloo", "--name", "again", "--seed", "1"]) == 0
    runs = [read_run(tmp_path / "compare" / name) for name in ("toy-30", "again-toy-30")]
    (section,) = compare_sections(runs)
    assert section.title == "toy-30"
    shown = {result.row: result for result in section.results if result.metric == "bias"}
    assert {row: result.record.name for row, result in shown.items()} == {
        "rloo": "again-toy-30",
        "ars": "again-toy-30",
        "arsm": "toy-30",
    }
    assert shown["rloo"].values == [runs[1].metrics[1]["bias"]]


# ---------------------------------------------------------------- tables and figures


def some() -> arsm.Ranking:
    return arsm.compare(
        LOGITS,
        f,
        estimators=["reinforce", "rloo:samples=8,ridge=1.0", "exact", "straight-through"],
        samples=200,
        generator=generator(),
    )


def test_a_comparison_prints_as_a_ranked_table() -> None:
    found = some()
    header, rule, *lines = str(found).splitlines()
    assert header.split() == ["estimator", "bias", "variance", "evals", "ms", "product"]
    assert set(rule) == {"-", " "}
    for line, row in zip(lines, found, strict=True):
        assert row.label.startswith(line.split()[0].rstrip("…"))  # long names are cut
    assert max(map(len, [header, *lines])) <= 80
    long = arsm.Ranking(tuple(row._replace(label=80 * "x") for row in found))
    assert max(map(len, str(long).splitlines())) == 80


def test_tables_for_pages_papers_and_spreadsheets() -> None:
    found = some()
    assert found.markdown().splitlines()[2].startswith(f"| `{found[0].label}` |")
    latex = found.latex(highlight="reinforce")
    assert r"\textbf{\texttt{reinforce}}" in latex
    assert latex.count(r"\\") == len(found) + 1
    assert r"\pm" in latex
    header, *lines = csv.reader(io.StringIO(found.csv()))
    assert [line[0] for line in lines] == [row.label for row in found]
    for line, row in zip(lines, found, strict=True):
        numbers = dict(zip(header[1:], map(float, line[1:]), strict=True))
        assert numbers["variance"] == row.variance
        assert numbers["product"] == row.cost
    with pytest.raises(ValueError, match='no row "mine" to highlight'):
        found.latex("mine")


def test_latex_escapes_and_powers() -> None:
    row = some()[0]._replace(label="my_file.py:A&B", variance=3.21e-7, variance_error=2e-9)
    latex = arsm.Ranking((row,)).latex()
    assert r"my\_file.py:A\&B" in latex
    assert r"(3.21 \pm 0.02) \times 10^{-7}" in latex


@pytest.mark.parametrize("ending", ["pdf", "svg", "png"])
def test_figures_of_comparisons(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"figure.{ending}"
    some().figure(highlight="reinforce").savefig(path)
    assert path.read_bytes().lstrip()[:5] in (b"%PDF-", b"<?xml", b"\x89PNG\r")


@pytest.mark.parametrize("factor", [1.1, 3.0, 20.0, 1e3, 1e9])
@pytest.mark.parametrize("least", [3e-7, 222.0])
def test_the_numbers_of_a_figure_do_not_overlap(least: float, factor: float) -> None:
    row = some()[0]._replace(bias=0.0, evaluations=1.0, variance_error=0.0)
    rows = (row._replace(variance=least), row._replace(variance=least * factor))
    figure = arsm.Ranking(rows).figure()
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    shown = [
        tick.label1
        for tick in axes.xaxis.get_major_ticks() + axes.xaxis.get_minor_ticks()
        if low <= tick.get_loc() <= high and tick.label1.get_text()
    ]
    boxes = sorted((text.get_window_extent().x0, text.get_window_extent().x1) for text in shown)
    assert len(boxes) >= 2
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(boxes))


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.03123, 0.00094, "0.0312±0.0009"),
        (4053.0, 11.2, "4053±11"),
        (0.0, 0.1, "0.0±0.1"),
        (3.21e-7, 2e-9, "(3.21±0.02)e-7"),
        (1.5, float("nan"), "1.5"),
        (1.5, 0.0, "1.5"),
    ],
)
def test_values_with_errors(value: float, error: float, text: str) -> None:
    assert with_error(value, error) == text


def test_the_error_of_the_variance_is_its_spread() -> None:
    """Over independent repetitions, in units of the errors claimed."""
    rows = [
        arsm.compare(
            LOGITS,
            f,
            estimators=["reinforce"],
            samples=400,
            generator=torch.Generator().manual_seed(seed),
        )[0]
        for seed in range(40)
    ]
    _, variance = reinforce_moments()
    scaled = [(row.variance - variance) / row.variance_error for row in rows]
    # t with 9 degrees of freedom has variance 9/7; 40 of them lie within these bounds but for 1e-4
    assert 0.5 < sum(x * x for x in scaled) / 40 < 3


def test_a_comparison_pools_its_parts() -> None:
    """The moments of all draws are those of one part."""
    chosen = arsm.Reinforce()
    problem = comparison._Case(LOGITS, f, (), generator(), None)
    (mean, variance), evaluations, _ = problem.moments_in_parts(chosen, 33, lambda share: None)
    again = comparison._Case(LOGITS, f, (), generator(), None)
    sizes = [33 // 10 + (i < 3) for i in range(10)]
    draws = []
    for size in sizes:
        logits = LOGITS.expand(size, *LOGITS.shape)
        draws.append(arsm.estimate(chosen, logits, f, generator=again.generator).grad)
    whole = torch.cat([g for g in draws if g is not None])
    assert evaluations == 1
    torch.testing.assert_close(mean, whole.mean(0))
    torch.testing.assert_close(variance, whole.var(0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vae, Path]:
    """A small VAE after an epoch, and its run folder."""
    sizes = Vae(
        variables=3, categories=3, hidden=(8, 4), images=400, batch=100, seeds=(3, 4), device="cpu"
    )
    config = replace(sizes, epochs=1, bound_samples=0, root=tmp_path_factory.mktemp("runs"))
    return config, train(config)[0]


def test_the_vaes_problem_is_the_elbo_of_its_best_weights(trained: tuple[Vae, Path]) -> None:
    config, folder = trained
    model = VaeNetwork(config)
    weights = load_checkpoint(folder / "checkpoint.pt")["state"]["best"][0]
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    setting = vae(folder)
    x = load_mnist().validation[: setting.logits.shape[0]].float()
    torch.testing.assert_close(setting.logits, model.encode(x))
    assert setting.budget == 1 + 3

    z = torch.cartesian_prod(*3 * [torch.arange(3)])
    one_hot = F.one_hot(z, 3).float()
    for row in range(len(x)):
        rows = [each[row].expand(27, *each.shape[1:]) for each in setting.context]
        h = one_hot.flatten(1)
        for layer in model.decoder[:-1]:
            h = F.leaky_relu(layer(h), 0.2)
        bits = F.binary_cross_entropy_with_logits(
            model.decoder[-1](h), rows[0], reduction="none"
        ).sum(-1)
        q = torch.distributions.Categorical(logits=setting.logits[row]).log_prob(z).sum(-1)
        expected = -bits - 3 * torch.tensor(3.0).log() - q
        for points in (z, one_hot):
            torch.testing.assert_close(setting.f(points, *rows), expected)


def test_the_command_compares_on_a_vae(trained: tuple[Vae, Path], tmp_path: Path) -> None:
    _, folder = trained
    words = ["compare", "--root", str(tmp_path), "--problems", "vae", "--checkpoint", str(folder)]
    words += ["--estimators", "rloo", "straight-through", "--samples", "200"]
    assert main(words) == 0
    record = read_run(tmp_path / "compare" / f"vae-{folder.name}")
    assert record.config["shape"] == [4, 3, 3]
    assert record.config["checkpoint"] == folder.name
    assert record.config["checkpoint_step"] == 4
    rloo, straight_through = record.metrics
    assert rloo["bias"] < 3 * rloo["bias_error"]
    assert straight_through["bias"] > 3 * straight_through["bias_error"]


def test_a_vaes_checkpoint_must_be_one(
    trained: tuple[Vae, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = trained

    def refusal(*words: str) -> str:
        assert main(["compare", "--root", str(tmp_path / "none"), *words]) == 2
        assert not (tmp_path / "none").exists()
        return capsys.readouterr().err

    with open_run(tmp_path, "vae", "two", {"layers": 2}) as run:
        run.save(1, {})
    with open_run(tmp_path, "toy", "one", {}) as run:
        run.save(1, {})
    with open_run(tmp_path, "vae", "begun", config.config(3e-4, 0.0)) as run:
        pass
    (tmp_path / "damaged").mkdir()
    for name in ("config.json", "checkpoint.pt"):
        (tmp_path / "damaged" / name).write_text("nothing")
    chosen = ["--problems", "vae", "--checkpoint"]
    assert "need each other" in refusal("--problems", "vae")
    assert "need each other" in refusal("--problems", "toy-30", "--checkpoint", str(folder))
    assert "has no config.json" in refusal(*chosen, str(tmp_path / "nowhere"))
    assert "has no checkpoint.pt" in refusal(*chosen, str(tmp_path / "vae" / "begun"))
    for other in ("vae/two", "toy/one"):
        assert "holds no VAE of one layer" in refusal(*chosen, str(tmp_path / other))
    assert "config.json is not one" in refusal(*chosen, str(tmp_path / "damaged"))


def test_evaluations_are_those_of_all_draws() -> None:
    counts = [
        arsm.compare(
            torch.zeros(30),
            lambda z: z[:, 0].float(),
            samples=3000,
            estimators=["ars"],
            generator=torch.Generator().manual_seed(seed),
        )[0].evaluations
        for seed in range(3)
    ]
    # one estimate takes 2.9 in the mean, with a standard deviation of 5
    assert all(abs(count - 2.9) < 5 * 5 / 3000**0.5 for count in counts)


def test_draws_of_noise_are_no_evaluations() -> None:
    (row,) = arsm.compare(LOGITS, f, budget=6, samples=10, estimators=["gumbel-rao:samples=1"])
    assert row.evaluations == 6
    assert isinstance(row.estimator, arsm.Average)


def test_what_cannot_be_compared_is_refused_and_gradients_need_not_be_on() -> None:
    with torch.no_grad():
        assert (
            len(arsm.compare(LOGITS, f, samples=5, training=1, estimators=["arsm", "relax"])) == 2
        )
    for wrong, sentence in (
        ("arsm", r'say \["arsm"\]'),
        (["vimco"], "estimates a multi-sample bound"),
        (["3*vimco"], "estimates a multi-sample bound"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            arsm.compare(LOGITS, f, samples=5, estimators=wrong)
    with pytest.raises(TypeError, match="logits must be a floating tensor"):
        arsm.compare(LOGITS.long(), f, samples=5)


def test_the_reference_keeps_no_graph_of_f() -> None:
    weight = torch.ones((), requires_grad=True)

    def learning(z: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return weight * f(z)

    torch.testing.assert_close(
        reference_gradient(LOGITS, learning).mean, reference_gradient(LOGITS, f).mean
    )


def test_nothing_of_the_users_is_changed() -> None:
    decoder = torch.nn.Linear(12, 1)
    attached = torch.nn.Linear(5, 12)(torch.randn(2, 5)).view(2, 3, 4)

    def f(z: Tensor, logits: Tensor) -> Tensor:
        return decoder(arsm.one_hot(z, 4).flatten(1)).squeeze(-1) - arsm.log_prob(logits, z).sum(-1)

    arsm.compare(attached, f, attached.log_softmax(-1), estimators=["rloo", "muprop"], samples=10)
    assert decoder.weight.grad is None
    mine = arsm.DoubleControl(alpha=0.2)
    for chosen in (mine, arsm.Average(mine, 2)):
        arsm.compare(LOGITS, relaxed_square, estimators=[chosen], training=3, samples=10)
    assert float(mine.control.alpha.detach()) == pytest.approx(0.2)


def test_a_budget_leaves_what_was_learned_and_asks_for_no_more_categories_than_there_are() -> None:
    for words, categories in (("unordered-set:samples=2", 4), ("unordered-set", 3)):
        (row,) = arsm.compare(
            torch.randn(1, categories),
            lambda z: z[:, 0].float(),
            estimators=[words],
            budget=8,
            samples=10,
        )
        assert row.evaluations == categories  # all of them, without replacement
    learned = arsm.DoubleControl(samples=2, alpha=0.9)
    learned.control.requires_grad_(False)
    fitted = fit_budget(learned, 8, 2)
    assert isinstance(fitted, arsm.DoubleControl)
    assert fitted.samples == 8
    assert fitted.control is learned.control
