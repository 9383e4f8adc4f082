"""The generated parts of the pages under results/ and of the README, written from the tables.

A page marks each part by its name, and `arsm report --export` writes what is between the marks:

    <!-- from the tables: NAME -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from arsm_experiments.report.pages import (
    agents,
    audit,
    benchmarks,
    claims,
    compare,
    conditional,
    control,
    language_model,
    language_model_candidates,
    language_model_history,
    maximize,
    paper,
    pyro,
    quantisation,
    routers,
    sequences,
    tasks,
    toy,
    trl,
    vae,
)
from arsm_experiments.report.pages.tables import Part, Tables
from arsm_experiments.runs.files import write_atomically

PAGES: dict[str, Mapping[str, Part]] = {
    "toy/README.md": toy.PARTS,
    "toy/HISTORY.md": toy.HISTORY_PARTS,
    "vae/README.md": vae.PARTS,
    "vae/HISTORY.md": vae.HISTORY_PARTS,
    "conditional/README.md": conditional.PARTS,
    "conditional/HISTORY.md": conditional.HISTORY_PARTS,
    "control/README.md": control.PARTS,
    "control/HISTORY.md": control.HISTORY_PARTS,
    "compare/README.md": compare.PARTS,
    "compare/HISTORY.md": compare.HISTORY_PARTS,
    "agents/README.md": agents.PARTS,
    "audit/README.md": audit.PARTS,
    "audit/HISTORY.md": audit.HISTORY_PARTS,
    "agents/HISTORY.md": agents.HISTORY_PARTS,
    "sequences/README.md": sequences.PARTS,
    "sequences/HISTORY.md": sequences.HISTORY_PARTS,
    "language_model/README.md": language_model.PARTS,
    "language_model/HISTORY.md": language_model_history.PARTS,
    "language_model/candidates.md": {"candidates": language_model_candidates.table},
    "maximize/README.md": maximize.PARTS,
    "maximize/HISTORY.md": maximize.HISTORY_PARTS,
    "pyro/README.md": pyro.PARTS,
    "pyro/HISTORY.md": pyro.HISTORY_PARTS,
    "router/README.md": routers.PARTS,
    "router/HISTORY.md": routers.HISTORY_PARTS,
    "trl/README.md": trl.PARTS,
    "trl/HISTORY.md": trl.HISTORY_PARTS,
    "README.md": paper.PARTS,
    "beyond.md": {"tasks": tasks.table},
    "../README.md": {
        "claims": claims.claims,
        "paper": paper.short,
    },
    "../benchmarks/README.md": benchmarks.PARTS,
    "../docs/estimators.md": {"compare": compare.in_short},
    "../docs/guides/choosing.md": {"compare": compare.choosing},
    "../docs/guides/other_trainers.md": {"noise": trl.noise_in_short},
    "../docs/guides/your_environment.md": {"branches": agents.in_short},
    "../docs/guides/your_language_model.md": {"noise": language_model.in_short},
    "../docs/guides/your_pyro_model.md": {"pyro": pyro.in_short},
    "../docs/guides/vector_quantisation.md": quantisation.PARTS,
}
"""The parts of each page by name; pages are relative to results/."""
MARKED = re.compile(r"(<!-- from the tables: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, parts: Mapping[str, Part], tables: Tables) -> str:
    """The page with every marked part made again."""

    def fill(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return begin + parts[name](tables).rstrip("\n") + "\n" + end

    return MARKED.sub(fill, page)


def remake(results: Path) -> list[Path]:
    """Write the marked parts of all pages beside these results; returns the pages that have any."""
    tables = Tables(results)
    made = []
    for name, parts in PAGES.items():
        page = results / name
        if page.is_file() and MARKED.search(text := page.read_text()):
            content = filled(text, parts, tables).encode()
            write_atomically(page, lambda file, content=content: file.write(content))
            made.append(page)
    return made
