"""Released packages under `arsm.audit`, unchanged from PyPI: what each claims and what was found.

python -m arsm_experiments.ecosystem                 # all entries, each package in an environment made for it
python -m arsm_experiments.ecosystem "pyro: *"       # some of them
python -m arsm_experiments.ecosystem --export results/audit
"""

from arsm_experiments.ecosystem import (
    numpyro,
    optax,
    pyro,
    relaxed,
    rlax,
    skyrl,
    stable_baselines3,
    storchastic,
    trl,
    vector_quantize,
    verl,
)
from arsm_experiments.ecosystem.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    *relaxed.ENTRIES,
    *storchastic.ENTRIES,
    *pyro.ENTRIES,
    *numpyro.ENTRIES,
    *trl.ENTRIES,
    *verl.ENTRIES,
    *skyrl.ENTRIES,
    *vector_quantize.ENTRIES,
    *rlax.ENTRIES,
    *stable_baselines3.ENTRIES,
    *optax.ENTRIES,
)
