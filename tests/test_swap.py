"""The fast forms of the pseudo actions against their definition, ties and extremes included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from arsm.kernels.compared import ComparedPairs
from arsm.noise import RESOLUTION, argmin_sample, dirichlet
from arsm.swap import (
    pair_row,
    pair_table,
    run_race,
    swap_with,
    without_winner,
)
from arsm.univariate import swap_all
from tests.by_definition import pseudo_actions
from tests.races import Drawn, races
from tests.statistics import deviations


def all_pairs(table: Tensor, categories: int) -> Tensor:
    """`pair_table`'s rows as [*B, K, C, C]."""
    c = torch.arange(categories)
    return table.long()[pair_row(c.unsqueeze(-1), c, categories)].movedim((0, 1), (-2, -1))


@settings(max_examples=60)
@given(races())
def test_the_pair_table_is_the_definition(drawn: Drawn) -> None:
    table = pair_table(run_race(*drawn))
    categories = drawn.logits.shape[-1]
    assert table.shape == (1 + categories * (categories - 1) // 2, *drawn.logits.shape[:-1])
    assert torch.equal(all_pairs(table, categories), pseudo_actions(*drawn))


@settings(max_examples=60)
@given(races())
def test_swaps_with_one_reference_are_the_definition(drawn: Drawn) -> None:
    race = run_race(*drawn)
    found = [
        swap_with(race, torch.full_like(race.z, j)).movedim(0, -1).long()
        for j in range(drawn.logits.shape[-1])
    ]
    assert torch.equal(torch.stack(found, -1), pseudo_actions(*drawn))


@settings(max_examples=60)
@given(races())
def test_fixed_point_decides_as_floating_point_away_from_near_ties(drawn: Drawn) -> None:
    logits, log_pi = (x.double() for x in drawn)
    categories = logits.shape[-1]
    i = torch.arange(categories)
    c, j = i.view(-1, 1, 1), i.view(1, -1, 1)
    order = torch.where(i == c, j, torch.where(i == j, c, i))  # [c, j, i]: who lends i its noise
    values, winners = (log_pi[..., order] - logits[..., None, None, :]).sort(-1)
    clear = values[..., 1] - values[..., 0] > 1e-9
    found = pseudo_actions(*drawn)
    assert torch.equal(found[clear], winners[..., 0][clear])


@settings(max_examples=60)
@given(races())
def test_a_masked_category_never_wins(drawn: Drawn) -> None:
    pseudo = pseudo_actions(*drawn)
    chosen = drawn.logits.unsqueeze(-2).expand(pseudo.shape).gather(-1, pseudo)
    assert bool((chosen > -torch.inf).all())


def test_ties_go_to_the_lowest_index() -> None:
    flat = torch.zeros(4)
    assert int(argmin_sample(flat, flat)) == 0
    assert bool((pseudo_actions(flat, flat) == 0).all())
    assert bool((pair_table(run_race(flat.unsqueeze(0), flat.unsqueeze(0))) == 0).all())


def test_keys_of_few_categories_have_the_resolution_of_fixed_point() -> None:
    """Values that differ by single steps of the resolution: coarser keys would tie."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 4, (2, 300, 1, 5), generator=generator)
    logits, log_pi = -RESOLUTION * steps[0].double(), -2 - RESOLUTION * steps[1].double()
    swaps, race = swap_all(logits, log_pi), run_race(logits, log_pi)
    assert isinstance(swaps.found, ComparedPairs)
    with_z, wins = swaps.found.with_z, swaps.found.wins
    a, theta = without_winner(race)
    assert torch.equal(swaps.z, race.z)
    assert torch.equal(with_z, swap_with(race, race.z).long())
    others = (torch.arange(5).view(5, 1, 1) != race.z).unsqueeze(1)  # the row of z is not used
    assert torch.equal(wins & others, (a < theta.unsqueeze(1)) & others)


@pytest.mark.parametrize("categories", [1, 2, 3, 7])
def test_rows_of_pairs_follow_triu_indices(categories: int) -> None:
    low, high = torch.triu_indices(categories, categories, 1)
    expected = torch.arange(1, 1 + low.numel())
    assert torch.equal(pair_row(low, high, categories), expected)
    assert torch.equal(pair_row(high, low, categories), expected)
    assert not pair_row(torch.arange(categories), torch.arange(categories), categories).any()


def test_a_table_of_more_categories_than_a_byte_counts() -> None:
    logits = torch.zeros(2, 300)
    race = run_race(logits, dirichlet(logits, torch.Generator().manual_seed(0)))
    found = all_pairs(pair_table(race), 300)
    expected = torch.stack(
        [swap_with(race, torch.full_like(race.z, j)).movedim(0, -1).long() for j in range(300)], -1
    )
    assert torch.equal(found, expected)
    assert int(found.max()) > 255


def test_every_pseudo_action_is_a_sample_of_the_categorical() -> None:
    logits = torch.tensor([0.5, -1.0, 1.5, 0.0], dtype=torch.float64).log_softmax(-1)
    many = logits.expand(40_000, 1, 4)
    table = pair_table(run_race(many, dirichlet(many, torch.Generator().manual_seed(0)))).squeeze(
        -1
    )
    won = (table.unsqueeze(-1) == torch.arange(4)).double()  # [pairs, rows, 4]
    assert float(deviations(won.transpose(0, 1), logits.exp()).max()) <= 1
