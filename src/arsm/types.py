"""The contract between estimators and their callers: ask, evaluate, tell."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from arsm import scores
from arsm.brief import of_options, of_parts
from arsm.options import check_class_options

Noise = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Queries:
    """Points at which an estimator wants f: M queries per batch row; the first L keep f's graph.

    Attributes:
        points: [M, *B, K] int64; or [M, *B, K, C] floating and attached to the logits
            (`needs_gradient`).
        z: [*B, K], the true sample, drawn from softmax(logits); [*B, n, K] where there
            are several.
        same_as: [M, *B]: query m is evaluated iff same_as[m] == m, else it takes the
            value of query same_as[m]. A live query may only point to a live one.
        weight: [L] or [L, *B]: the value is sum_l weight_l f(points_l).
        aux: Whatever else `tell` needs.
    """

    points: Tensor
    z: Tensor
    same_as: Tensor
    weight: Tensor
    aux: Any = None


class Estimator(ABC):
    """A gradient estimator: pure functions of logits [*B, K, C] and noise, which never call f.

    A subclass is a frozen dataclass that defines `unbiased`, `noise`, `ask`, and either
    `tell` or, with `paths`, `weights`. The other members have defaults. Callers use
    only the members declared here, so a wrapper that forwards them behaves like the
    estimator that it wraps.
    """

    unbiased: bool
    """The claim E[estimate] = dE[f]/dlogits, which the test suite checks against enumeration."""
    needs_gradient: bool = False
    """Whether f must be differentiable in z; f is then given floating points [N, K, C]."""
    target: Literal["mean", "bound"] = "mean"
    """The quantity whose gradient is estimated: E[f], or a multi-sample bound."""
    couples_rows: bool = False
    """Whether a row's estimate depends on other rows' samples."""
    given_sample: bool = True
    """Whether `noise` can be drawn given the true sample z."""
    vmappable: bool = True
    """Whether torch.func.vmap maps `ask` and `tell` inside autograd."""
    deterministic: bool = False
    """Whether the estimate is the same for all noise."""
    pathwise: bool = False
    """Whether autograd through its one point is the whole estimate, and `tell` returns None."""
    paths: int = 0
    """n, if the estimate is sum_i w_i d ln q(z_i) over n independent samples with the
    w_i of `weights`, else 0. The samples may then be whole paths through choices that
    depend on each other."""
    centred: bool = False
    """Whether the `weights` of a row sum to 0: the estimate is then sum_i w_i
    onehot(z_i), without softmax(logits).
    """
    weighs_energy: bool = False
    """Whether `weights` needs the energies of the samples' scores."""
    subset: int | None = None
    """k, if a sample is a subset of k categories: int64 [*B, k], ascending, of one
    variable, logits [*B, 1, C].
    """
    learned: nn.ModuleList = nn.ModuleList()
    """The learned parts, for the optimiser, `.to(device)` and checkpoints; empty for
    most estimators.
    """
    adapts: bool = False
    """Whether `learned` has running statistics, which `adapt` updates."""

    @abstractmethod
    def noise(
        self, logits: Tensor, generator: torch.Generator | None = None, z: Tensor | None = None
    ) -> Any:
        """Draw all the randomness; every tensor starts with the dimensions *B.

        With z [*B, K], draw it given that z was the true sample: then `ask(logits,
        noise).points[0] == z`. The values of the logits are used only in that case.
        """

    @abstractmethod
    def ask(self, logits: Tensor, noise: Any) -> Queries:
        """Return the points where f must be evaluated."""

    def tell(self, logits: Tensor, queries: Queries, values: Tensor) -> Tensor | None:
        """Turn f's values [M, *B] into the gradient [*B, K, C].

        Return None where autograd through the points is the estimate. For an estimator
        with `paths` this is sum_i w_i (onehot(z_i) - softmax(logits)).
        """
        dtype = torch.promote_types(values.dtype, logits.dtype)
        if self.weighs_energy:
            p = scores.probabilities_for(values, logits)
            # a variable's weight depends on those before it alone, as a token's does
            energy = scores.energy(p, queries.points).cumsum(-1)
            weight = self.weights(values.unsqueeze(-1).expand_as(energy), energy)
            return scores.weighted_scores(p, queries.points, weight.to(dtype))

        weight = self.weights(values).to(dtype)
        if self.centred:
            # the softmax would be multiplied by sum_i w_i = 0
            return scores.sum_by_category(queries.points, weight, logits.shape[-1])
        p = scores.probabilities_for(values, logits)
        return scores.weighted_scores(p, queries.points, weight)

    def weights(self, values: Tensor, energy: Tensor | None = None) -> Tensor:
        """The weights w_i of the samples' scores, from f's values: [n, *B] -> [n, *B].

        With `weighs_energy`, every variable (or token) has a weight of its own: *B
        includes the variables, and energy [n, *B] is sum_{s <= k} |onehot(z_is) -
        p_s|^2, summed over the variables up to this one.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no weights: its gradient is not a sum of scores."
        )

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass whose `tell` and `weights` could disagree."""
        super().__init_subclass__(**options)
        if cls.__repr__ is Estimator.__repr__:
            cls.__repr__ = Estimator.__repr__  # its own, which a dataclass leaves as it is
        own = [name for name in ("tell", "weights") if name in vars(cls)]
        # a class without paths is never asked for its weights
        if len(own) != 1 or vars(cls).get("paths") == 0:
            return
        # the one that is not overridden must be the base's, which derives tell from weights
        (missing,) = {"tell", "weights"} - set(own)
        if getattr(cls, missing) is not getattr(Estimator, missing):
            raise TypeError(
                f"{cls.__name__} overrides {own[0]} but inherits {missing}, which would disagree "
                "with it; override both, or only tell and declare paths = 0."
            )

    if not TYPE_CHECKING:  # to a type checker, the signature is that of the dataclass

        def __new__(cls, *_: Any, **options: Any) -> Estimator:
            check_class_options(cls, options)
            return super().__new__(cls)

    def __repr__(self) -> str:
        return of_options(self) if dataclasses.is_dataclass(self) else object.__repr__(self)

    def value(self, queries: Queries, live: Tensor) -> Tensor:
        """The value [*B] from f at the live queries [L, *B]: their weighted sum."""
        weight = queries.weight.to(live.dtype)
        weighted = weight.view(*weight.shape, *(1,) * (live.ndim - weight.ndim)) * live
        # a sum over one query would copy it
        return weighted.squeeze(0) if len(weight) == 1 else weighted.sum(0)

    def adapt(self, out: Estimate) -> None:
        """Update running statistics from an estimate; call it after every step of training.

        Does nothing for most estimators. The estimate itself never changes them.
        """
        return None

    def most_queries(self, logits: Tensor) -> int:
        """The maximum number of distinct evaluations that a row of these logits can need."""
        few = logits
        # the number of queries is the same for every row, so that one row is enough
        if logits.ndim > 2 and not self.couples_rows:
            few = logits.flatten(0, -3)[:1]
        # a generator of its own: a count must not change what is drawn afterwards
        noise = self.noise(few, torch.Generator(logits.device))
        asked = self.ask(few, noise).same_as.shape[0]
        return at_most_all(asked, logits)

    def within(self, budget: int) -> Estimator | None:
        """This estimator, resized to a budget of evaluations per row; None if it has no such size.

        Its learned parts are shared with it.
        """
        return None

    def __eq__(self, other: object) -> bool:
        """Equal options; tensors and modules are equal if they are the same object."""
        if type(self) is not type(other) or not dataclasses.is_dataclass(self):
            return self is other
        for name in _options(self):
            own = getattr(self, name)
            theirs = getattr(other, name)
            # == of two tensors is a tensor, not an answer
            if own is not theirs and (isinstance(own, Tensor | nn.Module) or own != theirs):
                return False
        return True

    def __hash__(self) -> int:
        if not dataclasses.is_dataclass(self):
            return hash((type(self), id(self)))
        return hash((type(self), *(getattr(self, name) for name in _options(self))))


def at_most_all(count: int, logits: Tensor) -> int:
    """A count of distinct evaluations per row, limited to the number of values of z:
    logits [*B, K, C].
    """
    # in float64, because C^K overflows an integer
    values = (logits > -torch.inf).sum(-1).double().prod(-1).max()
    return int(min(count, float(values)))


def _options(estimator: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(estimator)]


class NoTensor:
    """A result that is easily taken for a tensor: what only its `value` can do says so.

    Type checkers do not see it, and so still report such code.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # private names are asked for by copy, pickle and debuggers
            if hasattr(Tensor, name) and not name.startswith("_"):
                raise AttributeError(f"{_no_tensor(self)}: out.value.{name}", name=name, obj=self)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )

        def _refuse(self, *_: object) -> NoReturn:
            raise TypeError(f"{_no_tensor(self)}, as in -out.value.mean()")

        __neg__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __float__ = _refuse
        __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _refuse


def _no_tensor(result: object) -> str:
    return f"{type(result).__name__} is the result of an estimate and no tensor; use its value"


@dataclass(frozen=True, eq=False)
class Estimate(NoTensor):
    """The result of `arsm.estimate`.

    Attributes:
        value: [*B]: f at the true sample (the mean over several, weighted where the
            estimator weights them; the expectation for `Exact`, f at the relaxed sample
            for a relaxation, the bound for `VIMCO`). Its backward gives the estimate to
            the logits and the ordinary gradient to f's parameters and context. To
            autograd the estimate is a constant: a second derivative misses what it
            would contribute.
        z: [*B, K] or [*B, n, K], the true sample(s).
        grad: Shaped like the logits: the estimate of dE[f]/dlogits, detached; None for
            pure relaxations.
        info: `asked`: queries per row; `distinct` [*B]: the evaluations that they need;
            `finite` [*B]: whether logits and values were all finite.
        estimator_loss: []: the squared norm of the gradient, averaged over the batch,
            of an estimator that learns; minimise it together with the model's loss.
        logits: The logits that z was drawn from, with their graph; None where each
            sample has its own.
    """

    value: Tensor
    z: Tensor
    grad: Tensor | None
    info: Mapping[str, Tensor] = field(default_factory=dict)
    estimator_loss: Tensor | None = None
    logits: Tensor | None = None

    def __repr__(self) -> str:
        return of_parts(
            self, value=self.value, z=self.z, grad=self.grad, estimator_loss=self.estimator_loss
        )
