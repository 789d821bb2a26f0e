"""EmbeddingConfigSpec: every check, its type and words, and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from error_tables import ErrorTable, check_error, each_error
from interop.spec_cases import FEATURE, SGD, TABLE, dict_spec, embedding, fc, ids, spec

from tpu_embedding import interop

Spec = interop.EmbeddingConfigSpec

BAD: ErrorTable = {
    ValueError: {
        "Received: none of them (an empty argument": Spec,
        "Received: none of them": (
            lambda: Spec([], SGD, feature_to_config_dict={}, table_to_config_dict={})
        ),
        "Received: feature_to_config_dict (an empty argument": (
            lambda: Spec(None, SGD, feature_to_config_dict={"f": FEATURE})
        ),
        "feature_columns, feature_to_config_dict, table_to_config_dict": (
            lambda: Spec(
                [embedding()], SGD, None, False, None, {"f": FEATURE}, {"t": 1}
            )
        ),
        'Argument `partition_strategy` must be "div" or "mod". Received: \'row\'.': (
            lambda: spec(partition_strategy="row")
        ),
        "Received: None.": lambda: dict_spec(partition_strategy=None),
        "Argument `optimization_parameters` must be one of AdagradParameters,": (
            lambda: spec(parameters=None)
        ),
        "Received: 'sgd' of type str.": lambda: spec(parameters="sgd"),
        "StochasticGradientDescentParameters. Received:": (
            lambda: spec(parameters=tf.tpu.experimental.embedding.SGD())
        ),
        "Feature 'f' refers to table 't', which is not in `table_to_config_dict`. "
        "Its tables are 's', 'u'.": (
            lambda: dict_spec(tables={"u": TABLE, "s": TABLE})
        ),
        "Argument `clipping_limit` must be above 0, or None. Received: 0.": (
            lambda: spec(clipping_limit=0)
        ),
        "Received: nan.": lambda: dict_spec(clipping_limit=float("nan")),
        "EmbeddingConfigSpec has no field 'colour'.": lambda: spec()._replace(colour=1),
        "`partition_strategy`": lambda: spec()._replace(partition_strategy="x"),
    },
    TypeError: {
        "must be a list": lambda: Spec("abc", SGD),
        "Received: 3 of type int.": lambda: Spec(3, SGD),
        "in a list": lambda: Spec(embedding(), SGD),
        "'abc' of type str.": lambda: Spec(["abc"], SGD),
        "IdentityCategoricalColumn.": lambda: spec(ids("a")),
        "IndicatorColumn.": lambda: spec(fc.indicator_column(ids("a"))),
        "BucketizedColumn.": (
            lambda: spec(fc.bucketized_column(fc.numeric_column("n"), [1]))
        ),
        "Argument `feature_to_config_dict` must be a dict of configs by name.": (
            lambda: dict_spec(features=[FEATURE])
        ),
        "Argument `table_to_config_dict` must be a dict of configs by name.": (
            lambda: dict_spec(tables=[TABLE])
        ),
        "feature_to_config_dict['f'] must be a FeatureConfig": (
            lambda: dict_spec(features={"f": 1})
        ),
        "Argument `table_id` must be a str. Received: ['t'] of type list.": (
            lambda: interop.FeatureConfig(["t"])  # pyright: ignore[reportArgumentType]
        ),
        "Argument `weight_key` must be a str or None. Received: 3 of type int.": (
            lambda: interop.FeatureConfig("t", weight_key=3)  # pyright: ignore[reportArgumentType]
        ),
        "table_to_config_dict['t'] must be a TableConfig": (
            lambda: dict_spec(tables={"t": 1})
        ),
        "Argument `clipping_limit` must be a number or None.": (
            lambda: dict_spec(clipping_limit="1")
        ),
        "`experimental_gradient_multiplier_fn` must be a callable or None.": (
            lambda: spec(experimental_gradient_multiplier_fn=2.0)
        ),
        "`pipeline_execution_with_tensor_core` must be a bool.": (
            lambda: spec(pipeline_execution_with_tensor_core=1)
        ),
        "`profile_data_directory` must be a path or None.": (
            lambda: spec(profile_data_directory=3)
        ),
        "Argument `column` must be left out with `feature_columns`.": (
            lambda: Spec([embedding()], SGD, column=[embedding()])
        ),
        "`tensor_core_feature_columns` follows from `feature_columns`": (
            lambda: spec()._replace(tensor_core_feature_columns=[])
        ),
    },
}


@each_error(BAD)
def test_bad_arguments(error: type[Exception], text: str, bad: Any):
    check_error(error, text, bad)


# Two mistakes at once: the one that upstream finds first is named.
ORDER: dict[str, tuple[Callable[[], Any], str]] = {
    "which way, then strategy": (lambda: Spec(partition_strategy="x"), "exactly one"),
    "strategy, then columns": (
        lambda: Spec([1], SGD, partition_strategy="x"),
        "partition_strategy",
    ),
    "columns, then parameters": (lambda: Spec([1]), "feature_columns"),
    "parameters, then ours": (
        lambda: Spec([embedding()], None, -1),
        "optimization_parameters",
    ),
    "features, then tables": (
        lambda: dict_spec(features={"f": 1}, tables={"t": 1}),
        "FeatureConfig",
    ),
    "feature's class, then its table": (
        lambda: dict_spec(features={"f": 1}, tables={"u": TABLE}),
        "FeatureConfig",
    ),
    "feature's table, then tables": (
        lambda: dict_spec(tables={"u": 1}),
        "refers to table",
    ),
}


@pytest.mark.parametrize("case", ORDER)
def test_order_of_the_checks(case: str):
    call, text = ORDER[case]
    with pytest.raises((TypeError, ValueError), match=text):
        call()
