"""Configurations of TensorFlow's own classes, for the goldens of their protos.

Run as a script it makes the goldens anew, by TensorFlow's own TPUEmbedding:

    PYTHONPATH=tests python tests/tpu_v2_v4/configurations.py
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from described_tpu import TOPOLOGY, Described

TESTS = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden" / "tpu_embedding_configuration"
stock = tf.tpu.experimental.embedding


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration; `make` gives new arguments of TPUEmbedding each time.

    `shapes` are per_replica_input_shapes in the structure of the features; `cores` are
    those of each replica, by a device assignment, or 0.
    """

    make: Callable[[], tuple[Any, Any]]
    shapes: Any
    pipelined: bool = False
    cores: int = 0

    def strategy(self) -> tf.distribute.TPUStrategy:
        """Two hosts of four TPU v2 to v4 cores each, which are not there."""
        if not self.cores:
            return tf.distribute.TPUStrategy(Described("V1"))
        assignment = tf.tpu.experimental.DeviceAssignment.build(
            TOPOLOGY, computation_shape=[1, 1, 1, self.cores], num_replicas=4
        )
        return tf.distribute.TPUStrategy(
            Described("V1"), experimental_device_assignment=assignment
        )


def _rate_one() -> float:
    return 0.5


def _rate_two() -> float:
    return 0.25


def _one(optimizer: Any, **table: Any) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        config = stock.TableConfig(100, 8, **table)
        return {"film": stock.FeatureConfig(config)}, optimizer()

    return make


def _several() -> tuple[Any, Any]:
    """Tables in order of first use, shared, unnamed, named; every optimizer."""
    users = stock.TableConfig(1000, 16, name="users", combiner="sum")
    films = stock.TableConfig(1, 4, optimizer=stock.Adam(_rate_one), combiner="sqrtn")
    words = stock.TableConfig(70, 4, optimizer=stock.Adagrad(_rate_two), name="words")
    plots = stock.TableConfig(71, 4, optimizer=stock.FTRL(_rate_one))
    return [
        {
            "b": stock.FeatureConfig(films, name="of b"),
            "a": stock.FeatureConfig(users, max_sequence_length=5),
        },
        stock.FeatureConfig(words, output_shape=[3, 7]),
        (stock.FeatureConfig(users), stock.FeatureConfig(plots)),
    ], stock.AdagradMomentum(0.1, momentum=0.9)


CASES: dict[str, Case] = {
    "sgd": Case(_one(stock.SGD), {"film": (16,)}),
    "sgd_options": Case(
        _one(
            lambda: stock.SGD(
                0.3,
                use_gradient_accumulation=False,
                clip_weight_min=-2.0,
                clip_weight_max=0.0,
                weight_decay_factor=0.01,
                multiply_weight_decay_factor_by_learning_rate=True,
                low_dimensional_packing_status=True,
            )
        ),
        {"film": (16, 1)},
    ),
    "adagrad": Case(_one(stock.Adagrad), {"film": (16, 3)}, pipelined=True),
    "adagrad_options": Case(
        _one(
            lambda: stock.Adagrad(
                _rate_one,
                initial_accumulator_value=0.5,
                clip_weight_max=3.0,
                weight_decay_factor=0.02,
                clipvalue=0.75,
            )
        ),
        {"film": (2, 8, 1)},
    ),
    "adagrad_momentum": Case(
        _one(
            lambda: stock.AdagradMomentum(
                0.2,
                momentum=0.8,
                use_nesterov=True,
                exponent=3,
                beta2=0.9,
                epsilon=1e-5,
            )
        ),
        {"film": (16,)},
    ),
    "ftrl": Case(
        _one(
            lambda: stock.FTRL(
                0.2,
                learning_rate_power=-0.25,
                l1_regularization_strength=0.1,
                l2_regularization_strength=0.2,
                beta=0.3,
                multiply_linear_by_learning_rate=True,
                allow_zero_accumulator=True,
                clipvalue=(None, 0.5),
            )
        ),
        {"film": (16,)},
    ),
    "adam": Case(
        _one(
            lambda: stock.Adam(
                0.2,
                beta_1=0.8,
                beta_2=0.99,
                epsilon=1e-3,
                lazy_adam=False,
                sum_inside_sqrt=False,
                clipvalue=(-0.5, None),
            )
        ),
        {"film": (16,)},
    ),
    "quantization": Case(
        _one(
            stock.SGD,
            quantization_config=stock.QuantizationConfig(
                num_buckets=16, lower=-1.0, upper=0.0
            ),
        ),
        {"film": (16,)},
    ),
    "several": Case(
        _several,
        [{"b": (4,), "a": (4, None)}, (3, 7, None), ((2, 4, 1), (4, 9))],
        pipelined=True,
    ),
    "cores": Case(_one(stock.SGD), {"film": (16,)}, cores=2),
    "one_core": Case(_one(stock.SGD), {"film": (16,)}, cores=1),
}


def stock_proto(case: Case) -> Any:
    """The proto that TensorFlow's own class writes, which needs no TPU for it."""
    features, optimizer = case.make()
    tables = [feature.table for feature in tf.nest.flatten(features)]
    for one in (optimizer, *(table.optimizer for table in tables)):
        if one is not None:
            # A bool, as is the default, is a TypeError to protobuf 7.
            one.low_dimensional_packing_status = int(one.low_dimensional_packing_status)
    with case.strategy().scope():
        embedding = stock.TPUEmbedding(features, optimizer, case.pipelined)
        shapes = [tf.TensorShape(shape) for shape in flat_shapes(features, case.shapes)]
        shapes = tf.nest.pack_sequence_as(features, shapes)
        embedding._get_and_update_output_shapes_from_input(shapes)
        return embedding._create_config_proto()


def flat_shapes(features: Any, shapes: Any) -> list[Any]:
    """The shapes of a case in the order of tf.nest.flatten(features)."""
    if isinstance(features, stock.FeatureConfig):
        return [shapes]
    if isinstance(features, dict):
        return [
            s for k in sorted(features) for s in flat_shapes(features[k], shapes[k])
        ]
    pairs = zip(features, shapes, strict=True)
    return [s for f, shape in pairs for s in flat_shapes(f, shape)]


def main() -> None:
    """Writes all goldens."""
    GOLDEN.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (GOLDEN / f"{name}.textproto").write_text(str(stock_proto(case)))


if __name__ == "__main__":
    main()
