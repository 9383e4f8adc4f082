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

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from arsm.driver import graph_nodes
from arsm.sequences.batch import TokenCredit, token_log_probs
from arsm.sequences.heads import Headed, Limit, headed, logits_in_parts
from arsm.sequences.memory import limited_by
from arsm.sequences.model import Model, module_of, one_pass

Term: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`term(logits [S, V], row [S], step [S]) -> [S]`: a state's part of the surrogate,
whose gradient is the credit.
"""
ROUNDED = 8
"""Parts have a multiple of so many rows, some without credit among them. With sizes that
change from update to update, hardly any memory that a GPU's allocator holds would fit, and
asking the device for hundreds of tensors takes longer than computing them.
"""


class MicroBatch(NamedTuple):
    """Some rows of a pass: a micro-batch."""

    rows: Tensor
    """[m] int64."""
    length: int
    """The number of steps up to the last state with credit, L."""
    states: Tensor
    """[S] int64: the states with credit, in [m L]."""


@dataclass(frozen=True, eq=False)
class Pass:
    """The pass over the true sequences, before it is run."""

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

    def credited(self) -> Tensor:
        """[M, T] bool: the states that have any credit."""
        if self.credit.gradient is not None:
            return self.credit.gradient.credited()
        return (self.credit.weights != 0).any(-1)

    def parts(self) -> list[MicroBatch]:
        """The rows that have any credit, in as few parts as can be, of equal size, the
        longest first.

        Rows of about the same length are together: a part ends with its last state that
        has credit.
        """
        credited = self.credited()
        # tokens after the last credit change nothing: a causal model need not read them
        place = torch.arange(1, credited.shape[1] + 1, device=credited.device)
        length = (credited * place).amax(-1)
        order = length.argsort(stable=True)
        # all that the host must know, in one wait for the device and before there is work for it
        lengths = length[order].tolist()
        # rows without any credit come first in this order, and are left out
        first = bisect_right(lengths, 0)
        count = -(-(len(lengths) - first) // self.micro_batch)
        if count:
            first = self._round_down(first, len(lengths), count)
        found = []
        # the longest first: the others' tensors fit into the memory that it leaves
        for i in reversed(range(count)):
            begin, end = (first + (len(lengths) - first) * j // count for j in (i, i + 1))
            rows = order[begin:end]
            longest = lengths[end - 1]
            states = credited[rows, :longest].flatten().nonzero().squeeze(-1)
            found.append(MicroBatch(rows, longest, states))
        return found

    def _round_down(self, first: int, end: int, count: int) -> int:
        """The first of the rows up to `end` that makes `count` parts of a multiple of
        `ROUNDED` rows; `first` itself where rows are too few, or parts full.
        """
        rows = -(-(end - first) // (ROUNDED * count)) * ROUNDED * count
        fits = rows <= min(end, self.micro_batch * count)
        return end - rows if fits else first

    def read(self, part: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Prompts, sequences and mask of a part."""
        mask = None if self.prompt_mask is None else self.prompt_mask[part.rows]
        return self.prompts[part.rows], self.sequences[part.rows, : part.length], mask

    def term(self, logits: Tensor, row: Tensor, step: Tensor) -> Tensor:
        """The surrogate of credit: sum_i w_i ln p(token_i) in every state."""
        if self.credit.gradient is not None:
            # a surrogate whose derivative in the logits is this gradient
            gradient = self.credit.gradient(logits, row, step)
            # masked logits are -inf
            return (logits.masked_fill(gradient == 0, 0) * gradient).sum(-1)
        weights = self.credit.weights[row, step]
        tokens = self.credit.tokens[row, step]
        if self.credit.centred:
            # ln p less its normaliser, which the weights cancel: the logits of all other tokens are
            # not needed
            wide = torch.promote_types(logits.dtype, torch.float32)
            score = logits.gather(-1, tokens).to(wide) / self.temperature
        else:
            score = token_log_probs(logits, tokens, self.temperature)
        # a draw without weight may be forbidden, and 0 times -inf is NaN
        return (weights * score.masked_fill(weights == 0, 0)).sum(-1)


def attach_credit(value: Tensor, run: Pass, term: Term | None = None) -> Tensor:
    """value [N], whose derivative in the model's parameters is the credit of its rows.

    Args:
        value: [N], without a graph.
        run: the pass over the true sequences.
        term: the surrogate of a state, instead of `run.term`.
    """
    # nobody can call backward: no pass is prepared
    if not torch.is_grad_enabled():
        return value
    later = Later(run, run.term if term is None else term)
    if later.parameters is None:
        with limited_by("micro_batch", run.micro_batch, "computing the gradient"):
            return value + _with_graph(later, value)
    return _Deferred.apply(value, later, *later.parameters)  # pyright: ignore[reportReturnType]


def parameters_of(model: object) -> list[Tensor] | None:
    """The parameters that the model's logits may depend on; None if they cannot be known."""
    module = module_of(model)
    if module is None:
        return None
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def versions_of(model: object) -> list[int]:
    """Numbers that change whenever its parameters do."""
    return [parameter._version for parameter in parameters_of(model) or []]


def _with_graph(later: Later, value: Tensor) -> Tensor:
    """The surrogates [N], 0 in value, with an ordinary graph; of each part it is
    computed again on demand.
    """
    run = later.run

    def surrogate(part: MicroBatch) -> Tensor:
        # gradients of unknown parameters cannot be added up in parts: an ordinary graph
        logits = one_pass(run.model, *run.read(part))
        step = torch.arange(part.length, device=part.rows.device).repeat(part.rows.shape[0])
        logits = run.limit(logits.flatten(0, 1), step)
        terms = later.term(logits, part.rows.repeat_interleave(part.length), step)
        return terms.view(-1, part.length).sum(-1)

    first = torch.zeros_like(run.prompt[:1])
    # without any credit the first row's, which is 0
    parts = later.parts or [MicroBatch(first, run.sequences.shape[1], first)]
    found = []
    for part in parts:
        # a single part is held anyway: computing it again would save nothing
        of_part: Any = (
            checkpoint(surrogate, part, use_reentrant=False) if len(parts) > 1 else surrogate(part)
        )
        # 0 in value, so that the value stays the return
        found.append(of_part - of_part.detach())
    rows = torch.cat([part.rows for part in parts])
    return torch.zeros_like(value).index_add(0, run.prompt[rows], torch.cat(found).to(value.dtype))


class Later:
    """Forward and backward of every micro-batch, when the gradient is wanted."""

    def __init__(self, run: Pass, term: Term) -> None:
        self.run = run
        self.term = term
        self.parts = run.parts()
        self.parameters = parameters_of(run.model)
        # the pass runs in backward: by then an optimiser may have changed what it reads
        self.versions = versions_of(run.model)
        # backward runs outside of the caller's autocast, which the forward must have
        device = run.prompt.device.type
        self._autocast = (
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
        )

    def gradients(self, grad: Tensor) -> list[Tensor | None]:
        """sum_n grad_n d value_n / d parameter, for grad [N]."""
        parameters = self.parameters or []
        if versions_of(self.run.model) != self.versions:
            raise RuntimeError(
                "The model's parameters were changed between sequences.estimate and backward, "
                "which computes the gradient with them; call backward before the optimiser's step."
            )
        if not self.parts:
            # no token has any credit, as when all rewards are equal: the gradient is 0, not missing
            return [torch.zeros_like(parameter) for parameter in parameters]
        total = Total(parameters)
        # one context around all parts: the casts of the weights are kept until it is left
        with (
            torch.autocast(*self._autocast),
            limited_by("micro_batch", self.run.micro_batch, "computing the gradient"),
        ):
            for number, part in enumerate(self.parts):
                with torch.enable_grad():
                    whole = headed(self.run.model, *self.run.read(part))
                # one walk through the graph is enough: it takes a tenth of a part's time
                if number == 0 and whole.hidden.requires_grad:
                    total.reached(whole.hidden)
                weight = grad[self.run.prompt[part.rows]]
                backward = self._through_head(whole, part, weight, total)
                if whole.hidden.requires_grad:
                    total.add(parameters, whole.hidden, backward)
        return total.gradients

    def _through_head(
        self, whole: Headed, part: MicroBatch, weight: Tensor, total: Total
    ) -> Tensor:
        """The gradient of a micro-batch's hidden states, [m, L, D], for the weight [m] of its
        rows' values; that of the head's parameters is added to the total.
        """
        # cut from the trunk's graph, which is walked once when all states have their gradient
        hidden = whole.hidden.detach().flatten(0, 1)
        backward = torch.zeros_like(hidden)
        for some in whole.parts(part.states):
            with torch.enable_grad():
                # a leaf of its own per part: its graph is freed with the part's logits
                leaf = hidden[some].requires_grad_()
                row, step = some // part.length, some % part.length
                logits = self.run.limit(whole.head(leaf), step)
                terms = self.term(logits, part.rows[row], step)
            # the head's own parameters only: the trunk's are not in this graph
            own = total.reached(terms, leaf)
            backward[some] = total.add(own, terms, weight[row].to(terms.dtype), leaf)
        return backward.view_as(whole.hidden)


class Total:
    """Gradients of parameters, added up over parts of a graph."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.gradients: list[Tensor | None] = [None] * len(parameters)
        self._own = [False] * len(parameters)
        """Which of the gradients are sums, and not tensors that autograd gave."""
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
        # one call for all: a second one would walk the graph again
        inputs = parameters if leaf is None else [*parameters, leaf]
        # a backward pass has the types that the forward pass chose
        with torch.autocast(value.device.type, enabled=False):
            found = torch.autograd.grad(value, inputs, grad, allow_unused=True)
        again: list[tuple[Tensor, Tensor]] = []
        for parameter, each in zip(parameters, found, strict=False):
            i = self._place[id(parameter)]
            total = self.gradients[i]
            if total is None:
                self.gradients[i] = each
            elif each is None:
                continue
            elif self._own[i]:
                again.append((total, each))
            else:
                # not in place: autograd may hand one tensor to two parameters
                self.gradients[i] = total + each
                self._own[i] = True
        if again:
            # one kernel for hundreds of parameters
            totals, more = zip(*again, strict=True)
            torch._foreach_add_(list(totals), list(more))  # pyright: ignore[reportPrivateImportUsage]
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


def clipped_epochs(
    value: Tensor, run: Pass, versions: list[int], clip: float
) -> Callable[[], Tensor]:
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
    if versions_of(run.model) != versions:
        raise RuntimeError(
            "The model's parameters were changed since sequences.estimate, so the ratios would not "
            "begin at 1; call clipped before the optimiser's step."
        )
    tokens = run.credit.tokens
    weights = run.credit.weights
    # ln p before the first optimiser step: the denominators of all later ratios
    now = torch.zeros_like(weights)
    credited = run.credited()
    for part in run.parts():
        wanted = credited[part.rows, : part.length]
        for some, logits in logits_in_parts(run.model, *run.read(part), wanted, run.limit):
            row, step = part.rows[some // part.length], some % part.length
            log_probs = token_log_probs(logits, tokens[row, step], run.temperature)
            now[row, step] = log_probs.to(now.dtype)

    def term(logits: Tensor, row: Tensor, step: Tensor) -> Tensor:
        log_probs = token_log_probs(logits, tokens[row, step], run.temperature)
        weight = weights[row, step]
        # a draw without weight may be forbidden, and -inf - -inf is NaN
        change = (log_probs - now[row, step].to(log_probs.dtype)).masked_fill(weight == 0, 0)
        ratio = change.exp()
        # the smaller of both: a step gains nothing by moving further than the clip
        return torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight).sum(-1)

    return lambda: attach_credit(value.detach(), run, term)
