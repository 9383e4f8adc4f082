"""`python -m arsm_experiments.sequences` is `arsm sequences`, for torchrun."""

import sys

from arsm_experiments.cli import main

sys.exit(main(["sequences", *sys.argv[1:]]))
