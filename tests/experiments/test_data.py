"""The packed images, and the originals read from a folder."""

from __future__ import annotations

import gzip
import hashlib
import struct
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from arsm_experiments import data, pixel_coder
from arsm_experiments.data import (
    Mnist,
    draw,
    idx_bytes,
    load_mnist,
    pack,
    pack_sampled,
    parse_idx,
    provenance,
    read_idx,
    unpack,
    unpack_sampled,
)
from arsm_experiments.pixel_coder import pack_images, unpack_images

TRAIN_FILE = "train-images-idx3-ubyte"


@pytest.fixture(scope="module")
def mnist() -> Mnist:
    return load_mnist()


@pytest.fixture
def grey() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (30, 784), dtype=np.uint8)


def idx(grey: np.ndarray) -> bytes:
    return struct.pack(">4i", 2051, len(grey), 28, 28) + grey.tobytes()


def facts(packed: bytes = b"", train: bytes = b"") -> dict:
    digests = {"mnist.xz": packed, TRAIN_FILE: train}
    return {
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in digests.items()}
    }


def test_the_parts_have_the_sizes_of_the_paper(mnist: Mnist) -> None:
    assert [tuple(part.shape) for part in mnist] == [(55_000, 784), (5_000, 784), (10_000, 784)]
    assert all(part.dtype == torch.uint8 and int(part.max()) == 1 for part in mnist)


def test_the_images_are_digits_and_none_is_in_two_parts(mnist: Mnist) -> None:
    on = [float(part.float().mean()) for part in mnist]
    assert max(on) - min(on) < 0.005
    assert all(0.12 < share < 0.14 for share in on)
    border = torch.zeros(28, 28, dtype=torch.bool)
    border[[0, -1]] = border[:, [0, -1]] = True
    assert float(mnist.train[:, border.flatten()].float().mean()) < 1e-3
    rows = [{row.numpy().tobytes() for row in part[:500]} for part in mnist]
    assert not (rows[0] & rows[1] | rows[0] & rows[2] | rows[1] & rows[2])


def test_source_licence_and_checksums_are_recorded() -> None:
    recorded = provenance()
    assert "CC BY-SA 3.0" in recorded["licence"]
    assert "LeCun" in recorded["authors"]
    assert set(recorded["sha256"]) == {*data.FILES, "mnist.xz", "sampled.xz"}


def test_packing_keeps_every_bit(grey: np.ndarray) -> None:
    packed = pack(grey)
    assert np.array_equal(unpack(packed, facts(packed)), grey > 127)


@pytest.mark.parametrize("images", [0, 1, 40])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_the_pixel_coder_keeps_every_bit(images: int, share: float) -> None:
    on = (np.random.default_rng(2).random((images, 784)) < share).astype(np.uint8)
    assert np.array_equal(unpack_images(pack_images(on)), on)


def test_predictable_pixels_take_less_room_than_their_bits() -> None:
    """Strokes of a few pixels' width: an eighth of the room of one bit per pixel is plenty."""
    start = np.random.default_rng(3).integers(4, 20, (200, 1, 1))
    row, column = np.indices((28, 28))
    on = ((column - row // 2 >= start - 6) & (column - row // 2 < start - 3)).astype(np.uint8)
    table = 4_000  # the votes'
    assert len(pack_images(on.reshape(200, 784))) < 200 * 784 / 8 / 8 + table


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-100], lambda b: b[:500] + bytes([b[500] ^ 1]) + b[501:]]
)
def test_a_truncated_or_altered_packed_file_is_refused(damage) -> None:
    packed = (files("arsm_experiments") / "mnist" / "mnist.xz").read_bytes()
    with pytest.raises(ValueError, match=r"truncated or altered; install the package again\.$"):
        unpack(damage(packed), provenance())


@pytest.mark.parametrize("zipped", [False, True])
def test_original_files_are_read_plain_and_zipped(
    tmp_path: Path, grey: np.ndarray, zipped: bool
) -> None:
    content = idx(grey)
    path = tmp_path / (TRAIN_FILE + (".gz" if zipped else ""))
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert np.array_equal(read_idx(tmp_path, TRAIN_FILE, facts(train=content)), grey)
    assert np.array_equal(parse_idx(idx_bytes(tmp_path, TRAIN_FILE)), grey)


def test_originals_that_are_altered_truncated_or_missing_are_refused(
    tmp_path: Path, grey: np.ndarray
) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds neither .* put one of them there"):
        load_mnist(folder=tmp_path)
    (tmp_path / TRAIN_FILE).write_bytes(idx(grey))
    with pytest.raises(ValueError, match="truncated or altered"):
        load_mnist(folder=tmp_path)
    (tmp_path / TRAIN_FILE).unlink()
    (tmp_path / f"{TRAIN_FILE}.gz").write_bytes(gzip.compress(idx(grey))[:-200])
    with pytest.raises(ValueError, match="truncated or altered"):
        load_mnist(folder=tmp_path)


def test_sampled_pixels_are_on_as_often_as_they_are_bright() -> None:
    grey = np.repeat(np.arange(256, dtype=np.uint8), 10_000).reshape(256, -1)
    on = draw(grey)
    assert not on[0].any()
    assert on[255].all()
    # seven standard errors at most, in 254 comparisons
    assert np.abs(on.mean(-1) - np.arange(256) / 255).max() < 7 * 0.5 / 100
    assert np.array_equal(on, draw(grey))


def test_sampled_pixels_are_read_from_the_originals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grey = np.random.default_rng(1).integers(0, 256, (70_000, 1), dtype=np.uint8).repeat(784, 1)
    parts = dict(zip(data.FILES, np.split(grey, [60_000]), strict=True))
    monkeypatch.setattr(data, "read_idx", lambda folder, name, facts: parts[name])
    sampled = load_mnist(folder=tmp_path, sampled=True)
    assert sampled.test.dtype == torch.uint8
    expected = torch.from_numpy(parts[data.FILES[1]][:, 0] / 255.0)
    torch.testing.assert_close(sampled.test.double().mean(-1), expected, rtol=0, atol=7 * 0.5 / 28)
    assert not torch.equal(sampled.test, load_mnist(folder=tmp_path).test)


def test_packing_keeps_every_drawn_pixel(grey: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_coder, "LANES", 7)  # several lots of images, the last one smaller
    packed = pack_sampled(grey)
    recorded = {"sha256": {"sampled.xz": hashlib.sha256(packed).hexdigest()}}
    images = (grey > 127).astype(np.uint8)
    assert np.array_equal(unpack_sampled(packed, images, recorded), draw(grey))
    with pytest.raises(ValueError, match=r"truncated or altered; install the package again\.$"):
        unpack_sampled(packed[:-1], images, recorded)


def test_the_sampled_pixels_of_the_package(mnist: Mnist) -> None:
    """2.7% of all pixels differ from the thresholded ones, more on than off: faint strokes."""
    sampled = load_mnist(sampled=True)
    differ = [float((a != b).float().mean()) for a, b in zip(sampled, mnist, strict=True)]
    assert all(0.026 < share < 0.029 for share in differ)
    assert all(part.dtype == torch.uint8 and int(part.max()) == 1 for part in sampled)
    border = sampled.train.view(-1, 28, 28)[:, 0]
    assert float(border.float().mean()) < 1e-3


def test_grey_values_need_the_originals() -> None:
    with pytest.raises(ValueError, match="name a folder"):
        load_mnist(binarize=False)
