"""EmbeddingConfigSpec: its fields, its copies, its configs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import tensorflow as tf
from interop.spec_cases import (
    FEATURE,
    SGD,
    TABLE,
    dict_spec,
    embedding,
    fc,
    ids,
    sequence,
    shared,
    spec,
    weighted,
)

from tpu_embedding import interop

Spec = interop.EmbeddingConfigSpec
TENSOR_CORE = {
    "embedding_lookup_device": "tpu_tensor_core",
    "tensor_core_shape": [None, 3],
}


def test_fields_and_defaults_are_those_of_tensorflow():
    assert Spec._fields == (
        "feature_columns",
        "tensor_core_feature_columns",
        "optimization_parameters",
        "clipping_limit",
        "pipeline_execution_with_tensor_core",
        "experimental_gradient_multiplier_fn",
        "feature_to_config_dict",
        "table_to_config_dict",
        "partition_strategy",
        "profile_data_directory",
    )
    column = embedding()
    expected = ([column], [], SGD, None, False, None, None, None, "div", None)
    assert tuple(Spec([column], SGD)) == expected


def test_positional_order_is_that_of_tensorflow():
    def multiplier(step: Any) -> Any:
        return step

    made = Spec(None, SGD, 2.0, True, multiplier, {"f": FEATURE}, {"t": TABLE}, "mod")
    assert made.clipping_limit == 2.0
    assert made.pipeline_execution_with_tensor_core
    assert made.experimental_gradient_multiplier_fn is multiplier
    assert made.feature_to_config_dict == {"f": FEATURE}
    assert made.table_to_config_dict == {"t": TABLE}
    assert made.partition_strategy == "mod"
    assert made.feature_columns is made.tensor_core_feature_columns is None


@pytest.mark.parametrize("make", [list, tuple, iter])
def test_any_iterable_of_columns(make: Any):
    given = [embedding("a"), embedding("a"), *shared("b", "c")]
    made = Spec(make(given), SGD)
    assert made.feature_columns == given
    assert made.feature_columns is not given


def test_columns_without_tpu_tables_are_taken_and_name_no_table():
    numeric, plain = fc.numeric_column("n"), fc.embedding_column(ids("p"), 2)
    made = spec(numeric, plain, embedding("a"))
    assert made.feature_columns[:2] == [numeric, plain]
    assert list(made.table_to_config()) == ["tbl_a"]
    assert list(made.feature_to_config()) == ["a"]


def test_tensor_core_columns_stand_apart():
    core, other = embedding("a", **TENSOR_CORE), embedding("b")
    made = spec(core, other)
    assert made.feature_columns == [other]
    assert made.tensor_core_feature_columns == [core]
    alone = spec(core)
    assert (alone.feature_columns, alone.tensor_core_feature_columns) == ([], [core])
    assert alone._replace(clipping_limit=1.0).tensor_core_feature_columns == [core]


def test_a_single_dict_beside_columns_is_kept(caplog: pytest.LogCaptureFixture):
    made = spec(feature_to_config_dict={"f": FEATURE})
    assert made.feature_to_config_dict == {"f": FEATURE}
    assert list(made.table_to_config()) == ["tbl_a"]


def test_dicts_take_any_parameters_and_unused_tables():
    made = dict_spec(tables={"t": TABLE, "u": TABLE}, optimization_parameters=None)
    assert made.table_to_config() == {"t": TABLE, "u": TABLE}


def test_the_old_name_of_feature_columns():
    with pytest.warns(DeprecationWarning, match="is called `feature_columns`"):
        made = Spec(column=[embedding()], optimization_parameters=SGD)
    assert len(made.feature_columns) == 1


@pytest.mark.parametrize("parameters", [SGD, interop.AdamParameters(0.1)])
def test_specs_with_equal_parts_are_equal(parameters: Any):
    column = embedding()
    other = copy.deepcopy(parameters)
    assert Spec([column], parameters) == Spec([column], other)
    assert Spec([column], parameters) != Spec([column], SGD, clipping_limit=1)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies(copied: Any):
    columns = [embedding("a"), *shared("b", "c", use_safe_embedding_lookup=False)]
    made = Spec([*columns, embedding("d", **TENSOR_CORE)], SGD, 2.0)
    twin = copied(made)
    assert type(twin) is Spec
    assert tuple(twin)[2:] == tuple(made)[2:]
    assert twin.feature_to_config() == made.feature_to_config()
    assert [c.name for c in twin.feature_columns] == [c.name for c in columns]
    assert not twin.feature_columns[1].use_safe_embedding_lookup
    assert [c.name for c in twin.tensor_core_feature_columns] == ["d_embedding"]
    dicts = copied(dict_spec())
    assert dicts.feature_to_config_dict == {"f": FEATURE}


def test_deepcopy_has_dicts_of_its_own():
    made = dict_spec()
    copy.deepcopy(made).table_to_config_dict.clear()
    assert made.table_to_config_dict


def test_configs_of_eight_features():
    made = spec(
        embedding("a"),
        interop.embedding_column(weighted("w", "wt"), 3, combiner="sum"),
        *shared("b", "c", combiner="sqrtn", shared_embedding_collection_name="bc"),
        *interop.shared_embedding_columns([weighted("d", "dw"), ids("e")], 4),
        *interop.shared_embedding_columns(
            [sequence("s"), ids("f")], 2, max_sequence_lengths=[3, 0]
        ),
    )
    tables, features = made.table_to_config(), made.feature_to_config()
    found = {k: (t.vocabulary_size, t.dimension, t.combiner) for k, t in tables.items()}
    assert found == {
        "tbl_a": (8, 2, "mean"),
        "tbl_w_weighted_by_wt": (8, 3, "sum"),
        "tbl_bc": (8, 2, "sqrtn"),
        "tbl_d_weighted_by_dw_e_shared_embedding": (8, 4, "mean"),
        "tbl_f_s_shared_embedding": (8, 2, "mean"),
    }
    config = interop.FeatureConfig
    assert features == {
        "a": config("tbl_a"),
        "w": config("tbl_w_weighted_by_wt", weight_key="wt"),
        "b": config("tbl_bc"),
        "c": config("tbl_bc"),
        "d": config("tbl_d_weighted_by_dw_e_shared_embedding", weight_key="dw"),
        "e": config("tbl_d_weighted_by_dw_e_shared_embedding"),
        "s": config("tbl_f_s_shared_embedding", max_sequence_length=3),
        "f": config("tbl_f_s_shared_embedding"),
    }


@pytest.mark.parametrize(
    "columns",
    [
        lambda: [embedding("a"), embedding("a")],
        lambda: [embedding("a"), *shared("a", "b")],
        lambda: [embedding("a"), interop.embedding_column(weighted("a", "w"), 2)],
    ],
    ids=["twice", "shared", "weighted"],
)
def test_a_feature_in_two_embeddings(columns: Any):
    with pytest.raises(ValueError, match="Feature 'a' is used by two embedding"):
        spec(*columns()).table_to_config()


def test_two_groups_of_one_name():
    name = {"shared_embedding_collection_name": "same"}
    two = spec(*shared("a", "b", **name), *shared("c", dimension=3, **name))
    with pytest.raises(ValueError, match="'tbl_same' but differ in dimension"):
        two.table_to_config()


def test_two_groups_of_one_name_and_other_initial_values():
    v1 = tf.compat.v1
    ones, more = v1.constant_initializer([1.0]), v1.constant_initializer([1.0])
    twos, zeros = v1.constant_initializer([2.0]), v1.zeros_initializer()
    for first, second, same in (
        (None, None, True),  # Two default objects of one kind.
        (ones, more, True),
        (ones, twos, False),
        (ones, zeros, False),
        (lambda shape: 1, lambda shape: 1, False),
    ):
        name = {"shared_embedding_collection_name": "same"}
        two = spec(
            *shared("a", initializer=first, **name),
            *shared("b", initializer=second, **name),
        )
        if same:
            assert len(two.table_to_config()) == 1
            continue
        with pytest.raises(ValueError, match="'tbl_same' but differ in initializer"):
            two.table_to_config()


def test_columns_without_tpu_tables_have_no_configs():
    with pytest.raises(TypeError, match="NumericColumn describes no TPU"):
        interop.get_configs_from_feature_columns([fc.numeric_column("n")])


def test_a_bad_combiner_shows_in_the_table():
    with pytest.raises(ValueError, match="`combiner` must be"):
        spec(embedding("a", combiner="max")).table_to_config()
    assert spec(embedding("a", combiner=None)).table_to_config()["tbl_a"]


class OwnColumn:
    """A column of nobody's class, with the methods of the protocol."""

    name = "own_embedding"

    def get_feature_key_name(self) -> str:
        return "own"

    def get_embedding_var_name(self) -> str:
        return "own"

    def get_embedding_table_size(self) -> tuple[int, int]:
        return (5, 2)

    def get_combiner(self) -> str:
        return "sum"

    def get_initializer(self) -> Any:
        return tf.ones

    def get_weight_key_name(self) -> None:
        return None

    def get_max_sequence_length(self) -> int:
        return 0

    def get_learning_rate_fn(self) -> None:
        return None

    def is_sequence_column(self) -> bool:
        return False


def test_columns_need_only_the_methods():
    made = spec(OwnColumn())
    assert made.table_to_config()["tbl_own"] == interop.TableConfig(
        5, 2, tf.ones, "sum"
    )
