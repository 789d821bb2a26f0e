"""Tests of ConfigureTPUEmbedding: which configurations the engine takes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from google.protobuf import text_format
from software_tpu import engine_calls as calls

from tpu_embedding.testing import SoftwareTPUStrategy, library

# Changes a configuration in place.
Change = Callable[[Any], object]


@pytest.fixture(autouse=True)
def new_tpu() -> None:
    """A TPU without an engine."""
    library.load().tpu_embedding_software_tpu_initialize(meeting_timeout=1.0)


def is_initialized(config: bytes = b"") -> bool:
    return bool(tf.raw_ops.IsTPUEmbeddingInitialized(config=config))


def parameters(config: Any):
    return config.table_descriptor[0].optimization_parameters


def first(descriptor: str, **fields) -> Change:
    """Changes the fields of the first table or feature."""

    def change(config: Any) -> None:
        for name, value in fields.items():
            setattr(getattr(config, descriptor)[0], name, value)

    return change


table = functools.partial(first, "table_descriptor")
feature = functools.partial(first, "feature_descriptor")


def optimizer(name: str, **fields) -> Change:
    """Gives the first table another optimizer."""

    def change(config: Any) -> None:
        message = getattr(parameters(config), name)
        message.SetInParent()
        for field, value in fields.items():
            setattr(message, field, value)

    return change


def merge(text: str) -> Change:
    """Merges a configuration that is written as text."""
    return lambda config: text_format.Merge(text, config)


def of_parameters(text: str) -> Change:
    """Merges optimization parameters of the first table that are written as text."""
    return lambda config: text_format.Merge(text, parameters(config))


def shape(*axes: int) -> Change:
    def change(config: Any) -> None:
        del config.feature_descriptor[0].input_shape[:]
        config.feature_descriptor[0].input_shape.extend(axes)

    return change


def without_features(config: Any) -> None:
    del config.feature_descriptor[:]


def no_rate(config: Any) -> None:
    parameters(config).ClearField("learning_rate")


def no_optimizer(config: Any) -> None:
    parameters(config).ClearField("stochastic_gradient_descent")


MALFORMED = {
    "no table": (lambda c: c.ClearField("table_descriptor"), "table_descriptor: "),
    "same name": (
        lambda c: calls.add_table(c, "films"),
        "table_descriptor[1]: another table is called films",
    ),
    "no name": (table(name=""), "table_descriptor[0]: name is empty"),
    "no rows": (table(vocabulary_size=0), "vocabulary_size is 0, but must be > 0"),
    "many rows": (table(vocabulary_size=1 << 31), "vocabulary_size is 2147483648"),
    "no width": (table(dimension=-1), "dimension is -1, but must be > 0"),
    "table features": (table(num_features=1), "table_descriptor[0].num_features"),
    "table_id": (feature(table_id=1), "feature_descriptor[0]: table_id is 1"),
    "no shape": (shape(), "feature_descriptor[0]: input_shape is empty"),
    "bad shape": (shape(2, 0), "an axis of input_shape is 0"),
    "large shape": (shape(1 << 30, 4), "input_shape has more than"),
    "batch size": (
        merge("batch_size_per_tensor_core: 2"),
        "batch_size_per_tensor_core",
    ),
    "no batch size": (without_features, "batch_size_per_tensor_core is 0"),
    "no mode": (merge("mode: UNSPECIFIED"), "mode must be TRAINING or INFERENCE"),
    "backward": (merge("mode: BACKWARD_PASS_ONLY"), "mode must be TRAINING"),
    "no hosts": (merge("num_hosts: 0"), "num_hosts is 0, but must be > 0"),
    "no cores": (merge("num_tensor_cores: 0"), "num_tensor_cores is 0"),
    "spmd": (merge("spmd_sharding { enabled: true }"), "num_cores_per_replica is 0"),
    "spmd cores": (
        merge("spmd_sharding { enabled: true num_cores_per_replica: 2 }"),
        "num_tensor_cores is 1, but must be a multiple",
    ),
    "no rate": (no_rate, "learning_rate has neither `constant` nor `dynamic`"),
    "rate": (of_parameters("learning_rate { constant: nan }"), "constant is nan"),
    "tag": (of_parameters("learning_rate { dynamic { tag: -1 } }"), "tag is -1"),
    "tags": (
        of_parameters("learning_rate { dynamic { tag: 1 } }"),
        "tag: the largest is 1, but there are 1 different ones",
    ),
    "clipping": (
        of_parameters("clipping_limits { lower { value: 2 } upper { value: 1 } }"),
        "optimization_parameters.clipping_limits has lower 2 and upper 1",
    ),
    "gradients": (
        of_parameters("gradient_clipping_limits { lower { value: nan } }"),
        "optimization_parameters.gradient_clipping_limits has lower nan",
    ),
    "decay": (of_parameters("weight_decay_factor: -1"), "weight_decay_factor is -1"),
    "buckets": (
        of_parameters("simulated_quantization { enabled: true num_buckets: 4 }"),
        "simulated_quantization needs `clipping_limits`",
    ),
    "no optimizer": (no_optimizer, "optimization_parameters has no optimizer"),
    "exponent": (
        optimizer("adagrad_momentum", beta2=1.0),
        "optimization_parameters.adagrad_momentum.exponent is 0",
    ),
    "beta1": (optimizer("adam", beta1=1.5), "adam.beta1 is 1.5"),
    "epsilon": (optimizer("adam", epsilon=-1.0), "adam.epsilon is -1"),
    "non-lazy": (
        lambda c: (
            optimizer("adam", use_non_lazy_adam=True)(c),
            of_parameters("gradient_accumulation_status: DISABLED")(c),
        ),
        "adam.use_non_lazy_adam needs gradient accumulation",
    ),
    "lr_power": (optimizer("ftrl", lr_power=0.5), "ftrl.lr_power is 0.5"),
    "l1": (optimizer("ftrl", l1=-1.0), "ftrl.l1 is -1"),
}


@pytest.mark.parametrize(("change", "text"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_configuration_is_refused_and_changes_nothing(
    change: Change, text: str
):
    config = calls.config_of()
    change(config)
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(text)):
        tf.raw_ops.ConfigureTPUEmbedding(config=config.SerializeToString())
    assert not is_initialized()


def test_bytes_of_something_else_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not a serialized TPU"):
        tf.raw_ops.ConfigureTPUEmbedding(config=b"no proto")


@pytest.mark.parametrize("name", ["bounded_adagrad", "lion", "online_yogi", "assign"])
def test_optimizers_without_ops_are_refused_by_name(name: str):
    config = calls.config_of()
    optimizer(name)(config)
    with pytest.raises(tf.errors.UnimplementedError, match=f"parameters.{name}: the"):
        tf.raw_ops.ConfigureTPUEmbedding(config=config.SerializeToString())


def test_there_is_one_engine_until_the_tpu_is_initialized_again():
    first, second = (calls.config_of(n).SerializeToString() for n in (1, 2))
    assert not is_initialized()
    tf.raw_ops.ConfigureTPUEmbedding(config=first)
    assert (is_initialized(), is_initialized(first)) == (True, True)
    assert not is_initialized(second)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="has an embedding engine already"
    ):
        tf.raw_ops.ConfigureTPUEmbedding(config=second)
    strategy = SoftwareTPUStrategy("v4", 1)
    assert not is_initialized()
    tf.raw_ops.ConfigureTPUEmbedding(config=second)
    strategy.initialize_tpu_system()
    assert not is_initialized()


def test_a_sparse_core_strategy_leaves_the_engine_alone():
    tf.raw_ops.ConfigureTPUEmbedding(config=calls.config_of().SerializeToString())
    SoftwareTPUStrategy("v5p", 1)
    assert is_initialized()
