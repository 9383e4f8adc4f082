"""`estimate`: its value, its gradient, its determinism, and what it refuses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm.given_noise import check_noise
from tests.problems import PROBLEMS
from tests.roster import ROSTER, Entry


def total(z: Tensor) -> Tensor:
    return z.sum(-1).double()


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_noise_and_generator_make_the_estimate_reproducible(entry: Entry) -> None:
    problem = next(p for p in PROBLEMS if entry.fits(*p.size) and p.size[1] > 1)
    estimator = entry.make(*problem.size)
    logits = problem.logits.repeat(20, 1, 1, 1).requires_grad_()
    theta = problem.theta.repeat(20, 1, 1)

    def run(seed: int, given: bool = False) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        noise = estimator.noise(logits, generator) if given else None
        out = arsm.estimate(
            estimator, logits, problem.f, theta, noise=noise, generator=None if given else generator
        )
        return out.z, torch.autograd.grad(out.value.sum(), logits)[0]

    first = run(1)
    assert all(map(torch.equal, first, run(1)))
    assert all(map(torch.equal, first, run(1, given=True)))
    if not isinstance(estimator, arsm.Exact):
        assert not torch.equal(first[0], run(2)[0])


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_logits_keep_their_precision_where_f_has_less(entry: Entry) -> None:
    """An offset of 1e7 changes nothing, although f is float32: logits never take the dtype of its
    values.
    """
    problem = next(p for p in PROBLEMS if entry.fits(*p.size) and p.size[1] > 1)
    estimator = entry.make(*problem.size)
    logits = (problem.logits * 2**20).round() / 2**20  # the offset is then added without rounding
    logits, theta = logits.repeat(20, 1, 1), problem.theta.repeat(20, 1)
    noise = estimator.noise(logits, torch.Generator().manual_seed(0))

    def gradient(offset: float) -> Tensor:
        moved = (logits + offset).requires_grad_()
        out = arsm.estimate(
            estimator, moved, lambda z, theta: problem.f(z, theta).float(), theta, noise=noise
        )
        return torch.autograd.grad(out.value.sum(), moved)[0]

    plain, moved = gradient(0.0), gradient(1e7)
    assert plain.abs().max() > 0
    assert (
        float((plain - moved).abs().max() / plain.abs().max())
        < 100 * torch.finfo(torch.float32).eps
    )


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_logits_beyond_float32_give_finite_gradients(entry: Entry) -> None:
    categories = next(c for c in (3, 2) if entry.fits(1, c))
    logits = torch.zeros(2, 1, categories, dtype=torch.float64)
    logits[..., 0] = 1e39
    weight = torch.arange(1.0, 1 + categories)

    def f(z: Tensor) -> Tensor:
        return (arsm.one_hot(z, categories).squeeze(-2) * weight).sum(-1)

    out = arsm.estimate(entry.make(1, categories), logits.requires_grad_(), f)
    assert bool(out.info["finite"].all())
    assert bool(torch.autograd.grad(out.value.sum(), logits)[0].isfinite().all())


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_a_bare_vector_is_one_variable(entry: Entry) -> None:
    categories = next((c for c in (4, 2) if entry.fits(1, c)), None)
    if categories is None:
        pytest.skip("made for several variables")
    estimator = entry.make(1, categories)
    logits = torch.randn(
        categories, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    noise = estimator.noise(logits.unsqueeze(0), torch.Generator().manual_seed(0))

    def f(z: Tensor) -> Tensor:
        return (
            (arsm.one_hot(z, categories, torch.float64).squeeze(-2) * torch.arange(categories))
            .sum(-1)
            .square()
        )

    bare = arsm.estimate(estimator, logits, f, noise=noise)
    full = arsm.estimate(estimator, logits.unsqueeze(0), f, noise=noise)
    assert bare.value.shape == full.value.shape == ()
    assert torch.equal(bare.value, full.value)
    assert torch.equal(bare.z, full.z)
    first, second = (torch.autograd.grad(out.value, logits)[0] for out in (bare, full))
    assert torch.equal(first, second)
    if bare.grad is not None:
        assert bare.grad.shape == logits.shape


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_one_category_has_no_gradient(entry: Entry) -> None:
    if not entry.fits(2, 1):
        pytest.skip("made for more categories")
    logits = torch.randn(3, 2, 1, dtype=torch.float64).requires_grad_()
    f = PROBLEMS[0].function
    theta = torch.ones(3, 2, dtype=torch.float64)
    out = arsm.estimate(
        entry.make(2, 1), logits, lambda z, t: f(arsm.one_hot(z, 1, torch.float64), t), theta
    )
    assert not torch.autograd.grad(out.value.sum(), logits)[0].any()


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_grad_is_what_backward_gives(entry: Entry) -> None:
    problem = next(p for p in PROBLEMS if entry.fits(*p.size) and p.size[1] > 1)
    logits, theta = problem.logits.clone().requires_grad_(), problem.theta
    out = arsm.estimate(
        entry.make(*problem.size),
        logits,
        problem.f,
        theta,
        generator=torch.Generator().manual_seed(0),
    )
    assert out.value.shape == problem.logits.shape[:1]
    if out.grad is None:
        assert entry.make(*problem.size).needs_gradient
    else:
        assert not out.grad.requires_grad
        torch.testing.assert_close(
            torch.autograd.grad(out.value.sum(), logits)[0], out.grad, rtol=1e-12, atol=1e-12
        )


def test_the_value_is_f_at_the_true_sample() -> None:
    logits = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0))
    for estimator in (
        arsm.Reinforce(),
        arsm.AR(),
        arsm.ARS(),
        arsm.ARSM(),
        arsm.LocalExpectation(),
    ):
        out = arsm.estimate(estimator, logits, total)
        assert out.z.shape == (6, 2)
        assert torch.equal(out.value, total(out.z))
    for estimator in (arsm.RLOO(samples=3), arsm.Average(arsm.ARSM(), 3)):
        out = arsm.estimate(estimator, logits, total)
        assert out.z.shape == (6, 3, 2)
        torch.testing.assert_close(out.value, out.z.sum(-1).double().mean(-1))


def test_live_samples_alone_make_the_value() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    logits = torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(0))
    out = arsm.estimate(arsm.RLOO(samples=5, live=2), logits, lambda z: weight * total(z))
    expected = out.z[:, :2].sum(-1).double().mean(-1)
    torch.testing.assert_close(out.value.detach(), expected)
    torch.testing.assert_close(torch.autograd.grad(out.value.sum(), weight)[0], expected.sum())


def test_the_value_has_the_type_of_f() -> None:
    for dtype in (torch.float32, torch.float64):
        for estimator in (arsm.ARSM(), arsm.RLOO(), arsm.Average(arsm.ARSM(), 3), arsm.Exact()):
            out = arsm.estimate(
                estimator, torch.zeros(3, 2, 4), lambda z, dtype=dtype: z.sum(-1).to(dtype)
            )
            assert out.value.dtype == dtype
    assert (
        arsm.estimate(arsm.ARSM(), torch.zeros(4), lambda z: z.sum(-1).half()).value.dtype
        == torch.float32
    )


@pytest.mark.parametrize(
    "words", ["reinforce", "ar", "ars", "arsm", "arsm:pooled=True", "rloo:ridge=1.0", "exact"]
)
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 10), (torch.bfloat16, 7)])
def test_half_precision_logits(words: str, dtype: torch.dtype, bits: int) -> None:
    estimator = arsm.estimator(words)
    coarse = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    fine = coarse.float()
    noise = estimator.noise(fine, torch.Generator().manual_seed(1))
    found, expected = coarse.clone().requires_grad_(), fine.clone().requires_grad_()
    for logits in (found, expected):
        arsm.estimate(
            estimator, logits, lambda z: z.sum(-1).float(), noise=noise
        ).value.sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    assert found.grad.dtype == dtype
    # the gradient is computed in float32 and rounded once
    torch.testing.assert_close(found.grad.float(), expected.grad, rtol=2.0**-bits, atol=1e-5)


def test_no_grad() -> None:
    with torch.no_grad():
        out = arsm.estimate(arsm.ARSM(), torch.zeros(3, 2, 4, requires_grad=True), total)
    assert not out.value.requires_grad
    assert out.grad is not None


def test_logits_without_gradient() -> None:
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = arsm.estimate(arsm.ARSM(), torch.zeros(3, 2, 4), lambda z: weight * total(z))
    torch.testing.assert_close(torch.autograd.grad(out.value.sum(), weight)[0], total(out.z).sum())
    assert not arsm.estimate(arsm.ARSM(), torch.zeros(3, 2, 4), total).value.requires_grad


def test_saturated_logits_give_finite_estimates() -> None:
    for entry in ROSTER:
        for size in ((1, 3), (2, 3), (1, 2), (2, 2)):
            if not entry.fits(*size):
                continue
            for dtype in (torch.float32, torch.float64):
                if dtype == torch.float32 and not isinstance(entry.how, str):
                    continue  # learned parts are in float64
                logits = torch.zeros(5, *size, dtype=dtype)
                logits[..., 0] = 200.0
                logits.requires_grad_()
                out = arsm.estimate(
                    entry.make(*size),
                    logits,
                    lambda z, C=size[1], t=dtype: arsm.one_hot(z, C, t)[..., 0].sum(-1),
                )
                found = torch.autograd.grad(out.value.sum(), logits)[0]
                assert bool(found.isfinite().all()), (entry.label, size, dtype)


def test_gradients_add_up_in_a_network() -> None:
    """The encoder's parameters get the estimate through the chain rule."""
    torch.manual_seed(0)
    encoder = nn.Linear(3, 8).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    logits = encoder(x).view(5, 2, 4)
    out = arsm.estimate(arsm.ARSM(), logits, total)
    found = torch.autograd.grad(out.value.sum(), list(encoder.parameters()), retain_graph=True)
    expected = torch.autograd.grad(logits, list(encoder.parameters()), grad_outputs=out.grad)
    torch.testing.assert_close(found, expected)


# ---------------------------------------------------------------- what is refused, and how

GOOD = torch.zeros(2, 3, 4)


def refused(sentence: str, kind: type[Exception], call: Callable[[], object]) -> None:
    """The whole message is this one sentence."""
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        call()


def with_logits(logits: Tensor, **how) -> Callable[[], object]:
    return lambda: arsm.estimate(arsm.ARSM(), logits, total, **how)


def set_at(value: float, *where: int) -> Tensor:
    logits = GOOD.clone()
    logits[where] = value
    return logits


def with_f(f: Callable[..., object], logits: Tensor = GOOD) -> Callable[[], object]:
    return lambda: arsm.estimate(arsm.ARSM(), logits, f)  # pyright: ignore[reportArgumentType]


def test_logits_are_checked() -> None:
    finite = "logits must be finite, or -inf to mask a category."
    refused(
        f"logits[1, 2, 3] is nan; {finite}", ValueError, with_logits(set_at(torch.nan, 1, 2, 3))
    )
    refused(
        f"logits[0, 1, 2] is inf; {finite}", ValueError, with_logits(set_at(torch.inf, 0, 1, 2))
    )
    refused(
        f"logits[2] is nan; {finite}", ValueError, with_logits(torch.tensor([0.0, 1.0, torch.nan]))
    )
    empty = "are -inf in every category; leave at least one finite."
    refused(f"logits[1, 0] {empty}", ValueError, with_logits(set_at(-torch.inf, 1, 0)))
    refused(f"logits {empty}", ValueError, with_logits(torch.full((3,), -torch.inf)))
    kind = (
        "logits must be a floating tensor [*B, K, C], but are torch.int64; convert them with "
        ".float()."
    )
    refused(kind, TypeError, with_logits(torch.zeros(2, 3, dtype=torch.int64)))
    tiny = torch.zeros(2, 3).to(torch.float8_e4m3fn)
    refused(kind.replace("torch.int64", "torch.float8_e4m3fn"), TypeError, with_logits(tiny))
    listed = kind.replace("torch.int64", "list").replace(".float()", "torch.tensor")
    refused(listed, TypeError, with_logits([0.0, 1.0]))  # pyright: ignore[reportArgumentType]
    shape = "logits must be [C] or [*B, K, C] with no dimension empty, but are "
    for empty_shape in ([2, 3, 0], [2, 0, 4], [0, 3, 4], []):
        refused(f"{shape}{empty_shape}.", ValueError, with_logits(torch.zeros(empty_shape)))
    refused(
        'evaluation must be "packed" or "dense", but is \'sparse\'.',
        ValueError,
        with_logits(GOOD, evaluation="sparse"),
    )


def test_what_f_returns_is_checked() -> None:
    one = (
        "f must return one value per row of z: shape [1] for z of shape [1, 1], but returned shape "
    )
    certain = torch.tensor([0.0, -torch.inf])
    refused(f"{one}[1, 1].", ValueError, with_f(lambda z: z.float(), certain))
    refused(f"{one}[].", ValueError, with_f(lambda z: z.float().sum(), certain))
    refused(
        "f must return a floating type, but returned torch.int64; convert it with .float().",
        TypeError,
        with_f(lambda z: z.sum(-1)),
    )
    refused(
        "f must return a tensor [N], one value per row of z, but returned float.",
        TypeError,
        with_f(lambda z: 1.0),
    )
    refused(
        "f must return its values on cpu, where z lies, but returned them on meta.",
        ValueError,
        with_f(lambda z: torch.zeros(len(z), device="meta")),
    )
    refused(
        "f returned nan for z = [0] in row 0 of the batch; f must be finite wherever a category "
        "is not masked.",
        ValueError,
        with_f(lambda z: torch.full((len(z),), torch.nan), certain),
    )
    only_last = torch.tensor([[[0.0, -torch.inf]], [[-torch.inf, 0.0]]])
    refused(
        "f returned -inf for z = [1] in row 1 of the batch; f must be finite wherever a category "
        "is not masked.",
        ValueError,
        with_f(lambda z: (1.0 - z.sum(-1)).log(), only_last),
    )


def test_noise_is_checked() -> None:
    for estimator, noise, expected, found in (
        (
            arsm.RLOO(),
            arsm.RLOO().noise(SOME[:1]),
            "noise of samples [2, 4, 2]",
            "noise of samples [1, 4, 2]",
        ),
        (arsm.RLOO(), torch.zeros(2, 2, 3), "noise of samples [2, 4, 2]", "floating [2, 2, 3]"),
        (
            arsm.Reinforce(),
            arsm.RLOO().noise(SOME),
            "noise of samples [2, 1, 2]",
            "noise of samples [2, 4, 2]",
        ),
        (
            arsm.Reinforce(),
            tuple(arsm.Reinforce().noise(SOME)),
            "noise of samples [2, 1, 2]",
            TUPLE,
        ),
        (arsm.ARSM(), arsm.ARSM().noise(SOME[..., :2]), "floating [2, 2, 3]", "floating [2, 2, 2]"),
        (arsm.ARSM(), torch.zeros(2, 2, 1), "floating [2, 2, 3]", "floating [2, 2, 1]"),
        (arsm.ARSM(), torch.zeros(2, 2, 3).half(), "floating [2, 2, 3]", "torch.float16 [2, 2, 3]"),
        (arsm.ARSM(), "noise", "floating [2, 2, 3]", "str"),
        (arsm.ARS(), arsm.ARSM().noise(SOME), REFERENCES, "floating [2, 2, 3]"),
        (NeedsRows(), arsm.ARSM().noise(SOME[:1]), "floating [2, 2, 3]", "floating [1, 2, 3]"),
    ):
        sentence = (
            f"noise must be {expected} for {type(estimator).__name__} and logits [2, 2, 3], but is "
            f"{found}; draw it by estimator.noise(logits) for these logits."
        )
        call = functools.partial(arsm.estimate, estimator, SOME, total, noise=noise)
        refused(sentence, ValueError, call)


SOME = torch.zeros(2, 2, 3)
TUPLE = "tuple(floating [2, 1, 2], torch.int64 [2, 0, 2])"
REFERENCES = "ReferenceNoise(floating [2, 2, 3], torch.int64 [2, 2])"


class NeedsRows(arsm.ARSM):
    """Its noise reads the first row."""

    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Any:
        assert bool(logits[0].isfinite().all())
        return super().noise(logits, generator, z)


@pytest.mark.parametrize("entry", ROSTER, ids=lambda entry: entry.label)
def test_own_noise_is_accepted_and_no_other(entry: Entry) -> None:
    """Also noise given a sample; checking it draws no random numbers."""
    variables, categories = next(size for size in ((2, 3), (1, 3), (2, 2)) if entry.fits(*size))
    estimator, logits = entry.make(variables, categories), torch.zeros(4, variables, categories)
    own = [estimator.noise(logits)]
    if estimator.given_sample:
        own.append(estimator.noise(logits, None, torch.ones(4, variables, dtype=torch.int64)))
    before = torch.get_rng_state()
    for noise in own:
        check_noise(estimator, logits, noise)
        for other in (
            logits[:2],
            logits.unsqueeze(0),
            logits[0],
            torch.zeros(4, variables + 1, categories),
        ):
            with pytest.raises(ValueError, match="for these logits"):
                check_noise(estimator, other, noise)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("words", ["gumbel-softmax", "straight-through", "reinmax", "gumbel-rao"])
def test_a_relaxation_refuses_an_f_that_has_nothing_to_differentiate(words: str) -> None:
    logits = GOOD.clone().requires_grad_()
    with pytest.raises(ValueError, match="autograd finds no way from f's values to z"):
        arsm.estimate(arsm.estimator(words), logits, lambda z: z.argmax(-1)[:, 0].float())
    with torch.no_grad():
        arsm.estimate(arsm.estimator(words), logits, lambda z: z.argmax(-1)[:, 0].float())


def test_a_baseline_is_one_value_a_row() -> None:
    one_a_row = torch.zeros(len(GOOD))
    for baseline, average in ((one_a_row.unsqueeze(-1), False), (one_a_row, True)):
        estimator = arsm.Reinforce(baseline=baseline)
        with pytest.raises(ValueError, match="baseline must be a number or shaped like the batch"):
            arsm.estimate(arsm.Average(estimator, len(GOOD)) if average else estimator, GOOD, total)
    for estimator in (
        arsm.Reinforce(one_a_row),
        arsm.Average(arsm.Reinforce(one_a_row.unsqueeze(-1)), 3),
    ):
        assert arsm.estimate(estimator, GOOD, total).value.shape == one_a_row.shape


def test_an_average_is_of_an_estimator() -> None:
    for wrong in ("arsm", arsm.ARSM):
        with pytest.raises(TypeError, match="estimator must be an estimator such as"):
            arsm.Average(wrong, 2)  # pyright: ignore[reportArgumentType]


def test_context_is_checked() -> None:
    fits = "must be a tensor that leads with the batch's shape [2], but is "
    for position, found, context in (
        (0, [3, 5], [torch.zeros(3, 5)]),
        (1, [], [torch.zeros(2), torch.zeros(())]),
    ):
        call = lambda context=context: arsm.estimate(arsm.ARSM(), GOOD, total, *context)  # noqa: E731
        refused(f"Context {position} {fits}torch.float32 {found}.", ValueError, call)
    refused(
        f"Context 0 {fits}float.",
        ValueError,
        lambda: arsm.estimate(arsm.ARSM(), GOOD, total, 1.0),  # pyright: ignore[reportArgumentType]
    )
    refused(
        f"Context 0 {fits}list.",
        ValueError,
        lambda: arsm.compare(GOOD, total, ["arsm"]),  # pyright: ignore[reportArgumentType]
    )
    layer = lambda zs, *context: GOOD  # noqa: E731
    f = lambda zs, logits, *context: total(zs[0])  # noqa: E731
    refused(
        f"Context 1 {fits}torch.float32 [3].",
        ValueError,
        lambda: arsm.estimate_layers(arsm.ARSM(), [layer], f, torch.zeros(2), torch.zeros(3)),
    )


def test_estimators_from_words() -> None:
    assert arsm.estimator("arsm") == arsm.ARSM()
    assert arsm.estimator(" rloo:samples=46,ridge=1.0 ") == arsm.RLOO(samples=46, ridge=1.0)
    assert arsm.estimator("4*arsm:references=2") == arsm.Average(arsm.ARSM(references=2), 4)
    assert set(arsm.estimator_names()) >= {"arsm", "ars", "ar", "rloo", "reinforce", "exact"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("reinforse", 'There is no estimator "reinforse": did you mean "reinforce"?'),
        ("ARSM", 'There is no estimator "ARSM": did you mean "arsm"?'),
        ("xyzzy", 'There is no estimator "xyzzy": known are '),
        ("arsm:colour=1", '"colour=1" is no option of "arsm"; its options are pooled, references.'),
        ("ar:x=1", '"x=1" is no option of "ar"; it has none.'),
        (
            "rloo:samples=many",
            '"many" is no value for samples; write a number, True, False or None.',
        ),
        ("rloo:samples", 'Option "samples" of "rloo" needs a value, as in "rloo:samples=..."'),
        ("n*arsm", '"n*arsm" must begin with a whole number of draws, as in "4*arsm".'),
        ("0*arsm", "Average needs at least one draw, but n = 0."),
        (
            "rloo:samples=1",
            "RLOO compares samples with each other and needs at least 2, but samples = 1.",
        ),
        ("rloo:live=9", "live must lie between 1 and samples = 4, but is 9."),
        ("rloo:ridge=0", "ridge must be positive and finite, but is 0."),
        ("rloo:ridge=1e999", "ridge must be positive and finite, but is inf."),
        ("rloo:samples=2.5", "samples must be a whole number, but is 2.5."),
        ("unordered-set:samples=2.5", "samples must be a whole number, but is 2.5."),
        ("gumbel-rao:samples=2.5", "samples must be a whole number, but is 2.5."),
    ],
)
def test_words_that_mean_nothing(words: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        arsm.estimator(words)


def test_options_that_do_not_fit_the_logits() -> None:
    many = "references must lie between 1 and the 4 categories, but is 5."
    refused(many, ValueError, lambda: arsm.estimate(arsm.ARSM(references=5), GOOD, total))
    enumerated = (
        "Exact would enumerate 10^20 values of z per row, and stops at 1,048,576; use an "
        "estimator that samples, such as ARSM or RLOO."
    )
    refused(enumerated, ValueError, lambda: arsm.estimate(arsm.Exact(), torch.zeros(20, 10), total))


def test_what_is_no_estimator_is_refused_with_how_to_make_one() -> None:
    for wrong, how in (
        ("arsm", r"but is .*; arsm.estimator\(.arsm.\) makes one"),
        (arsm.ARSM, r"but is the class ARSM; ARSM\(...\), with its options, makes one"),
    ):
        with pytest.raises(TypeError, match=r"such as arsm.ARSM\(\), " + how):
            arsm.estimate(wrong, torch.zeros(3), lambda z: z[:, 0].float())  # pyright: ignore[reportArgumentType]
    for rows in (0, 2.5, True):
        with pytest.raises(
            ValueError, match=f"max_rows must be a whole number of at least 1, .* but is {rows}"
        ):
            arsm.estimate(arsm.ARSM(), torch.zeros(3), lambda z: z[:, 0].float(), max_rows=rows)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("words", ["arsm", "rloo:samples=8,ridge=0.001", "carms"])
def test_autocast_is_for_f_alone(words: str) -> None:
    chosen, logits = arsm.estimator(words), torch.randn(4, 3, 4)
    noise = chosen.noise(logits)

    def f(z: Tensor) -> Tensor:
        return 1e5 * z.float().sum(-1)

    alone = arsm.estimate(chosen, logits, f, noise=noise).grad
    with torch.autocast("cpu", dtype=torch.float16):
        cast = arsm.estimate(chosen, logits, f, noise=noise).grad
    torch.testing.assert_close(cast, alone, rtol=0, atol=0)
