"""Mistakes that beginners make: each is answered by one sentence that says what to do."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import sequences

LOGITS = torch.zeros(5, requires_grad=True)


def first(z: Tensor) -> Tensor:
    return z[:, 0].float()


def with_context(z: Tensor, x: Tensor) -> Tensor:
    return z[:, 0] * x.float()


def estimate(f: Any = first, *context: Any, logits: Any = LOGITS, **options: Any) -> arsm.Estimate:
    return arsm.estimate(arsm.RLOO(4), logits, f, *context, **options)


# ---------------------------------------------------------------- the result is no tensor


def results() -> list[Any]:
    layers = arsm.estimate_layers(
        arsm.RLOO(2), [lambda zs: torch.zeros(3, 1, 2)], lambda zs, logits: first(zs[0])
    )
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    return [
        estimate(),
        layers,
        sequences.SequenceEstimate(torch.zeros(1), tokens, tokens == 0, torch.zeros(1)),
    ]


@pytest.mark.parametrize("out", results(), ids=lambda out: type(out).__module__)
def test_a_result_is_no_tensor(out: Any) -> None:
    operators: list[Callable[[], Any]] = [
        lambda: -out,
        lambda: torch.zeros(()) + out,
        lambda: 2 * out,
        lambda: out / 8,
        lambda: sum([out, out]),
        lambda: float(out),
    ]
    for operation in operators:
        with pytest.raises(
            TypeError, match=r"Estimate is .* no tensor; use its value, as in -out\.value\.mean\(\)"
        ):
            operation()
    for name in ("backward", "mean", "sum", "item", "detach", "shape", "requires_grad"):
        with pytest.raises(AttributeError, match=rf"no tensor; use its value: out\.value\.{name}$"):
            getattr(out, name)


def test_a_result_is_still_an_object_like_others() -> None:
    out = estimate(logits=torch.zeros(5))
    with pytest.raises(AttributeError, match="'Estimate' object has no attribute 'gradient'"):
        out.gradient  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(out, "mean")
    assert torch.equal(copy.deepcopy(out).value, out.value)
    assert torch.equal(pickle.loads(pickle.dumps(out)).value, out.value)


# ---------------------------------------------------------------- f and its context


@pytest.mark.parametrize(
    ("f", "found"),
    [(torch.zeros(5), r"a tensor torch.float32 \[5\]"), (3.0, "float"), ([1, 2], "list")],
    ids=str,
)
def test_f_must_be_a_function(f: Any, found: str) -> None:
    with pytest.raises(
        TypeError, match=rf"f must be a function of z, such as .*, but is {found}\."
    ):
        estimate(f)


class Model(nn.Module):
    """f as a module, a method, or an object."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return with_context(z, x)

    def elbo(self, z: Tensor, x: Tensor) -> Tensor:
        return with_context(z, x)


def only_by_name(z: Tensor, *, x: Tensor) -> Tensor:
    return with_context(z, x)


@pytest.mark.parametrize(
    ("f", "context", "words"),
    [
        (first, 1, r"f\(z: .* cannot be called with z and 1 context tensor;"),
        (with_context, 0, r"f\(z: .*, x: .* cannot be called with z and 0 context tensors;"),
        (with_context, 2, "z and 2 context tensors"),
        (Model(), 0, "z and 0 context tensors"),
        (Model().elbo, 2, "z and 2 context tensors"),
        (functools.partial(with_context, torch.zeros(())), 1, "z and 1 context tensor"),
        (only_by_name, 1, "z and 1 context tensor"),
    ],
)
def test_f_must_take_the_context(f: Any, context: int, words: str) -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    with pytest.raises(
        TypeError, match=words + r".*one argument for each tensor that follows f in arsm\.estimate"
    ):
        estimate(f, *[torch.zeros(())] * context, generator=generator)
    assert torch.equal(generator.get_state(), before), "nothing has been drawn"


def test_every_f_that_takes_the_context_may() -> None:
    x = torch.ones(())
    functions: list[Any] = [
        with_context,
        Model(),
        Model().elbo,
        lambda *z_and_x: with_context(*z_and_x),
        lambda z, x, unit=1.0, *, scale=1.0: with_context(z, x),
        functools.partial(with_context),
        functools.partial(lambda scale, z, x: with_context(z, x), 2.0),
        functools.partial(lambda z, x, scale: with_context(z, x), scale=2.0),
        torch.no_grad()(with_context),
        type("Callable", (), {"__call__": lambda self, z, x: with_context(z, x)})(),
    ]
    for f in functions:
        estimate(f, x)
    estimate(functools.partial(only_by_name, x=x))


def test_context_must_lie_where_the_logits_do() -> None:
    with pytest.raises(
        ValueError, match=r"Context 0 lies on meta, but the logits on cpu; move it with \.to"
    ):
        estimate(with_context, torch.zeros((), device="meta"))


# ---------------------------------------------------------------- errors inside f


def test_an_error_inside_f_tells_how_f_was_called() -> None:
    def f(z: Tensor, x: Tensor) -> Tensor:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ") as caught:
        estimate(f, torch.zeros(2, 7), logits=torch.zeros(2, 1, 5), max_rows=3)
    assert str(caught.value) == "shapes differ"
    (note,) = caught.value.__notes__
    called = (
        r"f\(z torch\.int64 \[(\d), 1\], torch\.float32 \[\1, 7\]\): \1 points to evaluate, "
        r"which is not the batch"
    )
    assert re.search(called, note)
    assert "separate choices" not in note


def test_rows_taken_for_variables_are_explained() -> None:
    """Logits [B, C] are B variables of one row."""
    logits, y = torch.zeros(8, 5), torch.arange(8) % 5

    def f(z: Tensor, y: Tensor) -> Tensor:
        return (z == y).float()

    with pytest.raises(
        ValueError,
        match=r"but returned shape \[\d+, 8\]; for 8 separate choices use logits\.unsqueez",
    ):
        estimate(f, y, logits=logits)

    def stricter(z: Tensor, y: Tensor) -> Tensor:
        return (z.view(len(y)) == y).float()

    with pytest.raises(RuntimeError) as caught:
        estimate(stricter, y, logits=logits)
    words = "8 variables of one row; for 8 separate choices use logits.unsqueeze(1)"
    assert words in caught.value.__notes__[0]
    assert estimate(lambda z, y: f(z[:, 0], y), y, logits=logits.unsqueeze(1)).value.shape == (8,)


# ---------------------------------------------------------------- logits


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (torch.zeros(2, 5).to_sparse(), r"torch\.sparse_coo; convert them with \.to_dense\(\)"),
        (torch.zeros(5, dtype=torch.complex64), r"torch\.complex64; convert them with \.real"),
        (torch.zeros(5, dtype=torch.int64), r"torch\.int64; convert them with \.float\(\)"),
    ],
    ids=["sparse", "complex", "whole"],
)
def test_other_tensors_are_no_logits(logits: Tensor, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        estimate(logits=logits)


def test_logits_must_have_values() -> None:
    with pytest.raises(ValueError, match="meta device and have no values"):
        estimate(logits=torch.zeros(5, device="meta"))


def test_a_last_dimension_of_one_is_warned_of() -> None:
    logits = torch.zeros(8, 5, 1, requires_grad=True)
    with pytest.warns(
        UserWarning, match=r"logits \[8, 5, 1\] have one category per variable.*give .* logits\.mT"
    ):
        estimate(logits=logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate(logits=logits.mT)
        estimate(logits=logits.detach())
        estimate(logits=torch.zeros(1, 1, requires_grad=True))


PROBABILITIES = [
    torch.full((30,), 1 / 30),
    torch.randn(8, 2, 5).softmax(-1),
    torch.randn(4, 1, 3, dtype=torch.float64).softmax(-1),
    torch.eye(3),
]


@pytest.mark.parametrize("logits", PROBABILITIES, ids=lambda x: str(list(x.shape)))
def test_probabilities_are_noticed(logits: Tensor) -> None:
    with pytest.warns(UserWarning, match=r"look like probabilities.*probabilities\.log") as seen:
        estimate(logits=logits)
    assert {warning.filename for warning in seen} == {__file__}, "it names the user's line"
    with pytest.warns(UserWarning, match="look like probabilities") as seen:
        arsm.compare(logits, first, estimators=["rloo"], samples=4)
    assert __file__ in {warning.filename for warning in seen}


def test_logits_are_not_taken_for_probabilities() -> None:
    uneven = torch.tensor([[0.5, 0.5], [1.5, -0.5]])
    others = [torch.tensor([[0.2, 0.2], [0.6, 1.0]]), torch.full((2, 3), 0.333)]
    masked = torch.tensor([0.5, 0.5, -torch.inf])
    one = torch.ones(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for logits in [torch.zeros(5), torch.ones(3, 4), uneven, *others, masked, one]:
            estimate(logits=logits)
        generator = torch.Generator().manual_seed(0)
        for scale in (1e-3, 0.1, 1.0, 10.0):
            for shape in ((2,), (30,), (8, 1, 5), (4, 3, 2)):
                for _ in range(20):
                    logits = scale * torch.randn(shape, generator=generator)
                    estimate(logits=logits)
                    estimate(logits=logits.abs())
                    estimate(logits=logits.log_softmax(-1))


# ---------------------------------------------------------------- options


def dictionary_of_calls() -> dict[str, Callable[..., Any]]:
    return {
        "arsm.estimate": arsm.estimate,
        "arsm.estimate_layers": arsm.estimate_layers,
        "arsm.estimate_bound": arsm.estimate_bound,
        "arsm.compare": arsm.compare,
        "arsm.maximize": arsm.maximize,
        "arsm.audit": arsm.audit,
        "arsm.audit_advantages": arsm.audit_advantages,
        "arsm.audit_sequences": arsm.audit_sequences,
        "arsm.choices": arsm.choices,
        "arsm.sequences.estimate": sequences.estimate,
        "arsm.sequences.compare": sequences.compare,
        "arsm.policy.plan": arsm.policy.plan,
        "arsm.policy.plan_draws": arsm.policy.plan_draws,
        "arsm.policy.gradient": arsm.policy.gradient,
        "arsm.policy.weights": arsm.policy.weights,
        "arsm.policy.loss": arsm.policy.loss,
    }


@pytest.mark.parametrize("name", list(dictionary_of_calls()))
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(name: str) -> None:
    function = dictionary_of_calls()[name]
    known = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not parameter.VAR_POSITIONAL
    ]
    for option in (option for option in known if len(option) > 3):
        misspelt = option[:-2] + option[-1] + option[-2] + "_"
        with pytest.raises(TypeError) as caught:
            function(**{misspelt: 1})
        words = f'{name} has no option "{misspelt}"; did you mean "{option}"?'
        assert str(caught.value) == words


def test_an_option_that_is_like_no_other_lists_them() -> None:
    with pytest.raises(TypeError, match=r'maximize has no option "x"; its options are f, sp'):
        arsm.maximize(first, [2], x=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r'no option "seed"; give it generator=torch\.Gen'):
        estimate(seed=3)


@pytest.mark.parametrize(
    ("kind", "option", "words"),
    [
        (arsm.RLOO, "sample", 'RLOO has no option "sample"; did you mean "samples"?'),
        (
            arsm.RLOO,
            "n",
            'RLOO has no option "n"; its options are samples, live, ridge, surrogate.',
        ),
        (arsm.ARSM, "reference", 'ARSM has no option "reference"; did you mean "references"?'),
        (arsm.AR, "samples", 'AR has no option "samples"; it has no options at all.'),
        (arsm.RELAX, "learned", 'RELAX has no option "learned"; its options are'),
    ],
)
def test_a_misspelt_option_of_an_estimator(kind: Any, option: str, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**{option: 4})
    assert str(caught.value).startswith(words)


def test_a_compiled_function_may_make_its_estimator() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def value(logits: Tensor) -> Tensor:
        made = arsm.RLOO(samples=4)
        return arsm.estimate(made, logits, first, evaluation="dense").value

    assert value(torch.zeros(1, 5)).shape == ()


# ---------------------------------------------------------------- generators


@pytest.mark.parametrize(("generator", "seed"), [(5, 5), ("5", 0)])
def test_a_seed_is_no_generator(generator: Any, seed: int) -> None:
    made = rf"torch\.Generator\(logits\.device\)\.manual_seed\({seed}\) makes one"
    with pytest.raises(
        TypeError, match=rf"generator must be a torch\.Generator, but is .*; {made}"
    ):
        estimate(generator=generator)


class Elsewhere(torch.Generator):
    """A generator that says that it draws on a GPU."""

    device = torch.device("cuda:0")  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]


def test_a_generator_must_draw_where_the_logits_lie() -> None:
    with pytest.raises(
        ValueError, match="generator draws on cuda:0, but the logits lie on cpu; make it with"
    ):
        estimate(generator=Elsewhere())


# ---------------------------------------------------------------- too many evaluations


@pytest.mark.parametrize(
    "estimator", [arsm.ARSM(), arsm.ARSMPlus(), arsm.Average(arsm.ARSM(), 2)], ids=str
)
def test_many_pairs_of_many_categories_are_refused_at_once(estimator: arsm.Estimator) -> None:
    start = time.perf_counter()
    with pytest.raises(
        ValueError,
        match=r"may need [\d,]{11} evaluations of f for one row .*; use RLOO\(n\), .* ARSM\(r",
    ):
        arsm.estimate(estimator, torch.zeros(2, 20_000), first)
    assert time.perf_counter() - start < 1.0


def test_many_categories_are_not_refused_where_few_evaluations_do() -> None:
    arsm.estimate(arsm.ARSM(), torch.zeros(1, 20_000), first)
    arsm.estimate(arsm.RLOO(4), torch.zeros(2, 20_000), first)
    arsm.estimate(arsm.estimator("reinforce"), torch.zeros(2, 20_000), first)
    arsm.estimate(arsm.ARSM(references=2), torch.zeros(2, 20_000), first)
    arsm.estimate(arsm.ARSM(), arsm.ragged([1500, 3]), first)


# ---------------------------------------------------------------- batch normalisation


class Decoder(nn.Module):
    """A model with an encoder, whose batch normalisation is allowed, and a decoder, where it is
    not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        self.normal = nn.BatchNorm1d(1)

    def forward(self, z: Tensor) -> Tensor:
        return self.normal(z.float()).squeeze(1)

    def plain(self, z: Tensor) -> Tensor:
        return first(z)


GLOBAL = Decoder()


def by_a_global(z: Tensor) -> Tensor:
    return GLOBAL(z)


def with_normalisation(model: Decoder) -> list[Callable[[Tensor], Tensor]]:
    return [
        model,
        model.forward,
        lambda z: model(z),
        functools.partial(lambda model, z: model(z), model),
        by_a_global,
    ]


@pytest.mark.parametrize("how", range(5), ids=["module", "method", "closure", "partial", "global"])
def test_batch_normalisation_in_training_is_refused_inside_f(how: int) -> None:
    f = with_normalisation(GLOBAL.train())[how]
    with pytest.raises(
        ValueError,
        match=r"^normal normalises over the batch .* arsm\.estimate evaluates; use LayerNorm",
    ):
        estimate(f)
    tracked = GLOBAL.normal.num_batches_tracked
    assert tracked is not None
    assert int(tracked) == 0, "nothing has been evaluated"
    GLOBAL.eval()
    estimate(f)
    GLOBAL.train()(torch.zeros(2, 1))  # f alone is free again
    GLOBAL.normal.reset_running_stats()


def test_batch_normalisation_outside_f_is_allowed() -> None:
    model = Decoder()
    logits = model.encoder(torch.randn(4, 3)).unsqueeze(1)
    estimate(model.plain, logits=logits)
    estimate(lambda z: model.plain(z), logits=logits)


# ---------------------------------------------------------------- files of agents


def test_files_of_agents_that_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    from arsm import rl

    agent = rl.PolicyGradient("CartPole-v1")
    with pytest.raises(
        FileNotFoundError, match=r"no file /.*/none\.pt; PolicyGradient\.save writes"
    ):
        agent.load(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError, match=r"There is no file /.*; PolicyGradient\.save"):
        rl.PolicyGradient.from_file(tmp_path)  # a folder
    with pytest.raises(FileNotFoundError, match=r"no folder .*/none to write a\.pt into; make it"):
        agent.save(tmp_path / "none" / "a.pt")
    with pytest.raises(IsADirectoryError, match=r"is a folder; name a file in it, such as agent"):
        agent.save(tmp_path)
    assert not any(tmp_path.iterdir())
