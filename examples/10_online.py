"""A served model that follows its trainer: how much does freshness help?

    python examples/10_online.py [--publish 200]

The example trains on MovieLens-100K in the order of time. It exports a model after the
first fifth of the ratings; a second process loads it and answers. From then on every
rating is predicted before it is trained on, by three models: the live one, the one of
the second process, which gets a delta after every --publish ratings, and the
exported one, unchanged. It writes online.json and online.png into --out: the AUC of
the three over time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from movielens import stream
from movielens.stream import WINDOW, Ratings

import tpu_embedding as te

DIM = 16
BATCH = 50
MODELS = ("live", "deltas", "frozen")


class Options(argparse.Namespace):
    """The command line."""

    data: Path | None
    out: Path
    publish: int
    quick: bool


def parse_options(argv: Sequence[str] | None) -> Options:
    """Reads the command line."""
    parser = stream.parser("Follows a trainer by deltas.", "online")
    parser.add_argument(
        "--publish", type=int, default=200, help="ratings for each delta"
    )
    return parser.parse_args(argv, namespace=Options())


def score(activations: dict[str, tf.Tensor]) -> tf.Tensor:
    """Returns the log-odds [B] that the user likes the film, from table rows alone."""
    dot = tf.reduce_sum(activations["user"] * activations["item"], axis=1)
    return dot + activations["user_bias"][:, 0] + activations["item_bias"][:, 0]


class Trainer:
    """An embedding that trains on ratings."""

    def __init__(self, users: int, items: int) -> None:
        small = tf.random_normal_initializer(stddev=0.1, seed=1)
        tables = {
            "user": te.TableConfig(users, DIM, small, name="user"),
            "item": te.TableConfig(items, DIM, small, name="item"),
            "user_bias": te.TableConfig(users, 1, "zeros", name="user_bias"),
            "item_bias": te.TableConfig(items, 1, "zeros", name="item_bias"),
        }
        features = {name: te.FeatureConfig(table) for name, table in tables.items()}
        self.embedding = te.TPUEmbedding(features, te.Adagrad(0.1))

    def step(self, batch: Ratings) -> np.ndarray:
        """Trains on a batch; returns the scores from before the step."""
        features = {
            name: tf.constant(batch.user if name.startswith("user") else batch.item)
            for name in ("user", "item", "user_bias", "item_bias")
        }
        return stream.train(self.embedding, features, batch.rating, score)

    def train(self, ratings: Ratings) -> np.ndarray:
        """Trains on ratings in order; returns the scores from before each batch."""
        starts = range(0, len(ratings.user), BATCH)
        return np.concatenate([self.step(ratings[s : s + BATCH]) for s in starts])


def ask(model: Any, ratings: Ratings) -> np.ndarray:
    """Returns the scores of a served model."""
    answer = model.signatures["dense"](
        user=tf.constant(ratings.user),
        user_bias=tf.constant(ratings.user),
        item=tf.constant(ratings.item),
        item_bias=tf.constant(ratings.item),
    )
    return answer["output"].numpy()


def serve(base: str, connection: Connection) -> None:
    """Runs the second process, which applies deltas and answers requests."""
    model = tf.saved_model.load(base)
    while (request := connection.recv()) is not None:
        if isinstance(request, Ratings):
            connection.send(ask(model, request))
        else:
            connection.send(te.serving.apply_delta(model, request))


def request(connection: Connection, message: Any) -> Any:
    """Sends a message to the second process, and returns its answer."""
    connection.send(message)
    return connection.recv()


def run(ratings: Ratings, options: Options) -> dict[str, Any]:
    """Trains, publishes and asks; returns each model's AUC and the deltas' sizes."""
    first = len(ratings.user) // 5
    last = first + 4 * WINDOW if options.quick else len(ratings.user)
    trainer = Trainer(int(ratings.user.max()) + 1, int(ratings.item.max()) + 1)
    trainer.train(ratings[:first])
    base = options.out / "base"
    te.serving.export(trainer.embedding, base, score, signatures=["dense"], deltas=True)
    writer = te.serving.DeltaWriter(trainer.embedding, base, "second process")
    frozen = tf.saved_model.load(str(base))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(str(base), there), daemon=True)
    server.start()
    said: dict[str, list[np.ndarray]] = {model: [] for model in MODELS}
    sizes = []
    for start in range(first, last, options.publish):
        some = ratings[start : min(start + options.publish, last)]
        said["deltas"].append(request(here, some))
        said["frozen"].append(ask(frozen, some))
        said["live"].append(trainer.train(some))
        delta = options.out / f"{writer.sequence + 1}.delta"
        writer.export_delta(delta)
        assert request(here, str(delta)) == writer.sequence
        sizes.append(delta.stat().st_size)
    # The second process now answers as a new export of the trainer would.
    te.serving.export(trainer.embedding, options.out / "last", score)
    new = ask(tf.saved_model.load(str(options.out / "last")), some)
    np.testing.assert_array_equal(request(here, some), new)
    here.send(None)
    server.join()
    labels = ratings.rating[first:last]
    return {
        "ratings": list(range(first + WINDOW, last + 1, WINDOW)),
        "auc": {
            model: stream.auc_by_window(scores, labels)
            for model, scores in said.items()
        },
        "delta_bytes": sizes,
    }


def plot(results: dict[str, Any], paths: Sequence[Path]) -> None:
    """Plots the AUC of each model over the ratings."""
    labels = ("live", "served, follows by deltas", "served, as it was exported")
    with stream.figure(paths, figsize=(7, 3.5)) as (figure, axes):
        for model, label, line in zip(MODELS, labels, ("-", "--", ":"), strict=True):
            axes.plot(results["ratings"], results["auc"][model], line, label=label)
        axes.set_xlabel("ratings so far")
        axes.set_ylabel(f"AUC of the last {WINDOW:,} ratings")
        figure.legend(loc="outside upper center", ncols=len(MODELS))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and serves the models, and prints, writes and plots the results."""
    options = parse_options(argv)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    ratings = stream.find(options.data).numbered()
    results = run(ratings, options)
    print("ratings  " + "".join(f"{model:>8}" for model in MODELS))
    for number, ratings in enumerate(results["ratings"]):
        values = "".join(f"{results['auc'][m][number]:8.3f}" for m in MODELS)
        print(f"{ratings:7,}  {values}")
    sizes = results["delta_bytes"]
    print(f"{len(sizes)} deltas, {np.mean(sizes) / 1000:.0f} kB each on average")
    (options.out / "online.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(results, [options.out / "online.png", options.out / "online.svg"])


if __name__ == "__main__":
    main()
