"""The third stage: one pass with a graph over the true sequences, in micro-batches, for the credit of their tokens.

    value [N],    d sum(value) = sum over rows, steps and draws of w dln p(token)

The value is known before the pass. So nothing is computed when it is made: its backward runs each micro-batch forward
and backward and adds up the gradients of the parameters. Memory is that of one micro-batch, and no forward pass is made
twice, as activation checkpointing would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from arsm.driver import graph_nodes
from arsm.sequences.batch import TokenCredit, token_log_probs
from arsm.sequences.memory import limited_by
from arsm.sequences.model import Model, one_pass


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

    def parts(self) -> list[Tensor]:
        """The rows that have any credit, in parts."""
        if self.credit.gradient is not None:
            given = torch.ones_like(self.prompt, dtype=torch.bool)
        else:
            given = (self.credit.weights != 0).flatten(1).any(1)
        rows = given.nonzero().squeeze(-1)
        return list(rows.split(self.micro_batch)) if rows.shape[0] else []

    def logits(self, rows: Tensor) -> Tensor:
        """[m, T, V], before temperature."""
        mask = None if self.prompt_mask is None else self.prompt_mask[rows]
        return one_pass(self.model, self.prompts[rows], self.sequences[rows], mask)

    def log_probs(self, rows: Tensor) -> Tensor:
        """ln p of the credited tokens, [m, T, d]."""
        return token_log_probs(self.logits(rows), self.credit.tokens[rows], self.temperature)

    def surrogate(self, rows: Tensor) -> Tensor:
        """[m], whose gradient is the credit of these rows."""
        if self.credit.gradient is not None:
            logits, gradient = self.logits(rows), self.credit.gradient[rows]
            return (logits.masked_fill(gradient == 0, 0) * gradient).sum((-2, -1))  # masked logits are -inf
        weights, tokens = self.credit.weights[rows], self.credit.tokens[rows]
        if not self.credit.centred:
            return (weights * self.log_probs(rows).masked_fill(weights == 0, 0)).sum((-2, -1))
        # ln p less its normaliser, which the weights cancel: the logits of all other tokens are not needed
        logits = self.logits(rows).gather(-1, tokens)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        return (weights * logits.masked_fill(weights == 0, 0)).sum((-2, -1))


def attach_credit(value: Tensor, run: Pass, surrogate: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """value [N], whose derivative in the model's parameters is the credit of its rows.

    Args:
        value: [N], without a graph.
        run: the pass over the true sequences.
        surrogate: rows [m] -> [m], instead of `run.surrogate`.
    """
    if not torch.is_grad_enabled():
        return value
    surrogate = surrogate or run.surrogate
    parts = run.parts()
    parameters = parameters_of(run.model)
    if parameters is None:
        # without any credit the first row's, which is 0
        with limited_by("micro_batch", run.micro_batch, "computing the gradient"):
            return value + _with_graph(run, surrogate, parts or [torch.zeros_like(run.prompt[:1])], value)
    later = Later(surrogate, parts, run.prompt, parameters, run.micro_batch)
    return _Deferred.apply(value, later, *parameters)  # pyright: ignore[reportReturnType]


def parameters_of(model: object) -> list[Tensor] | None:
    """The parameters that the model's logits may depend on; None if they cannot be known."""
    inner = getattr(model, "module", getattr(model, "model", model))
    for each in (model, inner):
        if isinstance(each, nn.Module):
            return [parameter for parameter in each.parameters() if parameter.requires_grad]
    return None


def _with_graph(run: Pass, surrogate: Callable[[Tensor], Tensor], parts: list[Tensor], value: Tensor) -> Tensor:
    """The surrogates [N], 0 in value, with an ordinary graph; of each part it is computed again on demand."""
    found = []
    for rows in parts:
        of_part: Any = checkpoint(surrogate, rows, use_reentrant=False) if len(parts) > 1 else surrogate(rows)
        found.append(of_part - of_part.detach())
    rows = torch.cat(parts)
    return torch.zeros_like(value).index_add(0, run.prompt[rows], torch.cat(found).to(value.dtype))


class Later:
    """Forward and backward of every micro-batch, when the gradient is wanted."""

    def __init__(
        self,
        surrogate: Callable[[Tensor], Tensor],
        parts: list[Tensor],
        prompt: Tensor,
        parameters: list[Tensor],
        micro_batch: int,
    ) -> None:
        self.surrogate = surrogate
        self.parts = parts
        self.prompt = prompt
        self.parameters = parameters
        self.micro_batch = micro_batch
        self.versions = [parameter._version for parameter in parameters]
        device = prompt.device.type
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def gradients(self, grad: Tensor) -> list[Tensor | None]:
        """sum_n grad_n d value_n / d parameter, for grad [N]."""
        if [parameter._version for parameter in self.parameters] != self.versions:
            raise RuntimeError(
                "The model's parameters were changed between sequences.estimate and backward, which computes the "
                "gradient with them; call backward before the optimiser's step."
            )
        with limited_by("micro_batch", self.micro_batch, "computing the gradient"):
            return self._gradients(grad)

    def _gradients(self, grad: Tensor) -> list[Tensor | None]:
        if not self.parts:
            # no token has any credit, as when all rewards are equal: the gradient is 0, not missing
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        totals: list[Tensor | None] = [None] * len(self.parameters)
        device, dtype, enabled = self._autocast
        for number, rows in enumerate(self.parts):
            with torch.enable_grad(), torch.autocast(device, dtype, enabled):
                of_part = self.surrogate(rows)
            if number == 0:
                self._check_leaves(of_part)
            weights = grad[self.prompt[rows]].to(of_part.dtype)
            found = torch.autograd.grad(of_part, self.parameters, weights, allow_unused=True)
            for i, each in enumerate(found):
                total = totals[i]
                if total is None:
                    totals[i] = each
                elif each is not None:
                    total.add_(each)
        return totals

    def _check_leaves(self, of_part: Tensor) -> None:
        known = {id(parameter) for parameter in self.parameters}
        for node in graph_nodes(of_part):
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise RuntimeError(
                    f"The model's logits depend on a tensor {list(leaf.shape)} that is not among its parameters and "
                    "would get no gradient; register it as a parameter of the module."
                )


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

    At r = 1 its gradient is that of sum_i w_i ln p. Reference: Schulman et al., Proximal policy optimization
    algorithms, 2017.
    """
    if run.credit.gradient is not None:
        raise ValueError("Clipping needs a credit of single tokens; use an estimator with weights, such as RLOO(8).")
    if not 0 < clip < 1:
        raise ValueError(f"clip must lie in (0, 1), but is {clip}.")
    now = torch.zeros_like(run.credit.weights)
    with torch.no_grad():
        for rows in run.parts():
            now[rows] = run.log_probs(rows).to(now.dtype)

    def surrogate(rows: Tensor) -> Tensor:
        weights = run.credit.weights[rows]
        log_probs = run.log_probs(rows)
        ratio = (log_probs - now[rows].to(log_probs.dtype)).exp()
        return torch.minimum(ratio * weights, ratio.clamp(1 - clip, 1 + clip) * weights).sum((-2, -1))

    return lambda: attach_credit(value.detach(), run, surrogate)
