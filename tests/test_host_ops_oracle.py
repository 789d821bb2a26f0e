"""TensorFlow's own host ops for SparseCores, on the software TPU's kernels.

Compares every step of the golden files; test_csr_oracle.py compares only the end.
"""

from __future__ import annotations

import pathlib
from typing import Any

import csr_cases
import numpy as np
import pytest
import tensorflow as tf
from test_csr_oracle import files, limit_cases

from tpu_embedding.testing import library

RAW = tf.raw_ops


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    library.load()


def check(tensors: Any, case: csr_cases.Case, prefix: str, keys: str) -> None:
    for tensor, key in zip(tensors, keys.split(), strict=True):
        golden = case.arrays[f"{prefix}/{key}"]
        found = tensor.numpy()[: golden.shape[0]] if golden.ndim else tensor.numpy()
        if golden.dtype == np.float32:
            np.testing.assert_array_max_ulp(found, golden, maxulp=1)
        else:
            np.testing.assert_array_equal(found, golden)


def structure(feature: dict[str, Any], lengths: np.ndarray) -> np.ndarray:
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(0, int)])
    forms = {
        "dense": np.zeros(0),
        "ragged": np.concatenate([[0], np.cumsum(lengths)]),
        "sparse": np.stack([rows, columns], axis=1),
    }
    return forms[feature["kind"]].astype(np.int32)


def convert(case: csr_cases.Case, i: int) -> Any:
    meta, feature = case.meta, case.meta["feats"][i]
    table = meta["tables"][feature["table"]]
    return RAW.ConvertToListOfSparseCoreCooTensors(
        indices_or_row_splits=structure(feature, case.arrays[f"in/f{i}/lens"]),
        values=case.arrays[f"in/f{i}/ids"],
        weights=case.arrays[f"in/f{i}/weights"],
        sample_count=feature["samples"],
        num_sc_per_chip=meta["num_sc"],
        row_offset=feature["row_offset"],
        col_offset=table["col_offset"],
        col_shift=table["col_shift"],
        num_sc_shards=meta["num_sc"] * meta["num_replica"],
        stacked_table_sample_count=meta["stacked_samples"],
        combiner=feature["combiner"],
    )


def lists(case: csr_cases.Case, converted: list[Any], core: int) -> dict[str, Any]:
    """The arguments that the ops of one SparseCore share."""
    meta = case.meta
    features = meta["feats"]
    return {
        "row_ids_list": [c.row_ids_list[core] for c in converted],
        "col_ids_list": [c.col_ids_list[core] for c in converted],
        "gains_list": [c.gains_list[core] for c in converted],
        "sample_count_list": [f["samples"] // meta["num_sc"] for f in features],
        "col_offset_list": [meta["tables"][f["table"]]["col_offset"] for f in features],
        "num_replica": meta["num_replica"],
        "table_vocab_size": meta["stacked_vocab"],
        "feature_width": meta["width"],
        "num_sc_per_chip": meta["num_sc"],
        "table_name": "t",
    }


def sort(case: csr_cases.Case, arguments: dict[str, Any], **limits: int) -> Any:
    meta = case.meta
    return RAW.SortListOfSparseCoreCooTensors(
        **arguments,
        max_ids_per_sparse_core=limits.get("max_ids", meta["max_ids"]),
        max_unique_ids_per_sparse_core=limits.get("max_unique", meta["max_unique"]),
    )


@pytest.mark.parametrize(
    "path", files(csr_cases.CSR, "csr_*.npz") + files(csr_cases.LIMITS, "drop_*.npz")
)
def test_every_step(path: pathlib.Path):
    case = csr_cases.read(path)
    meta = case.meta
    converted = [convert(case, i) for i in range(len(meta["feats"]))]
    ordered = []
    for core in range(meta["num_sc"]):
        for i, one in enumerate(converted):
            parts = [one.row_ids_list, one.col_ids_list, one.gains_list]
            check([p[core] for p in parts], case, f"coo/f{i}/sc{core}", "row col gain")
        arguments = lists(case, converted, core)
        stats = RAW.GetStatsFromListOfSparseCoreCooTensors(**arguments)
        check(stats, case, f"stats/sc{core}", "max_ids max_unique_ids")
        ordered.append(sort(case, arguments))
        check(ordered[-1], case, f"sorted/sc{core}", "row col gain id_counts")
    csr = RAW.ConvertToSparseCoreCsrWrappedCooTensor(
        sorted_row_ids_list=[o.sorted_row_ids for o in ordered],
        sorted_col_ids_list=[o.sorted_col_ids for o in ordered],
        sorted_gains_list=[o.sorted_gains for o in ordered],
        id_counts_list=[o.id_counts for o in ordered],
        splits=tf.constant(0, tf.int64),
        sample_count_per_sc=meta["stacked_samples"] // meta["num_sc"],
        num_replica=meta["num_replica"],
        max_minibatches_per_sc=meta["max_minibatches"],
        max_ids_per_chip_per_sample=meta["max_ids_per_chip_per_sample"],
        table_vocab_size=meta["stacked_vocab"],
        feature_width=meta["width"],
        table_name="t",
        allow_id_dropping=meta.get("allow_id_dropping", False),
    )
    check(
        csr,
        case,
        "csr",
        "row_pointers sorted_sample_ids sorted_token_ids sorted_gains "
        "row_pointers_unpadded_size ids_unpadded_size num_minibatches_per_sc",
    )
    assert len(csr[0]) == case.arrays["csr/row_pointers_padded_size"]
    assert len(csr[1]) == case.arrays["csr/ids_padded_size"]


@pytest.mark.parametrize(("limit", "path"), limit_cases())
def test_limits(limit: dict[str, Any], path: pathlib.Path):
    case = csr_cases.read(path)
    converted = [convert(case, i) for i in range(len(case.meta["feats"]))]
    failed = None
    for core in range(case.meta["num_sc"]):
        try:
            sort(case, lists(case, converted, core), **{limit["case"]: limit["value"]})
        except tf.errors.InvalidArgumentError as error:
            failed = error
            break
    assert (failed is None) == (limit["error"] is None)


@pytest.mark.parametrize("path", files(csr_cases.LIMITS, "minibatch_*.npz"))
def test_minibatches(path: pathlib.Path):
    case = csr_cases.read(path)
    meta = case.meta
    names = "sample_count num_replica table_vocab_size feature_width num_sc_per_chip"
    shared = {key: meta[key] for key in [*names.split(), "table_name"]}
    key = tf.constant([""])
    found = RAW.GetMinibatchSplitsWithPhysicalReplica(
        program_key=key,
        row_ids=case.arrays["in/row"],
        col_ids=case.arrays["in/col"],
        gains=case.arrays["in/gain"],
        mini_batch_splits="",
        **shared,
    )
    names = "sorted_row_ids sorted_col_ids sorted_gains splits id_counts max_ids"
    check(found, case, "splits", names + " max_uniques")
    number = 0
    while f"csr{number}/mask" in case.arrays:
        csr = RAW.GetMinibatchesInCsrWithPhysicalReplica(
            program_key=key,
            row_ids=found.sorted_row_ids,
            col_ids=found.sorted_col_ids,
            gains=found.sorted_gains,
            splits=case.arrays[f"csr{number}/mask"],
            id_counts=found.id_counts,
            max_minibatches_per_sc=64,
            max_ids_per_chip_per_sample=1 << 14,
            mini_batch_in_csr="",
            **shared,
        )
        tensors = [*csr[:4], csr.num_minibatches_per_physical_sparse_core]
        names = "row_pointers sorted_sample_ids sorted_token_ids sorted_gains"
        check(tensors, case, f"csr{number}", names + " num_minibatches")
        number += 1
    assert number > 0


def test_a_scalar_weight_is_that_of_every_id():
    def lists(weights: Any) -> Any:
        found = RAW.ConvertToListOfSparseCoreCooTensors(
            indices_or_row_splits=tf.constant([0, 2, 3, 3, 4]),
            values=tf.constant([5, 1, 7, 2]),
            weights=weights,
            sample_count=4,
            num_sc_per_chip=2,
            row_offset=0,
            col_offset=0,
            col_shift=0,
            num_sc_shards=4,
            stacked_table_sample_count=4,
            combiner="sum",
        )
        return [value.numpy().tolist() for value in tf.nest.flatten(found)]

    assert lists(tf.constant(0.5)) == lists(tf.fill([4], 0.5))
    with pytest.raises(tf.errors.InvalidArgumentError, match="4 values have 3 weights"):
        lists(tf.fill([3], 0.5))
