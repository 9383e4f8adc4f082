"""The library's estimators as a loss for Pyro's stochastic variational inference."""

try:
    from arsm.pyro.elbo import ELBO
except ModuleNotFoundError as error:
    if error.name != "pyro":
        raise
    raise ModuleNotFoundError(
        "arsm.pyro needs Pyro; install it with `pip install 'arsm[pyro]'`.", name="pyro"
    ) from None

__all__ = ["ELBO"]
