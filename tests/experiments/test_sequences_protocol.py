"""The order in which the comparison's processes begin, and that all of them end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from arsm_experiments.runs.writer import open_run
from arsm_experiments.sequences import noise
from arsm_experiments.sequences.protocol import AGAIN, LONG, TINY, Campaign
from arsm_experiments.sequences.trials import EXPERIMENT, METHODS, RATES, TRIAL, Job, trials
from tests.experiments.tiny_llama import save_tiny_llama

pytest.importorskip("transformers", reason="transformers is in the extra `transformers`")


class Dry(Campaign):
    """Notes what would begin; a test says what has ended."""

    def _launch(self, name: str, module: str, words: list[str]) -> None:
        if name not in self.done and name not in self.running:
            self.running[name] = (module, words)  # pyright: ignore[reportArgumentType]

    def end(self, *names: str) -> None:
        for name in names:
            del self.running[name]
            self.done.add(name)


@pytest.fixture
def dry(tmp_path: Path) -> Dry:
    where = {"model": tmp_path, "data": tmp_path, "out": tmp_path}
    options = {"seconds": 1000.0, "workers": 2, "device": "cpu", "precision": "float32"}
    campaign = Dry(**where, **options, scale=TINY)  # pyright: ignore[reportArgumentType]
    campaign.starts.mkdir()
    campaign._begin()
    return campaign


def reach(campaign: Dry, name: str) -> None:
    (campaign.starts / f"{name}.safetensors").touch()


def finish(campaign: Dry, job: Job) -> None:
    plan = campaign._plan("countdown")
    with open_run(campaign.runs, EXPERIMENT, job.name(plan), job.config(plan)) as run:
        run.log(0, {"accuracy": 0.5}, job.seed)


def test_nothing_but_the_first_task_and_chain_begins_before_there_are_weights(dry: Dry) -> None:
    first = {"levels-countdown", "levels-chain", "countdown-0", "countdown-1"}
    assert set(dry.running) == first | {f"countdown-ppo-{n}" for n in range(len(RATES))}
    dry._follow()
    assert len(dry.running) == len(first) + len(RATES)


def test_noise_and_further_tasks_follow_their_weights(dry: Dry) -> None:
    reach(dry, "countdown-0.3")
    dry._follow()
    assert {"levels-translate", "noise-countdown-0.3b"} <= set(dry.running)
    assert "noise-chain-0.3b" not in dry.running
    reach(dry, "chain-0.3")
    reach(dry, "chain-0.8")
    dry._follow()
    assert "noise-chain-0.8b" in dry.running
    assert "noise-chain-0.3b" not in dry.running, "one process at a time"
    dry.end("levels-chain", "noise-chain-0.8b")
    dry._follow()
    assert "noise-chain-0.3b" in dry.running
    assert not {"levels-long", "countdown-2"} & set(dry.running), "value heads hold the memory"
    dry.end("noise-countdown-0.3b", *(f"countdown-ppo-{n}" for n in range(len(RATES))))
    dry._follow()
    assert {"levels-long", "countdown-2", "countdown-3", "countdown-4"} <= set(dry.running)
    dry.end("levels-long")
    reach(dry, "long-0.1")
    dry._follow()
    assert "noise-long-0.1" in dry.running
    assert (dry.out / "second" / "long-0.1.safetensors").resolve().parent.name == "starts"


def test_translation_waits_for_the_trials_and_for_idle_workers(dry: Dry) -> None:
    reach(dry, "countdown-0.3")
    dry._follow()
    dry.end("levels-translate", "countdown-0")
    dry._follow()
    assert "translate-0" not in dry.running, "trials on countdown are open"
    for job in trials(tuple(METHODS.values()), RATES):
        assert job.seed == TRIAL
        finish(dry, job)
    dry._follow()
    assert "translate-0" in dry.running
    assert "translate-1" not in dry.running, "its worker is busy"


def test_methods_of_the_noise_exist() -> None:
    assert set(AGAIN) <= set(noise.METHODS)
    assert set(LONG) <= set(noise.LONG_METHODS)


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
    )
    begun = time.monotonic()
    campaign.run()
    assert time.monotonic() - begun < 60
    assert len(campaign.running) == 2 + len(RATES) + 1
    assert all(process.poll() is not None for process in campaign.running.values())
