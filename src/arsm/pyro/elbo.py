r"""`arsm.pyro.ELBO`: the library's sampling estimators as a loss for `pyro.infer.SVI`.

    ELBO = E_q[sum_i t_i],    t_i = ln p or -ln q of a site, or -KL(q || p) where that is known in closed form

One run of guide and model, the true path, gives all terms and, by Pyro's provenance tracking, the sites that each term
depends on. The guide's discrete sites fall into stages: sites that do not depend on each other and have the same rows.
Given the true values of all sites that do not depend on the stage, its gradient is the problem of `arsm.estimate`,

    phi [*R, K, C],    f(z)_r = sum over row r of the terms that depend on z

R are the plates that the stage shares with all of these terms; its other dimensions are variables. The queries of all
stages are paths of further runs, with a plate around model and guide. On a path of stage t the sites that depend on t
are drawn again, discrete and normal ones with the noise of the true path as in `arsm.estimate_layers`; all others keep
their true values. Scales and masks belong to the terms. A term's own gradient (parameters of the model, reparameterised
sites, a KL) is autograd's, averaged over the live queries of the first stage that the term depends on.
"""

from __future__ import annotations

from typing import Any

import torch
from pyro import infer, poutine
from pyro.infer.util import is_validation_enabled
from pyro.util import warn_if_nan
from torch import Tensor

from arsm.capabilities import require
from arsm.driver import check_evaluation
from arsm.pyro.other_paths import OtherPaths, Stage
from arsm.pyro.true_path import Program, TruePath
from arsm.types import Estimator


class ELBO(infer.ELBO):
    """The negative ELBO, with an estimator for the gradients of the guide's discrete sites.

        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss=arsm.pyro.ELBO(arsm.RLOO(8)))

    Guide sites are Categorical, OneHotCategorical or Bernoulli (also after `to_event`, `expand` or `mask`), or
    reparameterised. Model and guide must allow a plate around them, as for `Trace_ELBO(vectorize_particles=True)`,
    which the first steps check while Pyro's validation is on. A plate is subsampled once per step, for all samples
    together.

    Args:
        estimator: one that only evaluates f and can start from a given sample: RLOO, ARSM, LocalExpectation, ...
        max_rows: maximum rows (samples times the largest site's batch) per run of the model; None for no limit.
    """

    def __init__(self, estimator: Estimator, max_rows: int | None = 512) -> None:
        enumerates = "use one such as arsm.RLOO(8), or pyro.infer.TraceEnum_ELBO for the exact gradient"
        needs = ("values_only", "mean", "nothing_learned", "given_sample")
        require(estimator, "arsm.pyro.ELBO", *needs, subset=None, instead=enumerates)
        check_evaluation("packed", max_rows)
        super().__init__()
        self.estimator, self.max_rows = estimator, max_rows
        self._checked: tuple[Program, Program] | None = None

    def _get_trace(
        self, model: Program, guide: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[poutine.Trace, poutine.Trace]:
        path = TruePath(model, guide, args, kwargs)
        return path.model_trace, path.guide_trace

    def loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """-ELBO from one sample."""
        with torch.no_grad():
            path = TruePath(model, guide, args, kwargs)
            return _minus(sum(term.value.sum() for term in path.terms.values())).item()

    def differentiable_loss(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> Tensor:
        """-ELBO [], whose backward gives every parameter of model and guide its gradient estimate."""
        path = TruePath(model, guide, args, kwargs)
        stages = [Stage(self.estimator, *found) for found in path.stages()]
        others = OtherPaths(path, stages)
        if is_validation_enabled() and self._checked != (model, guide) and others.check():
            self._checked = model, guide
        others.run(self.max_rows)
        elbo = torch.zeros(())
        pending = set(path.terms)
        for t, stage in enumerate(stages):
            moved = {key for key, term in path.terms.items() if stage.moves(term)}
            elbo = elbo + stage.value(others.terms(t, moved & pending), others.terms(t, moved))
            pending -= moved
        return _minus(sum((path.terms[key].value.sum() for key in pending), elbo))

    def loss_and_grads(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> float:
        """-ELBO; adds the estimate of its gradient to the parameters' `grad`."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        return loss.item()


def _minus(elbo: Tensor | float) -> Tensor:
    loss = -torch.as_tensor(elbo)
    warn_if_nan(loss, "loss")
    return loss
