"""Released packages under `arsm.audit`, unchanged from PyPI: what each claims and what was found.

python -m arsm_experiments.ecosystem            # all entries, each in its own environment
python -m arsm_experiments.ecosystem "pyro: *"  # some of them
python -m arsm_experiments.ecosystem --export results/audit
"""

from arsm_experiments.ecosystem import (
    genjax,
    numpyro,
    openrlhf,
    optax,
    own,
    pyro,
    relaxed,
    rlax,
    skyrl,
    stable_baselines3,
    storchastic,
    torchrl,
    trl,
    tunix,
    vector_quantize,
    verl,
)
from arsm_experiments.ecosystem.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    *relaxed.ENTRIES,
    *storchastic.ENTRIES,
    *pyro.ENTRIES,
    *numpyro.ENTRIES,
    *genjax.ENTRIES,
    *trl.ENTRIES,
    *verl.ENTRIES,
    *openrlhf.ENTRIES,
    *skyrl.ENTRIES,
    *tunix.ENTRIES,
    *vector_quantize.ENTRIES,
    *rlax.ENTRIES,
    *torchrl.ENTRIES,
    *stable_baselines3.ENTRIES,
    *optax.ENTRIES,
    *own.ENTRIES,
)
