"""An audit as a figure; the only module here that needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from arsm.referee.result import Audit


def plot_audit(audit: Audit) -> Figure:
    """Every problem's worst bias in units of its interval's half-width: outside of [-1,
    1] is wrong.
    """
    shown = [(row, row.worst) for row in reversed(audit.rows) if row.worst is not None]
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-1, 1, color="0.9")
    for place, (row, worst) in enumerate(shown):
        axes.plot([worst.relative], [place], "o", color="tab:red" if row.rejected else "tab:green")
    axes.set_yticks(range(len(shown)), [f"{row.problem} ({row.size})" for row, _ in shown])
    axes.set_xscale("symlog", linthresh=2)
    axes.set_xlabel("worst bias / half-width of its interval; outside of the band is wrong")
    axes.set_title(f"{audit.name}: {audit.verdict}")
    return figure
