r"""`arsm.pyro.ELBO`: the library's sampling estimators as a loss for `pyro.infer.SVI`.

    ELBO = E_q[sum_i t_i],
    t_i = ln p or -ln q of a site, or -KL(q || p) where that is known in closed form

One run of guide and model, the true path, gives all terms and, by Pyro's provenance
tracking, the sites that each term depends on. The guide's discrete sites fall into
stages: sites that do not depend on each other and have the same rows. Given the true
values of all sites that do not depend on the stage, its gradient is the problem of
`arsm.estimate`,

    phi [*R, K, C],    f(z)_r = sum over row r of the terms that depend on z

R are the plates that the stage shares with all of these terms; its other dimensions are
variables. There are two ways to evaluate f:

- From the true path (`other_paths.py`): any estimator. The queries of all stages are
  paths of further runs, with a plate around model and guide. On a path of stage t the
  sites that depend on t are drawn again, discrete and normal ones with the noise of the
  true path as in `arsm.estimate_layers`; all others keep their true values. A term's
  own gradient (parameters of the model, reparameterised sites, a KL) is autograd's,
  averaged over the live queries of the first stage that the term depends on.
- By whole runs (`whole_paths.py`): several stages, and an estimator with `paths`. All
  stages share n runs of guide and model.

Scales and masks belong to the terms.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from pyro import infer, poutine
from pyro.infer.util import is_validation_enabled
from pyro.util import warn_if_nan
from torch import Tensor

from arsm.capabilities import require
from arsm.driver import check_evaluation
from arsm.estimators.rloo import RLOO
from arsm.options import suggests
from arsm.pyro.categories import FAMILIES
from arsm.pyro.other_paths import NotInPlateError, OtherPaths
from arsm.pyro.sites import ChangedError
from arsm.pyro.stages import Posed, Stage, pose_stages
from arsm.pyro.true_path import Program, Structure, TruePath
from arsm.pyro.whole_paths import WholePaths, fits
from arsm.types import Estimator

MAX_ROWS = 1 << 14


@dataclass(frozen=True)
class Plan:
    """The way to run a program, found at its first step."""

    programs: tuple[Program, Program]
    vectorized: bool
    checked: bool
    """Whether the samples that were checked were different ones."""
    structure: Structure


class ELBO(infer.ELBO):
    """The negative ELBO, with an estimator for the gradients of the guide's discrete sites.

        loss = arsm.pyro.ELBO(arsm.RLOO(8))
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss=loss)

    Guide sites are Categorical, OneHotCategorical or Bernoulli (also after `to_event`,
    `expand` or `mask`), or reparameterised. The samples run together, with a plate around
    model and guide as in `Trace_ELBO(vectorize_particles=True)`; a program that does not
    allow this runs sample by sample, with a warning. A plate is subsampled once for all
    samples of an estimate.

    The first step checks the program. With Pyro's validation on, every step finds again
    which terms depend on which sites; with validation off, the first step's answer is
    used as long as sites, plates and kinds of distributions stay the same.

    Args:
        estimator: one that only evaluates f and can start from a given sample: RLOO,
            ARSM, LocalExpectation, ... None is `RLOO(num_particles)`.
        max_rows: maximum rows (samples times the largest site's batch) per run of the
            model; None for no limit.
        num_particles: number of independent estimates to average, each with the
            estimator's own samples; without an estimator, the number of samples.
        vectorize_particles: run the samples together (True), sample by sample (False), or
            together wherever the program allows it (None).
        max_plate_nesting: number of dimensions of plates; found in every run by default.
        retain_graph: whether `loss_and_grads` keeps the graph.
        strict_enumeration_warning: whether to warn of a guide without discrete sites.
    """

    @suggests("arsm.pyro.ELBO")
    def __init__(
        self,
        estimator: Estimator | None = None,
        max_rows: int | None = MAX_ROWS,
        *,
        num_particles: int = 1,
        vectorize_particles: bool | None = None,
        max_plate_nesting: float = inf,
        retain_graph: bool | None = None,
        strict_enumeration_warning: bool = True,
    ) -> None:
        if num_particles < 1 or (estimator is None and num_particles < 2):
            raise ValueError(
                "arsm.pyro.ELBO needs an estimator such as arsm.RLOO(8), or num_particles of at "
                f"least 2 (got {num_particles})."
            )
        if estimator is None:
            # samples of one estimate, not estimates to average: they are each other's baseline
            estimator = RLOO(num_particles)
            num_particles = 1
        enumerates = (
            "use one such as arsm.RLOO(8), or pyro.infer.TraceEnum_ELBO for the exact gradient"
        )
        needs = ("values_only", "mean", "nothing_learned", "given_sample")
        require(estimator, "arsm.pyro.ELBO", *needs, subset=None, instead=enumerates)
        check_evaluation("packed", max_rows)
        super().__init__(
            num_particles=num_particles,
            max_plate_nesting=max_plate_nesting,
            retain_graph=retain_graph,
            strict_enumeration_warning=strict_enumeration_warning,
        )
        self.estimator = estimator
        self.max_rows = max_rows
        self.vectorize_particles = vectorize_particles
        self._plan: Plan | None = None

    def _get_trace(
        self, model: Program, guide: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[poutine.Trace, poutine.Trace]:
        path = TruePath(model, guide, args, kwargs)
        return path.model_trace, path.guide_trace

    def loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """-ELBO from `num_particles` samples."""
        total = torch.zeros(())
        # the value alone needs no other samples than the guide's own
        with torch.no_grad():
            for _ in range(self.num_particles):
                path = TruePath(model, guide, args, kwargs, self.max_plate_nesting)
                total = total + sum(term.value.sum() for term in path.terms.values())
        return _minus(total / self.num_particles).item()

    def differentiable_loss(
        self, model: Program, guide: Program, *args: Any, **kwargs: Any
    ) -> Tensor:
        """-ELBO [], whose backward gives every parameter of model and guide its
        gradient estimate.
        """
        elbos = [self._estimate(model, guide, args, kwargs) for _ in range(self.num_particles)]
        return _minus(sum(elbos[1:], elbos[0]) / self.num_particles)

    def _estimate(
        self, model: Program, guide: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        plan = self._plan
        # one loss may serve several programs in turn; each change costs a tracked run
        if plan is not None and plan.programs != (model, guide):
            plan = None
        if plan is not None and not is_validation_enabled():
            try:
                return self._with_structure(plan, args, kwargs)
            # another shape of data, or another branch of the program: found out afresh
            except ChangedError:
                plan = None
        path = TruePath(model, guide, args, kwargs, self.max_plate_nesting)
        vectorized = self.vectorize_particles is not False if plan is None else plan.vectorized
        stages = pose_stages(self.estimator, path.stages())
        # Samples that happened to be equal have shown nothing: the next step looks again.
        if plan is None or not plan.checked:
            self._plan = self._check(path, stages, vectorized)
            vectorized = self._plan.vectorized
        if fits(self.estimator, path.structure):
            try:
                return self._whole_paths(path.structure, vectorized, (model, guide), args, kwargs)
            # the structure is of this very step, so that it differs between samples
            except ChangedError as error:
                raise ValueError(str(error)) from None
        return self._elbo(path, vectorized, stages)

    def _with_structure(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The ELBO of a program whose structure is known."""
        if fits(self.estimator, plan.structure):
            return self._whole_paths(plan.structure, plan.vectorized, plan.programs, args, kwargs)
        path = TruePath(*plan.programs, args, kwargs, structure=plan.structure)
        return self._elbo(path, plan.vectorized)

    def _whole_paths(
        self,
        structure: Structure,
        vectorized: bool,
        programs: tuple[Program, Program],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        paths = WholePaths(self.estimator, structure, vectorized)
        paths.run(*programs, args, kwargs, self.max_rows)
        return paths.elbo()

    def _check(self, path: TruePath, stages: list[Stage], vectorized: bool) -> Plan:
        """Refuse a program that cannot be estimated, and choose how to run it."""
        if not stages and self.strict_enumeration_warning:
            warnings.warn(
                f"The guide has no {FAMILIES} site, so that arsm.pyro.ELBO has nothing to "
                "estimate; use pyro.infer.Trace_ELBO.",
                stacklevel=2,
            )
        checked = True
        # without validation, and told how to run, nobody asked for a check
        if is_validation_enabled() or self.vectorize_particles is None:
            try:
                checked = OtherPaths(path, stages, vectorized).check()
            except NotInPlateError as error:
                # asked to run together, the user wants to know why that fails
                if self.vectorize_particles is not None:
                    raise
                checked = OtherPaths(path, stages, vectorized=False).check()
                vectorized = False
                warnings.warn(
                    f"{error} (It runs sample by sample now, which is slower.)", stacklevel=2
                )
        return Plan((path.model, path.guide), vectorized, checked, path.structure)

    def _elbo(self, path: TruePath, vectorized: bool, stages: list[Stage] | None = None) -> Tensor:
        """The ELBO [] with the gradient of its estimate."""
        if stages is None:
            stages = pose_stages(self.estimator, path.stages())
        others = OtherPaths(path, stages, vectorized)
        others.run(self.max_rows)
        # A term that depends on several stages counts once in the value, with the first of them,
        # and in the gradient of each.
        pending = set(path.terms)
        parts: dict[Posed, tuple[list[Tensor], list[Tensor]]] = {}
        for t, stage in enumerate(stages):
            moved = {key for key, term in path.terms.items() if stage.moves(term)}
            own = moved & pending
            # the same tensor for both wherever it can be: `Posed.value` then spreads it once
            changes = others.terms(t, moved)
            of_stages = parts.setdefault(stage.posed, ([], []))
            of_stages[0].append(changes if own == moved else others.terms(t, own))
            of_stages[1].append(changes)
            pending -= moved
        elbo = torch.zeros(())
        for posed, (own_terms, moved_terms) in parts.items():
            elbo = elbo + posed.value(own_terms, moved_terms)
        return sum((path.terms[key].value.sum() for key in pending), elbo) + path.score()

    def loss_and_grads(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """-ELBO; adds the estimate of its gradient to the parameters' `grad`."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        # a guide and a model without parameters still have a loss
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        return loss.item()


def _minus(elbo: Tensor | float) -> Tensor:
    loss = -torch.as_tensor(elbo)
    warn_if_nan(loss, "loss")
    return loss
