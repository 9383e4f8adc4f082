"""The order in which the comparison's processes begin, and that all of them end."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from arsm_experiments.sequences import noise
from arsm_experiments.sequences.protocol import (
    AGAIN,
    BESIDE,
    CANDIDATES,
    COSTLY,
    FIXED_FROM,
    FURTHER_ATTEMPTS,
    LONG_AGAIN,
    SIZES,
    STAGES,
    TINY,
    Campaign,
)
from arsm_experiments.sequences.trials import METHODS
from tests.experiments.tiny_llama import save_tiny_llama

pytest.importorskip("transformers", reason="transformers is in the extra `transformers`")


class Dry(Campaign):
    """Notes what would begin; a test says what has ended."""

    def _launch(self, name: str, module: str, words: list[str]) -> None:
        if name not in self.done and name not in self.running:
            self.running[name] = words  # pyright: ignore[reportArgumentType]

    def end(self, *names: str) -> None:
        for name in names:
            del self.running[name]
            self.done.add(name)
        self._follow()


def begun(tmp_path: Path, stage: str) -> Dry:
    where = {"model": tmp_path, "data": tmp_path, "out": tmp_path}
    options = {"seconds": 1000.0, "workers": 2, "device": "cpu", "precision": "float32"}
    campaign = Dry(**where, **options, scale=TINY, stage=STAGES[stage])  # pyright: ignore[reportArgumentType]
    campaign.starts.mkdir()
    campaign._begin()
    campaign._follow()
    return campaign


@pytest.fixture
def dry(tmp_path: Path) -> Dry:
    return begun(tmp_path, "training")


def reach(campaign: Dry, name: str) -> None:
    (campaign.starts / f"{name}.safetensors").touch()


LEVELS = {"levels-countdown", "levels-chain", "levels-translate"}


def test_nothing_but_fine_tuning_begins_before_there_are_weights(dry: Dry) -> None:
    assert set(dry.running) == LEVELS


def test_training_begins_with_its_weights_and_the_costly_methods_come_first(dry: Dry) -> None:
    reach(dry, "countdown-0.3")
    dry.end("levels-countdown")
    lanes = {"countdown-0", "countdown-1"}
    assert set(dry.running) == (LEVELS | lanes) - {"levels-countdown"}, "sizes come before noise"
    words: list[str] = dry.running["countdown-0"]  # pyright: ignore[reportAssignmentType]
    methods = words[words.index("--methods") + 1 :]
    assert methods[: len(COSTLY)] == [METHODS[name] for name in COSTLY]
    assert sorted(methods) == sorted(METHODS.values())


def test_noise_is_measured_one_by_one(dry: Dry) -> None:
    for name in ("countdown-0.3", "chain-0.3", "chain-0.8", "translate-0.3"):
        reach(dry, name)
    dry._follow()
    order = ["noise-translate-0.3", "noise-countdown-0.3b", "noise-chain-0.8b"]
    for name in order:
        assert [each for each in dry.running if each.startswith("noise")] == [name]
        dry.end(name)
    assert "noise-long-0.1" not in dry.running
    dry.end(*LEVELS)
    words: list[str] = dry.running["levels-long"]  # pyright: ignore[reportAssignmentType]
    assert words[words.index("--start") + 1].endswith("chain-0.8.safetensors")
    reach(dry, "long-0.1")
    dry.end("levels-long")
    assert "noise-long-0.1" in dry.running
    assert (dry.out / "measured" / "long-0.1.safetensors").resolve().parent.name == "starts"


def test_a_lane_takes_the_next_task_when_its_sizes_are_known(dry: Dry) -> None:
    for name in ("countdown-0.3", "chain-0.3", "translate-0.3"):
        reach(dry, name)
    dry._follow()
    dry.end("countdown-0")
    assert not {"translate-0", "chain-0"} & set(dry.running)
    folder = dry.out / "noise"
    folder.mkdir()
    costs = {"group 2, fresh": 5, "group 8, fresh": 9, "branch 4, fresh": 2, "branch 8, fresh": 3}
    with (folder / "noise-translate-0.3.jsonl").open("w") as file:
        for method, cost in costs.items():
            file.write(json.dumps({"method": method, "variance": cost, **MEASURED}) + "\n")
    dry.end("noise-translate-0.3")
    assert {"translate-0", "countdown-1"} <= set(dry.running)
    assert "translate-1" not in dry.running, "its lane is busy"
    words: list[str] = dry.running["translate-0"]  # pyright: ignore[reportAssignmentType]
    assert {"branch:rloo:samples=4", "4*branch:rloo:samples=4", "group:2"} <= set(words)
    dry.end("translate-0")
    assert "chain-0" in dry.running


MEASURED = {"variance_error": 0.1, "tokens": 10.0, "tokens_error": 0.0, "repeats": 5, "round": 0}
MEASURED |= {"unbiased": True, "seconds": 1.0, "memory": None, "accuracy": 0.3}


def test_methods_of_the_noise_exist() -> None:
    measured = (*AGAIN, *SIZES, *BESIDE, *CANDIDATES)
    plain = {name.removesuffix(noise.FRESH) for name in measured}
    assert plain <= set(noise.METHODS)
    assert set(LONG_AGAIN) <= set(noise.LONG_METHODS)


def test_candidates_are_measured_side_by_side_until_the_time_is_over(tmp_path: Path) -> None:
    dry = begun(tmp_path, "candidates")
    assert set(dry.running) == LEVELS
    for name in ("countdown-0.3", "chain-0.3", "chain-0.8", "translate-0.3"):
        reach(dry, name)
    dry.end(*LEVELS)
    reach(dry, "long-0.1")
    dry.end("levels-long")
    levels = {"countdown-0.3c", "chain-0.3c", "chain-0.8c", "translate-0.3c", "long-0.1b"}
    # a level that was not reached is not measured, and nothing is trained
    assert set(dry.running) == {f"noise-{name}" for name in levels}
    words: list[str] = dry.running["noise-chain-0.8c"]  # pyright: ignore[reportAssignmentType]
    assert 970 <= int(words[words.index("--seconds") + 1]) <= 980
    methods = words[words.index("--methods") + 1 :]
    assert {"group 4, fresh", "branch 8", "own 0.5, branch 8, fresh"} <= set(methods)
    assert len(methods) == len(set(methods))
    assert methods[: len(CANDIDATES) + 1] == [f"{x}, fresh" for x in ("branch 8", *CANDIDATES)]
    assert words[words.index("--fixed-from") + 1] == str(FIXED_FROM)


def test_a_process_that_fails_begins_again_a_few_times(tmp_path: Path) -> None:
    campaign = begun(tmp_path, "candidates")
    campaign.running.clear()
    campaign.commands["noise-chain-0.8c"] = ["false"]
    campaign._begin_process("noise-chain-0.8c")
    for _ in range(FURTHER_ATTEMPTS + 1):
        assert not campaign.done
        campaign.running["noise-chain-0.8c"].wait()
        campaign._collect()
    assert not campaign.running
    assert campaign.done == {"noise-chain-0.8c"}


def test_all_processes_end_with_the_time(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    campaign = Campaign(
        folder,
        tmp_path,
        tmp_path / "out",
        seconds=1.0,
        workers=1,
        device="cpu",
        precision="float32",
        scale=replace(TINY, fine_tuning=dict.fromkeys(TINY.fine_tuning, 600.0)),
        stage=STAGES["training"],
    )
    begun = time.monotonic()
    campaign.run()
    assert time.monotonic() - begun < 60
    assert set(campaign.running) == LEVELS
    assert all(process.poll() is not None for process in campaign.running.values())
