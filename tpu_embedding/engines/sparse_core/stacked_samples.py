"""Between the samples of features and those of stacks.

The samples of a replica are dealt out to its SparseCores: each has a block of the
samples of every feature, one feature after another. A stack lists them SparseCore by
SparseCore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Layout


class StackedSamples:
    """Activations and gradients, by feature and by stack."""

    def __init__(self, plan: Plan, layout: Layout, sparse_cores: int) -> None:
        """Notes the shapes, all of which are known.

        Args:
          plan: Each feature has a full `output_shape`.
          layout: Of that plan.
          sparse_cores: Of a device; they divide the samples of each feature.
        """
        self._layout = layout
        self._cores = sparse_cores
        self._dims = plan.dims
        self._shapes = [f.config.output_shape for f in plan.features]

    def split(self, stacks: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """For each feature its activations, [output shape..., dim].

        Args:
          stacks: By name of the stack [samples, width].
        """
        by_core = [
            tf.reshape(stacks[stack.name], [self._cores, -1, stack.width])
            for stack in self._layout.stacks
        ]
        activations = []
        for feature, stack in enumerate(self._layout.feature_stacks):
            first = self._layout.sample_offsets[feature] // self._cores
            last = first + self._layout.samples[feature] // self._cores
            dim = self._dims[feature]
            own = by_core[stack][:, first:last, :dim]
            activations.append(tf.reshape(own, [*self._shapes[feature], dim]))
        return activations

    def join(self, gradients: Sequence[tf.Tensor | None]) -> dict[str, tf.Tensor]:
        """By name of the stack the gradients of its samples, [samples, width].

        Args:
          gradients: For each feature [output shape..., dim]; None counts as zeros.
        """
        joined = {}
        for stack in self._layout.stacks:
            parts = [self._part(gradients[f], f, stack.width) for f in stack.features]
            joined[stack.name] = tf.reshape(
                tf.concat(parts, 1), [stack.samples, stack.width]
            )
        return joined

    def _part(self, gradient: tf.Tensor | None, feature: int, width: int) -> tf.Tensor:
        shape = [self._cores, self._layout.samples[feature] // self._cores]
        if gradient is None:
            return tf.zeros([*shape, width])
        dim = self._dims[feature]
        return tf.pad(
            tf.reshape(gradient, [*shape, dim]), [[0, 0], [0, 0], [0, width - dim]]
        )
