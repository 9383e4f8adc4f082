"""The generated part of docs/guides/vector_quantisation.md."""

from __future__ import annotations

from arsm_experiments.report.pages.tables import Tables, markdown, with_spread

WAYS = {
    "VQ-VAE": "VQ-VAE: the nearest code, its gradient copied",
    "straight-through": "`StraightThrough()`",
    "hard Gumbel-softmax": "`GumbelSoftmax(hard=True)`",
    "leave-one-out": "`RLOO(4)`",
}
SETTINGS = ("fixed rate", "bound")


def table(tables: Tables) -> str:
    """Test loss of both settings, its part for the pixels, codes in use and time per step: of the
    reported seeds if all ways have them, else of the trials.
    """
    cells = tables.cells("vector_quantisation/table.csv")
    names = [f"{setting}: {way}" for setting in SETTINGS for way in WAYS]
    seeds = min(
        cells[name, "test loss"].seeds if (name, "test loss") in cells else 0 for name in names
    )
    before = "" if seeds else "trial, "
    words = f"{seeds} seeds, 800 steps:" if seeds else "The trials, one seed and 400 steps:"
    rows = []
    for way, name in WAYS.items():
        row = [name]
        for setting in SETTINGS:
            of = f"{before}{setting}: {way}"
            row.append(with_spread(cells[of, "test loss"], 1))
            row.append(f"{cells[of, 'codes in use'].mean:.0f}")
        row.append(f"{cells[f'{before}bound: {way}', 'nats of the pixels'].mean:.1f}")
        row.append(f"{cells[f'{before}fixed rate: {way}', 'CPU ms per step'].mean:.1f} ms")
        rows.append(row)
    header = ["", "fixed rate", "codes", "bound", "codes", "pixels' part", "step"]
    return f"{words}\n\n{markdown(header, rows)}"


PARTS = {"quantisation": table}
