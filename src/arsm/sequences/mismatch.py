"""Do sampler and model agree? Rounding is reported, samples of another distribution are refused."""

from __future__ import annotations

import torch
from torch import Tensor

from arsm.sequences.batch import LogitsOf, token_log_probs
from arsm.sequences.fit import Fit

LARGEST_MEAN = {8: 1e-6, 4: 0.05, 2: 0.3}
"""Largest mean |difference of ln p| between decoding and one pass, by the bytes of the
model's type. TF32 and bfloat16 stay ten times below; a wrong cache, wrong positions or dropout
do not."""
FIT_TOKENS = 20_000
"""Tokens that are tested at most."""


def check_sampler(
    logits_of: LogitsOf,
    compared: list[slice],
    tokens: Tensor,
    live: Tensor,
    reported: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
    *,
    elsewhere: bool,
    corrected: bool = False,
) -> dict[str, Tensor]:
    """Compare the model's one-pass probabilities with the sampler's, in some rows.

    Args:
        logits_of: logits of some rows' states, before temperature.
        compared: the rows.
        tokens: [M, T].
        live: [M, T] bool.
        reported: [M, T], the sampler's ln p; None if it reports none.
        temperature: of the sampler.
        dtype: of the model's logits.
        elsewhere: whether somebody else sampled. Then the tokens are tested against the
            model's distribution.
        corrected: whether importance weights correct another distribution, which is
            then not refused.

    Returns:
        `mismatch` and `mean_mismatch`, the largest and the mean difference of ln p; NaN
        where nothing is reported.
    """
    gaps: list[Tensor] = []
    fit = Fit(temperature)
    for some in compared:
        for states, logits in logits_of(some, live):
            drawn = tokens[some].flatten()[states]
            sampler = None if reported is None else reported[some].flatten()[states]
            if sampler is not None:
                own = token_log_probs(logits, drawn, temperature)
                # read at the end: every look at a number waits for the device
                gaps.append((sampler.double() - own.double()).abs())
            if elsewhere and not corrected and fit.tokens < FIT_TOKENS:
                fit.add(logits, drawn, sampler)
    if elsewhere:
        _check_fit(fit)
    gap = torch.cat(gaps) if gaps else tokens.new_zeros(0, dtype=torch.float64)
    count = gap.shape[0]
    mean = float(gap.mean())  # NaN where nothing is reported
    if not elsewhere and count and not mean <= LARGEST_MEAN[dtype.itemsize]:
        raise ValueError(
            "The model's step by step and one-pass logits differ: ln p of a token by "
            f"{mean:.3g} on average; check its cache, positions and padding, and put it into eval "
            "mode if it has dropout."
        )
    largest = float(gap.max()) if count else mean
    return {"mismatch": torch.tensor(largest), "mean_mismatch": torch.tensor(mean)}


def _check_fit(fit: Fit) -> None:
    """Refuse tokens that another sampler explains better than the model."""
    closest = fit.alarm()
    if closest is not None:
        raise ValueError(
            f"The completions are not samples of this model: {closest} explains them better than "
            f"its own probabilities at temperature {fit.temperature:g}; sample with its weights, "
            "this temperature, and without top-k or top-p, which bias the gradient; or correct "
            "them with importance=Importance(), given the sampler's log_probs."
        )
