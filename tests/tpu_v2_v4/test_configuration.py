"""The proto of TPU v2 to v4 against those that TensorFlow's own class writes."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf.tpu import tpu_embedding_configuration_pb2
from tpu_v2_v4.configurations import CASES, GOLDEN, Case, flat_shapes, stock_proto

from tpu_embedding import distribution
from tpu_embedding.engines.tpu_v2_v4.configuration import make_configuration
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import make_plan
from tpu_embedding.tf_configs import convert_features, convert_optimizer

_Configuration: Any = vars(tpu_embedding_configuration_pb2)["TPUEmbeddingConfiguration"]


def own_proto(case: Case, **options: Any) -> Any:
    features, optimizer = case.make()
    converted = convert_features(features, None)
    plan = make_plan(
        converted.paths,
        converted.features,
        converted.keys,
        convert_optimizer(optimizer),
    )
    shapes = OutputShapes(plan.features)
    shapes.declare_inputs(flat_shapes(features, case.shapes))
    with case.strategy().scope():
        tpu = distribution.current().tpu
    assert tpu is not None
    return make_configuration(
        plan,
        tpu,
        [shapes.activation(spec.index) for spec in plan.features],
        pipelined=case.pipelined,
        **options,
    )


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    text = (GOLDEN / f"{name}.textproto").read_text()
    golden = text_format.Parse(text, _Configuration())
    assert own_proto(CASES[name]) == golden
    assert stock_proto(CASES[name]) == golden


def test_every_field_is_in_a_golden() -> None:
    """All fields of what the five optimizers share, and of their own messages."""
    proto = own_proto(CASES["sgd"]).table_descriptor[0].optimization_parameters
    rules = proto.DESCRIPTOR.oneofs_by_name["parameters"].fields
    ours = {
        "adagrad",
        "adagrad_momentum",
        "ftrl",
        "adam",
        "stochastic_gradient_descent",
    }
    rows = {field.name for field in proto.DESCRIPTOR.fields} - {r.name for r in rules}
    texts = "".join(path.read_text() for path in GOLDEN.glob("*.textproto"))
    wanted = rows - {"hot_id_replication_configuration"}  # No class can ask for it.
    for name in ours:
        message = proto.DESCRIPTOR.fields_by_name[name].message_type
        wanted |= {name, *(field.name for field in message.fields)}
    missing = {name for name in wanted if f" {name}" not in texts}
    assert missing == set()


def test_profile_data_directory() -> None:
    assert own_proto(CASES["sgd"]).profile_data_directory == ""
    proto = own_proto(CASES["sgd"], profile_data_directory="/profile")
    assert proto.profile_data_directory == "/profile"
    proto.ClearField("profile_data_directory")
    assert proto == own_proto(CASES["sgd"])


def test_a_shared_rate_has_one_tag() -> None:
    tables = own_proto(CASES["several"]).table_descriptor
    rates = [table.optimization_parameters.learning_rate for table in tables]
    assert [rate.WhichOneof("learning_rate") for rate in rates] == [
        "constant",
        "dynamic",
        "dynamic",
        "dynamic",
    ]
    assert [rate.dynamic.tag for rate in rates] == [0, 0, 1, 0]
    assert isinstance(CASES["several"].strategy(), tf.distribute.TPUStrategy)
