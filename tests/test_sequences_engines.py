"""Rollouts elsewhere: parts that anybody may play, weights that follow, engines that die; on Ray
with two actors.
"""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arsm
from arsm import sequences
from arsm.sequences import Branch, Completions, Decoding, EngineFailure, Group, Prefixes, Server
from arsm.sequences.engines import gather, split, weights_version
from tests.statistics import deviations
from tests.tables import Setting

ROWS = 6


class Parts:
    """An engine in this process that plays parts last to first and, as a server, knows no ln p of a
    given token.
    """

    def __init__(self, model: sequences.Model, rows: int = 50, **changes: Any) -> None:
        self.model, self.rows, self.changes = model, rows, changes

    def complete(
        self,
        prompts: Tensor,
        mask: Tensor | None,
        prefixes: Prefixes,
        decoding: Decoding,
        generator: torch.Generator | None = None,
    ) -> Completions:
        drawn_with = Decoding(**{**vars(decoding), **self.changes})
        parts = split(prompts, mask, prefixes, drawn_with, self.rows, generator)
        played = [part.play(self.model) for part in reversed(parts)][::-1]
        whole = gather(parts, played, prefixes, decoding)
        given = (prefixes.action >= 0).nonzero().squeeze(-1)
        whole.log_probs[given, prefixes.step[given]] = 0
        return whole


class Small(nn.Module):
    """A causal module whose logits depend on the last token and the sum of all."""

    def __init__(self, vocabulary: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary * 7, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens + 5 * (tokens.cumsum(-1) % 7))


def small() -> Small:
    torch.manual_seed(0)
    return Small()


@pytest.mark.parametrize("kl", [0.0, 0.4])
@pytest.mark.parametrize("strategy", [Branch(arsm.RLOO(3)), Group(2)], ids=str)
def test_unbiased_with_an_engine(strategy: sequences.Strategy, kl: float) -> None:
    setting = Setting(eos=0, ragged=True, temperature=0.7, kl=kl)
    rows = 6000
    engine = Parts(setting.model(rows), rows=1000)
    assert deviations(setting.estimates(strategy, rows, engine=engine), setting.exact()).max() < 1


def test_no_row_is_taken_for_another() -> None:
    setting = Setting(vocabulary=4, max_tokens=6, eos=0)
    model, how = setting.model(20), Decoding(6, 0)
    prompts = setting.prompts(20)[0]
    generator = torch.Generator().manual_seed(1)
    true = sequences.complete(
        model, prompts, None, Prefixes.bare(torch.arange(20), 6), how, generator
    )
    row, step = sequences.live_tokens(true.tokens, 0).nonzero().unbind(-1)
    mixed = torch.randperm(len(row), generator=generator)
    row, step = row[mixed], step[mixed]
    prefixes = Prefixes(row, step, (true.tokens[row, step] + 1) % 4, true.tokens)
    done = Parts(model, rows=7).complete(prompts, None, prefixes, how, generator)
    own = (
        model.logits(prompts[row], done.tokens)
        .log_softmax(-1)
        .gather(-1, done.tokens.unsqueeze(-1))
        .squeeze(-1)
    )
    drawn = (torch.arange(6) > step.unsqueeze(-1)) & sequences.live_tokens(done.tokens, 0)
    torch.testing.assert_close(done.log_probs, torch.where(drawn, own, 0))
    assert torch.equal(done.tokens[torch.arange(len(row)), step], prefixes.action)


def test_versions_tell_weights_apart() -> None:
    module = small()
    first = weights_version(module)
    assert weights_version(copy.deepcopy(module)) == first
    optimiser = torch.optim.SGD(module.parameters(), lr=1e-6)
    module(torch.tensor([[1, 2]])).square().sum().backward()
    optimiser.step()
    second = weights_version(module)
    module.table.weight.data[0, 0] += 1e-6  # which no version counter of torch's sees
    third = weights_version(module)
    assert len({first, second, third, weights_version(module.half())}) == 4
    assert weights_version(nn.Identity()) == weights_version(nn.Identity())
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.complex128):
        odd = nn.Identity()
        odd.register_buffer("number", torch.tensor(1).to(dtype))
        before = weights_version(odd)
        odd.get_buffer("number").zero_()
        assert weights_version(odd) != before


def estimate(
    engine: sequences.Engine, module: Small | None = None, rows: int = ROWS, **options: Any
) -> sequences.SequenceEstimate:
    prompts = torch.tensor([[1, 2]]).repeat(rows, 1)
    return sequences.estimate(
        Branch(arsm.RLOO(3)),
        sequences.Recompute(module or small()),
        prompts,
        lambda prompts, tokens: (tokens == 2).double().mean(-1),
        max_tokens=8,
        eos=0,
        engine=engine,
        generator=torch.Generator().manual_seed(3),
        **options,
    )


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {}], ids=["temperature", "weights"])
def test_samples_of_another_distribution_are_refused(changes: dict[str, Any]) -> None:
    other = small()
    if not changes:
        other.table.weight.data.neg_()
    with pytest.raises(
        ValueError, match=r"are not samples of this model: (other weights|temperature \S+) explains"
    ):
        estimate(Parts(sequences.Recompute(other), **changes), rows=20 * ROWS)


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    wider = sequences.Recompute(lambda tokens: torch.zeros(*tokens.shape, 60))
    with pytest.raises(
        ValueError, match=r"The engine sampled the token \d+, but the model's vocabulary is 0 to 4"
    ):
        estimate(Parts(wider))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="is no address of a server; write http://HOST:PORT"):
        Server(url, nn.Identity())


def test_a_server_that_is_not_there_changes_nothing() -> None:
    module = small()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(
        EngineFailure,
        match=r"The engine at http://127.0.0.1:9 does not answer .*nothing was changed\.$",
    ):
        estimate(Server("http://127.0.0.1:9", module), module)
    assert module.table.weight.grad is None
    assert torch.equal(before["table.weight"], module.table.weight)


# ---------------------------------------------------------------- Ray


class Deadly(Small):
    """Ends every process but the one that it was made in."""

    def __init__(self) -> None:
        super().__init__()
        self.home: Any = os.getpid()

    def forward(self, tokens: Tensor) -> Tensor:
        if os.getpid() != self.home:
            os._exit(1)
        return super().forward(tokens)


def same(a: sequences.SequenceEstimate, b: sequences.SequenceEstimate) -> bool:
    assert a.branches is not None
    assert b.branches is not None
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.branches.tokens, b.branches.tokens)


@pytest.mark.slow
def test_ray_actors_play_what_one_process_plays() -> None:
    """Two actors, one, and none; after an update of the weights; and after an actor was killed."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=4, log_to_driver=False, include_dashboard=False)
    module = small()
    model = sequences.Recompute(module)
    two = sequences.Cluster(model, module, workers=2, rows=5)
    try:
        one = sequences.Cluster(model, module, workers=1, rows=5)
        for update in range(3):
            expected = estimate(Parts(model, rows=5), module)
            assert same(estimate(two, module), expected)
            if update == 0:
                assert same(estimate(one, module), expected)
                one.close()
            if update == 1:
                pid = ray.get(two._actors[0].__ray_call__.remote(lambda self: os.getpid()))
                os.kill(pid, signal.SIGKILL)
            else:
                expected.value.sum().backward()
                torch.optim.SGD(module.parameters(), lr=1.0).step()
        deadly = Deadly()
        sequences.Cluster.patience = 1
        failing = sequences.Cluster(sequences.Recompute(deadly), deadly, workers=1)
        with pytest.raises(
            EngineFailure,
            match=r"A worker died 2 times over the same rollouts; .* nothing was changed\.$",
        ):
            estimate(failing, deadly)
        failing.close()
    finally:
        sequences.Cluster.patience = 3
        two.close()
        ray.shutdown()


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ValueError, match=r"needs ray; install it with `pip install 'arsm\[cluster\]'`"
    ):
        sequences.Cluster(sequences.Recompute(small()), small())
