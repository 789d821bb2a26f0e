"""Tests of the ops that load and retrieve tables: every optimizer, several hosts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from software_tpu import engine_calls as calls
from tensorflow.core.framework import op_def_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import kernels, op_def_library, op_def_registry

from tpu_embedding.testing import library

INVALID = tf.errors.InvalidArgumentError
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


def test_every_op_that_tensorflow_registers_has_a_kernel():
    library.load()
    buffer = pywrap_tf_session.TF_GetAllOpList()
    op_list: Any = vars(op_def_pb2)["OpList"]
    registered = op_list.FromString(bytes(pywrap_tf_session.TF_GetBuffer(buffer))).op
    pattern = re.compile(r"(?:Load|Retrieve)(?:All)?TPUEmbedding(\w*)Parameters")
    found = {op.name: pattern.fullmatch(op.name) for op in registered}
    infixes = {match[1] for match in found.values() if match}
    assert infixes == {"", *OPTIMIZERS}  # One op for all tables at once has none.
    for name, match in found.items():
        if match:
            (kernel,) = kernels.get_registered_kernels_for_op(name).kernel
            assert kernel.device_type == "CPU"
    assert sum(map(bool, found.values())) == 2 * len(infixes)


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
    retrieve = tf.raw_ops.RetrieveTPUEmbeddingStochasticGradientDescentParameters
    last = {"table_name": "films", "num_shards": 2, "shard_id": 1}
    for call in (lambda: tpu.run(receive), lambda: retrieve(**last)):
        with pytest.raises(ORDER, match="Table films: shard 1 of 2 has not been load"):
            call()
    load(parameters=parts[1], **last)
    assert tpu.run(receive)[0][:, 0].numpy().tolist() == [0, 2, 4]
    for shard, part in enumerate(parts):
        np.testing.assert_array_equal(
            retrieve(table_name="films", num_shards=2, shard_id=shard), part
        )


def parts_of(tables: list[Any], empty: Any) -> dict[str, list[Any]]:
    """`tables`, each with its parts, as the ops of all tables take them."""
    lists: dict[str, list[Any]] = {}
    for part in range(8):
        name = f"auxiliary{part}" if part else "parameters"
        lists[name] = [table[part] if part < len(table) else empty for table in tables]
    return lists


def test_all_tables_at_once():
    """TensorFlow has these ops without functions for Python."""
    config = calls.config_of(1)
    adam = calls.add_table(config, "users", "adam")
    adam.gradient_accumulation_status = 2  # DISABLED: has no sums of gradients.
    calls.Program(config)
    place = {"config": config.SerializeToString(), **HOST}
    films = calls.named_rows()
    users = [films + part for part in (10, 20, 30)]
    empty, nothing = np.zeros((0, 0), np.float32), np.zeros_like(films)

    @tf.function
    def load(parts: Any) -> None:
        op_def_library.apply_op("LoadAllTPUEmbeddingParameters", **parts, **place)

    @tf.function
    def retrieve() -> Any:
        return op_def_library.apply_op(
            "RetrieveAllTPUEmbeddingParameters", NumTables=2, **place
        )

    load(parts_of([[films + 5, nothing], users], empty))
    retrieved = retrieve()
    expected = parts_of([[films + 5, nothing], users], empty)
    for values, (name, wanted) in zip(retrieved, expected.items(), strict=True):
        for value, want in zip(values, wanted, strict=True):
            # Sums begin with a subnormal number.
            np.testing.assert_allclose(value, want, rtol=0, atol=1e-38, err_msg=name)
    assert calls.rows().tolist() == [5, 6, 7, 8, 9, 10]
    with pytest.raises(INVALID, match=r"Table films: the sums .* none between steps"):
        load(parts_of([[films, films], users], empty))
    # Eagerly no shape function has looked at it before.
    with pytest.raises(INVALID, match=r"`NumTables` is 1, but .* has 2 tables"):
        execute.execute(
            b"RetrieveAllTPUEmbeddingParameters",
            num_outputs=8,
            inputs=[],
            attrs=("NumTables", 1, *(part for pair in place.items() for part in pair)),
            ctx=context.context(),
        )
    assert calls.rows().tolist() == [5, 6, 7, 8, 9, 10]
