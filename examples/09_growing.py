"""Tables that grow and forget: a model trains on ratings in the order of time.

    python examples/09_growing.py [--users 200] [--films 1000]

The example reads MovieLens-100K in the order of time, and the model does not know in
advance which users and films exist. Tables of te.GrowingVocabulary give them rows when
they appear, and evict users that were not seen for long and films that were seen least.
A second model has tables of fixed size and as much memory, where an id has the row of
its hash. Every rating is predicted before it is trained on. The example writes
growing.json and growing.png into --out: the number of rows, of admitted and of evicted
ids, and the AUC of both models over time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from movielens import stream
from movielens.stream import WINDOW, Ratings

import tpu_embedding as te

DIM = 17  # The last column is the bias.
BATCH = 50
MODELS = ("growing", "hashed")
ROW_BYTES = 4 * DIM * 2  # This includes Adagrad's slot.
ID_BYTES = 56  # Per row of a growing table: the map, the id, hits and last update.


class Options(argparse.Namespace):
    """The command line."""

    data: Path | None
    out: Path
    users: int
    films: int
    quick: bool


def parse_options(argv: Sequence[str] | None) -> Options:
    """Reads the command line."""
    parser = stream.parser("Trains tables that grow and forget.", "growing")
    add = parser.add_argument
    add("--users", type=int, default=200, help="rows for users")
    add("--films", type=int, default=1000, help="rows for films")
    return parser.parse_args(argv, namespace=Options())


def score(activations: dict[str, tf.Tensor]) -> tf.Tensor:
    """Returns the log-odds [B] that the user likes the film, from table rows alone."""
    user, item = activations["user"], activations["item"]
    dot = tf.reduce_sum(user[:, :-1] * item[:, :-1], axis=1)
    return dot + user[:, -1] + item[:, -1]


class Model:
    """Two tables that train on ratings."""

    def __init__(self, users: Any, films: Any) -> None:
        """Makes two tables; `users` and `films` are their `vocabulary_size`."""
        small = tf.keras.initializers.RandomNormal(stddev=0.1)
        self.tables = {
            name: te.TableConfig(vocabulary, DIM, small, name=name)
            for name, vocabulary in (("user", users), ("item", films))
        }
        features = {name: te.FeatureConfig(t) for name, t in self.tables.items()}
        self.embedding = te.TPUEmbedding(features, te.Adagrad(0.1))

    def ids(self, table: str, strings: np.ndarray) -> tf.Tensor:
        """Hashes string ids to any int64, or to the rows of a table of fixed size."""
        size = self.tables[table].vocabulary_size
        buckets = size if isinstance(size, int) else 2**63 - 1
        return tf.strings.to_hash_bucket_fast(strings, buckets)

    def train(self, batch: Ratings) -> np.ndarray:
        """Trains on a batch; returns the scores from before the step."""
        user, item = self.ids("user", batch.user), self.ids("item", batch.item)
        features = {"user": user, "item": item}
        return stream.train(self.embedding, features, batch.rating, score)

    def counts(self) -> dict[str, int]:
        """Counts rows with an id, and ids admitted and evicted, in growing tables."""
        found = self.embedding.vocabularies.values()
        return {
            "rows": sum(len(table.ids) for table in found),
            "admitted": sum(table.admitted for table in found),
            "evicted": sum(table.evicted for table in found),
        }


def run(ratings: Ratings, options: Options) -> dict[str, Any]:
    """Trains both models; returns their AUC and counts over the ratings."""
    last = 3 * WINDOW if options.quick else len(ratings.rating)
    budgets = (options.users, options.films)
    same_memory = [rows * (ROW_BYTES + ID_BYTES) // ROW_BYTES for rows in budgets]
    users = te.GrowingVocabulary(options.users, eviction="lru", min_rows=BATCH)
    films = te.GrowingVocabulary(options.films, eviction="lfu")
    models = {"growing": Model(users, films), "hashed": Model(*same_memory)}
    results: dict[str, Any] = {"ratings": []}
    said: dict[str, list[np.ndarray]] = {name: [] for name in MODELS}
    for start in range(0, last - last % WINDOW, BATCH):
        batch = ratings[start : start + BATCH]
        for name, model in models.items():
            said[name].append(model.train(batch))
        done = start + BATCH
        if done % WINDOW:
            continue
        results["ratings"].append(done)
        for what, count in models["growing"].counts().items():
            results.setdefault(what, []).append(count)
    labels = ratings.rating[:done]
    auc = {name: stream.auc_by_window(said[name], labels) for name in MODELS}
    seen = [np.unique(ids[:last]).size for ids in (ratings.user, ratings.item)]
    sizes = {"ids": sum(seen), "hashed rows": sum(same_memory)}
    return {**results, "auc": auc, **sizes}


def plot(results: dict[str, Any], paths: Sequence[Path]) -> None:
    """Plots rows and their changes, and the AUC of both models, over the ratings."""
    label = {"growing": "tables that grow", "hashed": "hashed, as much memory"}
    size = {"nrows": 2, "figsize": (7, 5), "sharex": True}
    with stream.figure(paths, **size) as (_, (above, below)):
        for what, line in (("admitted", "--"), ("evicted", ":"), ("rows", "-")):
            above.plot(results["ratings"], results[what], line, label=what)
        above.set_ylabel("ids of users and films")
        above.legend()
        for name, line in zip(MODELS, ("-", "--"), strict=True):
            auc = results["auc"][name]
            below.plot(results["ratings"], auc, line, label=label[name])
        below.set_xlabel("ratings so far")
        below.set_ylabel(f"AUC of the last {WINDOW:,}")
        below.legend()


def main(argv: Sequence[str] | None = None) -> None:
    """Trains both models, and prints, writes and plots the results."""
    options = parse_options(argv)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    results = run(stream.find(options.data), options)
    print("ratings    rows  admitted   evicted  AUC growing  AUC hashed")
    for number, ratings in enumerate(results["ratings"]):
        rows, admitted, evicted = (
            results[what][number] for what in ("rows", "admitted", "evicted")
        )
        growing, hashed = (results["auc"][name][number] for name in MODELS)
        print(
            f"{ratings:7,}  {rows:6,}  {admitted:8,}  {evicted:8,}  {growing:11.3f}"
            f"  {hashed:10.3f}"
        )
    mean = {name: np.mean(results["auc"][name]) for name in MODELS}
    print(
        f"{results['ids']:,} ids. Mean AUC: {mean['growing']:.3f} with "
        f"{options.users + options.films:,} rows that grow, {mean['hashed']:.3f} with "
        f"{results['hashed rows']:,} rows of hashes."
    )
    (options.out / "growing.json").write_text(json.dumps(results, indent=2) + "\n")
    plot(results, [options.out / "growing.png", options.out / "growing.svg"])


if __name__ == "__main__":
    main()
