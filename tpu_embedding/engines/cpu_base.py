"""The code shared by the engines that do not store their tables as stacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tpu_embedding.layout.csr import PartitionedCsrFormatTensor, PreprocessedFeatures
from tpu_embedding.layout.plan import Plan, require_options
from tpu_embedding.layout.stacking import Layout, full_shape


def refuse_tpu_options(engine: str, plan: Plan) -> None:
    """Refuses layouts, which only TPUs have, and options that the engine lacks."""
    refuse_layouts(engine.replace("_", " "), plan)
    require_options(plan, engine)


def refuse_layouts(engine: str, plan: Plan) -> None:
    """Refuses tables with a layout."""
    for table in plan.tables:
        layout = table.config.layout
        if layout is not None:
            raise NotImplementedError(
                f"The {engine} engine does not support `layout={layout!r}` of table "
                f"{table.name}: only TPUs do. Leave it at its default."
            )


class StackedBatches:
    """Turns what an engine computes into the records of `layout.csr`, and back."""

    def __init__(self, plan: Plan, layout: Layout | None) -> None:
        """Remembers how many samples each feature is declared to have."""
        self._layout, self._dims = layout, plan.dims
        self._declared: list[int | None] = []
        for spec in plan.features:
            shape = full_shape(spec)
            self._declared.append(None if shape is None else math.prod(shape))

    @property
    def layout(self) -> Layout:
        """The stacks, if the public class hands them out."""
        assert self._layout is not None
        return self._layout

    def by_sample(
        self, gradients: Sequence[tf.Tensor | None]
    ) -> list[tf.Tensor | None]:
        """Reshapes gradients of activations to [samples, D]."""
        return [
            None if gradient is None else tf.reshape(gradient, [-1, dim])
            for gradient, dim in zip(gradients, self._dims, strict=True)
        ]

    def pack(
        self, stacks: Sequence[Sequence[tf.Tensor]], shapes: Sequence[tf.Tensor]
    ) -> PreprocessedFeatures:
        """Makes the record of one batch.

        `stacks` has row_pointers, sample ids, token ids and gains of each stack, and
        `shapes` has the output shape of each feature, int64 [k].
        """
        samples = [tf.cast(tf.reduce_prod(shape), tf.int32) for shape in shapes]
        return PreprocessedFeatures(
            tables={
                stack.name: PartitionedCsrFormatTensor(
                    *tensors,
                    sample_count=self._count([samples[f] for f in stack.features], k),
                    num_minibatches_per_physical_sparse_core=tf.constant(1, tf.int32),
                )
                for k, (stack, tensors) in enumerate(
                    zip(self.layout.stacks, stacks, strict=True)
                )
            },
            output_shapes=tuple(shapes),
            dropped_ids={
                table.table_name: tf.constant(0, tf.int64)
                for table in self.layout.tables
            },
            sizes={},
        )

    def samples(
        self, tables: Mapping[str, PartitionedCsrFormatTensor]
    ) -> list[tf.Tensor]:
        """Returns for each feature the number of its samples, an int64 scalar."""
        counts: dict[int, tf.Tensor] = {}
        for k, stack in enumerate(self.layout.stacks):
            count = tf.cast(tables[stack.name].sample_count, tf.int64)
            if len(self._undeclared(k)) > 1:
                # Each feature must have a count, else the op would not run at all.
                count = tf.ensure_shape(count, [len(stack.features)])
                counts.update(zip(stack.features, tf.unstack(count), strict=True))
                continue
            known = {f: self._declared[f] for f in stack.features}
            total = sum(n for n in known.values() if n is not None)
            for feature, n in known.items():
                rest = count - total
                counts[feature] = rest if n is None else tf.constant(n, tf.int64)
        return [counts[f] for f in range(len(self._declared))]

    def _undeclared(self, stack: int) -> list[int]:
        features = self.layout.stacks[stack].features
        return [f for f in features if self._declared[f] is None]

    def _count(self, samples: Sequence[tf.Tensor], stack: int) -> tf.Tensor:
        if len(self._undeclared(stack)) > 1:
            return tf.stack(samples)
        return tf.add_n(samples)
