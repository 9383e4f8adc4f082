"""optax.monte_carlo, if the package still has it."""

from __future__ import annotations

import warnings

from arsm_experiments.ecosystem.entry import UNBIASED, Entry, Found, from_package


def monte_carlo() -> Found:
    """Versions from 0.2.7 on do not have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from_package("optax").monte_carlo  # noqa: B018
        except (AttributeError, ImportError) as error:
            return Found(
                "not in this version",
                f"{type(error).__name__}: {' '.join(str(error).split())[:150]}",
            )
    return Found("not audited", "It is there again; write an entry for it.")


ENTRIES = (Entry("optax: monte_carlo", "optax", "optax", UNBIASED, monte_carlo),)
