"""The VAE's tables: the learning rate that validation chose, and the numbers of each seed's best
epoch.
"""

import csv
import json
from base64 import b64encode
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import pytest
from rich.console import Console

from arsm_experiments.report.alone import with_time
from arsm_experiments.report.command import Report
from arsm_experiments.report.sections import results_csv
from arsm_experiments.report.vae import vae_sections
from arsm_experiments.runs.provenance import short_commit
from arsm_experiments.runs.reader import Record, read_run
from arsm_experiments.vae import Vae
from tests.experiments import training_runs
from tests.experiments.training_runs import TEST_GAP, rows_of

STEPS_PER_EPOCH = 275
TRAIN_GAP = -7.0

write_run = partial(
    training_runs.write_run,
    train_gap=TRAIN_GAP,
    evaluations=40.0,
    at_end={"best_test": 0.5, "bound": -10.0},
)


def test_the_first_seed_chooses_the_rate_at_its_best_epoch(tmp_path: Path) -> None:
    # 2e-4 is best at the last epoch and 3e-4 on average, but the first seed was lowest at 1e-4,
    # half way
    curves = {
        1e-4: [[120.0, 86.0, 99.0], [120.0, 95.0, 94.0]],
        2e-4: [[120.0, 90.0, 87.0], [120.0, 90.0, 87.0]],
        3e-4: [[120.0, 90.0, 88.0], [120.0, 80.0, 80.0]],
    }
    records = [
        write_run(tmp_path, Vae(rates=(rate,), seeds=(0, 1)), validation)
        for rate, validation in curves.items()
    ]
    (section,) = vae_sections(records)
    (cells,) = rows_of(section).values()
    assert cells["learning rate"].values == [1e-4]
    assert cells["validation"].values == [86.0, 94.0]
    assert cells["train"].values == [86.0 + TRAIN_GAP, 94.0 + TRAIN_GAP]
    assert cells["test"].values == [86.5, 94.5]
    assert cells["test, last epoch"].values == [99.0 + TEST_GAP, 94.0 + TEST_GAP]
    assert cells["bound, 1,000 samples"].values == [76.0, 84.0]
    assert cells["seconds"].values == [records[0].seconds]
    assert all(cell.record == records[0] for cell in cells.values())
    assert len(section.records) == 3
    assert [panel.log for panel in section.figures[0].panels] == ["y"] * 3


def test_seeds_split_over_commands_are_one_row(tmp_path: Path) -> None:
    first = {2e-4: [120.0, 87.0, 88.0], 3e-4: [120.0, 86.0, 87.0], 4e-4: [120.0, 85.0, 89.0]}
    second = {3e-4: [[120.0, 70.0, 71.0]], 4e-4: [[119.0, 90.0, 88.0], [118.0, 84.0, 86.0]]}
    parts = [
        write_run(tmp_path / "parts", Vae(rates=(rate,)), [curve]) for rate, curve in first.items()
    ]
    parts += [
        write_run(tmp_path / "parts", Vae(rates=(rate,), seeds=(1, 2)[: len(curves)]), curves)
        for rate, curves in second.items()
    ]
    whole = [
        write_run(
            tmp_path / "whole",
            Vae(rates=(rate,), seeds=tuple(range(1 + len(others)))),
            [curve, *others],
        )
        for rate, curve in first.items()
        for others in [second.get(rate, [])]
    ]
    # "-seed-1" sorts behind, but the order of the folders must not matter
    (section,), (expected,) = vae_sections(parts[::-1]), vae_sections(whole)
    assert len(section.records) == len(parts)
    (cells,), (expected_cells,) = rows_of(section).values(), rows_of(expected).values()
    for metric in cells.keys() - {"seconds"}:
        assert cells[metric].values == expected_cells[metric].values
    assert cells["learning rate"].values == [4e-4]
    assert cells["validation"].values == [85.0, 88.0, 84.0]
    for figure, same in zip(section.figures, expected.figures, strict=True):
        for panel, alike in zip(figure.panels, same.panels, strict=True):
            assert [panel.views[axis] for axis in figure.axes if axis != "second"] == [
                alike.views[axis] for axis in figure.axes if axis != "second"
            ]


def test_seeds_of_another_precision_count_too(tmp_path: Path) -> None:
    records = [
        write_run(tmp_path, Vae(), [[120.0, 90.0, 90.5]]),
        write_run(
            tmp_path,
            Vae(seeds=(1, 2), precision="bf16"),
            [[120.0, 91.0, 92.0], [120.0, 93.0, 92.5]],
        ),
    ]
    (section,) = vae_sections(records)
    (cells,) = rows_of(section).values()
    assert cells["validation"].values == [90.0, 91.0, 92.5]


def test_a_run_from_before_a_setting_is_in_the_row_of_its_label(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path, Vae(seeds=(seed,)), [[120.0, 87.0, 88.0]]).folder for seed in (0, 1)
    ]
    header = json.loads((folders[0] / "config.json").read_text())
    del header["config"]["sampled_pixels"]
    (folders[0] / "config.json").write_text(json.dumps(header))
    (section,) = vae_sections([read_run(folder) for folder in folders])
    (cells,) = rows_of(section).values()
    assert cells["validation"].values == [87.0, 87.0]
    assert cells["test"].paper == 86.7


def test_seconds_are_those_of_all_commands_and_on_the_axis_a_seeds_own(tmp_path: Path) -> None:
    def timed(record: Record, pace: float) -> Record:
        metrics = [line | {"seconds": pace * line["epoch"]} for line in record.metrics]
        return replace(record, metrics=metrics, seconds=pace * 1000)

    curve = [120.0, 90.0, 89.0]
    records = [
        timed(write_run(tmp_path, Vae(), [curve]), 4.0),
        timed(write_run(tmp_path, Vae(seeds=(1, 2)), [curve, curve]), 1.0),
    ]
    (section,) = vae_sections(records)
    assert rows_of(section)["arsm"]["seconds"].values == [5000.0]
    (series,) = section.figures[0].panels[0].views["second"]
    assert series.x == [2.0 * epoch for epoch in (10, 500, 1000)]


def test_an_unfinished_run_stays_out_of_a_row_that_has_finished_seeds(tmp_path: Path) -> None:
    epochs = (10, 20, 500, 1000)
    finished = [
        write_run(tmp_path, Vae(rates=(2e-4,)), [[120.0, 90.0, 88.0, 89.0]], epochs),
        write_run(tmp_path, Vae(rates=(3e-4,)), [[120.0, 95.0, 94.0, 87.0]], epochs),
    ]
    running = write_run(
        tmp_path, Vae(rates=(3e-4,), seeds=(1, 2)), [[119.0, 70.0], [118.0, 119.0]], (10, 20)
    )
    (section,), (expected,) = vae_sections([*finished, running]), vae_sections(finished)
    assert results_csv([section]) == results_csv([expected])
    assert rows_of(section)["arsm"]["validation"].values == [87.0]


def test_an_unfinished_run_has_the_test_figure_of_its_best_epoch(tmp_path: Path) -> None:
    record = write_run(
        tmp_path, Vae(seeds=(0, 1)), [[120.0, 90.0, 91.0], [120.0, 94.0, 92.0]], (10, 200, 300)
    )
    (section,) = vae_sections([record])
    cells = rows_of(section)["arsm (300 epochs)"]
    assert cells["test"].values == [90.0 + TEST_GAP, 92.0 + TEST_GAP]
    assert cells["test, last epoch"].values == [91.0 + TEST_GAP, 92.0 + TEST_GAP]
    assert "bound, 1,000 samples" not in cells


@pytest.mark.parametrize(
    ("layers", "words", "paper"),
    [
        (1, "reinforce", (127.0, 127.6)),
        (1, "relax", (117.4, 118.7)),
        (1, "gumbel-softmax:hard=True", (94.1, 96.4)),
        (1, "25*gumbel-softmax", None),
        (1, "25*gumbel-softmax:hard=True", None),
        (1, "ar", (133.6, 135.0)),
        (1, "ars", (97.4, 101.4)),
        (1, "arsm", (82.0, 86.7)),
        (2, "gumbel-softmax", None),
        (2, "arsm", None),
        (1, "gumbel-softmax:temperature=0.5,hard=True", (94.1, 96.4)),
        (1, "gumbel-softmax", None),
        (1, "arsm:pooled=True", None),
        (1, "25*arsm", None),
        (2, "ars", None),
    ],
)
def test_the_papers_figures_stand_beside_its_own_rows(
    tmp_path: Path, layers: Literal[1, 2], words: str, paper: tuple[float, float] | None
) -> None:
    record = write_run(tmp_path, Vae(words, layers=layers), [[100.0, 90.0, 91.0]])
    (section,) = vae_sections([record])
    cells = rows_of(section)[words]
    assert (cells["train"].paper, cells["test"].paper) == (paper or (None, None))
    assert cells["validation"].paper is None


def test_the_papers_25_samples_and_two_layers_are_those_of_its_authors(tmp_path: Path) -> None:
    released = partial(
        Vae,
        learned_temperature=True,
        kl="analytic",
        first_logit_fixed=False,
        independent_decoder_sample=False,
    )
    printed = Vae(name="algorithm2", layers=2, first_logit_fixed=False, afresh=True)
    straight, many = (
        released("gumbel-softmax:hard=True", layers=2),
        released("25*gumbel-softmax:hard=True"),
    )
    runs = [write_run(tmp_path, each, [[100.0, 90.0, 91.0]]) for each in (many, straight, printed)]
    one, section, same = vae_sections(runs)
    (cells,) = rows_of(one).values()
    assert (cells["train"].paper, cells["test"].paper) == (93.6, 95.9)
    assert [
        cells["test"].paper for cells in (*rows_of(section).values(), *rows_of(same).values())
    ] == [98.3, 89.5]
    assert "without a run of ours" not in section.text
    (alone,) = vae_sections(
        [write_run(tmp_path / "alone", Vae("ars", layers=2), [[100.0, 90.0, 91.0]])]
    )
    assert "without a run of ours" in alone.text


def test_recipes_are_sections_of_their_own_without_the_papers_figures(tmp_path: Path) -> None:
    curve = [[100.0, 90.0, 91.0]]
    records = [
        write_run(tmp_path, Vae(name="recipe", dropouts=(0.2,), schedule="cosine"), curve),
        write_run(tmp_path, Vae(name="recipe", dropouts=(0.1,)), curve),
        write_run(tmp_path, Vae(layers=2), curve),
        write_run(tmp_path, Vae("rloo:samples=46,live=1"), curve),
        write_run(tmp_path, Vae(), curve),
        write_run(tmp_path, Vae("reinforce"), curve),
    ]
    sections = vae_sections(records)
    assert {section.title: list(rows_of(section)) for section in sections} == {
        "VAE, 1 layer": ["reinforce", "arsm", "rloo:samples=46,live=1"],
        "VAE, 2 layers": ["arsm"],
        "VAE, 1 layer (recipe)": ["arsm, dropout 0.1", "arsm, dropout 0.2, schedule cosine"],
    }
    recipe = sections[-1]
    assert all(result.paper is None for result in recipe.results)
    assert (
        "The paper also has, for test, without a run of ours: straight-through Gumbel-Softmax,"
        in sections[1].text
    )
    assert "without a run of ours" not in recipe.text


def test_curves_lie_over_iterations_and_over_evaluations_so_far(tmp_path: Path) -> None:
    record = write_run(tmp_path, Vae(seeds=(0, 1)), [[120.0, 90.0, 89.0], [118.0, 92.0, 93.0]])
    (section,) = vae_sections([record])
    files = {name: axes for figure in section.figures for name, axes in figure.files.items()}
    assert list(files) == [
        "1layer-iterations",
        "1layer-seconds",
        "1layer-evaluations",
        "1layer-state",
    ]
    steps = [epoch * STEPS_PER_EPOCH for epoch in (10, 500, 1000)]
    evaluations = [
        200 * 275 * epochs
        for epochs in (10 * 40, 10 * 40 + 490 * 39, 10 * 40 + 490 * 39 + 500 * 38)
    ]
    for name, places in (("iterations", steps), ("evaluations", evaluations)):
        (axis,) = files[f"1layer-{name}"]
        (series,) = section.figures[0].panels[1].views[axis]
        assert series.x == places
        assert series.y == [119.0, 91.0, 91.0]
    train, validation, test = section.figures[0].panels
    assert [[level.y for level in panel.levels] for panel in (train, validation, test)] == [
        [82.0],
        [],
        [86.7],
    ]


def test_curves_lie_over_the_time_of_steps_that_were_timed_alone(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, Vae(words, seeds=(0, 1)), [[120.0, 90.0, 89.0], [118.0, 92.0, 93.0]])
        for words in ("arsm", "relax")
    ]
    (section,) = vae_sections(runs)
    assert with_time(section.figures, tmp_path) == section.figures
    (tmp_path / "step_times.jsonl").write_text('{"label": "arsm", "milliseconds": 0.5}\n')
    *_, figure = with_time(section.figures, tmp_path)
    assert list(figure.files) == ["1layer-time"]
    for panel, before in zip(figure.panels, section.figures[0].panels, strict=True):
        ((series,),) = panel.views.values()
        assert series.name.startswith("arsm, ")
        assert series.x == [epoch * STEPS_PER_EPOCH * 0.5e-3 for epoch in (10, 500, 1000)]
        (same,) = [each for each in before.views["iteration"] if each.name == series.name]
        assert series.y == same.y
        assert {level.name for level in panel.levels} <= {series.name}


def test_fresh_seeds_are_drawn_and_stand_beside_the_papers_figure(tmp_path: Path) -> None:
    records = [
        write_run(tmp_path, Vae(rates=(2e-4,)), [[120.0, 86.0, 88.0]]),
        write_run(tmp_path, Vae(rates=(3e-4,)), [[120.0, 87.0, 88.0]]),
        write_run(
            tmp_path,
            Vae(rates=(2e-4,), seeds=(7, 8), name="fresh"),
            [[120.0, 90.0, 91.0], [120.0, 92.0, 93.0]],
        ),
    ]
    (section,) = vae_sections(records)
    (curve,) = section.figures[0].panels[1].views["iteration"]
    assert list(curve.y) == [120.0, 91.0, 92.0]
    assert curve.name == "arsm, rate 0.0002, fresh seeds"
    assert rows_of(section)["arsm"]["validation"].values == [90.0, 92.0]
    assert rows_of(section)["arsm"]["test"].paper == 86.7
    assert [record.name for record in section.records] == [record.name for record in records]
    assert "Rows show the fresh seeds" in section.text
    (ring,) = (
        series
        for series in section.figures[-1].panels[0].views["learning rate"]
        if series.mark == "ring"
    )
    assert list(ring.y) == [86.0]


def test_fresh_seeds_at_another_rate_or_precision_are_a_section_of_their_own(
    tmp_path: Path,
) -> None:
    curve = [[120.0, 86.0, 88.0]]
    grid = write_run(tmp_path, Vae(rates=(2e-4,)), curve)
    for number, config in enumerate(
        (Vae(rates=(3e-4,), name="fresh"), Vae(rates=(2e-4,), name="fresh", precision="bf16"))
    ):
        other = write_run(tmp_path / str(number), config, curve)
        sections = vae_sections([grid, other])
        assert [[record.name for record in section.records] for section in sections] == [
            [grid.name],
            [other.name],
        ]
        assert [section.title for section in sections] == ["VAE, 1 layer", "VAE, 1 layer (fresh)"]


def test_fresh_seeds_of_several_commands_are_one_row(tmp_path: Path) -> None:
    records = [
        write_run(tmp_path, Vae(rates=(2e-4,)), [[120.0, 86.0, 88.0]]),
        write_run(tmp_path, Vae(rates=(3e-4,)), [[120.0, 87.0, 88.0]]),
        write_run(tmp_path, Vae(rates=(2e-4,), seeds=(1,), name="fresh"), [[120.0, 90.0, 91.0]]),
        write_run(
            tmp_path,
            Vae(rates=(2e-4,), seeds=(3, 4), name="one-layer-fresh"),
            [[120.0, 92.0, 93.0], [120.0, 94.0, 95.0]],
        ),
        # still running
        write_run(
            tmp_path,
            Vae(rates=(2e-4,), seeds=(5,), name="one-layer-fresh"),
            [[120.0, 70.0]],
            (10, 20),
        ),
    ]
    section, running = vae_sections(records)
    assert rows_of(section)["arsm"]["validation"].values == [90.0, 92.0, 94.0]
    assert rows_of(section)["arsm"]["seeds that chose the rate"].values == [0.0]
    assert [record.name for record in section.records] == [record.name for record in records[:-1]]
    assert list(rows_of(running)) == ["arsm (20 epochs)"]


def test_three_other_seeds_report_a_row_without_the_one_that_chose(tmp_path: Path) -> None:
    records = [
        write_run(tmp_path, Vae(rates=(2e-4,)), [[120.0, 86.0, 88.0]]),
        write_run(tmp_path, Vae(rates=(3e-4,)), [[120.0, 87.0, 88.0]]),
        write_run(
            tmp_path,
            Vae(rates=(2e-4,), seeds=(1, 2)),
            [[120.0, 90.0, 91.0], [120.0, 92.0, 93.0]],
        ),
    ]
    (section,) = vae_sections(records)
    two = rows_of(section)["arsm"]
    assert two["validation"].values == [86.0, 90.0, 92.0]
    assert two["seeds that chose the rate"].values == [1.0]
    records.append(write_run(tmp_path, Vae(rates=(2e-4,), seeds=(3,)), [[120.0, 94.0, 95.0]]))
    (section,) = vae_sections(records)
    three = rows_of(section)["arsm"]
    assert three["validation"].values == [90.0, 92.0, 94.0]
    assert three["seeds that chose the rate"].values == [0.0]
    assert three["learning rates tried"].values == [2.0]
    assert [result.values for result in section.trials] == [[86.0], [87.0]]
    (curve,) = section.figures[0].panels[1].views["iteration"]
    assert list(curve.y) == [120.0, 92.0, 93.0]
    # the seed that chose ran in a command of its own, whose seconds do not count
    assert three["seconds"].values == [sum(record.seconds for record in records[2:])]


def test_a_row_of_several_commands_names_all_their_machines_and_has_no_place_in_time(
    tmp_path: Path,
) -> None:
    records = [write_run(tmp_path, Vae(seeds=(seed,)), [[120.0, 86.0, 88.0]]) for seed in (0, 1, 2)]
    places = (("one", "a" * 40), ("another", "b" * 40), ("one", "a" * 40))
    records = [
        replace(record, sessions=[{**record.sessions[0], "hardware": machine, "commit": commit}])
        for record, (machine, commit) in zip(records, places, strict=True)
    ]
    (section,) = vae_sections(records)
    assert section.figures[0].panels[0].views["iteration"]
    assert not section.figures[0].panels[0].views["second"]
    first = next(csv.DictReader(results_csv([section]).splitlines()))
    assert first["hardware"] == "another; one"
    assert first["commit"] == f"{'a' * 10}; {'b' * 10}"
    (section,) = vae_sections([records[0], records[2]])
    assert section.figures[0].panels[0].views["second"]


@pytest.mark.parametrize("known", [False, True])
def test_shorter_trials_choose_the_rate_of_fresh_seeds(tmp_path: Path, known: bool) -> None:
    """`known`: one rate already had several seeds that were trained to the end."""
    short, late = (10, 200, 400), (10, 400, 1000)
    old = [[120.0, 90.0, 60.0], [120.0, 90.0, 61.0]]
    records = [
        write_run(tmp_path, Vae(rates=(rate,), epochs=400), [[120.0, 91.0, best]], short)
        for rate, best in ((2e-4, 86.0), (3e-4, 84.0))
    ]
    if known:
        # better at its end, but not by the time at which the others stop
        records.append(write_run(tmp_path, Vae(rates=(1e-4,), seeds=(0, 1)), old, late))
    before = {row for section in vae_sections(records) for row in rows_of(section)}
    assert before == {"arsm, epochs 400", *(["arsm"] if known else [])}
    fresh = Vae(rates=(3e-4,), seeds=(1, 2), name="fresh")
    records.append(write_run(tmp_path, fresh, [[120.0, 83.0, 82.0], [120.0, 83.0, 81.0]], late))
    (section,) = vae_sections(records)
    cells = rows_of(section)["arsm"]
    assert cells["validation"].values == [82.0, 81.0]
    assert cells["learning rates tried"].values == [3.0 if known else 2.0]
    assert cells["seeds that chose the rate"].values == [0.0]
    assert cells["test"].paper == 86.7
    found = {result.metric: result.values for result in section.trials}
    assert found["epochs of the trials"] == [400]
    assert found["validation of the trial at 0.0003"] == [84.0]
    assert found.get("validation of the trial at 0.0001") == ([90.0] if known else None)


def test_a_choice_waits_for_the_seeds_that_report_it(tmp_path: Path) -> None:
    """Trials with one seed do not take the place of a rate that has several."""
    several = [[120.0, 90.0, 91.0], [120.0, 94.0, 95.0]]
    records = [
        write_run(tmp_path, Vae(rates=(1e-4,), seeds=(0, 1)), several),
        write_run(tmp_path, Vae(rates=(2e-4,)), [[120.0, 86.0, 88.0]]),
    ]
    (section,) = vae_sections(records)
    cells = rows_of(section)["arsm"]
    assert cells["validation"].values == [90.0, 94.0]
    assert cells["learning rates tried"].values == [1.0]
    assert cells["seeds that chose the rate"].values == [0.0]
    assert [result.values for result in section.trials] == [[90.0], [86.0]]


def test_rows_above_the_scale_leave_the_curves_and_the_papers_lines_are_labelled(
    tmp_path: Path,
) -> None:
    records = [
        write_run(tmp_path, Vae(estimator, rates=(2e-4,)), [curve])
        for estimator, curve in {"arsm": [140.0, 86.0, 88.0], "ar": [200.0, 150.0, 140.0]}.items()
    ]
    (section,) = vae_sections(records)
    objective, state, *_ = section.figures
    assert list(objective.legend) == ["arsm, rate 0.0002"]
    assert "cut off, AR entirely" in objective.caption
    assert list(state.legend) == ["ar, rate 0.0002", "arsm, rate 0.0002"]
    assert [level.label for level in objective.panels[2].levels] == ["86.7"]


def test_the_rates_of_a_grid_are_compared(tmp_path: Path) -> None:
    records = [
        write_run(tmp_path, Vae(rates=(2e-4,)), [[120.0, 90.0, 92.0]]),
        write_run(
            tmp_path, Vae(rates=(4e-4,), seeds=(1, 0)), [[120.0, 88.0, 94.0], [120.0, 89.0, 93.0]]
        ),
    ]
    (section,) = vae_sections(records)
    best, last = section.figures[-1].panels
    for panel, first, other in ((best, [90.0, 89.0], 88.0), (last, [92.0, 93.0], 94.0)):
        line, dots, ring = panel.views["learning rate"]
        assert (line.mark, dots.mark, ring.mark) == ("linked", "dots", "ring")
        assert (line.x, line.y) == ([2e-4, 4e-4], first)
        assert (dots.x, dots.y) == ([4e-4], [other])
        assert (ring.x, ring.y) == ([4e-4], [first[1]])


def test_the_page_and_the_table_have_all_commands_of_a_row(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = write_run(runs, Vae(), [[120.0, 87.0, 88.0]])
    second = write_run(runs, Vae(seeds=(1, 2)), [[120.0, 86.0, 88.0], [120.0, 88.0, 89.0]])
    header = json.loads((second.folder / "config.json").read_text())
    header["sessions"][-1] |= {"hardware": "another machine", "commit": "another commit"}
    (second.folder / "config.json").write_text(json.dumps(header))
    for record, picture in ((first, b"first"), (second, b"second")):
        (record.folder / f"pictures-seed{record.config['seeds'][0]}.png").write_bytes(picture)
    Report(root=runs).run(Console(quiet=True))
    page = (runs / "report.html").read_text()
    for text in (
        f"<strong>{first.name}</strong>",
        f"<strong>{second.name}</strong>",
        "seeds 1, 2",
        "another machine",
    ):
        assert text in page
    assert f"base64,{b64encode(b'first').decode()}" in page
    assert f"base64,{b64encode(b'second').decode()}" not in page
    (section,) = vae_sections([read_run(record.folder) for record in (first, second)])
    table = {
        (row["row"], row["metric"]): row
        for row in csv.DictReader(results_csv([section]).splitlines())
    }
    test = table["VAE, 1 layer: arsm", "test"]
    assert (test["mean"], test["std"], test["seeds"]) == ("87.5", "1", "3")
    first_line = table["VAE, 1 layer: arsm", "learning rate"]
    own = first.sessions[-1]
    assert first_line["hardware"] == f"{own['hardware']}; another machine"
    assert first_line["commit"] == "; ".join(
        sorted({short_commit(own["commit"]), short_commit("another commit")})
    )
    assert (test["hardware"], test["commit"]) == ("", ""), "they stand in the first line"
    assert "The paper also has, for test, without a run of ours: REINFORCE 127.6" in section.text
    assert "arsm 86.7" not in section.text


def test_the_page_and_the_table_have_the_numbers(tmp_path: Path) -> None:
    best = [87.0, 86.6, 87.4]
    validation = [[120.0, value, value + 1] for value in best]
    record = write_run(tmp_path / "runs", Vae(rates=(4e-4,), seeds=(0, 1, 2)), validation)
    picture = b"\x89PNG, or any other bytes"
    (record.folder / "pictures-seed0.png").write_bytes(picture)
    Report(root=tmp_path / "runs", export=tmp_path / "results").run(Console(quiet=True))
    page = (tmp_path / "runs" / "report.html").read_text()
    for text in (
        "VAE, 1 layer",
        "87.5 ± 0.4",
        "paper 86.7, +0.8",
        "80.0 ± 0.4",
        "paper 82, -2.0",
        record.name,
    ):
        assert text in page
    assert f"data:image/png;base64,{b64encode(picture).decode()}" in page
    with (tmp_path / "results" / "vae" / "table.csv").open() as file:
        table = {(row["row"], row["metric"]): row for row in csv.DictReader(file)}
    test = table["VAE, 1 layer: arsm", "test"]
    assert float(test["mean"]) == pytest.approx(fmean(best) + 0.5, rel=1e-5)
    assert float(test["std"]) == pytest.approx(stdev(best), rel=1e-5)
    assert (test["seeds"], test["paper"]) == ("3", "86.7")
    session = record.sessions[-1]
    first_line = table["VAE, 1 layer: arsm", "learning rate"]
    assert (first_line["hardware"], first_line["commit"]) == (
        session["hardware"],
        short_commit(session["commit"]),
    )
    for name in ("1layer-iterations", "1layer-seconds", "1layer-evaluations", "1layer-state"):
        assert (tmp_path / "results" / "vae" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
