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
    no row. The weights of a combiner are another matter: what the user's function makes
    of zeros may be NaN, so that they must be left as they are.
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
        self._is_there = create_local("pending/is_there", lambda: tf.constant(False))
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

    def is_there(self) -> tf.Tensor:
        """Whether something is pending, in one replica; a bool scalar."""
        return self._is_there.read_value()

    def write(self, inputs: Inputs) -> None:
        """Replaces what is pending, in one replica."""
        for stack, own in self._variables.items():
            for name, variable in own.items():
                variable.assign(tf.ensure_shape(inputs[stack][name], variable.shape))
        self._is_there.assign(True)

    def clear(self) -> None:
        """Forgets what is pending, in one replica."""
        for own in self._variables.values():
            own["row_pointers"].assign(tf.zeros_like(own["row_pointers"]))
        self._is_there.assign(False)
