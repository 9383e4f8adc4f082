"""The experiments, their run folders and the report made from them."""

__version__ = "0.3.0"
