"""The update that pipelining keeps until the lookups of the next step are done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.sparse_core.ops import MINIBATCHES
from tpu_embedding.engines.sparse_core.state import create_local

# By stack the inputs of its update op.
Inputs = Mapping[str, Mapping[str, tf.Tensor]]


class PendingUpdate:
    """One update of all stacks, kept in variables of each replica.

    Where nothing is pending all is 0: no partition has an entry, and the update touches
    no row.
    """

    def __init__(self, specs: Mapping[str, Mapping[str, tf.TensorSpec]]) -> None:
        """Makes the variables; to be called in the strategy's scope.

        Args:
          specs: Of the inputs, whose shapes are known.
        """
        self._variables: dict[str, dict[str, Any]] = {
            stack: {
                name: create_local(
                    f"pending/{stack}/{name}",
                    lambda spec=spec: tf.zeros(spec.shape, spec.dtype),
                )
                for name, spec in own.items()
            }
            for stack, own in specs.items()
        }
        for own in self._variables.values():
            if MINIBATCHES in own:  # Checked by the op even where there is nothing.
                for part in own[MINIBATCHES].values:
                    part.assign(1)

    def read(self) -> dict[str, dict[str, tf.Tensor]]:
        """What is pending, in one replica."""
        return {
            stack: {name: variable.read_value() for name, variable in own.items()}
            for stack, own in self._variables.items()
        }

    def write(self, inputs: Inputs) -> None:
        """Replaces what is pending, in one replica."""
        for stack, own in self._variables.items():
            for name, variable in own.items():
                variable.assign(tf.ensure_shape(inputs[stack][name], variable.shape))

    def clear(self) -> None:
        """Forgets what is pending, in one replica."""
        for own in self._variables.values():
            # Gradients too: they reach the weights of a combiner without any entry.
            for name in ("row_pointers", "activation_gradients"):
                own[name].assign(tf.zeros(own[name].shape, own[name].dtype))
