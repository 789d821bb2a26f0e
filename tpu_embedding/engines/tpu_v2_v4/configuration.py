"""The TPUEmbeddingConfiguration proto, and the learning rates that it has tags for.

The proto describes the tables to a TPU. Each field has the value that TensorFlow's
TPUEmbedding class writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.tpu import (
    optimization_parameters_pb2,
    tpu_embedding_configuration_pb2,
)

from tpu_embedding.distribution import TPUSystem, outside_of_replicas
from tpu_embedding.engines.rates import evaluate_rate
from tpu_embedding.layout.output_shapes import Shape
from tpu_embedding.layout.plan import Plan, TableSpec
from tpu_embedding.optimizers.base import Optimizer, takes_step

# The modules create their classes when they are imported, unknown to type checkers.
_Configuration: Any = vars(tpu_embedding_configuration_pb2)["TPUEmbeddingConfiguration"]
_Accumulation: Any = vars(optimization_parameters_pb2)["GradientAccumulationStatus"]
_Packing: Any = vars(optimization_parameters_pb2)["LowDimensionalPackingStatus"]


def make_configuration(
    plan: Plan,
    tpu: TPUSystem,
    output_shapes: Sequence[Shape],
    *,
    pipelined: bool,
    profile_data_directory: str | None = None,
) -> Any:
    """Makes the TPUEmbeddingConfiguration of a plan whose optimizers have a `tpu` rule.

    `output_shapes` has the full shape of each feature's activations on one core,
    without the embedding axis.
    """
    proto = _Configuration(
        # The mode of each batch says whether gradients will follow.
        mode=_Configuration.TRAINING,
        num_hosts=len(tpu.hosts),
        num_tensor_cores=len(tpu.devices) * tpu.cores_per_replica,
        sharding_strategy=_Configuration.DIV_DEFAULT,
        pipeline_execution_with_tensor_core=pipelined,
        profile_data_directory=profile_data_directory or "",
    )
    rates = dynamic_rates(plan)
    for table in plan.tables:
        _describe_table(proto.table_descriptor.add(), table, len(tpu.hosts), rates)
    for feature, shape in zip(plan.features, output_shapes, strict=True):
        proto.feature_descriptor.add(
            name=feature.config.name or "", table_id=feature.table, input_shape=shape
        )
    if tpu.assigned:
        proto.spmd_sharding.enabled = True
        proto.spmd_sharding.num_cores_per_replica = tpu.cores_per_replica
    return proto


def dynamic_rates(plan: Plan) -> list[Callable[..., Any]]:
    """Returns the callable learning rates, each once; the index of a rate is its tag.

    Tables with the same rate share a tag, because each tag makes a TPU slower.
    """
    rates: list[Callable[..., Any]] = []
    for table in plan.tables:
        rate = table.optimizer.learning_rate if table.optimizer else 0.0
        if callable(rate) and rate not in rates:
            rates.append(rate)
    return rates


def _describe_table(
    proto: Any, table: TableSpec, num_hosts: int, rates: Sequence[Callable[..., Any]]
) -> None:
    assert table.optimizer is not None
    proto.name = table.name
    # Each host must have a row.
    proto.vocabulary_size = max(table.config.vocabulary_size, num_hosts)
    proto.dimension = table.config.dim
    parameters = proto.optimization_parameters
    rate = table.optimizer.learning_rate
    if callable(rate):
        parameters.learning_rate.dynamic.tag = rates.index(rate)
    else:
        parameters.learning_rate.constant = rate
    _describe_optimizer(parameters, table.optimizer)
    config = table.config.quantization_config
    if config is not None:
        quantization = parameters.simulated_quantization
        quantization.enabled = True
        quantization.num_buckets = config.num_buckets
        _limit(quantization.clipping_limits, config.lower, config.upper)


def _describe_optimizer(parameters: Any, optimizer: Optimizer) -> None:
    """Writes the rule and the options that all rules have."""
    assert optimizer.tpu is not None
    rule = getattr(parameters, optimizer.tpu.message)
    rule.SetInParent()  # For a rule without fields, only its presence counts.
    for field, value in optimizer.tpu.values(optimizer).items():
        setattr(rule, field, value)
    parameters.gradient_accumulation_status = (
        _Accumulation.ENABLED
        if optimizer.use_gradient_accumulation
        else _Accumulation.DISABLED
    )
    parameters.low_dimensional_packing_status = (
        _Packing.ENABLED
        if optimizer.low_dimensional_packing_status
        else _Packing.UNSPECIFIED
    )
    _limit(
        parameters.clipping_limits, optimizer.clip_weight_min, optimizer.clip_weight_max
    )
    _limit(
        parameters.gradient_clipping_limits,
        optimizer.clip_gradient_min,
        optimizer.clip_gradient_max,
    )
    if optimizer.weight_decay_factor:
        parameters.weight_decay_factor = optimizer.weight_decay_factor
        parameters.multiply_weight_decay_factor_by_learning_rate = bool(
            optimizer.multiply_weight_decay_factor_by_learning_rate
        )


def _limit(limits: Any, lower: float | None, upper: float | None) -> None:
    """Sets the limits that are not None."""
    if lower is not None:
        limits.lower.value = lower
    if upper is not None:
        limits.upper.value = upper


class ProgramRates:
    """The callable learning rates, in the order of their tags.

    Attributes:
      updates: int64 scalar, the number of updates already applied, with a copy in each
        replica; None if no rate takes it.
    """

    def __init__(self, plan: Plan, strategy: tf.distribute.Strategy) -> None:
        """Creates the counter, if a rate takes it."""
        self._rates = dynamic_rates(plan)
        self.updates: tf.Variable | None = None
        if counts_updates(plan):
            self.updates = outside_of_replicas(lambda: _create_counter(strategy))

    def evaluate(self) -> list[tf.Tensor]:
        """Returns the rates as float32 scalars, in the order of their tags."""
        return [evaluate_rate(rate, self.updates) for rate in self._rates]

    def count_update(self) -> None:
        """Counts one update, in each replica."""
        if self.updates is not None:
            self.updates.assign_add(1)


def counts_updates(plan: Plan) -> bool:
    """Returns whether a learning rate takes the number of updates."""
    return any(takes_step(rate) for rate in dynamic_rates(plan))


def _create_counter(strategy: tf.distribute.Strategy) -> tf.Variable:
    with strategy.scope():
        return tf.Variable(
            tf.zeros([], tf.int64),
            trainable=False,
            name="updates",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
