"""The table and the figure of `benchmarks.router_transformer`."""

from __future__ import annotations

import statistics
from pathlib import Path

from arsm_experiments.runs.provenance import short_commit
from benchmarks import records
from benchmarks.router_transformer import (
    BLOCKS,
    LENGTH,
    OWN,
    PRICE,
    PRICED,
    REPORTED,
    SETTINGS,
    priced,
    test_loss,
)

UNSEEN = (OWN, "Switch", "untrained router")
"""Ways whose trainings without a price are scored with it too."""
TITLES = {
    "top-1": "one expert per token",
    "top-2": "two experts per token",
    PRICED: f"{PRICE:g} nats per expert in use",
}
Groups = dict[tuple[str, str], list[records.Record]]


def report(folder: Path) -> None:
    """Write transformer.csv and transformer.png."""
    path = folder / "transformer.jsonl.xz"
    trainings = records.read(path)
    records.write(path, trainings)
    groups = grouped(trainings)
    times = folder / "transformer_times.json"
    _write_csv(folder / "transformer.csv", groups, records.read_one(times))
    _draw(folder / "transformer.png", groups)


def grouped(trainings: list[records.Record]) -> Groups:
    """The reported seeds of every setting and way, in the settings' order."""
    found: Groups = {}
    for setting, ways in SETTINGS.items():
        for way in ways:
            group = [r for r in trainings if (r["setting"], r["way"]) == (setting, way)]
            group = [r for r in group if r["seed"] in REPORTED]
            if group:
                found[setting, way] = sorted(group, key=lambda r: r["seed"])
    return found


def _write_csv(path: Path, groups: Groups, times: records.Record) -> None:
    rows = []
    for (setting, way), group in groups.items():
        name = f"{setting}: {way}"
        rows.append(_row(name, "test loss", [test_loss(r) for r in group], group))
        rows.append(_row(name, "experts used", [r["used"] for r in group], group))
        shares = [statistics.mean(r["shares"]) for r in group]
        rows.append(_row(name, "perplexity of shares", shares, group))
        place = (times["hardware"], short_commit(times["commit"]))
        rows.append([name, "CPU ms per step", f"{times['ms'][name]:.2f}", "", 1, "", "", *place])
        if setting == "top-1" and way in UNSEEN:
            paid = [priced(r) for r in group]
            unseen = f"{PRICED}: {way}, price unseen"
            rows.append(_row(unseen, "test loss", paid, group))
            rows.append(_row(unseen, "experts used", [r["used"] for r in group], group))
    records.write_table(path, rows)


def _row(name: str, metric: str, found: list[float], group: list[records.Record]) -> list[object]:
    spread = f"{statistics.stdev(found):.4f}" if len(found) > 1 else ""
    spent = f"{sum(r['seconds'] for r in group):.1f}"
    place = (group[0]["hardware"], short_commit(group[0]["commit"]))
    return [name, metric, f"{statistics.mean(found):.4f}", spread, len(found), "", spent, *place]


def _draw(path: Path, groups: Groups) -> None:
    """Mean test loss over CPU seconds of training, one panel per setting."""
    import matplotlib.pyplot as plt

    from arsm_experiments.palette import save

    colours = {way: f"C{i}" for i, way in enumerate(SETTINGS["top-1"])}
    # a single way compares nothing
    shown = [s for s in SETTINGS if sum(setting == s for setting, _ in groups) > 1]
    width = 2.5 + 3.5 * len(shown)
    figure, grid = plt.subplots(
        1, len(shown), figsize=(width, 4.2), squeeze=False, layout="constrained"
    )
    axes = grid[0]
    for axis, setting in zip(axes, shown, strict=True):
        for (of, way), group in groups.items():
            if of == setting:
                # [seeds][points]: step, seconds, nats, experts in use
                points = list(zip(*(r["curve"] for r in group), strict=True))
                spent = [statistics.mean(p[1] for p in each) for each in points]
                price = PRICE * BLOCKS / LENGTH if setting == PRICED else 0.0
                losses = [statistics.mean(p[2] + price * p[3] for p in each) for each in points]
                axis.plot(spent, losses, ".-", color=colours[way], label=way)
        axis.set_title(TITLES[setting], fontsize=12)
        axis.set_xlabel("CPU seconds of training")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test loss, nats per character")
    # the middle panel has room where the curves of the quick ways have ended
    handles, labels = axes[0].get_legend_handles_labels()
    axes[len(axes) // 2].legend(handles, labels, fontsize=9, loc="lower right")
    save(figure, path)
    plt.close(figure)
