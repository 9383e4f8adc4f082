"""Audits for readers who were not there: a Markdown summary and a badge."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arsm.referee.result import Audit

COLOURS = {"unbiased": "#2da44e", "wrong": "#cf222e", "not decided": "#9a6700"}


def markdown(audits: Sequence[Audit]) -> str:
    """One table of all audits, and a section for each that did not pass."""
    lines = ["| loss | verdict | finding | seconds |", "|---|---|---|---|"]
    for audit in audits:
        kinds = ", ".join(finding.kind for finding in audit.findings)
        lines.append(
            f"| `{_cell(audit.name)}` | {audit.verdict} | {_cell(kinds)} | {audit.seconds:.1f} |"
        )
    for audit in audits:
        if audit.passed:
            continue
        lines += ["", f"### `{audit.name}`: {audit.verdict}", ""]
        lines += [f"- **{finding.kind}**: {finding.sentence}" for finding in audit.findings]
        lines += [f"- {note}" for note in audit.notes]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def badge(audits: Sequence[Audit]) -> str:
    """An SVG image: "gradient" and the worst verdict."""
    # one wrong gradient decides, whatever the others are
    order = ["wrong", "not decided", "unbiased"]
    verdict = min((audit.verdict for audit in audits), key=order.index, default="not decided")
    left = "gradient"
    right = verdict
    # 7 pixels per letter of 11-point Verdana, and 7 on either side
    widths = [7 * len(word) + 14 for word in (left, right)]
    total = sum(widths)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" '
        f'aria-label="{left}: {escape(right)}">'
        f'<rect width="{total}" height="20" rx="3" fill="#555"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" rx="3" fill="{COLOURS[verdict]}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" '
        'font-size="11">'
        f'<text x="{widths[0] / 2}" y="14">{left}</text>'
        f'<text x="{widths[0] + widths[1] / 2}" y="14">{escape(right)}</text></g></svg>\n'
    )
