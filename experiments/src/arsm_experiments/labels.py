"""Names of methods for people: "rloo:samples=46,live=1, epochs 500" becomes "leave-one-out, 46
samples, 500 epochs".

Run folders and table.csv keep the words that a command takes; pages, legends and terminal tables
show these names.
"""

from __future__ import annotations

import re

from arsm.estimators import NAMES as ESTIMATORS

NAMES = {
    # an estimator is called as its class, unless people say otherwise
    **{word: kind.__name__ for word, kind in ESTIMATORS.items()},
    "a2c": "A2C",
    "ars-plus": "ARS+",
    "arsm-plus": "ARSM+",
    "decoupled-straight-through": "decoupled straight-through",
    "double-control": "double control variates",
    "dr-grpo": "Dr. GRPO",
    "exact": "true gradient",
    "exact-plus-sampled": "exact plus sampled",
    "gapped-straight-through": "gapped straight-through",
    "gumbel-rao": "Gumbel-Rao",
    "gumbel-softmax": "Gumbel-Softmax",
    "imle": "I-MLE",
    "local-expectation": "local expectation",
    "otb": "optimal token baseline",
    "reinforce": "REINFORCE",
    "reinmax-rao": "ReinMax-Rao",
    "rloo": "leave-one-out",
    "straight-through": "straight-through",
    "unordered-set": "unordered set",
}
"""Names of all estimators, by the word that a command takes, and of the value baseline."""
BEFORE = {"hard=True": "straight-through", "pooled=True": "pooled"}
"""Options that are written before the name."""
OPTIONS = {"samples": "{} samples", "live": "{} differentiated", "references": "{} references"}
SETTINGS = {
    r"\badam\b": "Adam",
    r"\brmsprop\b": "RMSprop",
    r"\bkl analytic\b": "analytic KL",
    r"\bepochs (\d+)": r"\1 epochs",
    r"\bschedule (\w+)": r"\1 schedule",
    r"\bbound samples (\d+)": r"bound of \1 samples",
    r"\bfirst logit fixed False\b": "all logits free",
    r"\bindependent decoder sample False\b": "one sample for both networks",
    r"\bafresh True\b": "fresh draws below",
    r"\bas released True\b": "as the authors' script",
    r"\blearned temperature True\b": "learned temperature",
    r"\bpixel bias mean\b": "started from the mean image",
    r"\bsampled pixels True\b": "sampled pixels",
    r"\bepisodes an iteration (\d+)": r"\1 episodes per update",
    r"\bhidden none\b": "no hidden layer",
    r"\bhidden ([\d ]*\d)": r"hidden units \1",
    r"\bentropy ([\d.]+)": r"entropy bonus \1",
}

METRICS = {
    "E[f]": "expected reward",
    "gap / true gap": "gap to the optimum, true gradient = 1",
    "variance / arsm's at the start": "variance at the start, ARSM = 1",
    "variance / arsm's on the way": "variance where measured, ARSM = 1",
    "variance / arsm's at every update": "variance over all updates, ARSM = 1",
    "f calls an update": "calls of f per update",
    "its median": "median",
    "log variance": "log variance of the gradient",
    "bias that noise alone shows": "bias by noise alone",
    "ms": "milliseconds",
}
"""Readable titles of columns in table.csv."""


def heading(metric: str) -> str:
    """A column's title."""
    return METRICS.get(metric, metric)


def readable(label: str) -> str:
    """A run's label, or an estimator as a command takes it, in readable words; other text is
    unchanged.
    """
    words, comma, rest = re.fullmatch(r"(\S*?)(,?)( .*|)", label, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
    method = _method(words)
    if method is None:
        return label
    for pattern, replacement in SETTINGS.items():
        rest = re.sub(pattern, replacement, rest)
    return method + comma + rest


def _method(words: str) -> str | None:
    """E.g. 25*gumbel-softmax:hard=True: "straight-through Gumbel-Softmax, mean of 25"."""
    count, _, estimator = words.rpartition("*")
    name, _, options = estimator.partition(":")
    if name not in NAMES:
        return None
    given = [option for option in options.split(",") if option]
    parts = [" ".join([*(BEFORE[option] for option in given if option in BEFORE), NAMES[name]])]
    for key, _, value in (option.partition("=") for option in given if option not in BEFORE):
        value = value.removesuffix(".0")
        parts.append(OPTIONS[key].format(value) if key in OPTIONS else f"{key} {value}")
    return ", ".join(parts + [f"mean of {count}"] * bool(count))
