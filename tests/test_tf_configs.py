"""TensorFlow's configuration objects as ours: every option is carried or refused."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import tensorflow as tf
from optimizer_cases import STOCK, Case

from tpu_embedding import optimizers, tf_configs
from tpu_embedding.config import FeatureConfig, QuantizationConfig, TableConfig

stock = tf.tpu.experimental.embedding

User = collections.namedtuple("User", ["item", "age"])


def _ignored(*_: Any, **__: Any) -> Any:
    """Stands for any callable argument."""


def _stock_table(**options: Any) -> Any:
    return stock.TableConfig(**{"vocabulary_size": 8, "dim": 4, "name": "t", **options})


def _convert_one(feature: Any, **options: Any) -> FeatureConfig:
    (converted,) = tf_configs.convert_features(feature, **options).features
    return converted


# Values that are no default, for arguments that are not plain numbers.
OTHER_VALUES: dict[str, Any] = {
    "learning_rate": _ignored,
    "clipvalue": (-0.5, 0.25),
    "slot_variable_creation_fn": _ignored,
}


def _other_value(name: str, default: Any) -> Any:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(default, bool):
        return not default
    if default is None:
        return True if name.startswith("multiply") else 0.375
    return default / 2 or 0.5


@pytest.mark.parametrize(
    ("case", "field"),
    [(c, f) for c in STOCK for f in dataclasses.fields(c.cls) if not f.kw_only],
    ids=lambda value: value.name,
)
def test_every_option_of_an_optimizer_is_carried(case: Case, field: Any) -> None:
    options = {field.name: _other_value(field.name, field.default)}
    assert case.stock is not None
    converted = tf_configs.convert_optimizer(case.stock(**options))
    assert converted == case.cls(**options)
    assert converted != case.cls()


@pytest.mark.parametrize("case", STOCK, ids=lambda case: case.name)
def test_defaults_of_an_optimizer_are_carried(case: Case) -> None:
    assert case.stock is not None
    assert tf_configs.convert_optimizer(case.stock()) == case.cls()


@pytest.mark.parametrize("clipvalue", [None, 0.5, (-0.5, 0.25), (None, 1.0)])
def test_clipvalue_is_carried(clipvalue: Any) -> None:
    converted = tf_configs.convert_optimizer(stock.SGD(clipvalue=clipvalue))
    assert converted == optimizers.SGD(clipvalue=clipvalue)


def test_our_optimizers_and_none_pass_through() -> None:
    optimizer = optimizers.RowwiseAdagrad()
    assert tf_configs.convert_optimizer(optimizer) is optimizer
    assert tf_configs.convert_optimizer(None) is None


class _MyAdagrad(stock.Adagrad):
    """A subclass may have another rule."""


@pytest.mark.parametrize(
    "optimizer",
    ["adagrad", tf.keras.optimizers.SGD(), _MyAdagrad(), stock.Adagrad, 0.1],
    ids=lambda value: type(value).__name__,
)
def test_other_optimizers_are_refused(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="Unsupported optimizer for the whole"):
        tf_configs.convert_optimizer(optimizer)
    feature = stock.FeatureConfig(_stock_table(optimizer=optimizer))
    with pytest.raises(ValueError, match="Feature a: Unsupported optimizer for table"):
        tf_configs.convert_features({"a": feature})


# Option of a table -> (what TensorFlow is given, what ours then holds).
TABLE_OPTIONS: dict[str, tuple[Any, Any]] = {
    "vocabulary_size": (9, 9),
    "dim": (5, 5),
    "initializer": (_ignored, _ignored),
    "optimizer": (stock.Adam(0.25), optimizers.Adam(0.25)),
    "combiner": ("sqrtn", "sqrtn"),
    "name": ("films", "films"),
    "quantization_config": (
        stock.QuantizationConfig(16, -1.0, 1.0),
        QuantizationConfig(16, -1.0, 1.0),
    ),
    "layout": ("a layout", "a layout"),
    "dtype": (tf.float32, "float32"),
}


def test_every_option_of_a_table_is_under_test() -> None:
    fields = dataclasses.fields(TableConfig)
    assert {f.name for f in fields if not f.kw_only} == {*TABLE_OPTIONS}


@pytest.mark.parametrize("name", TABLE_OPTIONS)
def test_every_option_of_a_table_is_carried(name: str) -> None:
    given, held = TABLE_OPTIONS[name]
    table = _convert_one(stock.FeatureConfig(_stock_table(**{name: given}))).table
    assert isinstance(table, TableConfig)
    assert getattr(table, name) == held


def test_tensorflow_s_default_initializer_is_used_as_it_is() -> None:
    theirs = _stock_table()
    ours = _convert_one(stock.FeatureConfig(theirs)).table
    assert ours.initializer is theirs.initializer


@pytest.mark.parametrize(("option", "value"), [("dtype", tf.int32)])
def test_what_this_release_lacks_is_refused_by_name(option: str, value: Any) -> None:
    feature = stock.FeatureConfig(_stock_table(**{option: value}))
    with pytest.raises(NotImplementedError, match=rf"^Feature a/0: .*{option}"):
        tf_configs.convert_features({"a": [feature]})


def test_every_option_of_a_feature_is_carried() -> None:
    given = {
        "max_sequence_length": 0,
        "validate_weights_and_indices": False,
        "output_shape": [3, None],
        "name": "f",
    }
    converted = _convert_one(stock.FeatureConfig(_stock_table(), **given))
    assert {name: getattr(converted, name) for name in given} == {
        **given,
        "output_shape": (3, None),
    }
    sequence = stock.FeatureConfig(_stock_table(), max_sequence_length=5)
    assert _convert_one(sequence).max_sequence_length == 5
    assert _convert_one(sequence).output_shape is None


def test_a_sequence_with_an_output_shape_is_refused_with_its_path() -> None:
    feature = stock.FeatureConfig(_stock_table(), 5, output_shape=[3])
    with pytest.raises(ValueError, match=r"^Feature a: .*`max_sequence_length`"):
        tf_configs.convert_features({"a": feature})


@pytest.mark.parametrize(
    ("argument", "expected"), [(None, "error"), ("drop", "drop"), ("mod", "mod")]
)
def test_invalid_ids_is_for_tensorflow_s_tables(
    argument: str | None, expected: str
) -> None:
    theirs = stock.FeatureConfig(_stock_table())
    ours = FeatureConfig(TableConfig(8, 4, invalid_ids="error"))
    converted = tf_configs.convert_features([theirs, ours], invalid_ids=argument)
    assert [f.table.invalid_ids for f in converted.features] == [expected, "error"]


def test_invalid_ids_without_effect_is_refused() -> None:
    ours = FeatureConfig(TableConfig(8, 4, name="films"))
    for config in (ours, {"a": ours}):
        with pytest.raises(ValueError, match=r"embedding, but `feature_config` has no"):
            tf_configs.convert_features(config, invalid_ids="drop")


def test_a_wrong_invalid_ids_is_refused_even_if_no_table_needs_it() -> None:
    with pytest.raises(ValueError, match="invalid_ids"):
        tf_configs.convert_features(
            FeatureConfig(TableConfig(8, 4)), invalid_ids="skip"
        )


def test_our_objects_pass_through() -> None:
    feature = FeatureConfig(TableConfig(8, 4, optimizer=optimizers.SGD()))
    converted = tf_configs.convert_features(feature)
    assert converted.features == (feature,)
    assert converted.keys == {feature.table: feature.table}


def test_ours_and_theirs_mix() -> None:
    theirs = _stock_table()
    ours = TableConfig(8, 4, optimizer=stock.SGD(0.25))
    converted = tf_configs.convert_features(
        [FeatureConfig(theirs, 3), stock.FeatureConfig(theirs), FeatureConfig(ours)]
    )
    first, second, third = converted.features
    assert first.table is second.table
    assert first.max_sequence_length == 3
    assert third.table.optimizer == optimizers.SGD(0.25)
    assert converted.keys == {first.table: theirs, third.table: ours}


def test_equal_tables_stay_two_tables() -> None:
    converted = tf_configs.convert_features(
        [stock.FeatureConfig(_stock_table()), stock.FeatureConfig(_stock_table())]
    )
    assert len(converted.keys) == 2


@pytest.mark.parametrize(
    ("structure", "paths"),
    [
        (0, ["feature"]),
        ([0, 0], ["0", "1"]),
        ((0, [0]), ["0", "1/0"]),
        ({"b": 0, "a": {"d": 0, "c": 0}}, ["a/c", "a/d", "b"]),
        ({2: 0, 1: 0}, ["1", "2"]),
        ({"user": User(item=0, age=[0, 0])}, ["user/item", "user/age/0", "user/age/1"]),
        ([[], {"a": 0}, ()], ["1/a"]),
    ],
)
def test_paths_and_order_are_those_of_tf_nest(structure: Any, paths: list[str]) -> None:
    table = TableConfig(8, 4)
    features = tf.nest.map_structure(lambda _: FeatureConfig(table), structure)
    converted = tf_configs.convert_features(features)
    assert list(converted.paths) == paths
    assert list(converted.features) == tf.nest.flatten(features)


@pytest.mark.parametrize("leaf", [None, "films", 3, TableConfig(8, 4), _stock_table()])
def test_a_leaf_that_is_no_feature_is_refused_with_its_path(leaf: Any) -> None:
    with pytest.raises(ValueError, match=r"^Feature a/1: "):
        tf_configs.convert_features({"a": [FeatureConfig(TableConfig(8, 4)), leaf]})


@pytest.mark.parametrize("structure", [{}, [], (), {"a": []}])
def test_a_structure_without_features_is_refused(structure: Any) -> None:
    with pytest.raises(ValueError, match="holds no FeatureConfig"):
        tf_configs.convert_features(structure)
