"""MNIST, binarized and packed inside the package, or read from its original files.

`mnist/mnist.xz` holds the 60,000 training and 10,000 test images, a pixel on where its grey value
exceeds 127, compressed by `pixel_coder`. `mnist/sampled.xz` holds the same images with each pixel
drawn once, its grey value the probability (`draw`), as they follow from the thresholded ones.
`mnist/mnist.json` beside them names their source, their licence and the checksums of all files.
`experiments/scripts/pack_mnist.py` makes all.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arsm_experiments.pixel_coder import pack_images, unpack_images

PIXELS = 28 * 28
THRESHOLD = 127
FILES = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
TRAINING, VALIDATION, TESTING = 60_000, 5_000, 10_000


class Mnist(NamedTuple):
    """The three parts, uint8 [N, 784] each: 0 and 1 where binarized, else grey values 0..255."""

    train: Tensor
    """[55000, 784]."""
    validation: Tensor
    """[5000, 784]: the first images of the training file."""
    test: Tensor
    """[10000, 784]."""


def load_mnist(
    binarize: bool = True, folder: str | Path | None = None, sampled: bool = False
) -> Mnist:
    """Read the images that ship with the package or, where a folder is named, its original idx or
    idx.gz files.

    `sampled` binarizes by drawing each pixel once, with its grey value as the probability, instead
    of the threshold.
    """
    facts = provenance()
    if folder is None:
        if not binarize:
            raise ValueError(
                "The images that ship with the package are binarized; name a folder with the "
                "original idx files to read grey values."
            )
        packed = files("arsm_experiments") / "mnist"
        images = unpack((packed / "mnist.xz").read_bytes(), facts)
        if sampled:
            images = unpack_sampled((packed / "sampled.xz").read_bytes(), images, facts)
    else:
        images = np.concatenate([read_idx(Path(folder), name, facts) for name in FILES])
        if binarize:
            images = (draw(images) if sampled else images > THRESHOLD).astype(np.uint8)
    validation, train, test = torch.from_numpy(images).split(
        [VALIDATION, TRAINING - VALIDATION, TESTING]
    )
    return Mnist(train, validation, test)


def draw(grey: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Each pixel on with probability grey / 255, the same draw every time."""
    return (
        np.random.Generator(np.random.PCG64(0)).integers(0, 255, grey.shape, dtype=np.uint8) < grey
    )


def provenance() -> dict[str, Any]:
    """Source, licence and SHA-256 checksums of the packed images."""
    return json.loads((files("arsm_experiments") / "mnist" / "mnist.json").read_text())


def pack(grey: NDArray[np.uint8]) -> bytes:
    """Grey values [N, 784] -> one bit per pixel, compressed."""
    return pack_images((grey > THRESHOLD).astype(np.uint8))


def unpack(packed: bytes, facts: dict[str, Any]) -> NDArray[np.uint8]:
    """The inverse of `pack`, [70000, 784] of 0 and 1; refuses what does not match its checksum."""
    check(
        packed,
        facts["sha256"]["mnist.xz"],
        "The packed MNIST file mnist.xz",
        "install the package again",
    )
    return unpack_images(packed)


def pack_sampled(grey: NDArray[np.uint8]) -> bytes:
    """Grey values [N, 784] -> the pixels that `draw` makes of them, compressed for a reader who has
    the thresholded ones.
    """
    return pack_images(draw(grey).astype(np.uint8), (grey > THRESHOLD).astype(np.uint8))


def unpack_sampled(
    packed: bytes, images: NDArray[np.uint8], facts: dict[str, Any]
) -> NDArray[np.uint8]:
    """The drawn pixels, from the thresholded images [N, 784]: the inverse of `pack_sampled`."""
    check(
        packed,
        facts["sha256"]["sampled.xz"],
        "The packed file of sampled pixels, sampled.xz,",
        "install the package again",
    )
    return unpack_images(packed, images)


def read_idx(folder: Path, name: str, facts: dict[str, Any]) -> NDArray[np.uint8]:
    """One of MNIST's image files, `name` or `name`.gz, as [N, 784]; refuses what does not match its
    checksum.
    """
    content = idx_bytes(folder, name)
    check(
        content,
        facts["sha256"][name],
        f"{name} in {folder}, unpacked,",
        "fetch it again from a mirror of MNIST",
    )
    return parse_idx(content)


def idx_bytes(folder: Path, name: str) -> bytes:
    """The content of an idx file, which may be compressed."""
    plain, zipped = folder / name, folder / f"{name}.gz"
    if plain.exists():
        return plain.read_bytes()
    if not zipped.exists():
        raise FileNotFoundError(
            f"{folder} holds neither {plain.name} nor {zipped.name}; put one of them there."
        )
    try:
        return gzip.decompress(zipped.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{zipped} is truncated or altered ({error}); fetch it again from a mirror of MNIST."
        ) from None


def parse_idx(content: bytes) -> NDArray[np.uint8]:
    """The images of an idx file, [N, 784]: a header of four big-endian integers, then one byte per
    pixel.
    """
    return np.frombuffer(content, np.uint8, offset=16).reshape(-1, PIXELS)


def check(content: bytes, expected: str, what: str, advice: str) -> None:
    """Refuse content whose SHA-256 is not the expected one."""
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(
            f"{what} has SHA-256 {found[:12]}... instead of {expected[:12]}..., so it is truncated "
            f"or altered; {advice}."
        )
