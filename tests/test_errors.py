"""Bad calls of configurations and inputs, and the exact errors that they raise."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from error_tables import ErrorTable, each_error

from tpu_embedding import combiners, inputs, optimizers, tf_configs, tpu_generations
from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.config import FeatureConfig, QuantizationConfig, TableConfig
from tpu_embedding.layout.plan import make_plan

stock = tf.tpu.experimental.embedding


def _all(valency: Any, vectors: Any) -> Any:
    return vectors


class Thing:
    """An object that is not valid as any argument."""

    def __repr__(self) -> str:
        return "Thing()"


THING = Thing()
TABLE = TableConfig(8, 4, name="films")
FEATURE = FeatureConfig(TABLE)
SLOT_OWNER = TableConfig(8, 4, name="a")
SLOT_NAMED = TableConfig(8, 4, name="a/accumulators")
OTHER = FeatureConfig(TableConfig(8, 4, name="films"))
RULES = ", ".join(optimizers.OPTIMIZERS)
RAGGED = tf.ragged.constant([[1, 2], []])


def _plan(*features: FeatureConfig) -> Any:
    keys = {feature.table: feature.table for feature in features}
    return make_plan([f"f/{i}" for i in range(len(features))], features, keys, None)


CALLS: ErrorTable = {
    ValueError: {
        "Argument `initial_accumulator_value` must be positive. Received: 0.0.": (
            lambda: optimizers.Adagrad(initial_accumulator_value=0.0)
        ),
        "Argument `invalid_ids` must be one of ('error', 'drop', 'mod'). "
        "Received: 'skip'.": lambda: TableConfig(8, 4, invalid_ids="skip"),
        "Argument `dim` must be an int >= 1. Received: True of type bool. Convert "
        "other kinds of integers with int(...).": lambda: TableConfig(8, True),
        "`clip_weight_min` must not exceed `clip_weight_max`. Received: 1.0 and 0.5.": (
            lambda: optimizers.SGD(clip_weight_min=1.0, clip_weight_max=0.5)
        ),
        "`clipvalue` clips the summed gradient of a row, so it cannot be used with "
        "`use_gradient_accumulation=False`. Received: clipvalue=0.5. Leave `clipvalue` "
        "at None or `use_gradient_accumulation` at True.": (
            lambda: optimizers.SGD(clipvalue=0.5, use_gradient_accumulation=False)
        ),
        "`lazy_adam=False` updates every row once per step, so it cannot be used with "
        "`use_gradient_accumulation=False`. Leave `use_gradient_accumulation` at True "
        "or `lazy_adam` at True.": (
            lambda: optimizers.Adam(lazy_adam=False, use_gradient_accumulation=False)
        ),
        'Argument `combiner` must be one of "sum", "mean", "sqrtn", or a '
        "CustomCombiner. Received: 'max'.": (lambda: combiners.convert_combiner("max")),
        "Argument `dtype` must be float32, bfloat16 or int8. Received: 'float16'.": (
            lambda: TableConfig(8, 4, dtype="float16")
        ),
        "Argument `rounding_seed` is 3, but a table of dtype float32 is not rounded. "
        'Leave it at None, or set `dtype="bfloat16"` or "int8".': (
            lambda: TableConfig(8, 4, rounding_seed=3)
        ),
        "Argument `table` must be a TableConfig, of this package or of "
        "tf.tpu.experimental.embedding. Received: 'films'.": (
            lambda: FeatureConfig("films")
        ),
        "A feature called 'recent' cannot have both `max_sequence_length` and "
        "`output_shape`. Received: 3 and (8,). Leave one of them at its default.": (
            lambda: FeatureConfig(TABLE, 3, output_shape=[8], name="recent")
        ),
        "A table cannot be called 'a/accumulators': checkpoints use this name for a "
        "slot or for the count of updates. Give the table another name.": (
            lambda: make_plan(
                ["a", "b"],
                [FeatureConfig(SLOT_OWNER), FeatureConfig(SLOT_NAMED)],
                {SLOT_OWNER: SLOT_OWNER, SLOT_NAMED: SLOT_NAMED},
                optimizers.Adagrad(),
            )
        ),
        "`feature_config` holds no FeatureConfig. Pass one, or a dict, list or tuple "
        "of them.": lambda: tf_configs.convert_features({}),
        "Feature user/0: each leaf of `feature_config` must be a FeatureConfig, of "
        "this package or of tf.tpu.experimental.embedding. Received: 3 of type int.": (
            lambda: tf_configs.convert_features({"user": [3]})
        ),
        "Feature 0: Argument `name` must be None or not empty. Received: ''.": (
            lambda: tf_configs.convert_features(
                [stock.FeatureConfig(stock.TableConfig(8, 4, name=""))]
            )
        ),
        "Table 'ids' has vocabulary_size=2147483648, but row numbers are int32, as on "
        "TPUs: a table has at most 2147483647 rows. Split the ids among several "
        "tables.": (lambda: _plan(FeatureConfig(TableConfig(2**31, 1, name="ids")))),
        "Two different tables are called 'films': the one of feature f/0 and the one "
        "of feature f/1. Table names must be unique. Give them different names, or "
        "pass the same TableConfig object to share one table.": (
            lambda: _plan(FEATURE, OTHER)
        ),
        "Unsupported optimizer for the whole embedding: 'adagrad' of type str. "
        f"Supported are {RULES}, and those of tf.tpu.experimental.embedding with the "
        "same names.": lambda: tf_configs.convert_optimizer("adagrad"),
        f"{_all!r} returned a tensor of shape (4, 2); it must return a float64 tensor "
        "of shape (2,).": (
            lambda: CustomCombiner(_all, 4).compute(1, np.zeros((4, 2)))
        ),
        "Unknown TPU generation 'v1'. Use one of v2, v3, v4, v5e, v5p, v6e, 7x.": (
            lambda: tpu_generations.generation("v1")
        ),
        "Feature a must be a tf.Tensor, tf.SparseTensor or tf.RaggedTensor. Received: "
        f"Thing() of type {__name__}.Thing.": (lambda: inputs.to_id_batch("a", THING)),
        "The weights of feature a must be None or, like the feature itself, a "
        f"tf.RaggedTensor. Received: Thing() of type {__name__}.Thing. Read a "
        "tf.Variable with tf.convert_to_tensor, and pass weights in the same kind of "
        "tensor as the ids.": lambda: inputs.to_id_batch("a", RAGGED, THING),
        "The weights of feature a must have the shape of its ids, (2,). Received: "
        "(1,).": (
            lambda: inputs.to_id_batch("a", tf.constant([1, 2]), tf.constant([1.0]))
        ),
        "Feature a: the rank of a dense input must be >= 1 and known. Received: rank "
        "0.": lambda: inputs.to_id_batch("a", tf.constant(1)),
        "Argument `upper` must be above 1.0. Received: 0.0.": (
            lambda: QuantizationConfig(4, 1.0, 0.0)
        ),
    },
    TypeError: {
        "Argument `lazy_adam` must be a bool. Received: 1 of type int.": (
            lambda: optimizers.Adam(lazy_adam=1)  # pyright: ignore[reportArgumentType]
        ),
        "Argument `learning_rate` must be a finite number or a callable that returns "
        "one. Received: '0.1' of type str. For a rate held in a variable pass "
        "`lambda: variable`.": (
            lambda: optimizers.SGD("0.1")  # pyright: ignore[reportArgumentType]
        ),
        "A callable `learning_rate` takes no argument, or one: the number of updates "
        "already applied to the table. Received: <built-in function add>, which needs "
        "2. Bind the others with functools.partial or a lambda.": (
            lambda: optimizers.SGD(operator.add)  # pyright: ignore[reportArgumentType]
        ),
        "The weights of feature a must be of a floating point dtype. Received: int32. "
        "Convert them with tf.cast.": (lambda: inputs.to_id_batch("a", RAGGED, RAGGED)),
    },
    NotImplementedError: {
        "Tables of dtype int32 are not supported. Argument `dtype` must be "
        "float32, bfloat16 or int8.": lambda: TableConfig(8, 4, dtype="int32")
    },
}


@each_error(CALLS)
def test_bad_call(error: type[Exception], text: str, bad: Any) -> None:
    with pytest.raises(error) as raised:
        bad()
    assert type(raised.value) is error
    assert str(raised.value) == text
    assert text.endswith(".")
    assert "  " not in text
