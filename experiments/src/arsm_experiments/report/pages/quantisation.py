"""The generated part of docs/guides/vector_quantisation.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Tables, markdown, with_spread

WAYS = {
    "VQ-VAE": "VQ-VAE: the nearest code, its gradient copied",
    "straight-through": "`StraightThrough()`",
    "hard Gumbel-softmax": "`GumbelSoftmax(hard=True)`",
    "leave-one-out": "`RLOO(4)`",
}
METRICS = ("test loss", "nats of the pixels", "codes in use")


def table(tables: Tables) -> str:
    """Test loss of both settings, codes in use and time per step."""
    rows = []
    for way, name in WAYS.items():
        fixed, bound = (
            [tables.cell("vector_quantisation", f"{setting}: {way}", metric) for metric in METRICS]
            for setting in ("fixed rate", "bound")
        )
        step = tables.cell("vector_quantisation", f"fixed rate: {way}", "CPU ms per step")
        rows.append(
            [
                name,
                with_spread(fixed[0], 1),
                f"{fixed[2].mean:.0f}",
                with_spread(bound[0], 1),
                f"{bound[1].mean:.1f}",
                f"{step.mean:.1f} ms",
            ]
        )
    header = ["", "fixed rate", "codes in use", "bound", "pixels' part of it", "step"]
    return markdown(header, rows)


PARTS = {"quantisation": table}
