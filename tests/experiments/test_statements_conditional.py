"""Numbers in the sentences about conditional MNIST are those of its table."""

from __future__ import annotations

import pytest

from arsm_experiments.report.sections import Result
from tests.experiments.statements import assert_said


def test_conditional_arsm_passes_the_paper_by_three_changes(results: dict[tuple[str, str], Result]) -> None:
    start = results["Conditional MNIST (mean): arsm, pixel bias mean", "test, 1,000 samples"]
    tuned = results["Conditional MNIST (mean-long): arsm, schedule cosine, pixel bias mean", "test, 1,000 samples"]
    assert tuned.record.config["rate"] == pytest.approx(10 * start.record.config["rate"])
    said = f"with three changes together: {tuned.mean:.1f} ± {tuned.std:.1f}.** They are the start, ten times the rate"
    assert_said("results/conditional/README.md", said)
    assert_said("results/conditional/README.md", f"the start alone gives {start.mean:.1f}")
    muprop, pooled = (
        results[f"Conditional MNIST (mean): {words}, epochs 500, schedule cosine, pixel bias mean", start.metric].mean
        for words in ("muprop", "arsm:pooled=True")
    )
    said = f"and 500 epochs, it reaches {muprop:.1f}, {muprop - pooled:.1f} behind pooled ARSM"
    assert_said("results/conditional/README.md", said)
    assert tuned.mean < 58.3 < start.mean
    recipe = min(
        (r for (label, metric), r in results.items() if "vimco" in label and metric == start.metric),
        key=lambda r: r.mean,
    )
    assert_said("README.md", f"better settings reach {tuned.mean:.1f} (ARSM) and {recipe.mean:.1f} (VIMCO)")
    assert_said(
        "results/README.md", "with ten times its rate, a cosine schedule and biases that start from the mean image"
    )


def test_no_number_of_the_paper_that_it_does_not_have(results: dict[tuple[str, str], Result]) -> None:
    plain = results["Conditional MNIST: gumbel-softmax", "test, 1,000 samples"]
    sampled = results["Conditional MNIST (sampled): gumbel-softmax, sampled pixels True", "test, 1,000 samples"]
    assert plain.paper is None
    assert_said("results/conditional/README.md", f"A difference of that size, {sampled.mean - plain.mean:.1f} nats")
