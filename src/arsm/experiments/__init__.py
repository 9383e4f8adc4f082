"""The experiments, their run folders and the report made from them."""
