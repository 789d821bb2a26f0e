"""Engines called directly, without a TPUEmbedding: a part of test_portable.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.distribution import Topology
from tpu_embedding.engines import Engine, EngineOptions, choose
from tpu_embedding.inputs import IdBatch, to_id_batch
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import make_plan

Call = Callable[[], Any]
# Ways to make a call: the engine and what wraps the call.
MODES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "portable": ("portable", lambda call: call),
    "portable_graph": ("portable", tf.function),
    "host": ("host", lambda call: call),
}
ERRORS = (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError)


def make_engine(
    name: str,
    features: Sequence[te.FeatureConfig],
    ranks: Sequence[int],
) -> Engine:
    """An engine whose features are f0, f1, ... with outputs of the given ranks."""
    keys = {feature.table: feature.table for feature in features}
    paths = [f"f{index}" for index in range(len(features))]
    plan = make_plan(paths, features, keys, te.Adagrad(0.1))
    shapes = OutputShapes(plan.features)
    for spec, rank in zip(plan.features, ranks, strict=True):
        shapes._ranks[spec.index] = rank
    topology = Topology(
        strategy=tf.distribute.get_strategy(),
        engine=name,
        num_replicas=1,
        device="/device:CPU:0",
    )
    engine_class = choose(topology, plan)
    options = EngineOptions(
        plan=plan,
        topology=topology,
        output_shapes=shapes,
        pipelined=False,
        check_numerics=True,
    )
    layout = engine_class.lay_out(options)
    return engine_class(dataclasses.replace(options, layout=layout))


def outcome(call: Call) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        return call()
    except ERRORS as error:
        return error


def assert_same(portable: Any, host: Any, where: Any) -> None:
    """Both returned the same numbers, or raised errors of one class and wording."""
    if isinstance(portable, Exception) or isinstance(host, Exception):
        assert type(portable) is type(host), (where, portable, host)
        assert portable.message in host.message, where
    elif host is None:
        assert portable is None, where
    else:
        for own, other in zip(portable, host, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def assert_same_variables(portable: Engine, host: Engine, where: Any) -> None:
    """Both hold the same tables and slots."""
    own, other = portable.checkpoint_variables(), host.checkpoint_variables()
    for name, variable in own.items():
        np.testing.assert_allclose(
            variable, other[name], rtol=1e-4, atol=1e-6, err_msg=f"{name} {where}"
        )


def films(**arguments: Any) -> te.TableConfig:
    return te.TableConfig(
        8, 2, initializer=te.RowIdInitializer(), name="films", **arguments
    )


class Mixed:
    """Three features of two tables, with random batches and gradients of them."""

    DIMS = (3, 2, 3)

    @classmethod
    def engine(cls, name: str) -> Engine:
        one = te.TableConfig(
            11, 3, initializer=te.RowIdInitializer(), name="one", combiner="sqrtn"
        )
        two = te.TableConfig(
            5,
            2,
            initializer=te.RowIdInitializer(),
            name="two",
            optimizer=te.Adam(0.1, lazy_adam=False),
        )
        features = [te.FeatureConfig(table) for table in (one, two, one)]
        return make_engine(name, features, (1, 1, 1))

    @staticmethod
    def batch(seed: int, *, bad: bool = False) -> list[IdBatch]:
        """Dense, dense of rank 2, ragged with weights; `bad` has an invalid id."""
        rng = np.random.default_rng(seed)
        second = rng.integers(0, 5, [4, 2], np.int32)
        if bad:
            second[2, 1] = 7
        third = tf.RaggedTensor.from_row_lengths(rng.integers(0, 11, [6]), [1, 0, 3, 2])
        weights = third.with_values(tf.constant(rng.normal(size=6), tf.float32))
        return [
            to_id_batch("f0", tf.constant(rng.integers(0, 11, [4]))),
            to_id_batch("f1", tf.constant(second)),
            to_id_batch("f2", third, weights),
        ]

    @classmethod
    def gradients(cls, seed: int, *, bad: bool = False) -> list[tf.Tensor | None]:
        """Of random values; `bad` ones have a NaN, or a wrong shape."""
        rng = np.random.default_rng(seed)
        values: list[tf.Tensor | None] = [
            tf.constant(rng.normal(size=[4, dim]), tf.float32) for dim in cls.DIMS
        ]
        if rng.random() < 0.3:
            values[2] = None
        if bad:
            nan = tf.fill([4, 2], np.float32("nan"))
            values[1] = nan if rng.random() < 0.5 else tf.zeros([3, 2])
        return values
