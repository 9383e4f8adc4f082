"""The comparison of two training steps finds a difference where there is one, and none where there
is none.
"""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks import vae_curve


def lines(old: Path, new: Path) -> dict[str, list[str]]:
    """The rows of the comparison by epoch."""
    return {
        row[0]: row
        for line in vae_curve.compare(old, new).splitlines()
        if (row := line.split()) and row[0].isdigit()
    }


def test_the_epoch_with_the_clearest_difference_is_shown(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    before = 100 + torch.randn(6, 30, 4, generator=generator)  # series, epochs, seeds
    after = before + 0.1 * torch.randn(before.shape, generator=generator)
    after[:, 16] += 1
    for name, curves in (("old", before), ("new", after[:5])):  # a run may have ended early
        vae_curve.save({"curves": curves}, tmp_path / name)
    rows = lines(tmp_path / "old", tmp_path / "new")
    assert list(rows) == ["1", "2", "5", "10", "17", "20"]
    difference, _, error, ratio = rows["17"][3:]
    assert abs(float(difference) - 1) < 0.1
    assert 0.01 < float(error) < 0.04
    assert float(ratio) > 25
    assert all(abs(float(row[-1])) < 4 for epoch, row in rows.items() if epoch != "17")


def test_a_run_repeats_and_saves_what_the_comparison_needs(tmp_path: Path) -> None:
    for name in ("first.pt", "second.pt"):
        replicas = vae_curve.build(seeds=2, images=200)
        vae_curve.train(
            tmp_path / name, tmp_path / "weights.pt", epochs=2, series=2, replicas=replicas
        )
    rows = lines(tmp_path / "first.pt", tmp_path / "second.pt")
    assert [row[3:] for row in rows.values()] == [["0.0000", "±", "0.0000", "0.0"]] * 2
    assert vae_curve.compare(tmp_path / "first.pt", tmp_path / "second.pt").endswith(
        "relative difference 0.0e+00"
    )
    run = torch.load(tmp_path / "first.pt", weights_only=True)
    assert not torch.equal(*run["curves"])  # series have different noise
    assert run["gradient"].norm() > 0
