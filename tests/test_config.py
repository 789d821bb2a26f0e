"""Configurations: arguments, defaults, errors, copies; names of combiners."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference import lookup

import tpu_embedding as te
from tpu_embedding import combiners, keras
from tpu_embedding.config import (
    FeatureConfig,
    QuantizationConfig,
    SparseCoreEmbeddingConfig,
    TableConfig,
)

stock = tf.tpu.experimental.embedding


def _arguments(cls: type) -> list[tuple[str, Any]]:
    """Positional arguments and their defaults; float32 by its name."""
    parameters = inspect.signature(cls).parameters.values()
    return [
        (p.name, getattr(p.default, "name", p.default))
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]


@pytest.mark.parametrize(
    "cls", [TableConfig, FeatureConfig, QuantizationConfig, SparseCoreEmbeddingConfig]
)
def test_arguments_are_those_of_tensorflow(cls: type) -> None:
    assert _arguments(cls) == _arguments(getattr(stock, cls.__name__))


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (TableConfig, ["invalid_ids", "rounding_seed", "placement", "string_ids"]),
        (FeatureConfig, ["salt"]),
    ],
)
def test_what_is_ours_alone_is_keyword_only(cls: type, names: list[str]) -> None:
    parameters = inspect.signature(cls).parameters
    assert [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY] == names


def _ignored(*_: Any, **__: Any) -> None:
    """Stands for any callable argument."""


# Argument -> a value that TensorFlow and we refuse.
BAD_TABLE_ARGUMENTS: list[tuple[str, Any]] = [
    ("vocabulary_size", 0),
    ("vocabulary_size", -1),
    ("vocabulary_size", 2.0),
    ("vocabulary_size", "2"),
    ("vocabulary_size", np.float64(2)),
    ("vocabulary_size", None),
    ("dim", 0),
    ("dim", 1.5),
    ("initializer", 1.0),
    ("combiner", "max"),
    ("combiner", None),
    ("dtype", tf.float64),
    ("dtype", tf.string),
]


def test_sizes_of_numpy_become_ints() -> None:
    table = TableConfig(np.int64(4), np.int32(2))
    assert (table.vocabulary_size, table.dim) == (4, 2)
    assert {type(table.vocabulary_size), type(table.dim)} == {int}


@pytest.mark.parametrize(("argument", "value"), BAD_TABLE_ARGUMENTS)
def test_bad_table_arguments_raise_as_in_tensorflow(argument: str, value: Any) -> None:
    arguments = {"vocabulary_size": 4, "dim": 2, "name": "t", argument: value}
    with pytest.raises(Exception) as expected:  # noqa: PT011 - compared below.
        stock.TableConfig(**arguments)
    with pytest.raises(expected.type, match=argument):
        TableConfig(**arguments)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("table", "films"),
        ("table", None),
        ("max_sequence_length", -1),
        ("max_sequence_length", 1.0),
        ("validate_weights_and_indices", 1),
        ("output_shape", [-2]),
        ("output_shape", ["a"]),
    ],
)
def test_bad_feature_arguments_raise_as_in_tensorflow(
    argument: str, value: Any
) -> None:
    ours = {"table": TableConfig(4, 2), argument: value}
    theirs = {"table": stock.TableConfig(4, 2, name="t"), argument: value}
    with pytest.raises(Exception) as expected:  # noqa: PT011 - compared below.
        stock.FeatureConfig(**theirs)
    with pytest.raises(expected.type, match=argument):
        FeatureConfig(**ours)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("vocabulary_size", True, ValueError),
        ("dim", True, ValueError),
        ("name", 3, TypeError),
        ("name", "", ValueError),
        ("quantization_config", 4, TypeError),
        ("invalid_ids", "ignore", ValueError),
        ("invalid_ids", None, ValueError),
        ("dtype", "float16", ValueError),
        ("dtype", None, ValueError),
        ("dtype", tf.int32, NotImplementedError),
        ("rounding_seed", -1, ValueError),
        ("rounding_seed", 2**63, ValueError),
        ("rounding_seed", 1.0, TypeError),
        ("rounding_seed", True, TypeError),
        ("rounding_seed", 1, ValueError),  # Of a float32 table.
    ],
)
def test_table_arguments_that_only_we_refuse(
    argument: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=argument):
        TableConfig(**{"vocabulary_size": 4, "dim": 2, argument: value})


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("max_sequence_length", True, ValueError),
        ("name", 3, TypeError),
        ("output_shape", "ab", TypeError),
        ("output_shape", [True], TypeError),
    ],
)
def test_feature_arguments_that_only_we_refuse(
    argument: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=argument):
        FeatureConfig(**{"table": TableConfig(4, 2), argument: value})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((1, 0.0, 1.0), ValueError),
        ((2.0, 0.0, 1.0), TypeError),
        ((True, 0.0, 1.0), TypeError),
        ((4, "0", 1.0), TypeError),
        ((4, 0.0, float("nan")), ValueError),
        ((4, 0.0, float("inf")), ValueError),
        ((4, 1.0, 1.0), ValueError),
        ((4, 2.0, 1.0), ValueError),
    ],
)
def test_bad_quantization(arguments: tuple, error: type[Exception]) -> None:
    with pytest.raises(error):
        QuantizationConfig(*arguments)


@pytest.mark.parametrize("optimizer", ["adagrad", object(), None])
def test_a_table_does_not_check_its_optimizer_at_birth(optimizer: Any) -> None:
    assert TableConfig(4, 2, optimizer=optimizer).optimizer is optimizer


@pytest.mark.parametrize("dtype", ["float32", tf.float32, np.float32, np.dtype("f4")])
def test_dtype_is_kept_by_name(dtype: Any) -> None:
    assert TableConfig(4, 2, dtype=dtype).dtype == "float32"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        (tf.TensorShape(None), None),  # pyright: ignore[reportArgumentType]
        ([], ()),
        ([8], (8,)),
        ((8, None), (8, None)),
        (tf.TensorShape([None, 3]), (None, 3)),
        (8, (8,)),
        (np.int64(8), (8,)),
        (np.array([8, 2]), (8, 2)),
        ([np.int32(8), None], (8, None)),
    ],
)
def test_output_shape_is_kept_as_a_tuple(given: Any, kept: Any) -> None:
    assert FeatureConfig(TableConfig(4, 2), output_shape=given).output_shape == kept
    theirs = stock.FeatureConfig(
        stock.TableConfig(4, 2, name="t"), output_shape=given
    ).output_shape
    assert theirs.as_list() == list(kept) if kept is not None else theirs.rank is None
    if kept is not None:
        ours = FeatureConfig(TableConfig(4, 2), output_shape=given).output_shape
        assert ours.as_list() == theirs.as_list()
        assert (ours.rank, ours.num_elements()) == (theirs.rank, theirs.num_elements())
        assert (repr(ours), str(ours)) == (repr(theirs), str(kept))


def test_a_sequence_has_no_output_shape() -> None:
    with pytest.raises(ValueError, match="max_sequence_length"):
        FeatureConfig(TableConfig(4, 2), 3, output_shape=[8])


def test_tensorflow_s_quantization_becomes_ours() -> None:
    table = TableConfig(
        4, 2, quantization_config=stock.QuantizationConfig(16, -1.0, 1.0)
    )
    assert table.quantization_config == QuantizationConfig(16, -1.0, 1.0)


def test_a_feature_takes_tensorflow_s_table() -> None:
    table = stock.TableConfig(4, 2, name="t")
    assert FeatureConfig(table).table is table


def test_tables_and_features_compare_by_identity() -> None:
    table = TableConfig(4, 2)
    assert table != TableConfig(4, 2)
    assert len({table, TableConfig(4, 2), table}) == 2
    feature = FeatureConfig(table)
    assert feature != FeatureConfig(table)
    assert {feature: 1}[feature] == 1


def test_quantization_compares_by_value() -> None:
    assert QuantizationConfig(4, 0.0, 1.0) == QuantizationConfig(4, 0.0, 1.0)
    assert QuantizationConfig(4, 0.0, 1.0) != QuantizationConfig(5, 0.0, 1.0)


def test_quantization_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantizationConfig(4, 0.0, 1.0).lower = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_repr_shows_tensorflows_arguments_and_others_that_are_set() -> None:
    ours = TableConfig(2, 4, combiner="sum", name="films")
    theirs = tf.tpu.experimental.embedding.TableConfig(
        2, 4, combiner="sum", name="films"
    )
    assert repr(ours) == repr(theirs)
    ours.dtype, ours.invalid_ids = "bfloat16", "drop"
    assert repr(ours) == repr(theirs)[:-1] + ", dtype='bfloat16', invalid_ids='drop')"
    assert "placement='rows'" in repr(TableConfig(2, 4, placement="rows"))


def _embeddings(feature: FeatureConfig) -> list[Any]:
    """One call for each class that is made of configs."""
    return [
        lambda: te.TPUEmbedding([feature], te.SGD()),
        lambda: te.TPUEmbeddingV2([feature], te.SGD()),
        lambda: te.TPUEmbeddingV0([feature], te.SGD()),
        lambda: te.TPUEmbeddingForServing([feature], None),
        lambda: keras.TPUEmbedding([feature], te.SGD()),
    ]


@pytest.mark.parametrize("which", range(5))
def test_configs_can_be_changed_until_an_embedding_is_made(which: int) -> None:
    feature = FeatureConfig(TableConfig(4, 2))
    feature.max_sequence_length = 3
    feature.table = table = TableConfig(4, 2)
    table.vocabulary_size = 6
    table.dtype = tf.float32
    table.name = "films"
    embedding = _embeddings(feature)[which]()
    if which == 4:
        assert embedding([tf.constant([[5, 0, 1, 2]])])[0].shape == (1, 3, 2)
    with pytest.raises(AttributeError, match="`name` of this TableConfig cannot be"):
        table.name = "users"
    with pytest.raises(AttributeError, match=r"dataclasses.replace\(config, table="):
        feature.table = TableConfig(4, 2)
    with pytest.raises(AttributeError, match="`name` of this TableConfig cannot be de"):
        del table.name
    assert table.name == "films"
    assert table.dtype == "float32"
    other = dataclasses.replace(table, name="users")
    other.dim = 3
    assert (other.name, other.dim, table.dim) == ("users", 3, 2)


@pytest.mark.parametrize("which", range(5))
def test_changed_configs_are_checked_again(which: int) -> None:
    feature = FeatureConfig(TableConfig(4, 2))
    feature.table.dim = 0
    with pytest.raises(ValueError, match="Argument `dim` must be an int >= 1"):
        _embeddings(feature)[which]()
    feature.table.dim = 2  # Nothing was made of it yet.
    feature.max_sequence_length = -1
    with pytest.raises(ValueError, match="Argument `max_sequence_length`"):
        _embeddings(feature)[which]()
    feature.max_sequence_length = 0
    _embeddings(feature)[which]()


def test_functions_leave_configs_changeable() -> None:
    feature = FeatureConfig(TableConfig(4, 2), name="f", output_shape=[2])
    rows = {feature.table: tf.zeros([4, 2])}
    te.serving_embedding_lookup(tf.constant([1, 3]), None, rows, feature)
    feature.table.name = "films"


def test_configs_survive_pickle_and_copy() -> None:
    feature = FeatureConfig(TableConfig(4, 2, name="t"), output_shape=[3, None])
    feature.freeze()
    feature.table.freeze()
    for again in (pickle.loads(pickle.dumps(feature)), copy.deepcopy(feature)):
        assert again.output_shape == (3, None)
        assert again.table.name == "t"
        assert again.table is not feature.table
        again.table.name = again.name = "u"  # No embedding was made of a copy.


def test_sparse_core_config_keeps_limits_of_its_own() -> None:
    limits = {"a": 3}
    config = SparseCoreEmbeddingConfig(max_ids_per_table=limits)
    limits["a"] = 4
    assert config.max_ids_per_table == {"a": 3}


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("disable_table_stacking", 1, TypeError),
        ("allow_id_dropping", None, TypeError),
        ("initialize_tables_on_host", "yes", TypeError),
        ("enable_fast_table_initialization", 0, TypeError),
        ("stock_feature_counts", 1, TypeError),
        ("minibatching", 0, TypeError),
        ("max_ids_per_chip_per_sample", 0, ValueError),
        ("max_ids_per_chip_per_sample", 1.5, ValueError),
        ("max_ids_per_table", 3, TypeError),
        ("max_ids_per_table", {1: 3}, TypeError),
        ("max_unique_ids_per_table", {"a": 0}, ValueError),
        ("max_unique_ids_per_table", {"a": True}, ValueError),
        ("shard_loads", [1.0], TypeError),
        ("shard_loads", {1: [1.0]}, TypeError),
        ("shard_loads", {"a": "12"}, TypeError),
        ("shard_loads", {"a": [True]}, TypeError),
        ("shard_loads", {"a": [-1.0]}, ValueError),
        ("shard_loads", {"a": [float("nan")]}, ValueError),
    ],
)
def test_sparse_core_config_is_checked(
    argument: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=argument):
        SparseCoreEmbeddingConfig(**{argument: value})


@pytest.mark.parametrize("combiner", combiners.COMBINERS)
def test_every_combiner_passes_its_own_check(combiner: str) -> None:
    combiners.convert_combiner(combiner)


@pytest.mark.parametrize("combiner", combiners.COMBINERS)
def test_tensorflow_and_the_reference_know_every_combiner(combiner: str) -> None:
    tf.tpu.experimental.embedding.TableConfig(4, 2, combiner=combiner, name="t")
    assert len(lookup.gains([1.0, 2.0], combiner)) == 2


@pytest.mark.parametrize("combiner", ["", "max", "Mean", None, 0, ["sum"]])
def test_other_combiners_are_refused(combiner: object) -> None:
    with pytest.raises(ValueError, match="combiner"):
        combiners.convert_combiner(combiner)


def test_the_positional_combiner_of_tensorflow_is_refused_by_name() -> None:
    stock: Any = tf.tpu.experimental.embedding
    if hasattr(stock, "PositionalWeightedCombiner"):  # TensorFlow 2.22
        rule = stock.CustomOptimizer(lambda *values: values, 0.1)
        combiner = stock.PositionalWeightedCombiner(3, tf.ones_initializer(), rule)
    else:
        combiner = types.SimpleNamespace(combiner="positional_weighted", max_valency=3)
    with pytest.raises(NotImplementedError, match=r"A PositionalWeighted.* Custom"):
        combiners.convert_combiner(combiner)


def test_a_custom_combiner_is_a_word_as_tensorflows_is() -> None:
    def first(valency: Any, vectors: Any) -> Any:
        return vectors[0]

    # Without an address: what processes compare, and as TensorFlow's words begin.
    word = str(combiners.CustomCombiner(first, max_valency=4))
    assert word == "custom_combiner(max_valency=4, num_weights=0)"
