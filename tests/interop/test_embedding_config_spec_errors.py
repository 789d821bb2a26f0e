"""EmbeddingConfigSpec: every check, its type and words, and their order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from interop.spec_cases import FEATURE, SGD, TABLE, dict_spec, embedding, fc, ids, spec

from tpu_embedding import interop

Spec = interop.EmbeddingConfigSpec

# What is wrong, and the type and words of the error, in the order of the checks.
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nothing": (Spec, ValueError, "Received: none of them"),
    "empty": (
        lambda: Spec([], SGD, feature_to_config_dict={}, table_to_config_dict={}),
        ValueError,
        "Received: none of them",
    ),
    "one dict": (
        lambda: Spec(None, SGD, feature_to_config_dict={"f": FEATURE}),
        ValueError,
        "Received: feature_to_config_dict (an empty argument",
    ),
    "both": (
        lambda: Spec([embedding()], SGD, None, False, None, {"f": FEATURE}, {"t": 1}),
        ValueError,
        "feature_columns, feature_to_config_dict, table_to_config_dict",
    ),
    "strategy": (
        lambda: spec(partition_strategy="row"),
        ValueError,
        'Argument `partition_strategy` must be "div" or "mod". Received: \'row\'.',
    ),
    "no strategy": (
        lambda: dict_spec(partition_strategy=None),
        ValueError,
        "Received: None.",
    ),
    "string": (lambda: Spec("abc", SGD), TypeError, "must be a list"),
    "number": (lambda: Spec(3, SGD), TypeError, "Received: 3 of type int."),
    "bare column": (lambda: Spec(embedding(), SGD), TypeError, "into a list"),
    "strings": (lambda: Spec(["abc"], SGD), TypeError, "'abc' of type str."),
    "categorical": (lambda: spec(ids("a")), TypeError, "IdentityCategoricalColumn."),
    "indicator": (
        lambda: spec(fc.indicator_column(ids("a"))),
        TypeError,
        "IndicatorColumn.",
    ),
    "bucketized": (
        lambda: spec(fc.bucketized_column(fc.numeric_column("n"), [1])),
        TypeError,
        "BucketizedColumn.",
    ),
    "no parameters": (
        lambda: spec(parameters=None),
        ValueError,
        "Argument `optimization_parameters` must be one of AdagradParameters,",
    ),
    "string parameters": (
        lambda: spec(parameters="sgd"),
        ValueError,
        "Received: 'sgd' of type str.",
    ),
    "another optimizer": (
        lambda: spec(parameters=tf.tpu.experimental.embedding.SGD()),
        ValueError,
        "StochasticGradientDescentParameters. Received:",
    ),
    "no dict of features": (
        lambda: dict_spec(features=[FEATURE]),
        TypeError,
        "Argument `feature_to_config_dict` must be a dict of configs by name.",
    ),
    "no dict of tables": (
        lambda: dict_spec(tables=[TABLE]),
        TypeError,
        "Argument `table_to_config_dict` must be a dict of configs by name.",
    ),
    "feature type": (
        lambda: dict_spec(features={"f": 1}),
        TypeError,
        "feature_to_config_dict['f'] must be a FeatureConfig",
    ),
    "table of a list": (
        lambda: interop.FeatureConfig(["t"]),  # pyright: ignore[reportArgumentType]
        TypeError,
        "Argument `table_id` must be a str. Received: ['t'] of type list.",
    ),
    "weights of a number": (
        lambda: interop.FeatureConfig("t", weight_key=3),  # pyright: ignore[reportArgumentType]
        TypeError,
        "Argument `weight_key` must be a str or None. Received: 3 of type int.",
    ),
    "unknown table": (
        lambda: dict_spec(tables={"u": TABLE, "s": TABLE}),
        ValueError,
        "Feature 'f' refers to table 't', which is not in `table_to_config_dict`. "
        "Its tables are 's', 'u'.",
    ),
    "table type": (
        lambda: dict_spec(tables={"t": 1}),
        TypeError,
        "table_to_config_dict['t'] must be a TableConfig",
    ),
    "limit of 0": (
        lambda: spec(clipping_limit=0),
        ValueError,
        "Argument `clipping_limit` must be above 0, or None. Received: 0.",
    ),
    "limit not a number": (
        lambda: dict_spec(clipping_limit="1"),
        TypeError,
        "Argument `clipping_limit` must be a number or None.",
    ),
    "limit of nan": (
        lambda: dict_spec(clipping_limit=float("nan")),
        ValueError,
        "Received: nan.",
    ),
    "multiplier": (
        lambda: spec(experimental_gradient_multiplier_fn=2.0),
        TypeError,
        "`experimental_gradient_multiplier_fn` must be a callable or None.",
    ),
    "pipelining": (
        lambda: spec(pipeline_execution_with_tensor_core=1),
        TypeError,
        "`pipeline_execution_with_tensor_core` must be a bool.",
    ),
    "directory": (
        lambda: spec(profile_data_directory=3),
        TypeError,
        "`profile_data_directory` must be a path or None.",
    ),
    "old name and new": (
        lambda: Spec([embedding()], SGD, column=[embedding()]),
        TypeError,
        "Argument `column` must be left out with `feature_columns`.",
    ),
    "derived field": (
        lambda: spec()._replace(tensor_core_feature_columns=[]),
        TypeError,
        "`tensor_core_feature_columns` follows from `feature_columns`",
    ),
    "unknown field": (
        lambda: spec()._replace(colour=1),
        ValueError,
        "EmbeddingConfigSpec has no field 'colour'.",
    ),
    "replaced": (
        lambda: spec()._replace(partition_strategy="x"),
        ValueError,
        "`partition_strategy`",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str):
    call, error, text = BAD[case]
    with pytest.raises(error, match=re.escape(text)) as caught:
        call()
    assert type(caught.value) is error


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
