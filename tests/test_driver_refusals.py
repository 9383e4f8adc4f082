"""`estimate`: what it refuses, and how."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import arsm
from arsm.given_noise import check_noise
from tests.roster import ROSTER, Entry

GOOD = torch.zeros(2, 3, 4)


def total(z: Tensor) -> Tensor:
    return z.sum(-1).double()


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
