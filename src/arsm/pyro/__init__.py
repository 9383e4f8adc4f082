"""The library's estimators as a loss for Pyro's stochastic variational inference."""

from arsm.pyro.elbo import ELBO

__all__ = ["ELBO"]
