"""In tables a number and its spread stay on one line."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put no-break spaces around every plus-minus sign of a table."""
    return re.sub(
        r"^\|.*$", lambda row: row[0].replace(" ± ", "\u00a0±\u00a0"), markdown, flags=re.MULTILINE
    )
