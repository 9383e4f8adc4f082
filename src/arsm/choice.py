"""`Choice` and `choices`: discrete choices anywhere inside a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from arsm.capabilities import require
from arsm.checks import NotFiniteError, check_count, describe, legal_rows
from arsm.choice_reach import Reach
from arsm.choice_run import Run, draw_choice, shaped
from arsm.options import suggests
from arsm.types import Estimator


class Choice(nn.Module):
    """A discrete choice inside a module: `z = self.route(logits)` in any `forward`.

    Logits [N, K, C] give int64 [N, K]: K choices for each of the N rows of the batch;
    each row has one loss. A router over tokens passes its logits [B, T, E] as they are:
    K = T choices of E experts per row. In training mode the choices are drawn; in
    evaluation mode they are the most probable ones.

    Where every position has a loss of its own, as every token of a language model has,
    the loss function returns [N, T], and `reach` says which of these losses a choice
    can change. It is credited with their sum alone: less noise, and no bias if it is
    true.

    To train the layers that compute the logits, call the loss inside `arsm.choices`.
    Outside, a choice in training mode raises if its logits require a gradient, because
    they would get none.

    Args:
        k: choose k different categories instead of one, by the conditional Poisson law:
            logits [N, T, C] give int64 [N, T, k], ascending; [N, 1, C] give [N, k]
            where `reach` is "row".
        reach: "row", all losses of its row; "later", those of its own position and of
            later ones, as in causal models; "own", that of its own position, where
            positions do not mix. `arsm.choices(..., check=True)` tests it.

    With a relaxing estimator z is floating [N, K, C] in training (with k ones where k
    is given); `arsm.one_hot` accepts both.
    """

    logits: Tensor | None
    """The logits of the last call inside `arsm.choices`, with their graph, for balancing losses."""

    def __init__(self, k: int | None = None, reach: Reach = "row") -> None:
        super().__init__()
        if k is not None:
            check_count("k", k)
        if reach not in ("row", "later", "own"):
            raise ValueError(f'reach must be "row", "later" or "own", but is {reach!r}.')
        self.k = k
        self.reach: Reach = reach
        self.logits = None
        self._run: Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "logits": None, "_run": None}  # a copy is in no run

    def extra_repr(self) -> str:
        named = []
        if self.k is not None:
            named.append(f"k={self.k}")
        if self.reach != "row":
            named.append(f"reach={self.reach!r}")
        return ", ".join(named)

    def forward(self, logits: Tensor) -> Tensor:
        if torch.compiler.is_exporting() and not self.training:
            return _most_probable(self, logits)  # a graph cannot check values
        if torch.compiler.is_compiling():
            # a run keeps Python state, so a compiled model has a graph break here
            eager: Any = torch.compiler.disable
            return eager(self._choose)(logits)
        return self._choose(logits)

    def _choose(self, logits: Tensor) -> Tensor:
        _check(self, logits)
        if not self.training:
            if self._run is not None and logits.requires_grad:
                raise RuntimeError(
                    "This Choice is in evaluation mode inside `arsm.choices`, where its logits "
                    "get no gradient; call model.train(), or evaluate outside or under "
                    "torch.no_grad()."
                )
            return _most_probable(self, logits)
        # PyTorch has no public way to ask whether a backward pass is running
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "A Choice was called in the backward pass, as activation checkpointing does, "
                "where it would choose again; checkpoint the modules before and after it."
            )
        if self._run is not None:
            self.logits = logits
            return self._run.choose(self, logits)
        if logits.requires_grad:
            raise RuntimeError(
                "This Choice is in training mode, and its logits require a gradient that nothing "
                "will give them; compute the loss inside `with arsm.choices(model, estimator) as "
                "run:`, or call model.eval()."
            )
        return draw_choice(logits, self, None)


@suggests("arsm.choices")
@contextlib.contextmanager
def choices(
    model: nn.Module,
    estimator: Estimator,
    *,
    generator: torch.Generator | None = None,
    check: bool = False,
) -> Iterator[Run]:
    """Train a module with choices in it.

        with arsm.choices(model, arsm.RLOO(4)) as run:
            loss = run(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
        loss.mean().backward()

    Args:
        model: contains one or many `arsm.Choice`, at any depth; may be compiled or
            wrapped in DDP.
        estimator: `RLOO(n)` makes one forward pass over n copies of each row. An
            estimator that only evaluates f, such as ARSM, makes one more pass per
            choice; relaxations make one pass with floating choices. Those that
            differentiate f at several points, bound it, or learn, are refused.
            `Choice(k=...)` takes `RLOO`, or an estimator of k-subsets with the same k.
            `Choice(reach=...)` takes unbiased estimators that only evaluate f, such as
            `RLOO`, `Reinforce` and `LocalExpectation`; with a k, those that weigh whole
            samples, as the first two do.
        generator: the choices are drawn from it.
        check: test what the choices declare as their `reach`: change one at a time, and
            raise if a loss moves that it should not reach. It costs a few more passes,
            so use it for a step or two.

    Layers must work row by row: layer normalisation does, batch normalisation in
    training mode does not and is refused. Dropout and other randomness before a choice
    fit `RLOO(n)`, `Reinforce` and relaxations, which run the model once; the others
    need the same logits in every pass and raise if they differ. After the last choice
    it fits all.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "arsm.choices takes the module that contains the choices, but got "
            f"{type(model).__name__}."
        )
    found = [module for module in model.modules() if isinstance(module, Choice)]
    _check_fit(estimator, found, model)
    positions = any(choice.reach != "row" for choice in found)
    run = Run(model, estimator, generator, positions=positions, check=check)
    # all of them before the first is changed: else a refusal would leave the others' run broken
    for choice in found:
        if choice._run is not None:
            raise RuntimeError(
                "This model is already inside another `arsm.choices`; leave that one first."
            )
    try:
        for choice in found:
            choice._run = run
        yield run
    finally:
        # the logits hold the graph of the last step
        for choice in found:
            choice._run = choice.logits = None


def _check_fit(estimator: Estimator, found: list[Choice], model: nn.Module) -> None:
    relaxes = "use RLOO or another that only evaluates f, or a relaxation such as StraightThrough"
    require(estimator, "arsm.choices", "mean", "nothing_learned", "one_pass", instead=relaxes)
    if not found:
        raise ValueError(
            f"{type(model).__name__} contains no arsm.Choice; put one where its forward chooses."
        )
    # DDP looks for unused parameters before the credit connects the logits with the loss
    for module in model.modules():
        searches = isinstance(module, DistributedDataParallel) and module.find_unused_parameters
        if searches and not module.static_graph and not estimator.pathwise:
            raise ValueError(
                "DDP with find_unused_parameters=True takes the layers before a Choice for "
                "unused, as its output has no graph; leave the option out, or wrap a module whose "
                "forward returns run(function, *batch)."
            )
    for choice in found:
        if choice.reach == "row":
            continue
        by = f"this model's Choice(reach={choice.reach!r})"
        require(estimator, by, "values_only", "unbiased", instead="use RLOO(4)")
        if choice.k is not None:
            by = f"this model's Choice(k={choice.k}, reach={choice.reach!r})"
            require(estimator, by, "paths", "one_weight", instead="use RLOO(4)")
    # an estimator that weighs whole paths does not care what is drawn along them
    if estimator.paths:
        return
    for choice in found:
        by = "this model's Choice()" if choice.k is None else f"this model's Choice(k={choice.k})"
        instead = "RLOO fits all, SIMPLE(k) and SubsetRLOO(k) their k"
        require(estimator, by, subset=choice.k, instead=instead)


def _check(choice: Choice, logits: Tensor) -> None:
    if (
        not isinstance(logits, Tensor)
        or not logits.is_floating_point()
        or logits.ndim != 3
        or 0 in logits.shape
    ):
        raise ValueError(
            f"A Choice takes floating logits [N, K, C], but got {describe(logits)}; for one choice "
            "use [N, 1, C]."
        )
    if not bool(legal_rows(logits.detach()).all()):
        raise NotFiniteError(
            "A Choice got logits that are NaN, +inf, or -inf in every category of a variable."
        )
    if choice.k is None:
        return
    if not bool(((logits.detach() > -torch.inf).sum(-1) >= choice.k).all()):
        raise ValueError(
            f"Choice(k={choice.k}) takes logits [N, T, C] with at least {choice.k} categories that "
            f"are not masked, but got {list(logits.shape)}."
        )


def _most_probable(choice: Choice, logits: Tensor) -> Tensor:
    if choice.k is None:
        return logits.argmax(-1)
    # the likeliest set of the conditional Poisson law is that of the k largest logits
    return shaped(choice, logits.topk(choice.k, -1).indices.sort(-1).values)
