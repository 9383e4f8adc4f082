"""The third stage: one pass with a graph over the true sequences, in micro-batches, for
the credit of their tokens.

    value [N],    d sum(value) = sum over rows, steps and draws of w dln p(token)

The value is known before the pass. So nothing is computed when it is made: its backward
runs each micro-batch forward and backward and adds up the gradients of the parameters.
Memory is that of one micro-batch, and no forward pass is made twice, as activation
checkpointing would.

Within a micro-batch the same is done once more for the head: the weights of all states
are known, so that the head runs forward and backward for some states at a time and adds
up the gradient of their hidden states, which then goes through the rest of the model at
once. Logits exist for those states alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from arsm.driver import graph_nodes
from arsm.sequences.batch import TokenCredit, token_log_probs
from arsm.sequences.heads import Headed, Limit, headed, logits_in_parts
from arsm.sequences.memory import limited_by
from arsm.sequences.model import Model, one_pass

Term: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`term(logits [S, V], row [S], step [S]) -> [S]`: a state's part of the surrogate,
whose gradient is the credit.
"""


@dataclass(frozen=True, eq=False)
class Pass:
    """What the pass over the true sequences needs."""

    model: Model
    prompts: Tensor
    """[M, P]."""
    prompt_mask: Tensor | None
    sequences: Tensor
    """[M, T]: the true tokens."""
    prompt: Tensor
    """[M]: which of the N values each row belongs to."""
    credit: TokenCredit
    temperature: float
    micro_batch: int
    limit: Limit
    """Which tokens could be drawn."""

    @cached_property
    def credited(self) -> Tensor:
        """[M, T] bool: the states that have any credit."""
        if self.credit.gradient is not None:
            return self.credit.gradient.credited()
        return (self.credit.weights != 0).any(-1)

    @cached_property
    def lengths(self) -> Tensor:
        """[M]: tokens up to the last state that has any credit; 0 for none."""
        steps = torch.arange(1, self.sequences.shape[1] + 1, device=self.sequences.device)
        return (self.credited * steps).amax(-1)

    def parts(self) -> list[Tensor]:
        """The rows that have any credit, in parts of similar lengths, longest first."""
        order = self.lengths.argsort(descending=True, stable=True)
        rows = order[: int((self.lengths > 0).sum())]
        return list(rows.split(self.micro_batch)) if rows.shape[0] else []

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Prompts, sequences and mask of some rows, up to the last state with credit."""
        mask = None if self.prompt_mask is None else self.prompt_mask[rows]
        # a causal model's logits do not depend on later tokens, most of which are padding
        width = max(1, int(self.lengths[rows].max()))
        return self.prompts[rows], self.sequences[rows, :width], mask

    def term(self, logits: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """The surrogate of credit: sum_i w_i ln p(token_i) in every state."""
        if self.credit.gradient is not None:
            gradient = self.credit.gradient(logits, row, step)
            # masked logits are -inf
            return (logits.masked_fill(gradient == 0, 0) * gradient).sum(-1)
        weights, tokens = self.credit.weights[row, step], self.credit.tokens[row, step]
        if self.credit.centred:
            # ln p less its normaliser, which the weights cancel: the logits of all other tokens are
            # not needed
            wide = torch.promote_types(logits.dtype, torch.float32)
            score = logits.gather(-1, tokens).to(wide) / self.temperature
        else:
            score = token_log_probs(logits, tokens, self.temperature)
        return (weights * score.masked_fill(weights == 0, 0)).sum(-1)


def attach_credit(value: Tensor, run: Pass, term: Term | None = None) -> Tensor:
    """value [N], whose derivative in the model's parameters is the credit of its rows.

    Args:
        value: [N], without a graph.
        run: the pass over the true sequences.
        term: the surrogate of a state, instead of `run.term`.
    """
    if not torch.is_grad_enabled():
        return value
    later = Later(run, run.term if term is None else term)
    if later.parameters is None:
        with limited_by("micro_batch", run.micro_batch, "computing the gradient"):
            return value + _with_graph(later, value)
    return _Deferred.apply(value, later, *later.parameters)  # pyright: ignore[reportReturnType]


def parameters_of(model: object) -> list[Tensor] | None:
    """The parameters that the model's logits may depend on; None if they cannot be known."""
    inner = getattr(model, "module", getattr(model, "model", model))
    for each in (model, inner):
        if isinstance(each, nn.Module):
            return [parameter for parameter in each.parameters() if parameter.requires_grad]
    return None


def _with_graph(later: Later, value: Tensor) -> Tensor:
    """The surrogates [N], 0 in value, with an ordinary graph; of each part it is
    computed again on demand.
    """
    run = later.run

    def surrogate(rows: Tensor) -> Tensor:
        logits = one_pass(run.model, *run.read(rows))
        width = logits.shape[1]
        step = torch.arange(width, device=rows.device).repeat(rows.shape[0])
        logits = run.limit(logits.flatten(0, 1), step)
        terms = later.term(logits, rows.repeat_interleave(width), step)
        return terms.view(-1, width).sum(-1)

    # without any credit the first row's, which is 0
    parts = later.parts or [torch.zeros_like(run.prompt[:1])]
    found = []
    for rows in parts:
        of_part: Any = (
            checkpoint(surrogate, rows, use_reentrant=False) if len(parts) > 1 else surrogate(rows)
        )
        found.append(of_part - of_part.detach())
    rows = torch.cat(parts)
    return torch.zeros_like(value).index_add(0, run.prompt[rows], torch.cat(found).to(value.dtype))


class Later:
    """Forward and backward of every micro-batch, when the gradient is wanted."""

    def __init__(self, run: Pass, term: Term) -> None:
        self.run = run
        self.term = term
        self.parts = run.parts()
        self.parameters = parameters_of(run.model)
        self.versions = [parameter._version for parameter in self.parameters or []]
        device = run.prompt.device.type
        self._autocast = (
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
        )

    def gradients(self, grad: Tensor) -> list[Tensor | None]:
        """sum_n grad_n d value_n / d parameter, for grad [N]."""
        parameters = self.parameters or []
        if [parameter._version for parameter in parameters] != self.versions:
            raise RuntimeError(
                "The model's parameters were changed between sequences.estimate and backward, "
                "which computes the gradient with them; call backward before the optimiser's step."
            )
        if not self.parts:
            # no token has any credit, as when all rewards are equal: the gradient is 0, not missing
            return [torch.zeros_like(parameter) for parameter in parameters]
        total = Total(parameters)
        with limited_by("micro_batch", self.run.micro_batch, "computing the gradient"):
            for rows in self.parts:
                self._add_part(rows, grad[self.run.prompt[rows]], total)
        return total.gradients

    def _add_part(self, rows: Tensor, weight: Tensor, total: Total) -> None:
        """One micro-batch: rows [m], and the weight [m] of their values."""
        device, dtype, enabled = self._autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled):
            whole = headed(self.run.model, *self.run.read(rows))
        if whole.hidden.requires_grad:
            total.reached(whole.hidden)
        backward = self._through_head(whole, rows, weight, total)
        if whole.hidden.requires_grad:
            total.add(total.parameters, whole.hidden, backward)

    def _through_head(self, whole: Headed, rows: Tensor, weight: Tensor, total: Total) -> Tensor:
        """The gradient of the hidden states, [m, width, D]; that of the head's parameters
        is added to the total.
        """
        device, dtype, enabled = self._autocast
        width = whole.hidden.shape[1]
        hidden = whole.hidden.detach().flatten(0, 1)
        backward = torch.zeros_like(hidden)
        states = self.run.credited[rows, :width].flatten().nonzero().squeeze(-1)
        for some in whole.parts(states):
            with torch.enable_grad(), torch.autocast(device, dtype, enabled):
                leaf = hidden[some].requires_grad_()
                row, step = some // width, some % width
                logits = self.run.limit(whole.head(leaf), step)
                terms = self.term(logits, rows[row], step)
            own = total.reached(terms, leaf)
            backward[some] = total.add(own, terms, weight[row].to(terms.dtype), leaf)
        return backward.view_as(whole.hidden)


class Total:
    """Gradients of parameters, added up over parts of a graph."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.gradients: list[Tensor | None] = [None] * len(parameters)
        self._place = {id(parameter): i for i, parameter in enumerate(parameters)}

    def reached(self, value: Tensor, leaf: Tensor | None = None) -> list[Tensor]:
        """The parameters that value's graph ends in; refuses other leaves than `leaf`."""
        found = []
        for node in graph_nodes(value):
            end = getattr(node, "variable", None)
            if end is None or end is leaf:
                continue
            if id(end) not in self._place:
                raise RuntimeError(
                    f"The model's logits depend on a tensor {list(end.shape)} that is not among "
                    "its parameters and would get no gradient; register it as a parameter of the "
                    "module."
                )
            found.append(end)
        return found

    def add(
        self, parameters: list[Tensor], value: Tensor, grad: Tensor, leaf: Tensor | None = None
    ) -> Tensor:
        """Add grad dvalue/dparameter; return grad dvalue/dleaf."""
        inputs = parameters if leaf is None else [*parameters, leaf]
        found = torch.autograd.grad(value, inputs, grad, allow_unused=True)
        for parameter, each in zip(parameters, found, strict=False):
            i = self._place[id(parameter)]
            total = self.gradients[i]
            if total is None:
                self.gradients[i] = each
            elif each is not None:
                # not in place: autograd may hand one tensor to two parameters
                self.gradients[i] = total + each
        return found[-1]


class _Deferred(torch.autograd.Function):
    """value, with gradients of the parameters that are computed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, later: Later, *parameters: Tensor) -> Tensor:
        ctx.later = later
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *ctx.later.gradients(grads[0])


def clipped_epochs(value: Tensor, run: Pass, clip: float) -> Callable[[], Tensor]:
    """Further epochs over the same credit: PPO's surrogate with ratios to the probabilities of now.

        sum_i min(r_i w_i, clamp(r_i, 1 - clip, 1 + clip) w_i),    r_i = p(token_i) / p_now(token_i)

    At r = 1 its gradient is that of sum_i w_i ln p. Reference: Schulman et al.,
    Proximal policy optimization algorithms, 2017.
    """
    if run.credit.gradient is not None:
        raise ValueError(
            "Clipping needs a credit of single tokens; use an estimator with weights, such as "
            "RLOO(8)."
        )
    if not 0 < clip < 1:
        raise ValueError(f"clip must lie in (0, 1), but is {clip}.")
    tokens, weights = run.credit.tokens, run.credit.weights
    now = torch.zeros_like(weights)
    for rows in run.parts():
        prompts, sequences, mask = run.read(rows)
        width = sequences.shape[1]
        wanted = run.credited[rows, :width]
        states = logits_in_parts(run.model, prompts, sequences, mask, wanted, run.limit)
        for some, logits in states:
            row, step = rows[some // width], some % width
            log_probs = token_log_probs(logits, tokens[row, step], run.temperature)
            now[row, step] = log_probs.to(now.dtype)

    def term(logits: Tensor, row: Tensor, step: Tensor) -> Tensor:
        log_probs = token_log_probs(logits, tokens[row, step], run.temperature)
        ratio = (log_probs - now[row, step].to(log_probs.dtype)).exp()
        weight = weights[row, step]
        return torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight).sum(-1)

    return lambda: attach_credit(value.detach(), run, term)
