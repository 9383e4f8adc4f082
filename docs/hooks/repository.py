"""Pages that live elsewhere in the repository, results and benchmarks, appear in the site as they
are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

PUBLISHED = (
    "results/README.md",
    "results/beyond.md",
    "results/*/README.md",
    "results/*/speed.md",
    "results/*.png",
    "results/*/*.png",
    "results/*/*.gif",
    "benchmarks/README.md",
)
LINKED = (
    "results/judging.md",
    "results/*/HISTORY.md",
    "results/*/PROTOCOL.md",
    "results/*/candidates.md",
)
"""Pages that the others link to, and the menu does not list."""
TARGET = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")


def published(config: MkDocsConfig) -> list[str]:
    """Their paths in the repository, which are those in the site."""
    root = Path(config.config_file_path).parent
    return [
        path.relative_to(root).as_posix()
        for pattern in (*PUBLISHED, *LINKED)
        for path in sorted(root.glob(pattern))
    ]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Results that the menu has no title for come last, under their own."""
    section = next(part["Results"] for part in config.nav or [] if "Results" in part)
    listed = {uri for entry in section for uri in entry.values()}
    section += [uri for uri in published(config) if uri.endswith("README.md") and uri not in listed]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them."""
    root = Path(config.config_file_path).parent
    for uri in published(config):
        file = File(uri, str(root), config.site_dir, config.use_directory_urls)
        if any(PurePosixPath(uri).match(pattern) for pattern in LINKED):
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link in or out of docs/ leads to the page of the site that shows the same file."""
    docs = Path(config.docs_dir)
    source = Path(page.file.abs_src_path or "")

    def inside(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / found[2]))
        if not target.is_relative_to(docs.parent):
            return found[0]
        uri = target.relative_to(docs if target.is_relative_to(docs) else docs.parent).as_posix()
        return found[1] + os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)

    return TARGET.sub(inside, markdown)
