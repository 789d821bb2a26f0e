"""Tests of the ops that load and retrieve tables: every optimizer, several hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from software_tpu import engine_calls as calls
from tensorflow.python.framework import op_def_registry

ORDER = tf.errors.FailedPreconditionError
HOST = {"num_shards": 1, "shard_id": 0}
# By the infix of the op: the optimizer's field.
OPTIMIZERS = {
    "StochasticGradientDescent": "stochastic_gradient_descent",
    "Adagrad": "adagrad",
    "AdagradMomentum": "adagrad_momentum",
    "ADAM": "adam",
    "FTRL": "ftrl",
    "Momentum": "momentum",
    "RMSProp": "rms_prop",
    "CenteredRMSProp": "centered_rms_prop",
    "Adadelta": "adadelta",
    "ProximalAdagrad": "proximal_adagrad",
    "ProximalYogi": "proximal_yogi",
    "MDLAdagradLight": "mdl_adagrad_light",
    "FrequencyEstimator": "frequency_estimator",
}


def slots_of(op: str) -> list[str]:
    definition: Any = op_def_registry.get(op)
    return [arg.name for arg in definition.input_arg]


@pytest.mark.parametrize("infix", OPTIMIZERS)
def test_parameters_of_every_optimizer_come_back(infix: str, rng: np.random.Generator):
    config = calls.config_of(1)
    del config.table_descriptor[:]
    calls.add_table(config, "films", OPTIMIZERS[infix])
    if infix == "AdagradMomentum":
        parameters = config.table_descriptor[0].optimization_parameters
        parameters.adagrad_momentum.exponent = 2.0
    calls.Program(config)
    load = f"LoadTPUEmbedding{infix}Parameters"
    values = {
        name: rng.normal(size=(calls.ROWS, calls.WIDTH)).astype(np.float32)
        for name in slots_of(load)
    }
    getattr(tf.raw_ops, load)(table_name="films", **HOST, **values)
    retrieve = getattr(tf.raw_ops, f"RetrieveTPUEmbedding{infix}Parameters")
    retrieved = retrieve(table_id=0, **HOST)
    if len(values) == 1:
        retrieved = (retrieved,)
    for (name, value), part in zip(values.items(), retrieved, strict=True):
        np.testing.assert_array_equal(part, value, err_msg=name)


def test_an_optimizer_without_a_rule_looks_up_and_does_not_train():
    config = calls.config_of(1)
    del config.table_descriptor[:]
    calls.add_table(config, "films", "mdl_adagrad_light")
    program = calls.Program(config)
    values = calls.named_rows()
    tf.raw_ops.LoadTPUEmbeddingMDLAdagradLightParameters(
        parameters=values,
        **dict.fromkeys(("accumulators", "weights", "benefits"), values),
        table_name="films",
        **HOST,
    )
    with pytest.raises(
        tf.errors.UnimplementedError, match=r"Table films: .* mdl_adagrad_light"
    ):
        calls.enqueue([0, 1, 2], 0)
    calls.enqueue([0, 1, 2], 0, mode_override="inference")
    assert calls.first_column(program.run(program.receive)) == [[0, 1, 2]]


@pytest.mark.parametrize("mod", [False, True], ids=["div", "mod"])
def test_tables_are_dealt_to_hosts(mod: bool):
    config = calls.config_of(1, sharding_strategy=int(mod))
    config.table_descriptor[0].vocabulary_size = 5
    config.num_hosts = 2
    tpu = calls.SoftwareTPUStrategy("v4", 1)
    tf.raw_ops.ConfigureTPUEmbedding(config=config.SerializeToString())
    table = calls.named_rows()[:5]
    parts = [table[0::2], table[1::2]] if mod else [table[:3], table[3:]]
    load = tf.raw_ops.LoadTPUEmbeddingStochasticGradientDescentParameters
    load(parameters=parts[0], table_name="films", num_shards=2, shard_id=0)
    calls.enqueue([0, 2, 4], 0)
    receive = tf.function(
        lambda: tf.raw_ops.RecvTPUEmbeddingActivations(
            num_outputs=1, config=config.SerializeToString()
        )
    )
    with pytest.raises(ORDER, match="Table films: shard 1 of 2 has not been loaded"):
        tpu.run(receive)
    load(parameters=parts[1], table_name="films", num_shards=2, shard_id=1)
    assert tpu.run(receive)[0][:, 0].numpy().tolist() == [0, 2, 4]
    retrieve = tf.raw_ops.RetrieveTPUEmbeddingStochasticGradientDescentParameters
    for shard, part in enumerate(parts):
        np.testing.assert_array_equal(
            retrieve(table_name="films", num_shards=2, shard_id=shard), part
        )
