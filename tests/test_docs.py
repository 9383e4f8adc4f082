"""The documentation does what it says: code runs, commands parse, numbers agree with results/, and
the site builds.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import os
import pydoc
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import arsm
from arsm.capabilities import NEEDS
from arsm.noise import dirichlet
from arsm_experiments.cli import parse
from tests.by_definition import pseudo_actions
from tests.problems import PROBLEMS
from tests.test_unbiased import worst

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
REPOSITORY = [*PAGES, *sorted(ROOT.glob("results/**/README.md")), ROOT / "benchmarks" / "README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_page(page: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for language, block in FENCE.findall(page.read_text()):
        if language == "python":
            exec(compile(block, str(page), "exec"), names)
    return names


# ---------------------------------------------------------------- Python

CLAIMS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "docs/guides/your_model.md": lambda page: (
        page["losses"][-1] < 0.6 * page["losses"][0]
        and page["accuracy"] > 0.9
        and page["route_losses"][-1] < 0.3 * page["route_losses"][0]
        and page["on"] == [0, 1, 2, 3, 4]
    ),
    "docs/guides/your_environment.md": lambda page: (
        sum(page["scores"][-10:]) > sum(page["scores"][:10]) + 2
        and sum(page["performance"][-10:]) > 0.5 * sum(page["performance"][:10])
    ),
    "docs/guides/your_pyro_model.md": lambda page: (
        page["losses"][-1] < 0.6 * page["losses"][0] and min(page["right"]) > 0.9
    ),
    "docs/guides/pyro_recipes.md": lambda page: all(
        losses[-1] < losses[0] for losses in page["curves"]
    ),
    "docs/guides/choice.md": lambda page: page["accuracy"] > 0.75 and page["selected"] == [[1, 4]],
    "docs/guides/vector_quantisation.md": lambda page: page["losses"][-1] < 0.6 * page["losses"][0],
    "docs/adding_a_caller.md": lambda page: (
        sum(page["history"][-10:]) < 0.8 * sum(page["history"][:10])
    ),
    "docs/guides/your_black_box.md": lambda page: page["best"].point.tolist() == [2, 5, 1],
    "docs/guides/your_language_model.md": lambda page: (
        sum(page["history"][-10:]) > sum(page["history"][:10]) + 3
        and page["mismatch"] < 1e-3
        and page["found"].rows[0].label.startswith("Branch")
        and page["found"].rows[0].cost < 0.5 * min(row.cost for row in page["found"].rows[3:])
    ),
    "docs/guides/other_trainers.md": lambda page: (
        page["batch"]["credit_tokens"].shape == page["batch"]["credit_weights"].shape == (3, 6, 4)
    ),
    "docs/mathematics/swap.md": lambda page: (
        float((page["error"] / page["standard_error"]).abs().max()) < 6
    ),
    "docs/mathematics/computing.md": lambda page: (
        float((page["fast"] - page["slow"]).abs().max()) < 1e-12
    ),
    "docs/mathematics/beyond.md": lambda page: (
        abs(float(page["variance"]) / page["predicted"] - 1) < 0.1
    ),
    "docs/mathematics/sequences.md": lambda page: page["mean"] == [1] * 5,
}
"""What a page says that its code shows."""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_blocks_run_and_show_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = run_page(page)
    assert CLAIMS.get(name(page), lambda _: True)(names)


def test_the_readmes_code_prints_what_its_last_lines_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_page(ROOT / "README.md")
    said = re.findall(r"^# (.* runs)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said


def test_the_readmes_counts_over_many_runs_are_those_of_its_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "README.md").read_text()
    runs, *said = re.findall(r"With (\d+) runs instead of 10: (\d+), (\d+) and (\d+)", text)[0]
    code = text.partition("```python\n")[2].partition("```")[0]
    exec(code.replace("torch.zeros(10,", f"torch.zeros({runs},"), {})
    assert re.findall(r"in (\d+) of", capsys.readouterr().out) == said


def test_every_claim_has_its_page() -> None:
    assert set(CLAIMS) <= set(map(name, PAGES))


@pytest.mark.parametrize("skeleton", ["ModeBaseline", "MedianBaseline"])
def test_the_skeletons_are_unbiased(skeleton: str) -> None:
    estimator = run_page(DOCS / "adding_an_estimator.md")[skeleton]()
    for problem in PROBLEMS:
        assert max(worst(estimator, problem).values()) <= 1, problem.name


def test_the_table_of_an_estimator_has_every_member_with_a_default() -> None:
    table = (
        (DOCS / "adding_an_estimator.md")
        .read_text()
        .partition("| member |")[2]
        .partition("\n\n")[0]
    )
    listed = set(re.findall(r"^\| `(\w+)", table, re.MULTILINE))
    declared = {
        name
        for name in (*vars(arsm.Estimator), *arsm.Estimator.__annotations__)
        if not name.startswith("_")
    }
    assert listed == declared - {"unbiased", "noise", "ask", "tell"}


def test_the_table_of_needs_is_complete() -> None:
    table = (DOCS / "adding_a_caller.md").read_text().partition("| need |")[2].partition("\n\n")[0]
    assert set(re.findall(r'^\| `"(\w+)"', table, re.MULTILINE)) == set(NEEDS)


def test_the_page_quotes_a_refusal_as_it_is() -> None:
    with pytest.raises(ValueError, match="GumbelSoftmax") as refusal:
        arsm.policy.plan(
            arsm.GumbelSoftmax(), torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, dtype=torch.int64)
        )
    assert f'"{refusal.value}"' in (DOCS / "adding_an_estimator.md").read_text()


# ---------------------------------------------------------------- commands


def test_blocks_in_docs_are_python_or_commands() -> None:
    """Nothing escapes the tests by being called something else."""
    for page in DOCS.rglob("*.md"):
        languages = {language for language, _ in FENCE.findall(page.read_text())}
        assert languages <= {"python", "console", "diff", "bibtex"}, name(page)


def test_what_a_diff_leaves_is_python_with_names_that_exist() -> None:
    changed = 0
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language != "diff":
                continue
            kept = [line[1:] for line in block.splitlines() if not line.startswith("-")]
            changed += 1
            for node in ast.walk(ast.parse("\n".join(kept))):
                if isinstance(node, ast.ImportFrom):
                    module = pytest.importorskip(node.module or "", reason="in the extra `trl`")
                    assert all(hasattr(module, alias.name) for alias in node.names), name(page)
    assert changed > 0


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Every line of a page that is no Python and begins with one of the project's commands."""
    for page in REPOSITORY:
        for language, block in FENCE.findall(page.read_text()):
            for line in block.splitlines() if language != "python" else ():
                if re.match(
                    r"(arsm|make|pip install|python -m|python \S+\.py|torchrun)( |$)", line
                ):
                    yield page, shlex.split(line, comments=True)
                else:
                    assert language != "console", (
                        f"{name(page)}: {line!r} is no command that a test checks"
                    )


def check(words: list[str]) -> bool:
    """Whether the command exists with these options."""
    command, *rest = words
    if command == "arsm":
        made = parse(rest)
        assert made is not None
        # a word in capitals, and a class in a file, stand for one of the reader's
        if not any(word.isupper() or ".py:" in word for word in rest):
            made.check()
        return True
    if command == "make":
        return all(
            re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            for target in rest
        )
    if command == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        named = re.search(r"\[(.*)\]", rest[-1])
        return rest[0] == "install" and (named is None or set(named[1].split(",")) <= set(extras))
    if command == "torchrun":
        module = rest.index("-m") + 1
        return check(["arsm", rest[module].removeprefix("arsm_experiments."), *rest[module + 1 :]])
    if rest[0] == "-m":
        return importlib.util.find_spec(rest[1]) is not None
    return (ROOT / rest[0]).is_file()


def test_commands_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "full").mkdir(parents=True)  # as the commands before leave it
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    # a page may name a model that is not installed here
    monkeypatch.setattr("arsm_experiments.sequences.command.check_pretrained", lambda *_: None)
    found = list(commands())
    assert {words[0] for _, words in found} >= {"arsm", "make", "pip", "python"}
    for page, words in found:
        assert check(words), f"{name(page)}: {shlex.join(words)}"


# ---------------------------------------------------------------- numbers and names


def test_links_lead_somewhere() -> None:
    for page in REPOSITORY:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def changes() -> dict[str, list[str]]:
    """The files of every change in the table of CONTRIBUTING.md."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| change | files |")[2]
    rows = re.findall(r"^\| ([a-z][^|]*) \| (.*) \|$", table.partition("\n\n")[0], re.MULTILINE)
    file = re.compile(r"`([\w./*<>-]+(?:\.py|\.toml|/))`")
    return {change: file.findall(files) for change, files in rows}


def test_files_that_a_change_touches_exist() -> None:
    folders = [ROOT / "src", ROOT / "tests", ROOT / "experiments"]
    there = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    assert len(changes()) == 10
    for change, files in changes().items():
        # the room of the twin is yet to be made
        for file in set(files) - {"src/arsm/jax/"}:
            pattern = re.sub(r"<\w+>", "*", file)
            assert any(path.match(pattern) for path in there), f"{change}: there is no {file}"


def test_estimators_page_names_every_estimator() -> None:
    words = set(re.findall(r"^\| `([a-z-]+)", (DOCS / "estimators.md").read_text(), re.MULTILINE))
    assert words == set(arsm.estimator_names())


def test_environment_guide_names_settings_that_exist() -> None:
    from arsm.rl import PolicyGradient, Settings

    known = {field.name for field in dataclasses.fields(Settings)} | set(
        inspect.signature(PolicyGradient).parameters
    )
    words = re.findall(
        r"^\| `(\w+)", (DOCS / "guides" / "your_environment.md").read_text(), re.MULTILINE
    )
    assert len(words) > 5
    assert set(words) <= known


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_figure_shows_what_the_first_page_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = load(DOCS / "swap_figure.py")
    figure.draw(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        path.name for path in (DOCS / "assets").glob("swap-*.svg")
    }
    log_pi = dirichlet(figure.LOGITS, torch.Generator().manual_seed(figure.SEED))
    pseudo = pseudo_actions(figure.LOGITS, log_pi)
    winner, (first, second) = figure.NAMES[pseudo[0, 0]], figure.SWAP
    sentence = (
        f"{winner} has won, but had {figure.NAMES[first]} and {figure.NAMES[second]} drawn each "
        f"other's noise, {figure.NAMES[pseudo[first, second]]} would have"
    )
    assert sentence in " ".join((DOCS / "index.md").read_text().split())
    assert len(pseudo.unique()) == 5


def test_the_pictures_of_boxes_are_those_that_their_script_draws(tmp_path: Path) -> None:
    load(DOCS / "boxes_figures.py").draw(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_text() == (DOCS / "assets" / path.name).read_text()


def test_every_picture_is_shown() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for path in (DOCS / "assets").glob("*.svg"):
        assert f"assets/{path.name}#only-" in pages, path.name


# ---------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is in the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Requests(HTMLParser):
    """What a browser fetches for a page without being asked."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fetched = ("href",) if tag == "link" else ("src", "srcset", "data", "poster")
        self.found |= {value for key, value in attrs if key in fetched and value}


def test_the_site_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        outside = {target for target in Requests(page).found if re.match(r"(https?:)?//", target)}
        assert not outside, name_in(site, page)
        assert 'class="mermaid"' not in page.read_text(), "diagrams would fetch a script"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text()), name_in(
            site, sheet
        )


def name_in(site: Path, path: Path) -> str:
    return str(path.relative_to(site))


def test_formulas_are_mathml(site: Path) -> None:
    count = 0
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert "arithmatex" not in text, name_in(site, page)
        count += text.count("<math ")
    sources = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert count >= len(re.findall(r"\$\$.+?\$\$", sources, re.DOTALL)) + 100


def test_a_formula_that_is_not_understood_is_refused() -> None:
    pytest.importorskip("latex2mathml")
    formula = load(DOCS / "hooks" / "mathml.py").formula
    assert "<mi>tr</mi><mspace" in formula(r"\operatorname{tr} G", display=False)
    with pytest.raises(ValueError, match="in other words"):
        formula(r"\nosuchcommand x", display=False)


def test_the_reference_has_every_public_name(site: Path) -> None:
    from arsm import rl, sequences

    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    ids = set(re.findall(r'id="([\w.]+)"', text))
    assert {f"arsm.{public}" for public in arsm.__all__} <= ids
    assert {f"arsm.rl.{public}" for public in rl.__all__} <= ids
    assert {f"arsm.sequences.{public}" for public in sequences.__all__} <= ids


# ---------------------------------------------------------------- the front door


def doors() -> list[Path]:
    """The pages that the README's table of starting points leads to."""
    table = (ROOT / "README.md").read_text().partition("| you have |")[2].partition("\n\n")[0]
    return [ROOT / target for target in re.findall(r"\]\(([^)]+)\)", table)]


def test_there_is_a_door_for_everyone() -> None:
    wanted = {"model", "choice", "language", "pyro", "environment", "black_box", "gradient"}
    assert len(doors()) >= len(wanted)
    for word in wanted:
        assert any(word in door.stem for door in doors()), word


@pytest.mark.parametrize("door", doors(), ids=lambda door: door.stem)
def test_the_first_code_behind_a_door_runs_as_pasted(
    door: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # how to install it, and what to change in a script, come before
    blocks = [
        each for each in FENCE.findall(door.read_text()) if each[0] not in ("console", "diff")
    ]
    language, block = blocks[0]
    assert language == "python"
    exec(compile(block, str(door), "exec"), {})
    assert capsys.readouterr().out.strip(), "the first code of a page shows something"


def test_the_readme_is_short_and_in_plain_words() -> None:
    text = (ROOT / "README.md").read_text()
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 900
    results = text.partition("## Results")[2].partition("\n## ")[0]
    assert 6 <= results.count("\n| [") <= 14
    raw = [
        word
        for word in arsm.estimator_names()
        if re.search(rf"(?<![\w-]){word}[:,; ]", results) and word.islower()
    ]
    assert [word for word in raw if word not in ("straight-through",)] == []
    assert not re.search(r"\w+=\w+", results), "settings as a command takes them"


def test_the_reference_in_a_clone_is_current() -> None:
    index = load(DOCS / "reference_index.py")
    assert index.PAGE.read_text() == index.page(), (
        "docs/reference/README.md is stale; run `make readme`"
    )


def test_help_shows_the_fields_of_a_class() -> None:
    from arsm import diagnostics, layers, policy, rl, sequences

    budget = "budget: S_max: the most rollouts per true episode; None for all."
    for cls, words in (
        (rl.Settings, budget),
        (rl.Learning, "gamma: Discount factor."),
        (rl.Iteration, "episodes: True episodes so far."),
        (arsm.Estimate, "estimator_loss: "),
        (arsm.RLOO, "live: "),
        (policy.Rollouts, "weight: "),
        (sequences.SequenceEstimate, "tokens: "),
        (arsm.extend.SampleNoise, "given: [*B, g, K] int64"),
        (layers.LayersEstimate, "layers: "),
        (diagnostics.Bias, "standard_error: "),
    ):
        text = pydoc.plain(pydoc.render_doc(cls))
        assert words in text.partition("Attributes:")[2], f"help({cls.__name__}) should say {words}"
    assert "Attributes:" not in (inspect.getdoc(arsm.GumbelSoftmax.__mro__[1]) or "")


def test_help_explains_every_option_of_every_estimator() -> None:
    classes: set[Any] = {type(arsm.estimator(words)) for words in arsm.estimator_names()}
    classes |= {arsm.SIMPLE, arsm.SubsetRLOO, arsm.Average}
    for cls in classes:
        text = (inspect.getdoc(cls) or "").partition("Attributes:")[2]
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.init and f"{field.name}: " not in text
        ]
        assert not missing, f"help({cls.__name__}) should explain {missing}"


# ---------------------------------------------------------------- releases


def test_one_version_everywhere() -> None:
    import arsm_experiments

    assert arsm.__version__ == arsm_experiments.__version__ == "0.3.0"
    newest = re.search(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] in (arsm.__version__, "Unreleased")
    assert f"\nversion: {arsm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
