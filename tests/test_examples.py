"""Every example runs in a short form and already shows what it is there to show."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import arsm

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_choice", "latent_code"])
def test_notebooks_run_from_top_to_bottom(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    monkeypatch.setattr(plt, "show", plt.close)
    cells = json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    variables: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), variables)
    if name == "one_choice":
        assert variables["found"]["REINFORCE"] == 0
        assert variables["found"]["ARSM"] == 10
    else:
        ends = [curve[-1] for curve in variables["curves"].values()]
        assert ends[1] < ends[0] - 10  # leave-one-out is ahead of averaged REINFORCE


def test_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quickstart.py"])
    load("quickstart")
    assert capsys.readouterr().out.splitlines() == [
        "REINFORCE finds the best of 30 choices in 0 of 10 runs.",
        "leave-one-out finds the best of 30 choices in 10 of 10 runs.",
    ]


def test_training_loop() -> None:
    reached = load("training_loop").main(steps=200, batch=50, estimators=["arsm:pooled=True"])
    assert reached["arsm:pooled=True"] < 200  # a decoder that learns alone stays at 206


def test_lightning_module() -> None:
    pytest.importorskip(
        "lightning", reason="lightning is not installed; pip install 'arsm[examples]'"
    )
    reached = load("lightning_module").main(
        steps=200, estimators=["rloo:samples=29,live=1", "relax"]
    )
    assert reached["rloo:samples=29,live=1"] < 20  # from 45 nats
    assert reached["relax"] < 34.5  # a model that makes no use of its choices stays at 34.9


def test_distributions() -> None:
    module = load("distributions")
    reached = module.main(steps=100)
    torch.manual_seed(0)
    dial = module.Dial()
    start, evidence = (
        dial.elbo(arsm.Exact(), torch.zeros(module.K, module.C)).item(),
        dial.evidence().item(),
    )
    assert all(evidence - 0.1 * (evidence - start) < elbo < evidence for elbo in reached.values())


def test_router() -> None:
    reached = load("router").main(steps=60)
    best_alone = max(share for name, share in reached.items() if name.startswith("always"))
    assert reached["arsm:pooled=True"] > best_alone


def test_black_box() -> None:
    module = load("black_box")
    sys.modules[module.__name__] = module  # other processes import f by its name
    reached = module.main(evaluations=32)
    assert reached["maximize"] > reached["average"] + 0.2


def test_simulator() -> None:
    reached = load("simulator").main(steps=40)
    assert reached["arsm:pooled=True"] > reached["best constant level"]


def test_new_caller() -> None:
    module = load("new_caller")
    reached = module.main(steps=40)
    best_rule = min(reached[name] for name in module.RULES)
    assert reached["branch, ARSM"] < reached["whole runs, REINFORCE"]
    assert reached["branch, leave-one-out of 4"] < best_rule


def test_retrieval(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("retrieval")
    monkeypatch.setattr(module, "C", 2_000)
    reached = module.main(steps=40, samples=4)
    assert reached["unordered-set:samples=8"] > reached["untrained"] + 0.05


def test_language_model() -> None:
    pytest.importorskip(
        "transformers", reason="transformers is not installed; pip install 'arsm[transformers]'"
    )
    reached = load("language_model").main(imitation=180, tokens=30_000)
    assert reached["every token"] > reached["start"] + 0.03
    assert reached["whole answers"] > 0.2


def test_trl_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="TRL is not installed; pip install 'arsm[trl]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reached = load("trl_branch").main(imitation=100, updates=25)
    assert reached["BranchTrainer"] > reached["start"] + 0.03  # 1,000 answers: two standard errors
    assert reached["GRPOTrainer"] > reached["start"] - 0.05


def test_the_page_lists_every_example() -> None:
    linked = set(re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text()))
    assert linked == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_how_to_run_it(path: Path) -> None:
    assert f"python examples/{path.name}" in path.read_text()


def test_many_actions() -> None:
    pytest.importorskip("gymnasium")
    reached = load("many_actions").main(knobs=2, steps=100_000)
    for before, after in reached.values():  # 12.1, and 19.6 with a standard error of 1
        assert after > before + 5
    assert len(reached) == 2


def test_knobs_drag_their_neighbours_and_go_back() -> None:
    pytest.importorskip("gymnasium")
    knobs = load("many_actions").Knobs(4)
    begin, _ = knobs.reset(seed=0)
    state = knobs.save_state()
    # the first moves by 0.2, its neighbours by half of that
    off, reward, *_ = knobs.step([4, 2, 2, 2])
    torch.testing.assert_close(
        torch.tensor(off - begin), torch.tensor([0.2, 0.1, 0.0, 0.1]).double()
    )
    assert reward == pytest.approx(1 - abs(off).mean())
    knobs.load_state(state)
    again, *_ = knobs.step([4, 2, 2, 2])
    assert again.tolist() == off.tolist()
    ends = [knobs.step([2, 2, 2, 2])[3] for _ in range(31)]
    assert ends == [False] * 30 + [True]


@pytest.mark.parametrize("knobs", [1, 4, 16])
def test_the_pseudo_actions_of_many_knobs_do_not_grow_with_them(knobs: int) -> None:
    logits = torch.zeros(1, 200, knobs, 5)
    actions = torch.distributions.Categorical(logits=logits).sample()
    found = arsm.policy.plan(arsm.ARSM(), logits, actions).pseudo_actions
    assert int(found.max()) <= 5 * 4 // 2


def test_spread() -> None:
    pytest.importorskip("mpe2", reason="mpe2 is not installed; pip install 'arsm[games]'")
    assert sorted(load("spread").main(agents=2, steps=500)) == ["agent_0", "agent_1"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_what_to_expect(path: Path) -> None:
    """`--help` prints the file's head: what it shows, what to look at, how to run it."""
    source = path.read_text()
    assert "description=__doc__" in source
    head = ast.get_docstring(ast.parse(source)) or ""
    assert re.search(r"\b(Expect|expect|Look at)\b", head)
    assert f"python examples/{path.name}" in head
