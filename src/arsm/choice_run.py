r"""The object that `arsm.choices` yields: it runs a loss function through a module and
credits every `Choice` in it.

    E[f],    z_t ~ Cat(softmax(phi_t)),    t = 1..T in the order of the calls,
    phi_t a function of z_1..z_{t-1}

How a choice gets its credit follows from what the estimator declares:

- `paths` = n, with weights from the values alone: n copies of every row run through the
  model in one forward pass; path i's weight multiplies sum_t d ln q(z_t^i). Where the
  function has a loss l_s for each position s, each has weights of its own, which
  multiply the d ln q of the choices that reach it: a choice that cannot change l_s has
  a score that is independent of it, with mean 0.
- `pathwise`: one pass in which the choices are floating and autograd does the rest.
- else: one pass along the true path; then, for each choice t, one pass without grad
  over the estimator's other queries, with the choices before t held at the true path
  and those after it drawn again. That is `estimate` for phi_t with a random f, as in
  `estimate_layers`: equal queries share a value, and the true one's is the true path's.
  Later choices run the true path's races, so they differ only where the query changes
  them. Where there is a loss for each position, each has a credit of its own, of which
  the choices that reach it keep their part.

All three are unbiased where the estimator is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from arsm.batch_norm import refuse_batch_norm
from arsm.categorical import log_prob
from arsm.choice_checks import batch_rows, check_again, check_values
from arsm.choice_reach import Made, check_reach, reaches, sum_of_reaching
from arsm.draws import draw_one
from arsm.noise import argmin_sample, dirichlet, given_winner, working_dtype
from arsm.question import Others, Question, attach, attach_paths, pose
from arsm.sampling import uniforms
from arsm.subsets import draw_subsets, subset_log_prob
from arsm.types import Estimator

if TYPE_CHECKING:
    from arsm.choice import Choice


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a Choice on the true path."""

    choice: Choice
    question: Question
    z: Tensor
    """[N, K], or [N, k]."""
    race: Tensor | None
    """[N, K, C]: noise with which z won; None for subsets."""


class Run:
    """The object that `arsm.choices` yields: call it with a loss function and a batch."""

    def __init__(
        self,
        model: nn.Module,
        estimator: Estimator,
        generator: torch.Generator | None,
        *,
        positions: bool = False,
        check: bool = False,
    ) -> None:
        self.model = model
        self.estimator = estimator
        self.generator = generator
        self._positions = positions  # the function has a loss for each position
        self._test_reach = check
        self._rows = 0
        self._chooser: Callable[[Choice, Tensor], Tensor] | None = None

    def __call__(self, function: Callable[..., Tensor], *batch: Tensor) -> Tensor:
        """The values of a loss function, with gradients for every choice.

        Args:
            function: `function(*batch) -> [N]`, row by row, through the model; its rows
                are the batch's, some of them repeated. With a `Choice(reach=...)`,
                [N, T]: a loss for each position.
            batch: tensors [N, ...].

        Returns:
            [N] or [N, T]: the function's values, with their own sign (their mean over
                the samples where there are several).
            Backward gives the choices' logits their estimate, and everything else its
            ordinary gradient.
        """
        rows = batch_rows(batch)
        # repeated rows would change the batch's mean, and with it every row's value
        refuse_batch_norm(self.model, "arsm.choices")
        if self._by_paths:
            return self._over_paths(function, batch, rows)
        if self.estimator.pathwise:
            return self._evaluate(function, batch, rows, self._relax)
        return self._over_queries(function, batch, rows)

    def choose(self, choice: Choice, logits: Tensor) -> Tensor:
        """The value that a Choice returns."""
        if self._chooser is None:
            raise RuntimeError(
                "A Choice was called inside `arsm.choices` but not by run(function, *batch); call "
                "the model in that function."
            )
        if logits.shape[0] != self._rows:
            raise ValueError(
                f"A Choice got logits {list(logits.shape)}, but the batch has {self._rows} rows "
                "here; logits must be [N, K, C] with one row for each loss, so unflatten tokens "
                "[B T, E] to [B, T, E]."
            )
        if choice.k and logits.shape[1] > 1 and not self._by_paths:
            raise ValueError(
                f"Choice(k={choice.k}) takes logits [N, 1, C] with "
                f"{type(self.estimator).__name__}, but got {list(logits.shape)}; RLOO(n) takes "
                "several sets per row."
            )
        return self._chooser(choice, logits)

    @property
    def _by_paths(self) -> bool:
        # energies add up over one set of variables, while here each choice has its own logits
        return self.estimator.paths > 0 and not self.estimator.weighs_energy

    def _evaluate(
        self,
        function: Callable[..., Tensor],
        batch: tuple[Tensor, ...],
        rows: int,
        chooser: Callable[[Choice, Tensor], Tensor],
    ) -> Tensor:
        """The function's values [rows], or [rows, T], with every choice made by the chooser."""
        self._rows = rows
        self._chooser = chooser
        try:
            values = function(*batch)
        finally:
            # a Choice that is called outside of a pass must raise
            self._chooser = None
        check_values(values, rows, positions=self._positions)
        # a copy: a simulator may write the next pass's values into the same buffer
        return values.to(working_dtype(values.dtype), copy=not values.requires_grad)

    def _over_paths(
        self, function: Callable[..., Tensor], batch: tuple[Tensor, ...], rows: int
    ) -> Tensor:
        n = self.estimator.paths
        made: list[Made] = []
        log_q: list[Tensor] = []

        def choose(choice: Choice, logits: Tensor) -> Tensor:
            z = draw_choice(logits, choice, self.generator)
            # one path is enough to test the reach
            made.append(Made(choice, z[:rows], logits[:rows].detach()))
            log_q.append(_log_probs(logits, z, choice.k))
            return z

        # the paths are the outer dimension: path i is rows i N to (i + 1) N
        repeated = tuple(x.repeat(n, *(1,) * (x.ndim - 1)) for x in batch)
        values = self._evaluate(function, repeated, n * rows, choose)
        if self._test_reach:
            check_reach(self, function, batch, made)
        values = values.unflatten(0, (n, rows))  # [n, N] or [n, N, T]
        # a pass may meet no Choice, as one that returns early does
        if not made:
            return values.mean(0)

        # ln q of a path is the sum over its choices, of those that reach a loss
        reaching = []
        for each, call in zip(log_q, made, strict=True):
            reaching.append(sum_of_reaching(each, call.choice.reach, values[0]))
        whole = sum(reaching[1:], reaching[0]).unflatten(0, (n, rows))
        return attach_paths(values.mean(0), self.estimator, values, whole)

    def replay(
        self, function: Callable[..., Tensor], batch: tuple[Tensor, ...], choices: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The function's values with given choices, and the logits of each Choice;
        random layers draw the same numbers in every replay.
        """
        logits: list[Tensor] = []

        def choose(choice: Choice, seen: Tensor) -> Tensor:
            logits.append(seen)
            return choices[len(logits) - 1]

        # one seed for all replays: dropout that differed would look like a choice's reach
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return self._evaluate(function, batch, len(batch[0]), choose), logits

    def _relax(self, choice: Choice, logits: Tensor) -> Tensor:
        return pose(self.estimator, logits, generator=self.generator).queries.points[0]

    def _over_queries(
        self, function: Callable[..., Tensor], batch: tuple[Tensor, ...], rows: int
    ) -> Tensor:
        calls: list[_Call] = []
        last: dict[Choice, Tensor] = {}

        def choose(choice: Choice, logits: Tensor) -> Tensor:
            last[choice] = logits
            question = pose(self.estimator, logits, generator=self.generator)
            z = question.true
            race = None
            # an estimator need not say which noise led to z, so it is drawn given z
            if not choice.k:
                race = given_winner(logits, z, dirichlet(logits, self.generator))
            calls.append(_Call(choice, question, z, race))
            return z

        # the true path, with f's graph
        true = self._evaluate(function, batch, rows, choose)
        if self._test_reach:
            made = [Made(call.choice, call.z, call.question.logits.detach()) for call in calls]
            check_reach(self, function, batch, made)

        # the other queries of one choice after the other, and its credit on top of the value
        value = true
        for t, call in enumerate(calls):
            others = call.question.others()
            # where all queries equal the true sample, no pass is needed
            values = true.detach()[:0]
            if len(others.row) > 0:
                values = self._values_of_others(function, batch, calls, t, others)
            values = values.to(true.dtype)
            if self._positions:
                value = self._attach_reached(value, call, others, values, true.detach())
            else:
                gradient = self._credit(call, others, values, true.detach())
                value = attach(value, call.question.logits, gradient)
        for choice, logits in last.items():  # not the queries' logits, which have no graph
            choice.logits = logits
        return value

    def _credit(self, call: _Call, others: Others, values: Tensor, true: Tensor) -> Tensor:
        """The gradient [N, K, C] of one loss, from its values [R] at the others and [N]."""
        every = call.question.spread_others(others, values, true)
        gradient = call.question.credit(every).gradient
        if gradient is None:
            raise TypeError(
                f"{self.estimator!r} tells no gradient but is not declared as pathwise."
            )
        return gradient.detach()

    def _attach_reached(
        self, value: Tensor, call: _Call, others: Others, values: Tensor, true: Tensor
    ) -> Tensor:
        """value [N, T], where the loss at each position has a credit of its own for the
        choices that reach it; from the losses [R, T] at the others and [N, T].

        A choice that does not reach a loss has a gradient with mean 0 there, which is
        left out.
        """
        logits = call.question.logits
        positions = true.shape[-1]
        reached = reaches(logits.shape[1], call.choice.reach, positions, logits.device)
        by_loss = []
        for s in range(positions):
            gradient = self._credit(call, others, values[:, s], true[:, s])
            by_loss.append(gradient * reached[s].unsqueeze(-1))
        expanded = logits.unsqueeze(1).expand(-1, positions, -1, -1)
        return attach(value, expanded, torch.stack(by_loss, 1))

    @torch.no_grad()
    def _values_of_others(
        self,
        function: Callable[..., Tensor],
        batch: tuple[Tensor, ...],
        calls: list[_Call],
        t: int,
        others: Others,
    ) -> Tensor:
        """f at the queries of call t that differ from the true sample: [R] or [R, T]."""
        row = others.row
        made = 0

        def choose(choice: Choice, logits: Tensor) -> Tensor:
            nonlocal made
            number = made
            made += 1
            if number <= t:
                self._require_same_call(calls[number], choice, logits, row, batch)
            # before choice t the true path, at t the query
            if number < t:
                return calls[number].z.index_select(0, row)
            if number == t:
                return others.point
            # after it the true path's race, if this choice has one of the same size
            race = calls[number].race if number < len(calls) else None
            if race is None or race.shape[1:] != logits.shape[1:]:
                return draw_choice(logits, choice, self.generator)
            return argmin_sample(logits, race.index_select(0, row))

        asked = tuple(x.index_select(0, row) for x in batch)
        values = self._evaluate(function, asked, len(row), choose)
        if made <= t:
            raise RuntimeError(
                f"The model made {len(calls)} choices for the true sample but {made} in another "
                "pass; their number must not depend on the rows."
            )
        return values

    def _require_same_call(
        self,
        call: _Call,
        choice: Choice,
        logits: Tensor,
        row: Tensor,
        batch: tuple[Tensor, ...],
    ) -> None:
        """Require that another pass makes the same choice from the same logits."""
        if call.choice is not choice:
            raise RuntimeError(
                "The model made another choice here than for the true sample; which choices "
                "it makes, and in which order, must not depend on the rows."
            )
        check_again(self.model, self.estimator, call.question.logits, logits, row, batch)


def draw_choice(logits: Tensor, choice: Choice, generator: torch.Generator | None) -> Tensor:
    """Choices [N, K] of one category each, or sets of k as `shaped` has them."""
    logits = logits.detach()
    if choice.k is None:
        return draw_one(logits, generator)
    z = draw_subsets(logits, uniforms(logits.unsqueeze(-1), 1, generator), choice.k)
    return shaped(choice, z.squeeze(-2))


def shaped(choice: Choice, z: Tensor) -> Tensor:
    """Sets [N, T, k], or [N, k] where there is one per row and no position matters."""
    return z.squeeze(1) if choice.reach == "row" and z.shape[1] == 1 else z


def _log_probs(logits: Tensor, z: Tensor, k: int | None) -> Tensor:
    """ln q of each choice of a row: [N, K], at least float32."""
    if k is not None:
        return subset_log_prob(logits, z.view(*logits.shape[:2], k))
    masked = logits == -torch.inf
    # the gradient of 0 * inf would be NaN
    finite = logits.masked_fill(masked, torch.finfo(logits.dtype).min)
    log_q = finite.to(working_dtype(logits.dtype)).log_softmax(-1)
    return log_prob(log_q, z)
