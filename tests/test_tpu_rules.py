"""What TPUs v2 to v4 call each rule, against TensorFlow's ops and messages."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tensorflow as tf
from optimizer_cases import STOCK, Case
from tensorflow.core.protobuf.tpu import optimization_parameters_pb2 as proto

from tpu_embedding import optimizers

RULES = [cls for cls in optimizers.OPTIMIZERS.values() if cls.tpu]
PARAMETERS = proto.OptimizationParameters
each_rule = pytest.mark.parametrize("cls", RULES, ids=lambda cls: cls.__name__)


def inputs(op: str) -> list[str]:
    """The tensors that a Load op takes."""
    others = ("table_id", "table_name", "config", "num_shards", "shard_id", "name")
    arguments = inspect.signature(getattr(tf.raw_ops, op)).parameters
    return [name for name in arguments if name not in others]


@each_rule
def test_ops_take_the_slots_in_their_order(cls: type[Any]) -> None:
    names = [slot.name for slot in cls().slots]
    op = f"TPUEmbedding{cls.tpu.ops}Parameters"
    assert inputs(f"Load{op}") == ["parameters", *names]
    assert hasattr(tf.raw_ops, f"Retrieve{op}")


def test_every_rule_that_tensorflow_can_load_is_there() -> None:
    suffix, prefix = "Parameters", "LoadTPUEmbedding"
    loaded = {
        name.removeprefix(prefix).removesuffix(suffix)
        for name in dir(tf.raw_ops)
        if name.startswith(prefix) and name.endswith(suffix)
    }
    loaded.remove("MDLAdagradLight")  # Its update rule is not published.
    assert {cls.tpu.ops for cls in RULES if cls.tpu} == loaded


@each_rule
def test_every_field_of_the_message_is_set(cls: type[Any]) -> None:
    message = PARAMETERS.DESCRIPTOR.fields_by_name[cls.tpu.message].message_type
    values = cls.tpu.values(cls())
    assert set(values) == {field.name for field in message.fields}
    assert cls.tpu.message in [
        field.name
        for field in PARAMETERS.DESCRIPTOR.oneofs_by_name["parameters"].fields
    ]
    getattr(PARAMETERS(), cls.tpu.message).MergeFrom(message._concrete_class(**values))


@pytest.mark.parametrize(
    ("case", "options"),
    [(c, o) for c in STOCK if c.cls.tpu for o in c.options],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_fields_are_those_that_tensorflow_sets(case: Case, options: Any) -> None:
    assert case.stock is not None
    if options.get("allow_zero_accumulator"):  # TensorFlow still refuses 0.
        options = {**options, "initial_accumulator_value": 0.5}
    theirs, ours = PARAMETERS(), PARAMETERS()
    # TensorFlow's default for the packing raises TypeError with protobuf 7.
    stock = case.stock(**options, low_dimensional_packing_status=0)
    stock._set_optimization_parameters(theirs)
    rule, optimizer = case.cls.tpu, case.cls(**options)
    message = getattr(ours, rule.message)
    message.SetInParent()
    for field, value in rule.values(optimizer).items():
        setattr(message, field, value)
    assert getattr(theirs, rule.message) == message
    assert theirs.WhichOneof("parameters") == rule.message
