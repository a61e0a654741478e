"""The demo's own data: scikit-learn's handwritten digits as Avro files.

1,797 images are no streaming job, so the training images are repeated with small shifts and a little noise, in a seeded
random order. The test images are set aside before that, so no relative of theirs is trained on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SEED = 20
TRAIN_ROWS = 60_000
TEST_ROWS = 360


def write_digits(train_path: Path, test_path: Path) -> None:
    """Writes scikit-learn's digits: TRAIN_ROWS shifted, noisy copies of most, and TEST_ROWS others as they are."""
    import fastavro
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(pixels))
    # Before copies are made: a copy of a test image would give the answer away.
    test, train = order[:TEST_ROWS], order[TEST_ROWS:]
    picked = rng.permutation(np.resize(train, TRAIN_ROWS))  # The file is read in sequence, so it is shuffled here.
    schema = fastavro.parse_schema(
        {
            "type": "record",
            "name": "Digit",
            "fields": [
                {"name": "pixels", "type": {"type": "array", "items": "float"}, "doc": "8 x 8 pixels by row, 0 to 16"},
                {"name": "label", "type": "int", "doc": "the digit"},
            ],
        }
    )
    for path, images, which in ((train_path, augment(pixels[picked], rng), picked), (test_path, pixels[test], test)):
        records = ({"pixels": x, "label": y} for x, y in zip(images.tolist(), labels[which].tolist(), strict=True))
        with open(path, "wb") as file:
            fastavro.writer(file, schema, records, codec="deflate", sync_marker=b"fastpipe digits!")


def augment(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shifts each 8 x 8 image `[n, 64]` by up to a pixel in each direction, and adds noise in steps of a quarter."""
    padded = np.pad(pixels.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    down, right = rng.integers(0, 3, (2, len(pixels), 1, 1))
    cells = np.arange(8)
    shifted = padded[np.arange(len(pixels))[:, None, None], down + cells[:, None], right + cells]
    noise = np.round(rng.normal(0, 0.7, shifted.shape) * 4) / 4
    noisy: np.ndarray = np.clip(shifted + noise, 0, 16)
    return noisy.reshape(pixels.shape)
