"""Branches that begin while the true sequences are still being sampled: the same tokens as played
afterwards, and an unbiased estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import arsm
from arsm.sequences import Branch, Decoding, Group, Model, Prefixes, Slots, Strategy, by_likelihood
from arsm.sequences import estimate as run_estimate
from arsm.sequences.ahead import PlayedAhead
from arsm.sequences.decode import Completions
from arsm.sequences.draws import Sampled
from arsm.sequences.sampler import DECODERS
from tests.slot_models import EOS, MODELS, V, gemma2, llama, ragged, wrapped
from tests.statistics import deviations
from tests.tables import SETTINGS as ENUMERABLE
from tests.tables import InSlots, Setting, Table, reward

DRAWS = 4


def over(tokens: list[int]) -> bool:
    """After two of the last five tokens of the vocabulary in a row."""
    return len(tokens) > 1 and min(tokens[-2:]) > V - 5


DECODINGS = {
    "ends": Decoding(9, EOS, 0.8),
    "never ends": Decoding(9),
    "several ends": Decoding(9, [EOS, 7, 4]),
    "min_tokens": Decoding(9, [EOS, 7, 4], min_tokens=4),
    "stop": Decoding(9, EOS, stop=over),
    "stop, min_tokens": Decoding(9, EOS, stop=over, min_tokens=5),
    "one token": Decoding(1, EOS),
    "two tokens": Decoding(2, EOS),
    "twenty": Decoding(20, EOS),
}


def noise(sequence: Tensor, step: Tensor) -> Tensor:
    """Uniform numbers [R, DRAWS] that are a function of (sequence, step)."""
    place = (sequence * 32 + step).unsqueeze(-1) * DRAWS + torch.arange(DRAWS)
    # a fractional part of multiples of an irrational number, scrambled by the sine
    return torch.sin(place.double() * 12.9898).mul(43758.5453).frac().abs()


def others(sampled: Sampled, decoding: Decoding) -> Prefixes:
    """The distinct other draws of every state, and which draw is the first of its kind."""
    true = sampled.tokens[..., 0]
    live = decoding.live(true)
    found = []
    for row, step in live.nonzero().tolist():
        drawn = sampled.tokens[row, step].tolist()
        found += [(row, step, token) for token in dict.fromkeys(drawn) if token != drawn[0]]
    row, step, action = torch.tensor(found, dtype=torch.int64).view(-1, 3).unbind(-1)
    return Prefixes(row, step, action, true)


def names(sampled: Sampled, prefixes: Prefixes) -> Tensor:
    """What the noise knows the branches by."""
    count, width, draws = sampled.tokens.shape
    drawn = sampled.tokens[prefixes.row, prefixes.step]
    draw = (drawn == prefixes.action.unsqueeze(-1)).byte().argmax(-1)
    return count + (prefixes.row * width + prefixes.step) * draws + draw


def going(prefixes: Prefixes, completions: Completions, decoding: Decoding) -> Tensor:
    """[R] bool: whether anything is drawn after the action."""
    return decoding.live(completions.tokens).sum(-1) > prefixes.step + 1


def compare(
    slots: Slots, prompts: Tensor, mask: Tensor | None, row: Tensor, decoding: Decoding
) -> tuple[PlayedAhead, Tensor]:
    """Sampled and played at once against one after the other; what was played, and the branches
    that could have been.
    """
    expected = slots.sample(prompts, mask, row, decoding, DRAWS, noise=noise)
    sampled, played = slots.sample_ahead(prompts, mask, row, decoding, DRAWS, noise=noise)
    assert torch.equal(sampled.tokens, expected.tokens)
    torch.testing.assert_close(sampled.log_probs, expected.log_probs, atol=1e-9, rtol=0)
    torch.testing.assert_close(sampled.largest, expected.largest, atol=1e-9, rtol=0)

    prefixes = others(sampled, decoding)
    name = names(sampled, prefixes)
    whole = prompts[row], None if mask is None else mask[row]
    later = slots.complete(
        *whole, prefixes, decoding, noise=lambda which, step: noise(name[which], step)[:, :1]
    )
    place = played.places(prefixes)
    ahead = (place >= 0).nonzero().squeeze(-1)
    assert sorted(place[ahead].tolist()) == list(range(played.row.shape[0]))
    assert torch.equal(played.completions.tokens[place[ahead]], later.tokens[ahead])
    torch.testing.assert_close(
        played.completions.log_probs[place[ahead]], later.log_probs[ahead], atol=1e-9, rtol=0
    )
    # nothing is computed for actions that end their sequence
    may = going(prefixes, later, decoding)
    assert bool(may[ahead].all())
    return played, may


@pytest.mark.parametrize("make", [make for make in MODELS if make is not gemma2])
@pytest.mark.parametrize("padded", [False, True])
def test_every_model_branches_ahead(make: Callable[[], object], padded: bool) -> None:
    """But for one that cannot compute in float64, where equal tokens are certain."""
    model = wrapped(make)
    prompts, mask = ragged(5)
    slots = Slots(model.slots(), 64, look_every=3)
    row = torch.arange(5).repeat_interleave(2)
    played, may = compare(slots, prompts, mask if padded else None, row, Decoding(9, EOS, 0.8))
    assert played.row.shape[0] > 10
    assert played.row.shape[0] <= int(may.sum())


@pytest.mark.parametrize("decoding", DECODINGS.values(), ids=DECODINGS)
@pytest.mark.parametrize(
    ("rows", "look_every"), [(1, 4), (3, 1), (7, 4), (16, 9), (1000, 1), (1000, 4), (1000, 9)]
)
def test_numbers_of_slots_and_looks_change_nothing(
    rows: int, look_every: int, decoding: Decoding
) -> None:
    model = wrapped(llama)
    prompts, mask = ragged(6)
    row = torch.tensor([0, 1, 2, 3, 4, 5, 0, 3])
    # the sequences are sampled in two groups
    slots = Slots(model.slots(), rows, look_every=look_every, known=4)
    played, may = compare(slots, prompts, mask, row, decoding)
    assert slots.tally.ahead == played.row.shape[0]
    if rows == 1:
        assert played.row.shape[0] == 0
    if rows == 1000:
        # there is a slot for everyone
        assert played.row.shape[0] == int(may.sum())
        assert bool(may.any()) == (decoding.max_tokens > 1)
    elif rows >= 7 and decoding.max_tokens > 8 and look_every < 9:
        assert 0 < played.row.shape[0] <= int(may.sum())


def test_branches_take_no_steps_of_their_own() -> None:
    model = wrapped(llama)
    prompts, mask = ragged(6)
    slots = Slots(model.slots(), 1000, look_every=2)
    row, decoding = torch.arange(6), Decoding(20)
    slots.sample_ahead(prompts, mask, row, decoding, DRAWS, noise=noise)
    # a branch begins at most a look after its state
    assert 20 < slots.tally.steps <= 22
    assert slots.tally.ahead > 100


def test_few_slots_are_run_before_there_are_branches() -> None:
    model = wrapped(llama)
    prompts, mask = ragged(6)
    slots = Slots(model.slots(), 1024, look_every=2)
    slots.sample_ahead(prompts, mask, torch.arange(6), Decoding(20), DRAWS, noise=noise)
    assert slots.tally.row_steps < slots.tally.steps * 512


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_draw_the_tokens_of_eager_ones() -> None:
    """Also by graphs that are captured while branches are in flight."""
    model = wrapped(llama, torch.float32)
    model.model.cuda()
    prompts, mask = (x.cuda() for x in ragged(40))
    table = torch.rand(40 * (1 + 20 * DRAWS), 32, DRAWS, dtype=torch.float64, device="cuda")
    options = prompts, mask, torch.arange(40, device="cuda"), Decoding(20, EOS), DRAWS
    found = []
    for captured in (False, True):
        slots = Slots(model.slots(), 512, captured=captured)
        for _ in range(2):  # the second call replays the graphs of the first
            sampled, played = slots.sample_ahead(
                *options, noise=lambda s, t: table[s, t.clamp(0, 31)]
            )
            found.append((sampled.tokens, played.completions.tokens))
        assert slots.tally.ahead > 200
    for tokens, branches in found[1:]:
        assert torch.equal(tokens, found[0][0])
        assert torch.equal(branches, found[0][1])


# ---------------------------------------------------------------- through `estimate`

SETTINGS = ENUMERABLE | {
    "min_tokens": Setting(eos=1, max_tokens=4, min_tokens=2),
    "stop": Setting(eos=1, max_tokens=4, stop=lambda tokens: tokens[-2:] in ([2, 0], [0, 0])),
}
STRATEGIES: dict[str, Branch] = {
    "RLOO": Branch(arsm.RLOO(3)),
    "group": Branch(arsm.RLOO(3), group=2),
}
CHOOSY: dict[str, Strategy] = {
    "budget": Branch(arsm.RLOO(3), budget=10),
    "keep": Branch(arsm.RLOO(3), keep=0.6),
    "chance": Branch(arsm.RLOO(3), chance=by_likelihood(0.3)),
    "coin": Branch(arsm.RLOO(3), group=2, coin=0.4),
    "logits": Branch(arsm.ARSM()),
    "Group": Group(3),
}
ROWS = 6000


def in_slots(made: list[Slots], rows: int, look_every: int) -> Callable[[Table], InSlots]:
    """A model with slots that look that often."""

    def wrap(table: Table) -> InSlots:
        model = InSlots(table)
        made.append(Slots(model, rows, look_every=look_every))
        DECODERS[model] = {(None, rows): made[-1]}
        return model

    return wrap


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("look_every", [1, 3])
def test_unbiased_with_refills_and_branches_in_flight(
    setting: Setting, strategy: Branch, look_every: int
) -> None:
    made: list[Slots] = []
    # fewer slots than sequences: refills first, then branches while others are still sampled
    slots = 700 * (strategy.group or 1)
    found = setting.estimates(strategy, ROWS, wrap=in_slots(made, slots, look_every), slots=slots)
    assert deviations(found, setting.exact()).max() < 1
    assert made[0].tally.ahead > 500
    # some branches found no slot, and were played afterwards
    assert made[0].tally.starts > made[0].tally.ahead + ROWS * (strategy.group or 1)


def test_a_wrong_cache_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail: branches copy the row of another sequence."""
    begin = Slots._branch

    def shifted(slots: Slots, board: object, job: object, size: int, slot: Tensor, starts: object):
        return begin(slots, board, job, size, slot.roll(1), starts)  # pyright: ignore

    monkeypatch.setattr(Slots, "_branch", shifted)
    setting = SETTINGS["ragged, ends, temperature"]
    found = setting.estimates(STRATEGIES["RLOO"], 4 * ROWS, wrap=in_slots([], 700, 1), slots=700)
    assert deviations(found, setting.exact()).max() > 1


@pytest.mark.parametrize("strategy", CHOOSY.values(), ids=CHOOSY)
def test_strategies_that_choose_later_do_not_branch_ahead(strategy: Strategy) -> None:
    made: list[Slots] = []
    setting = SETTINGS["ends"]
    setting.estimates(strategy, 20, wrap=in_slots(made, 1024, 1), slots=1024)
    assert made[0].tally.starts > 20
    assert made[0].tally.ahead == 0


@pytest.mark.parametrize("slots", [64, 1024])
def test_the_same_tokens_are_counted(slots: int) -> None:
    setting = replace(SETTINGS["ends"], max_tokens=6)
    prompts, _ = setting.prompts(40)
    made: list[Slots] = []
    model = in_slots(made, slots, 2)(Table(40, setting.vocabulary))
    out = run_estimate(
        Branch(arsm.RLOO(4)),
        model,
        prompts,
        reward,
        max_tokens=6,
        eos=1,
        rows=slots,
        generator=torch.Generator().manual_seed(0),
    )
    assert made[0].tally.ahead > 0
    assert out.branches is not None
    assert out.credit is not None
    wanted = others(Sampled(out.credit.tokens, *[torch.zeros(())] * 2), Decoding(6, 1))
    for found, expected in (
        (out.branches.row, wanted.row),
        (out.branches.step, wanted.step),
        (out.branches.action, wanted.action),
    ):
        assert torch.equal(found, expected)
    after = torch.arange(6) >= out.branches.step.unsqueeze(-1)
    branched = int((Decoding(6, 1).live(out.branches.tokens) & after).sum())
    assert int(out.info["generated"]) == int(out.mask.sum()) + branched
    assert int(out.info["rollouts"]) == wanted.row.shape[0]
    # each goes on from its own sequence
    before = torch.arange(6) < out.branches.step.unsqueeze(-1)
    assert bool((out.branches.tokens == out.tokens[out.branches.row])[before].all())


def test_three_branches_per_sequence_need_no_second_round() -> None:
    model = wrapped(llama)
    prompts, mask = ragged(32)
    # one other draw in three states: at most three branches per sequence
    out = run_estimate(
        Branch(arsm.RLOO(2)),
        model,
        prompts,
        reward,
        max_tokens=4,
        mask=mask,
        generator=torch.Generator().manual_seed(0),
    )
    assert out.branches is not None
    played = int((out.branches.step < 3).sum())
    assert played > 50
    (slots,) = DECODERS[model].values()
    assert isinstance(slots, Slots)
    assert slots.tally.ahead == played
    assert slots.tally.starts == 32 + played


@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(8)), Group(3)], ids=["Branch", "Group"])
def test_earlier_calls_change_no_tokens(strategy: Strategy) -> None:
    """Slots that an earlier call needed are not used by a smaller one: a training that is resumed
    goes on as it would have.
    """
    prompts, _ = ragged(30)

    def tokens(model: Model) -> list[Tensor]:
        out = run_estimate(
            strategy,
            model,
            prompts,
            reward,
            max_tokens=9,
            rows=100,
            generator=torch.Generator().manual_seed(0),
        )
        return [out.tokens, *([] if out.branches is None else [out.branches.tokens])]

    expected = tokens(wrapped(llama))
    model = wrapped(llama)
    run_estimate(Group(3), model, prompts.repeat(10, 1), reward, max_tokens=9)
    torch.testing.assert_close(tokens(model), expected, rtol=0, atol=0)
