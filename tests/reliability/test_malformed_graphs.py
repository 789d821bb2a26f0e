"""Graphs that were edited by hand: an error that names the list, never a crash."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from steps import train_on
from tensorflow.core.framework import attr_value_pb2

import tpu_embedding as te

ROWS, DIM = 5, 2
NUM_IN_CI = 40
ERRORS = (tf.errors.InvalidArgumentError, ValueError)
LISTS = ("s", "i", "f", "b", "shape")
RECORDS = ("plan", "call")
NameAttrList: Any = vars(attr_value_pb2)["NameAttrList"]


def features() -> tuple[dict[str, te.FeatureConfig], dict[str, Any], dict[str, Any]]:
    """Two tables with two optimizers, three kinds of input, weights on one."""
    one = te.TableConfig(ROWS, DIM, te.RowIdInitializer(), te.Adam(0.1), name="one")
    two = te.TableConfig(
        ROWS,
        DIM,
        te.RowIdInitializer(),
        te.RowwiseAdagrad(0.1),
        name="two",
        quantization_config=te.QuantizationConfig(4, 0.0, 8.0),
    )
    configs = {
        "a": te.FeatureConfig(one),
        "b": te.FeatureConfig(two, max_sequence_length=2),
        "c": te.FeatureConfig(one, output_shape=[2]),
    }
    ids = tf.ragged.constant([[1, 2, 3], []], tf.int64)
    values = {
        "a": tf.constant([1, 2]),
        "b": tf.sparse.from_dense([[1, 0, 2], [0, 3, 0]]),
        "c": ids,
    }
    weights = {"a": None, "b": None, "c": ids.with_values(tf.ones([3]))}
    return configs, values, weights


def queued() -> Any:
    configs, values, weights = features()
    embedding = te.TPUEmbedding(configs, None)

    @tf.function
    def step() -> None:
        train_on(embedding, values, tf.identity, weights=weights)
        flat, looked_up = embedding.core.look_up(
            [*values.values()], [*weights.values()]
        )
        embedding.core.update(looked_up, flat)

    embedding.build()
    return embedding, step.get_concrete_function()


def stacked() -> Any:
    configs, values, weights = features()
    embedding = te.TPUEmbeddingV2(configs, None)
    embedding.build()

    @tf.function
    def step() -> None:
        activations, preserved = embedding(values, weights)
        embedding.apply_gradients(activations, preserved)

    return embedding, step.get_concrete_function()


@dataclasses.dataclass(frozen=True)
class Edit:
    """One attribute of one node, changed; `refused` if that must be an error."""

    node: str
    attribute: str
    value: Any
    refused: bool
    what: str


def edits(graph: Any) -> Iterator[Edit]:
    """Everything that can be done to the lists of our ops, one at a time."""
    for node in graph.node:
        if not node.op.startswith("TpuEmbedding"):
            continue
        for name, value in sorted(node.attr.items()):
            if name == "replica":
                for number in (-1, 99, 2**31 - 1):
                    changed = tf.compat.v1.AttrValue(i=number)
                    yield Edit(node.name, name, changed, True, f"{number}")
            if name in RECORDS:
                yield from edits_of_record(node.name, name, value)
            for kind in LISTS:
                if getattr(value.list, kind):
                    yield from edits_of_list(node.name, name, value, kind)


def edits_of_record(node: str, name: str, value: Any) -> Iterator[Edit]:
    """The fields of a serialized record (ops/library.py), one changed at a time."""
    record = NameAttrList.FromString(value.s)

    def changed(field: str, content: Any) -> Any:
        result = copy.deepcopy(record)
        result.attr[field].CopyFrom(content)
        return tf.compat.v1.AttrValue(s=result.SerializeToString())

    for field, content in sorted(record.attr.items()):
        missing = copy.deepcopy(record)
        del missing.attr[field]
        without = tf.compat.v1.AttrValue(s=missing.SerializeToString())
        yield Edit(node, name, without, True, f"no {field}")
        other = tf.compat.v1.AttrValue(type=1)  # Of a type that no field has.
        yield Edit(node, name, changed(field, other), True, f"type of {field}")
        for kind in (*LISTS, "func"):
            if getattr(content.list, kind):
                for edit in edits_of_list(node, field, content, kind):
                    new = changed(field, edit.value)
                    yield Edit(node, name, new, edit.refused, f"{field} {edit.what}")
    cut = tf.compat.v1.AttrValue(s=value.s[: len(value.s) // 2])
    yield Edit(node, name, cut, True, "cut")


def edits_of_list(node: str, name: str, value: Any, kind: str) -> Iterator[Edit]:
    def changed(items: list[Any]) -> Any:
        result = copy.deepcopy(value)
        result.list.ClearField(kind)
        getattr(result.list, kind).extend(items)
        return result

    items = list(getattr(value.list, kind))
    yield Edit(node, name, changed(items[:-1]), True, "cut")
    yield Edit(node, name, changed([*items, items[-1]]), True, "longer")


def run_edited(function: Any, edit: Edit) -> None:
    """Runs the graph with one attribute changed."""
    graph = function.graph.as_graph_def()
    for node in graph.node:
        if node.name == edit.node:
            node.attr[edit.attribute].CopyFrom(edit.value)
    wrapped = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(graph, name=""), []
    )
    feeds = [wrapped.graph.get_tensor_by_name(t.name) for t in function.inputs]
    operations = [
        operation
        for operation in wrapped.graph.get_operations()
        if operation.type.startswith("TpuEmbedding")
    ]
    pruned = wrapped.prune(feeds, operations)
    pruned(*function.captured_inputs)


@pytest.mark.parametrize("make", [queued, stacked])
def test_edited_graphs(
    make: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "host")
    embedding, function = make()
    run_edited(function, Edit("", "", None, False, ""))
    every = list(edits(function.graph.as_graph_def()))
    assert len({(edit.attribute, edit.what) for edit in every}) > 30
    some = rng.permutation(len(every))[:NUM_IN_CI]
    missed = []
    for edit in [every[i] for i in some]:
        before = bits(embedding)
        try:
            run_edited(function, edit)
        except ERRORS:
            continue
        finally:
            embedding.reset()
        if edit.refused:
            missed.append(edit)
            assert before
    assert not missed, [(e.node, e.attribute, e.what) for e in missed]


def bits(embedding: Any) -> list[bytes]:
    tables = embedding.variables.values()
    return [v.numpy().tobytes() for table in tables for v in table.values()]
