"""Numbers in the sentences about the VAE are those of its table and runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

import pytest

from arsm_experiments.report.sections import Result
from arsm_experiments.report.vae import AS_RELEASED
from arsm_experiments.runs.merge import merge_seeds
from arsm_experiments.runs.reader import Record
from tests.experiments.statements import RESULTS, assert_said, curves, means, page, runs_of


def test_arsm_beside_the_authors_log(records: list[Record]) -> None:
    runs = runs_of(records, "vae", "arsm", layers=1, rate=3e-4)
    (record,) = merge_seeds(runs, lambda r: r.label)
    epochs = curves(record, "epoch")[0]
    validation, train = curves(record, "validation"), curves(record, "train")
    assert len(validation) == 6

    def at(epoch: int) -> tuple[float, float]:
        place = epochs.index(epoch)
        return fmean(c[place] for c in train.values()), fmean(c[place] for c in validation.values())

    best = [min(curve) for curve in validation.values()]
    cells = [f"{x:.1f} / {y:.1f}" for x, y in map(at, (10, 100, 300))]
    last = f"{at(1000)[0]:.1f} / {at(1000)[1]:.2f}"
    row = f"| ours, mean of six seeds | {' | '.join(cells)} | {last} | {spread(best, '.2f')} |"
    assert_said("results/vae/README.md", row)
    above_last, above_best = at(1000)[1] - 87.15, fmean(best) - 86.65
    assert above_best > 2 * stdev(best)
    sentence = (
        f"Our last validation -ELBO is {above_last:.1f} nats above theirs and our best {above_best:.1f}, more than two"
    )
    assert_said("results/vae/README.md", sentence)


def test_differences_from_the_papers_vae_rows(results: dict[tuple[str, str], Result]) -> None:
    tests = {row: r for (row, metric), r in results.items() if metric == "test" and r.paper is not None}

    def gain(row: str) -> str:
        found = tests[f"VAE, {row}"]
        assert found.paper is not None
        return f"{found.paper - found.mean:.1f}"

    better = f"ARS is {gain('1 layer: ars')}, REINFORCE {gain('1 layer: reinforce')} and RELAX"
    assert_said("results/vae/README.md", f"{better} {gain('1 layer: relax')} nats better here")
    behind = tests["VAE, 1 layer: relax"].mean - tests["VAE, 1 layer: arsm"].mean
    assert_said("results/vae/README.md", f"and {behind:.1f} behind ARSM, for")
    assert_said("results/vae/README.md", f"reaches {tests['VAE, 1 layer: ar'].mean:.1f} where the paper has 135.0")


def best_epochs(record: Record) -> tuple[list[float], list[float]]:
    """Every seed's best validation, and the epochs at which they were, sorted."""
    validation, epochs = curves(record, "validation"), curves(record, "epoch")[0]
    best = [min(curve) for curve in validation.values()]
    return best, sorted(epochs[curve.index(low)] for curve, low in zip(validation.values(), best, strict=True))


def rises(record: Record) -> list[float]:
    """Every seed's last validation above its best."""
    return [curve[-1] - min(curve) for curve in curves(record, "validation").values()]


def listed(values: Iterable[float], form: str = ".1f") -> str:
    *first, last = (format(value, form) for value in values)
    return f"{', '.join(first)} and {last}"


def spread(values: Sequence[float], form: str) -> str:
    return f"{format(fmean(values), form)} ± {format(stdev(values), form)}"


def test_rows_of_the_first_vae_table_are_finished(records: list[Record]) -> None:
    text = (RESULTS / "vae" / "README.md").read_text()
    fresh = [r for r in records if (r.experiment, r.group) == ("vae", "fresh")]
    assert len(fresh) == text.partition("Validation selects the rate")[0].count(", fresh |") == 8
    assert all(end[-1] == 1000 for r in fresh for end in curves(r, "epoch").values())
    assert not any(re.search(r"\(\d+ epochs\)", row) for name in ("vae", "conditional") for row, _ in means(name))
    (ars,) = runs_of(records, "vae", "ars", "fresh")
    _, epochs = best_epochs(ars)
    assert_said(
        "results/vae/README.md", f"ARS has its best validation after {epochs[0]} to {epochs[-1]} of 1,000 epochs"
    )


def at_best(record: Record, key: str) -> list[float]:
    """The metric at every seed's best validation."""
    validation = curves(record, "validation")
    return [curve[validation[seed].index(min(validation[seed]))] for seed, curve in curves(record, key).items()]


@pytest.mark.parametrize(
    ("label", "rate", "words"),
    [
        ("arsm:pooled=True", 3e-4, "Pooled ARSM was"),
        ("25*gumbel-softmax", 1e-4, "Gumbel-Softmax with 25 samples was"),
        ("rloo:samples=46,live=1", 3e-4, "Leave-one-out REINFORCE with 46 samples was"),
        ("rloo:samples=10,live=1", 5e-4, "With 10 samples it was"),
    ],
)
def test_fresh_seeds_are_worse_than_the_one_that_chose(
    label: str, rate: float, words: str, records: list[Record]
) -> None:
    chose, fresh = (runs_of(records, "vae", label, group, layers=1, rate=rate) for group in ("", "fresh"))
    (chosen, *_), fresh_tests = at_best(chose[0], "test"), at_best(fresh[0], "test")
    assert fmean(fresh_tests) > chosen
    said = page("results/vae/README.md")
    assert f"{words} chosen at {chosen:.1f}, and the " in said
    assert f"fresh seeds reached {listed(fresh_tests)}." in said


def test_leave_one_out_overfits(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    labels = [f"rloo:samples={words}" for words in ("10,live=1", "46,live=1", "46,live=1,ridge=1.0")]
    epochs = [e for label in labels for e in best_epochs(*runs_of(records, "vae", label, "fresh"))[1]]
    ends, bests = (
        [results[f"VAE, 1 layer: {label}", metric].mean for label in labels] for metric in ("test, last epoch", "test")
    )
    arsm_end, arsm = (results["VAE, 1 layer: arsm", metric].mean for metric in ("test, last epoch", "test"))
    said = f"After {min(epochs)} to {max(epochs)} epochs it overfits: its validation -ELBO rises, and in the test it"
    above = f"ends {min(ends) - arsm_end:.0f} to {max(ends) - arsm_end:.0f} nats above ARSM"
    assert_said("results/vae/README.md", f"{said} {above}")
    assert max(bests) - arsm < 5
    recipes = [r.mean for (row, m), r in results.items() if row.startswith("VAE, 1 layer (recipe)") and m == "test"]
    said = f"is {arsm - max(recipes):.0f} to {max(bests) - min(recipes):.0f} nats below them"
    assert_said("results/vae/README.md", f"The recipe, which regularises, {said}")


def test_the_exact_gradient_of_the_kl(records: list[Record]) -> None:
    (record,) = runs_of(records, "vae", "arsm, kl analytic", "fresh")
    assert record.config["rate"] == 4e-4
    tests = [curve[-1] for curve in curves(record, "best_test").values()]
    epochs = [1 + curve.index(min(curve)) for curve in curves(record, "validation").values()]
    said = f"seeds reach {listed(tests)}, no better than with ln q inside f. Their best validation was at epochs"
    assert_said("results/vae/README.md", f"{said} {listed((10 * place for place in epochs), ',')}")


def test_25_straight_through_samples(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    (record,) = (r for r in records if r.experiment == "vae" and r.label.startswith("25*gumbel-softmax:hard=True"))
    found = {metric: results[f"VAE, 1 layer: {record.label}", metric] for metric in ("train", "test")}
    test, train = (f"{found[m].mean:.1f} ± {found[m].std:.1f} against {found[m].paper}" for m in ("test", "train"))
    apart = max(each.mean - each.paper for each in found.values() if each.paper is not None)
    said = f"within {apart:.1f} nats of the paper: {test} in the test, {train} in training"
    assert_said("results/vae/README.md", said)
    _, epochs = best_epochs(record)
    said = f"best after {epochs[0]} to {epochs[-1]} epochs and then rises by {min(rises(record)):.1f} to"
    assert_said("results/vae/README.md", f"{said} {max(rises(record)):.1f} nats until epoch 1,000")
    losses = list(curves(record, "train").values())
    lows, ends = sorted(min(curve) for curve in losses), sorted(curve[-1] for curve in losses)
    places = sorted(10 * (1 + curve.index(min(curve))) for curve in losses)
    said = f"after {places[0]} to {places[-1]} epochs, at {lows[0]:.1f} to {lows[-1]:.1f}, and ends at {ends[0]:.1f}"
    assert_said("results/vae/README.md", f"{said} to {ends[-1]:.1f}")


def test_one_straight_through_sample(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    label = f"gumbel-softmax:hard=True{AS_RELEASED}"
    (record,) = runs_of(records, "vae", label, "authors")
    assert curves(record, "epoch")[0][-1] == 1000
    one, many, ours = (
        results[f"VAE, 1 layer{row}", "test"]
        for row in (f" (authors): {label}", f": 25*{label}", ": gumbel-softmax:hard=True")
    )
    assert one.paper == 96.4
    said = f"reaches {one.mean:.1f} ± {one.std:.1f} in the test, {one.mean - 96.4:.1f} nats above the paper's 96.4"
    assert_said("results/vae/README.md", f"One sample with the authors' settings {said}")
    assert_said("results/vae/README.md", f"So 25 samples gain {one.mean - many.mean:.1f} nats (0.5 in the paper)")
    said = f"One sample with our settings is {one.mean - ours.mean:.1f} nats better than with theirs"
    assert_said("results/vae/README.md", said)
    _, epochs = best_epochs(record)
    said = f"best after {epochs[0]} to {epochs[-1]} epochs and then rises by {min(rises(record)):.1f} to"
    assert_said("results/vae/README.md", f"{said} {max(rises(record)):.1f} nats")


def test_two_layers_that_share_their_noise(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    (shared,) = runs_of(records, "vae", "arsm", layers=2, rate=1e-4)
    (fresh,) = runs_of(records, "vae", "arsm, first logit fixed False, afresh True", "algorithm2", layers=2)
    best, epochs = best_epochs(shared)
    assert_said(
        "results/vae/README.md", f"best after {epochs[0]} to {epochs[-1]} epochs, at {listed(best)} in validation"
    )
    said = f"and then rise by {min(rises(shared)):.1f} to {max(rises(shared)):.1f} nats until epoch 1,000"
    assert_said("results/vae/README.md", said)
    cells = f"{min(best):.1f} to {max(best):.1f}, {epochs[0]} to {epochs[-1]}"
    assert_said("results/vae/README.md", f"| best validation, at epoch | {cells} |")
    test = results["VAE, 2 layers: arsm", "test"]
    assert test.paper is None
    assert_said("results/vae/README.md", f"| test there | {min(test.values):.1f} to {max(test.values):.1f} |")
    above = test.mean - results[f"VAE, 2 layers (algorithm2): {fresh.label}", "test"].mean
    said = f"the test result, {test.mean:.1f} ± {test.std:.1f}, is {above:.1f} above that of Algorithm 2"
    assert_said("results/vae/README.md", said)
    less, more = (
        [fmean(seeds) for seeds in zip(*curves(run, "gradient_variance").values(), strict=True)]
        for run in (shared, fresh)
    )
    assert all(a < b for a, b in zip(less[5:], more[5:], strict=True))


RECIPE = "arsm:pooled=True, dropout 0.2, epochs {}, schedule cosine"


def test_the_recipe_with_two_layers(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    (record,) = (r for r in records if (r.experiment, r.group, r.config.get("layers")) == ("vae", "recipe", 2))
    assert curves(record, "epoch")[0][-1] == record.config["epochs"] == 800
    test = results[f"VAE, 2 layers (recipe): {record.label}", "test"]
    said = f"the three seeds reach {listed(test.values)} in the test after 800 epochs. Their mean, {test.mean:.1f}, is"
    below = f"{89.5 - test.mean:.1f} nats below the paper's 89.5"
    one = results["VAE, 1 layer: arsm", "test"].mean - test.mean
    assert_said("results/vae/README.md", f"{said} {below} and {one:.1f} below ARSM with one layer")
    single = results[f"VAE, 1 layer (recipe): {RECIPE.format(900)}", "test"]
    assert_said("results/vae/README.md", f"It is {test.mean - single.mean:.1f} above the same recipe with one layer")
    _, epochs = best_epochs(record)
    said = f"at epochs {listed(epochs, '.0f')}, and the last is at most {max(rises(record)):.1f} nats above it"
    assert_said("results/vae/README.md", said)


def test_two_layers_by_algorithm_2(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    label = "arsm, first logit fixed False, afresh True"
    (record,) = runs_of(records, "vae", label, "algorithm2", layers=2)
    test = results[f"VAE, 2 layers (algorithm2): {label}", "test"]
    assert test.paper == 89.5
    said = f"reach {test.mean:.1f} ± {test.std:.1f}, which is {test.mean - 89.5:.1f} above the paper's 89.5"
    assert_said("results/vae/README.md", said)
    best, epochs = best_epochs(record)
    assert curves(record, "epoch")[0][-1] == 1000
    said = (
        f"best after {epochs[0]} to {epochs[-1]} epochs, at {listed(best)}, and then rises by {min(rises(record)):.1f}"
    )
    assert_said("results/vae/README.md", f"{said} to {max(rises(record)):.1f} nats until epoch 1,000")


def test_two_layers_straight_through(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    learned = [r for r in records if r.experiment == "vae" and r.config.get("learned_temperature")]
    (record,) = (r for r in learned if r.config["layers"] == 2)
    test = results[f"VAE, 2 layers: {record.label}", "test"]
    assert test.paper == 98.3
    said = f"reaches {test.mean:.1f} ± {test.std:.1f}, {98.3 - test.mean:.1f} nats better than in the paper"
    assert_said("results/vae/README.md", said)
    _, epochs = best_epochs(record)
    said = f"Its validation is best after {epochs[0]} to {epochs[-1]} epochs and then rises"
    assert_said("results/vae/README.md", said)


def test_rates_of_the_recipe(records: list[Record]) -> None:
    runs = runs_of(records, "vae", RECIPE.format(900), "recipe", layers=1)
    assert [r.config["rate"] for r in runs] == [5e-4, 8e-4, 1e-3]

    def cells(found: list[list[float]]) -> str:
        return " | ".join(spread(seeds, ".1f") for seeds in found)

    train = [at_best(run, "train") for run in runs]
    test = [[curve[-1] for curve in curves(run, "best_test").values()] for run in runs]
    assert_said("results/vae/README.md", f"| train, with dropout | {cells(train)} |")
    assert_said("results/vae/README.md", f"| test | {cells(test)} |")


TRIALS = {
    "unchanged (encoder dropout 0.2)": {},
    "weight decay 0.03": {"weight_decay": 0.03},
    "weight decay 0.1": {"weight_decay": 0.1},
    "weight decay 0.3": {"weight_decay": 0.3},
    "encoder dropout 0.3": {"dropout": 0.3},
    "encoder dropout 0.4": {"dropout": 0.4},
    "input dropout 0.1": {"input_dropout": 0.1},
    "input dropout 0.2": {"input_dropout": 0.2},
    "decoder dropout 0.1": {"decoder_dropout": 0.1},
    "decoder dropout 0.2": {"decoder_dropout": 0.2},
    "encoder dropout 0.3, input dropout 0.1, weight decay 0.1": {
        "dropout": 0.3,
        "input_dropout": 0.1,
        "weight_decay": 0.1,
    },
    "encoder dropout 0.3, decoder dropout 0.1, weight decay 0.1": {
        "dropout": 0.3,
        "decoder_dropout": 0.1,
        "weight_decay": 0.1,
    },
    "encoder dropout 0.3, input and decoder dropout 0.1, weight decay 0.1": {
        "dropout": 0.3,
        "input_dropout": 0.1,
        "decoder_dropout": 0.1,
        "weight_decay": 0.1,
    },
}
"""What each trial of the recipe changes."""


def test_trials_of_the_recipe(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    runs = [r for r in records if (r.experiment, r.group) == ("vae", "trials")]
    assert len(runs) == len(TRIALS)
    found: dict[str, tuple[float, float]] = {}
    for name, changes in TRIALS.items():
        config = {"dropout": 0.2, "input_dropout": 0.0, "decoder_dropout": 0.0, "weight_decay": 0.0} | changes
        (run,) = (r for r in runs if all(r.config[key] == value for key, value in config.items()))
        assert (run.config["rate"], run.config["seeds"], curves(run, "epoch")[0][-1]) == (8e-4, [0], 600)
        found[name] = min(curves(run, "validation")[0]), curves(run, "best_test")[0][-1]
        assert_said("results/vae/README.md", f"| {name} | {found[name][0]:.1f} | {found[name][1]:.1f} |")
    assert min(found, key=lambda name: found[name]) == "weight decay 0.03"
    decayed, plain = found["weight decay 0.03"][1], found["unchanged (encoder dropout 0.2)"][1]
    worse = [validation for name, (validation, _) in found.items() if "dropout" in name and "unchanged" not in name]
    assert min(worse) > found["unchanged (encoder dropout 0.2)"][0] + 1
    label = f"{RECIPE.format(600)}, weight decay 0.03"
    (fresh,) = runs_of(records, "vae", label, "recipe")
    assert fresh.config["seeds"] == [1, 2, 3]
    won, long = (results[f"VAE, 1 layer (recipe): {words}", "test"] for words in (label, RECIPE.format(900)))
    said = f"three new seeds, 1 to 3, reach {listed(won.values)} in the test, with a mean of {won.mean:.1f}.**"
    errors = (long.mean - won.mean) / math.hypot(*(stdev(each.values) / math.sqrt(3) for each in (won, long)))
    below = f"That is {long.mean - won.mean:.1f} nats below the recipe with 900 epochs and no weight decay"
    assert_said("results/vae/README.md", f"{said} {below} ({errors:.1f} standard errors)")
    apart = max(won.values) - min(won.values)
    said = f"weight decay alone gains {plain - decayed:.1f} nats, but seeds of one setting differ by up to {apart:.1f}"
    assert_said("results/vae/README.md", said)
    assert_said("results/vae/README.md", f"has only one seed with 600 epochs, {plain:.1f}.")


CLOCKED = (
    ("arsm", "", "ARSM", 4e-4),
    ("arsm:pooled=True", "fresh", "pooled ARSM", 3e-4),
    ("rloo:samples=46,live=1", "fresh", "leave-one-out REINFORCE, 46 samples", 3e-4),
    ("25*gumbel-softmax", "fresh", "Gumbel-Softmax, 25 samples", 1e-4),
    (
        f"25*gumbel-softmax:hard=True{AS_RELEASED}",
        "",
        "straight-through Gumbel-Softmax, 25 samples, learned temperature",
        3e-4,
    ),
    ("gumbel-softmax:hard=True", "", "straight-through Gumbel-Softmax", 3e-4),
    ("relax", "", "RELAX", 5e-4),
    ("ars", "fresh", "ARS", 2e-4),
    ("reinforce", "", "REINFORCE", 1e-4),
)
"""Labels, groups, names and rates of the rows whose time per step was measured alone on the GPU."""
STEPS_PER_EPOCH = 275


def clocked_rows(records: list[Record]) -> list[str]:
    """Validation -ELBO after so many seconds of steps, from the time of one step and the runs' records."""
    lines = (RESULTS / "vae" / "step_times.jsonl").read_text().splitlines()
    times = {line["label"]: line["milliseconds"] for line in map(json.loads, lines)}
    rows = []
    for label, group, name, rate in CLOCKED:
        (record,) = merge_seeds(runs_of(records, "vae", label, group, layers=1, rate=rate), lambda r: r.label)
        whole = times[label] * 1e-3 * STEPS_PER_EPOCH * 1000
        found = []
        for seconds in (10, 20, 40):
            place = int(100 * seconds / whole) - 1  # measured every ten epochs
            found.append(fmean(curve[place] for curve in curves(record, "validation").values()))
        cells = " | ".join(f"{value:.1f}" for value in found)
        rows.append(f"| {name} | {times[label]:.2f} | {whole:.0f} | {cells} |")
    return rows


def test_validation_by_seconds_alone_on_the_gpu(records: list[Record]) -> None:
    for row in clocked_rows(records):
        assert_said("results/vae/README.md", row)
    lines = map(json.loads, (RESULTS / "vae" / "step_times.jsonl").read_text().splitlines())
    times = {line["label"]: line["milliseconds"] for line in lines}
    relaxed, straight = (times[f"25*gumbel-softmax{more}"] / times["arsm"] for more in ("", f":hard=True{AS_RELEASED}"))
    said = f"25 samples take {relaxed:.1f} times ARSM's time, and {straight:.1f} times as the authors train them"
    assert_said("results/vae/README.md", said)


def test_what_bfloat16_costs(records: list[Record]) -> None:
    def lows(group: str, rate: float) -> list[float]:
        runs = runs_of(records, "vae", "arsm", group, layers=1, rate=rate)
        assert {run.config["precision"] for run in runs} == {group or "bf16"}
        assert all(curve[-1] == 1000 for run in runs for curve in curves(run, "epoch").values())
        return [min(curve) for run in runs for curve in curves(run, "validation").values()]

    def worse(one: list[float], other: list[float]) -> tuple[float, float]:
        """By how much one is above the other, and in standard errors."""
        above = fmean(one) - fmean(other)
        return above, above / math.hypot(*(stdev(each) / math.sqrt(len(each)) for each in (one, other)))

    bf16, tf32, float32 = ([lows(group, rate) for rate in (3e-4, 4e-4)] for group in ("", "tf32", "float32"))
    names = ("f at pseudo samples in bfloat16, six seeds", "TF32, three seeds", "float32, three seeds")
    for name, found in zip(names, (bf16, tf32, float32), strict=True):
        assert_said("results/vae/README.md", f"| {name} | {' | '.join(spread(each, '.2f') for each in found)} |")
    lowest = min(bf16[0] + tf32[0] + float32[0])
    assert lowest in tf32[0]
    assert_said("results/vae/README.md", f"The best of all twelve seeds at this rate reached {lowest:.2f}, in TF32")
    low, low_errors = worse(float32[0], bf16[0])
    high, high_errors = worse(float32[1], bf16[1])
    said = f"At 3e-4, float32 is {-low:.1f} nats better than bfloat16 ({-low_errors:.1f} standard errors), and still"
    said = f"{said} {fmean(float32[0]) - 86.65:.1f} above the authors' best. At 4e-4 it is {high:.1f} worse"
    assert_said("results/vae/README.md", f"{said} ({high_errors:.1f} standard errors).")
    assert abs(worse(tf32[0], bf16[0])[0]) < 0.1
    above, errors = worse(tf32[1], bf16[1])
    assert_said("results/vae/README.md", f"At 4e-4 TF32 is {above:.1f} nats worse, {errors:.1f} standard errors.")
    above, errors = worse(tf32[1], float32[1])
    said = f"lies between them, {above:.1f} below TF32 ({errors:.1f} standard errors)"
    assert_said("results/vae/README.md", said)


def test_two_layers_as_released(records: list[Record], results: dict[tuple[str, str], Result]) -> None:
    (record,) = (r for r in records if r.experiment == "vae" and r.config.get("as_released"))
    best, epochs = best_epochs(record)
    assert curves(record, "epoch")[0][-1] == 1000
    said = f"validation is best after {epochs[0]} to {epochs[-1]} epochs, at {listed(best)}, and then rises"
    assert_said("results/vae/README.md", said)
    test = results[f"VAE, 2 layers (as-released): {record.label}", "test"]
    assert_said("results/vae/README.md", f"reach {test.mean:.1f} ± {test.std:.1f} in the test")


def test_the_variance_of_ar(records: list[Record]) -> None:
    ratios = []
    for seed in (0, 1, 2):
        ar, reinforce = (
            next(r for r in runs_of(records, "vae", words, layers=1, rate=1e-4) if seed in r.config["seeds"])
            for words in ("ar", "reinforce")
        )
        ratios.append(curves(ar, "gradient_variance")[seed][-1] / curves(reinforce, "gradient_variance")[seed][-1])
    assert [round(ratio, -2) for ratio in ratios] == [400, 600, 2900]
    assert_said("results/vae/README.md", "and 400, 600 and 2,900 times at the end, by seed")
