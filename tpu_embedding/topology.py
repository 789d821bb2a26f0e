"""What the tf.distribute strategy says about where an embedding runs.

No other module asks about strategies.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tpu_embedding import errors
from tpu_embedding.ops import library

ENGINE_VARIABLE = "TPU_EMBEDDING_ENGINE"
_ENGINES = ("host", "portable")
# By public name, which is not always that of the class.
_UNSUPPORTED: dict[str, Any] = {
    "TPUStrategy": (
        tf.distribute.TPUStrategy,
        tf.distribute.experimental.TPUStrategy,
    ),
    "MultiWorkerMirroredStrategy": tf.distribute.MultiWorkerMirroredStrategy,
    "ParameterServerStrategy": tf.distribute.ParameterServerStrategy,
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One embedding's place in the world.

    Attributes:
      engine: "host" or "portable".
      num_replicas: Replicas that share the tables, R.
      device: Where the tables live.
    """

    strategy: tf.distribute.Strategy
    engine: str
    num_replicas: int
    device: str

    def replica(self) -> int | None:
        """The replica that is being traced or run, or None outside of replicas.

        Raises:
          RuntimeError: If a strategy is active that is not the embedding's own.
        """
        context = tf.distribute.get_replica_context()
        active = tf.distribute.get_strategy()
        if active is not self.strategy and tf.distribute.has_strategy():
            raise errors.other_strategy(self.strategy, active)
        if self.num_replicas == 1:
            return 0
        if context is None or active is not self.strategy:
            return None
        return int(tf.get_static_value(context.replica_id_in_sync_group))

    def split(self, values: Sequence[Any]) -> list[list[Any]]:
        """For each replica its part of each value.

        A value that is not distributed goes to every replica whole.
        """
        parts = [self.strategy.experimental_local_results(value) for value in values]
        return [
            [part[replica] if len(part) > 1 else part[0] for part in parts]
            for replica in range(self.num_replicas)
        ]


def current() -> Topology:
    """The topology of the strategy whose scope is active.

    Raises:
      NotImplementedError: For strategies that no engine serves yet.
      ValueError: If the environment variable TPU_EMBEDDING_ENGINE names no engine.
      RuntimeError: If it asks for the host engine and its library cannot be loaded.
    """
    strategy = tf.distribute.get_strategy()
    for name, classes in _UNSUPPORTED.items():
        if isinstance(strategy, classes):
            raise errors.unsupported_strategy(name)
    if _is_software_tpu(strategy):
        raise errors.unsupported_strategy("SoftwareTPUStrategy")
    device = "/device:CPU:0"
    if tf.distribute.has_strategy():
        device = strategy.extended.worker_devices[0]
    return Topology(
        strategy=strategy,
        engine=_choose_engine(device),
        num_replicas=strategy.num_replicas_in_sync,
        device=device,
    )


def is_tpu() -> bool:
    """Whether a TPU strategy's scope is active, or one that stands in for it."""
    strategy = tf.distribute.get_strategy()
    is_tpu_strategy = isinstance(strategy, _UNSUPPORTED["TPUStrategy"])
    return is_tpu_strategy or _is_software_tpu(strategy)


def _is_software_tpu(strategy: tf.distribute.Strategy) -> bool:
    return hasattr(strategy.extended, "tpu_hardware")


def _choose_engine(device: str) -> str:
    asked = os.environ.get(ENGINE_VARIABLE, "")
    if asked and asked not in _ENGINES:
        raise errors.unknown_engine(ENGINE_VARIABLE, asked, _ENGINES)
    if asked == "portable":
        return asked
    reason = library.unavailable_reason()
    if tf.DeviceSpec.from_string(device).device_type == "GPU":
        reason = f"the tables are on {device}, and the host engine is for the CPU."
    if reason is None:
        return "host"
    if asked == "host":
        raise errors.host_engine_unavailable(ENGINE_VARIABLE, reason)
    logging.log_first_n(
        logging.WARNING, "tpu_embedding uses its portable engine: %s", 1, reason
    )
    return "portable"
