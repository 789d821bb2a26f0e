"""The golden files of tests/golden/{csr,limits}, read into what the package takes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.inputs import IdBatch, to_id_batch
from tpu_embedding.layout.csr import (
    PartitionedFeature,
    PartitionedStack,
    Partitioning,
)

GOLDEN = pathlib.Path(__file__).with_name("golden")
CSR = pathlib.Path(os.environ.get("CSR_ORACLE_DIR", GOLDEN / "csr"))
LIMITS = pathlib.Path(os.environ.get("LIMITS_ORACLE_DIR", GOLDEN / "limits"))


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden file: its arrays by key, and what `meta` says."""

    arrays: Mapping[str, np.ndarray]
    meta: Mapping[str, Any]


def read(path: pathlib.Path) -> Case:
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    return Case(arrays, json.loads(str(arrays.pop("meta"))))


def to_partitioning(meta: Mapping[str, Any], **changes: Any) -> Partitioning:
    """One stacked table "t" as `meta` says, but for the `changes`."""
    features = tuple(
        PartitionedFeature(
            path=f"f{i}",
            table=f"t{feature['table']}",
            vocabulary_size=meta["tables"][feature["table"]]["vocab"],
            combiner=feature["combiner"],
            invalid_ids="error",
            samples=feature["samples"],
            sample_offset=feature["row_offset"],
            row_offset=meta["tables"][feature["table"]]["col_offset"],
            rotation=meta["tables"][feature["table"]]["col_shift"],
            output_shape=(feature["samples"],),
        )
        for i, feature in enumerate(meta["feats"])
    )
    table = PartitionedStack(
        name="t",
        rows=meta["stacked_vocab"],
        samples=meta["stacked_samples"],
        features=tuple(range(len(features))),
        max_ids_per_partition=meta["max_ids"],
        max_unique_ids_per_partition=meta["max_unique"],
    )
    table_changes = {k: v for k, v in changes.items() if hasattr(table, k)}
    other_changes = {k: v for k, v in changes.items() if not hasattr(table, k)}
    partitioning = Partitioning(
        sparse_cores_per_device=meta["num_sc"],
        num_replicas=meta["num_replica"],
        features=features,
        stacks=(dataclasses.replace(table, **table_changes),),
        max_ids_per_chip_per_sample=meta["max_ids_per_chip_per_sample"],
        allow_id_dropping=meta.get("allow_id_dropping", False),
        max_minibatches=meta["max_minibatches"],
    )
    return dataclasses.replace(partitioning, **other_changes)


def _dense(lengths: np.ndarray, values: tf.Tensor) -> tf.Tensor:
    assert (lengths == 1).all()
    return values


def _sparse(lengths: np.ndarray, values: tf.Tensor) -> tf.SparseTensor:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(0, int)])
    return tf.SparseTensor(
        np.stack([rows, columns], axis=1).astype(np.int64),
        values,
        [len(lengths), max(1, lengths.max(initial=0))],
    )


def _ragged(lengths: np.ndarray, values: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(values, lengths.astype(np.int64))


KINDS = {"dense": _dense, "sparse": _sparse, "ragged": _ragged}


def to_batches(case: Case) -> list[IdBatch]:
    """The features of a file, each of its own kind."""
    batches = []
    for i, feature in enumerate(case.meta["feats"]):
        make = KINDS[feature["kind"]]
        lengths = case.arrays[f"in/f{i}/lens"]
        ids = make(lengths, tf.constant(case.arrays[f"in/f{i}/ids"]))
        weights = make(lengths, tf.constant(case.arrays[f"in/f{i}/weights"]))
        batches.append(to_id_batch(f"f{i}", ids, weights))
    return batches


def minibatch_case(case: Case) -> tuple[Partitioning, list[IdBatch]]:
    """A minibatch file as one ragged feature whose weights are the gains."""
    meta = case.meta
    rows = case.arrays["in/row"]
    lengths = np.bincount(rows, minlength=meta["sample_count"])
    feature = {
        "table": 0,
        "samples": meta["sample_count"],
        "kind": "ragged",
        "combiner": "sum",
        "row_offset": 0,
    }
    vocabulary_size = meta["table_vocab_size"]
    table = {"vocab": vocabulary_size, "col_offset": 0, "col_shift": 0}
    full = {
        "num_sc": meta["num_sc_per_chip"],
        "num_replica": meta["num_replica"],
        "tables": [table],
        "feats": [feature],
        "stacked_samples": meta["sample_count"],
        "stacked_vocab": vocabulary_size,
        "max_ids": 1 << 30,
        "max_unique": 1 << 30,
        # A multiple of 8, and large enough for the padding of 64 minibatches.
        "max_ids_per_chip_per_sample": 1 << 14,
        "max_minibatches": 64,
    }
    arrays = {
        "in/f0/lens": lengths,
        "in/f0/ids": case.arrays["in/col"],
        "in/f0/weights": case.arrays["in/gain"],
    }
    partitioning = to_partitioning(full)
    return partitioning, to_batches(Case(arrays, full))
