"""Where the experiments were until 0.1."""

raise ModuleNotFoundError(
    "The experiments are a package of their own since 0.2: install it with `pip install ./experiments` from a clone, "
    "and import arsm_experiments instead of arsm.experiments.",
    name=__name__,
)
