"""The graph that a step traces: TensorFlow's ops, on the devices of the replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from software_tpu.calls import strategy_of
from sparse_core.models import two_tables
from v2_calls import BATCH

import tpu_embedding as te

RULES: list[tuple[Any, str, dict[str, Any]]] = [
    (te.SGD(1.0, clip_weight_min=-1.5), "Sgd", {"clip_weight_min": -1.5}),
    (te.Adagrad(1.0), "Adagrad", {"clip_weight_max": np.inf}),
    (
        te.AdagradMomentum(1.0, momentum=0.5, exponent=3, beta2=0.25, epsilon=0.5),
        "AdagradMomentum",
        {
            "use_nesterov": False,
            "exponent": 3.0,
            "beta1": 0.5,
            "beta2": 0.25,
            "epsilon": 0.5,
        },
    ),
    (
        te.Adam(1.0, beta_1=0.5, beta_2=0.75, epsilon=0.25, sum_inside_sqrt=False),
        "Adam",
        {"use_sum_inside_sqrt": False, "beta1": 0.5, "beta2": 0.75, "epsilon": 0.25},
    ),
    (
        te.FTRL(
            1.0,
            learning_rate_power=-0.75,
            l1_regularization_strength=0.5,
            l2_regularization_strength=0.25,
            beta=2.0,
            multiply_linear_by_learning_rate=True,
        ),
        "Ftrl",
        {
            "multiply_linear_by_learning_rate": True,
            "beta": 2.0,
            "learning_rate_power": -0.75,
            "l1_regularization_strength": 0.5,
            "l2_regularization_strength": 0.25,
        },
    ),
]


def graphs_of(strategy: Any, step: Any) -> Iterator[list[tf.Operation]]:
    """The ops of each replica's function."""
    function: Any = tf.function(lambda: strategy.run(step))
    graph = function.get_concrete_function().graph
    (run,) = [op for op in graph.get_operations() if op.type.endswith("SoftwareTpuRun")]
    for replica in run.get_attr("replicas"):
        yield graph._get_function(replica.name).graph.get_operations()


@pytest.mark.parametrize(("optimizer", "rule", "attributes"), RULES, ids=lambda x: "")
def test_the_ops_of_a_step(
    optimizer: Any, rule: str, attributes: dict[str, Any]
) -> None:
    system = ("v6e", 2)
    config = te.SparseCoreEmbeddingConfig(
        max_ids_per_table={"films_users": 11},
        max_unique_ids_per_table={"films_users": 9},
        max_ids_per_chip_per_sample=8,
    )
    embedding = two_tables(system, optimizer, sparse_core_embedding_config=config)
    embedding.build()

    def step() -> None:
        _, preserved = embedding(BATCH)
        embedding.apply_gradients({n: tf.ones([2, 2]) for n in "abc"}, preserved)

    expected = {
        "TPUCopyWithDynamicShape": {"N": 4},
        "TPUAnnotateTensorsWithDynamicShape": {},
        "XlaSparseDenseMatmulWithStaticBufferSize": {
            "input_size": 6,
            "quantization_config_num_buckets": 0,
        },
        f"XlaSparseDenseMatmulGradWith{rule}AndStaticBufferSize": attributes,
    }
    limits = {
        "table_name": b"films_users",
        "max_ids_per_sparse_core": 11,
        "max_unique_ids_per_sparse_core": 9,
    }
    for replica, ops in enumerate(graphs_of(strategy_of(*system), step)):
        found = {op.type: op for op in ops if op.type.startswith(("TPU", "Xla"))}
        assert list(found) == list(expected)
        for kind, own in expected.items():
            wanted = {**own, **(limits if kind.startswith("Xla") else {})}
            assert {name: found[kind].get_attr(name) for name in wanted} == wanted
            assert found[kind].device.endswith(f"CPU:{replica}")
        # 2 SparseCores x 64 minibatches x 4 shards, padded to 8; 8 ids x 6 samples.
        inputs = [tuple(tensor.shape) for tensor in found[kind].inputs][:5]
        assert inputs == [(1024,), (48,), (48,), (48,), (6, 8)]
