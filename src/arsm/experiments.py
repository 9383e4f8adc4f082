"""The place of the experiments in 0.1."""

raise ModuleNotFoundError(
    "Since 0.2 the experiments are a separate package: install it with `pip install ./experiments` from a clone, "
    "and import arsm_experiments instead of arsm.experiments.",
    name=__name__,
)
