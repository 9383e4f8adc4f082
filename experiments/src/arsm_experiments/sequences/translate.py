"""Short messages to translate from English into German, from the catalogues of Django and Wagtail,
judged by chrF.

`python -m arsm_experiments.sequences.translate FILE.json WHEEL...` reads the wheels and writes the
pairs. They are what `pip download --no-deps Django==5.2.19 wagtail==8.0.1` fetches; both have a BSD
licence.
"""

from __future__ import annotations

import argparse
import gettext
import hashlib
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CATALOGUE = "/de/LC_MESSAGES/django.mo"
FILE = "messages-en-de.json"
SHA256 = "7c54adffa4f5911212f3702db2474a7dbf4e1014d398ab562ba8c259bf20e041"
"""Of the file of pairs."""
WORDS = range(2, 13)
ORDER = 6
"""chrF compares runs of 1 to so many characters."""
BETA = 2
"""Recall counts so many times as much as precision."""


def read_pairs(wheels: Sequence[Path]) -> list[tuple[str, str]]:
    """English and German messages of 2 to 12 words, without plurals and placeholders."""
    pairs: dict[str, str] = {}
    for wheel in sorted(wheels, key=lambda path: path.name):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(CATALOGUE)]
            for name in sorted(names):
                catalogue = gettext.GNUTranslations(io.BytesIO(archive.read(name)))
                pairs |= {
                    english: german
                    for english, german in catalogue._catalog.items()  # pyright: ignore
                    if isinstance(english, str) and _is_plain(english) and _is_plain(german)
                }
    return sorted(pairs.items())


def _is_plain(text: str) -> bool:
    """Whether this is a message of a few words without markup."""
    return len(text.split()) in WORDS and re.search(r"[%{}<>\n\x04\u201c\u2026]", text) is None


def write_pairs(wheels: Sequence[Path], path: Path) -> str:
    """Write the pairs; their hash."""
    whole = json.dumps(read_pairs(wheels), ensure_ascii=False, indent=0).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(whole)
    return hashlib.sha256(whole).hexdigest()


def load_messages(path: Path) -> list[dict[str, Any]]:
    """Questions, those for testing first; which they are is decided by a hash."""
    if not path.exists():
        raise ValueError(
            f"There is no {path}; make it with `pip download --no-deps Django==5.2.19 "
            f"wagtail==8.0.1` and `python -m arsm_experiments.sequences.translate {path} *.whl`."
        )
    whole = path.read_bytes()
    if hashlib.sha256(whole).hexdigest() != SHA256:
        raise ValueError(f"{path} is not the file of these versions' messages; make it again.")
    pairs = sorted(json.loads(whole), key=lambda pair: _hash(pair[0]))
    return [
        {
            "prompt": [{"role": "user", "content": f"Translate into German: {english}"}],
            "completion": german,
            "german": german,
        }
        for english, german in pairs
    ]


def _hash(text: str) -> str:
    return hashlib.sha256(f"translate {text}".encode()).hexdigest()


def closeness(completions: Sequence[Any], german: Sequence[str], **_: Any) -> list[float]:
    """chrF of every completion, 0 to 1."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [chrf(text, right) for text, right in zip(texts, german, strict=True)]


def chrf(text: str, reference: str) -> float:
    r"""The F-score of common runs of characters, spaces left out.

        F = (1 + b^2) P R / (b^2 P + R),    b = 2

    with precision P and recall R averaged over runs of 1 to 6 characters, as far as both texts have
    such runs. Reference: Popović, chrF: character n-gram F-score for automatic MT evaluation, 2015.
    """
    ours, right = "".join(text.split()), "".join(reference.split())
    precision = recall = 0.0
    orders = 0
    for n in range(1, min(ORDER, len(ours), len(right)) + 1):
        have, want = _runs(ours, n), _runs(right, n)
        common = (have & want).total()
        precision += common / have.total()
        recall += common / want.total()
        orders += 1
    if precision + recall == 0:
        return 0.0
    return (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall) / orders


def _runs(text: str, n: int) -> Counter[str]:
    return Counter(text[i : i + n] for i in range(len(text) - n + 1))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+")
    options = parser.parse_args()
    print(write_pairs(options.wheels, options.out))


if __name__ == "__main__":
    main()
