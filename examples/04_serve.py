"""Serves the recommender of example 01: how small, how fast and how good?

    python examples/04_serve.py [--demo build/demo]

The example takes the best checkpoint of example 01, or trains for two epochs if there
is none. It exports the model three times, with tables of float32, int8 and int4, loads
each model from its files alone, and queries it for the test ratings of MovieLens-100K,
in batches of 1, 32 and 1024. It writes models, serving.json and serving.png into --out.

Times depend on the machine and its load; compare only times of one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# These are the settings of example 01, which writes the checkpoint.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib as mpl
import numpy as np
import tensorflow as tf
from movielens import data, metrics, model, serving

import tpu_embedding as te

BUILD = Path(__file__).resolve().parents[1] / "build"
TRAINING = Path(__file__).with_name("01_movielens_ranking.py")
STORAGES = ("float32", "int8", "int4")
BATCHES = (1, 32, 1024)


@dataclasses.dataclass(frozen=True)
class Result:
    """One exported model.

    Attributes:
      storage: The form in which its tables are stored.
      table_bytes: The size of all tables.
      quality: The metrics of its answers.
      milliseconds: The median time of an answer, by batch size.
    """

    storage: str
    table_bytes: int
    quality: metrics.Evaluation
    milliseconds: dict[int, float]


class Options(argparse.Namespace):
    """The command line."""

    data: Path | None
    demo: Path
    out: Path
    quick: bool


def parse_options(argv: Sequence[str] | None) -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Serves the recommender.")
    add = parser.add_argument
    add("--data", type=Path, help="folder with ml-100k.*; default: download them")
    add("--demo", type=Path, default=BUILD / "demo", help="output of example 01")
    add("--out", type=Path, default=BUILD / "serving", help="default: build/serving")
    add("--quick", action="store_true", help="few timings, as a test")
    return parser.parse_args(argv, namespace=Options())


def best_checkpoint(options: Options) -> str:
    """Returns the best checkpoint of example 01; runs the example if there is none."""
    found = tf.train.latest_checkpoint(str(options.demo / "checkpoints" / "best"))
    if found is not None:
        return found
    own = options.out / "demo"
    print(f"No checkpoint in {options.demo}: training for two epochs.")
    command = [sys.executable, str(TRAINING), "--quick", "--out", str(own)]
    more = [] if options.data is None else ["--data", str(options.data)]
    subprocess.run([*command, *more], check=True)
    return tf.train.latest_checkpoint(str(own / "checkpoints" / "best"))


def restore(
    catalogue: data.Catalogue, checkpoint: str
) -> tuple[te.TPUEmbeddingForServing, serving.Recommender]:
    """Restores the model of example 01, without the optimizers' slots."""
    features = model.make_feature_config(catalogue.vocabulary_sizes)
    for config in features.values():  # Without an optimizer there are no slots.
        features[config.name] = dataclasses.replace(
            config, table=dataclasses.replace(config.table, optimizer=None)
        )
    embedding = te.TPUEmbeddingForServing(features, optimizer=None)
    embedding.build()
    dense_part = model.make_dense_part(features, mean_rating=0.0)
    weights = [variable.value for variable in dense_part.variables]
    saved = tf.train.Checkpoint(embedding=embedding, weights=weights)
    saved.restore(checkpoint).assert_existing_objects_matched().expect_partial()
    return embedding, serving.Recommender(catalogue, dense_part)


def predict(served: Any, ratings: data.Ratings) -> np.ndarray:
    """Returns the answers of a loaded model for the test ratings."""
    batches = ratings.batches(ratings.split.test, 4096)
    return np.concatenate([serving.ask_pairs(served, batch) for batch in batches])


def time_all(asks: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Returns the median milliseconds of each call; calls alternate, as load varies."""
    seconds: list[list[float]] = [[] for _ in asks]
    for _ in range(rounds + 1):  # The first round warms up.
        for ask, own in zip(asks, seconds, strict=True):
            start = time.perf_counter()
            ask()
            own.append(time.perf_counter() - start)
    return [1000 * statistics.median(own[1:]) for own in seconds]


def measure(
    models: dict[str, Any], ratings: data.Ratings, rounds: int
) -> dict[str, dict[int, float]]:
    """Measures the milliseconds of an answer, by storage and batch size."""
    times: dict[str, dict[int, float]] = {storage: {} for storage in models}
    for size in BATCHES:
        batch = next(iter(ratings.batches(ratings.split.test[:size], size)))

        def ask(served: Any, batch: Any = batch) -> Callable[[], Any]:
            return lambda: serving.ask_pairs(served, batch)

        medians = time_all([ask(served) for served in models.values()], rounds)
        for storage, median in zip(models, medians, strict=True):
            times[storage][size] = median
    return times


def table(results: Sequence[Result]) -> str:
    """Returns a table with a line for each model."""
    heads = "".join(f"{f'batch {size}':>12}" for size in BATCHES)
    lines = [f"{'tables':8}{'bytes':>10}{'size':>8}{'RMSE':>9}{'AUC':>9}{heads}"]
    for result in results:
        share = result.table_bytes / results[0].table_bytes
        times = "".join(f"{result.milliseconds[n]:9.2f} ms" for n in BATCHES)
        lines.append(
            f"{result.storage:8}{result.table_bytes:10,}{share:8.1%}"
            f"{result.quality.rmse:9.4f}{result.quality.auc:9.4f}{times}"
        )
    return "\n".join(lines)


def plot(results: Sequence[Result], path: Path) -> None:
    """Plots size against AUC, with a point for each model."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt  # After the choice of the backend.

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for result in results:
        axes.plot(result.table_bytes / 1000, result.quality.auc, "o")
        axes.annotate(
            result.storage,
            (result.table_bytes / 1000, result.quality.auc),
            xytext=(6, 6),
            textcoords="offset points",
        )
    axes.set_xlim(left=0)
    axes.set_xlabel("tables, kB")
    axes.set_ylabel("AUC on the test ratings")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Exports the models, loads and queries them, and compares the results."""
    options = parse_options(argv)
    ratings, catalogue = data.find(options.data, BUILD / "data")
    embedding, recommender = restore(catalogue, best_checkpoint(options))
    test = ratings.rating[ratings.split.test]

    models, sizes, quality = {}, {}, {}
    for storage in STORAGES:
        folder = options.out / storage
        shutil.rmtree(folder, ignore_errors=True)
        report = serving.export(recommender, embedding, folder, storage)
        print(f"\n{report}")
        models[storage] = tf.saved_model.load(str(folder)).signatures["pairs"]
        sizes[storage] = report.bytes_after
        quality[storage] = metrics.evaluate(predict(models[storage], ratings), test)

    times = measure(models, ratings, rounds=5 if options.quick else 200)
    results = [Result(s, sizes[s], quality[s], times[s]) for s in STORAGES]
    print(f"\n{table(results)}")
    written = {r.storage: dataclasses.asdict(r) for r in results}
    (options.out / "serving.json").write_text(json.dumps(written, indent=2) + "\n")
    plot(results, options.out / "serving.png")


if __name__ == "__main__":
    main()
