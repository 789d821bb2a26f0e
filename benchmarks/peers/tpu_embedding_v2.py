"""Ours: TPUEmbeddingV2.preprocess_features, for the SparseCores of a software TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow as tf

import tpu_embedding as te
from benchmarks import feed, one_stack
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed_both
from tpu_embedding.layout import limits
from tpu_embedding.ops import library
from tpu_embedding.testing import SoftwareTPUStrategy

RULE = "TPUEmbeddingV2.preprocess_features: ids checked, one op for all tables"

# Preprocessing does not depend on widths. Narrow tables go into one stack, as the
# peers' do, and take little memory.
_DIM = 8


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Traces one function for each number of devices; no optimizer matters."""
    del optimizer
    library.load()  # Without it TensorFlow's ops would be measured.
    most_first = sorted(one_stack.DEVICES.items(), key=lambda item: -item[1])
    # TensorFlow cannot add devices later.
    embeddings = {name: embedding(scenario, n) for name, n in most_first}
    functions: dict[str, Callable[[], float]] = {}
    for name in one_stack.DEVICES:
        next_batch = feed.dense(scenario.batches(4))
        functions |= timed_both(name, step(embeddings[name], next_batch))
    return functions


def embedding(scenario: Scenario, devices: int) -> te.TPUEmbeddingV2:
    """Makes an embedding of narrow tables in one stack, without limits."""
    features = [
        te.FeatureConfig(
            te.TableConfig(rows, _DIM, combiner="sum", name=f"t{i:03}"),
            output_shape=[scenario.batch_size],
            name=f"f{i:03}",
        )
        for i, rows in enumerate(scenario.rows)
    ]
    stack = "_".join(str(feature.table.name) for feature in features)
    config = te.SparseCoreEmbeddingConfig(
        max_ids_per_chip_per_sample=one_stack.IDS_PER_SAMPLE,
        max_ids_per_table={stack: one_stack.NO_LIMIT},
        max_unique_ids_per_table={stack: one_stack.NO_LIMIT},
    )
    strategy = SoftwareTPUStrategy(one_stack.TPU, devices)
    # The peers have no limits either: such a program is too large for a SparseCore.
    unlimited = mock.patch.object(limits, "sparse_core_excesses", return_value=[])
    with strategy.scope(), unlimited:
        return te.TPUEmbeddingV2(
            features, te.SGD(0.01), sparse_core_embedding_config=config
        )


def step(
    of: te.TPUEmbeddingV2, next_batch: Callable[[], list[tf.Tensor]]
) -> Callable[[], Any]:
    """Returns a function that runs preprocess_features on the next batch."""
    return tf.function(lambda: of.preprocess_features(next_batch()), autograph=False)
