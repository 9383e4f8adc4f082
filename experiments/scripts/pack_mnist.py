"""Pack MNIST's image files into the package: `python experiments/scripts/pack_mnist.py FOLDER`, idx
or idx.gz.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from arsm_experiments.data import FILES, THRESHOLD, idx_bytes, pack, pack_sampled, parse_idx

TARGET = Path(__file__).parents[1] / "src" / "arsm_experiments" / "mnist"


def main(folder: Path) -> None:
    originals = {name: idx_bytes(folder, name) for name in FILES}
    grey = np.concatenate([parse_idx(content) for content in originals.values()])
    packed = {"mnist.xz": pack(grey), "sampled.xz": pack_sampled(grey)}
    checksums = {
        name: hashlib.sha256(content).hexdigest() for name, content in (originals | packed).items()
    }
    facts = {
        "name": "MNIST, binarized",
        "source": "The MNIST database of handwritten digits, http://yann.lecun.com/exdb/mnist/",
        "authors": "Yann LeCun and Corinna Cortes",
        "licence": "CC BY-SA 3.0, https://creativecommons.org/licenses/by-sa/3.0/",
        "changes": "Images alone, without labels: 60,000 for training, then 10,000 for testing; a "
        f"pixel is on where its grey value exceeds {THRESHOLD}; compressed by the package's "
        "pixel_coder. sampled.xz: the same images drawn once, each pixel on with probability grey "
        "/ 255 (numpy's PCG64 with seed 0), as they follow from these. This file, mnist.xz and "
        "sampled.xz stay under the licence of the original.",
        "sha256": checksums,
    }
    TARGET.mkdir(exist_ok=True)
    for name, content in packed.items():
        (TARGET / name).write_bytes(content)
        print(f"{TARGET / name}: {len(content):,} bytes")
    (TARGET / "mnist.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(
            "Name the folder that holds the image files of MNIST: python "
            "experiments/scripts/pack_mnist.py FOLDER"
        )
    main(Path(sys.argv[1]))
