"""The user's features and those of a plan, which has one for each hash of a table.

Only this module makes the value of an id from its rows, and rows from ids for engines
whose kernels do not hash.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.hashing import join_rows, rows_of
from tpu_embedding.inputs import IdBatch, to_id_batch
from tpu_embedding.layout.plan import FeatureSpec
from tpu_embedding.nest_utils import Structure


def read_features(
    specs: Sequence[FeatureSpec],
    values: Sequence[Any],
    weights: Sequence[Any],
    *,
    as_rows: bool = True,
) -> list[IdBatch]:
    """Reads the batches of a plan.

    With `as_rows` the ids of hashed tables become rows; otherwise the engine's kernels
    hash them.
    """
    batches: list[IdBatch] = []
    for spec, value, weight in zip(specs, values, weights, strict=True):
        if spec.is_first:  # The others have the same ids.
            batch = to_id_batch(spec.path, value, weight, string_ids=spec.string_ids)
        if spec.row_hash is None or not as_rows:
            batches.append(batch)
        else:
            rows = rows_of(batch.ids, spec.row_hash)
            batches.append(dataclasses.replace(batch, ids=rows))
    return batches


class FeatureStructure(Structure):
    """The nested structure of the user's features, which are some or all of a plan.

    `flatten` and `pack` have a leaf for each feature of the user. Lists for a plan have
    an element for each feature of the plan.
    """

    def __init__(self, nested: Any, specs: Sequence[FeatureSpec]) -> None:
        """Takes the features of the plan in the order of the leaves."""
        super().__init__(nested)
        self._specs = [spec for spec in specs if spec.is_first]
        self._counts = [_rows(spec) for spec in self._specs]  # Features in the plan.
        self._starts = list(itertools.accumulate(self._counts, initial=0))[:-1]

    def for_plan(self, leaves: Sequence[Any]) -> list[Any]:
        """Repeats the value of each user feature for its features of the plan."""
        pairs = zip(self._counts, leaves, strict=True)
        return [leaf for count, leaf in pairs for _ in range(count)]

    def of_user(self, values: Sequence[Any]) -> list[Any]:
        """Reverses `for_plan`."""
        return [values[start] for start in self._starts]

    def join(self, activations: Sequence[Any]) -> list[Any]:
        """Joins the activations of the plan into those of the user's features."""
        joined = []
        places = zip(self._specs, self._starts, self._counts, strict=True)
        for spec, start, count in places:
            parts = list(activations[start : start + count])
            if spec.row_hash is not None:
                parts = [join_rows(parts, spec.row_hash.hashing)]
            joined += parts
        return joined

    def pack_joined(self, activations: Sequence[Any]) -> Any:
        """Joins activations as `join`, and packs them into this structure."""
        return self.pack(self.join(activations))

    def join_shapes(self, shapes: Sequence[tuple[int | None, ...]]) -> list[Any]:
        """Returns the shapes of what `join` returns for activations of these shapes."""
        pairs = zip(self._specs, self.of_user(shapes), strict=True)
        return [(*shape[:-1], self._dim(spec, shape[-1])) for spec, shape in pairs]

    def split(self, gradients: Any) -> list[Any]:
        """Splits gradients of the user's features into those of the plan.

        Raises:
          TypeError, ValueError: If the structure differs, or the gradient of a feature
            that is joined has the wrong last axis.
        """
        found: list[Any] = []
        flat = self.flatten("gradients", gradients)
        for spec, count, gradient in zip(self._specs, self._counts, flat, strict=True):
            if count == 1 or _adds(spec) or not isinstance(gradient, tf.Tensor):
                found += [gradient] * count
                continue
            width = spec.config.table.dim
            last = gradient.shape[-1:]
            if not last.is_compatible_with([width * count]):
                raise ValueError(
                    f"The gradient of feature {spec.path} must have the shape of its "
                    f"activation, whose last axis is {width * count}. Received: "
                    f"{gradient.shape}."
                )
            found += tf.split(gradient, [width] * count, -1)
        return found

    def _dim(self, spec: FeatureSpec, width: Any) -> Any:
        return width if _adds(spec) else width * _rows(spec)


def _rows(spec: FeatureSpec) -> int:
    """Returns the number of rows of an id."""
    return 1 if spec.row_hash is None else spec.row_hash.hashing.hashes


def _adds(spec: FeatureSpec) -> bool:
    return spec.row_hash is not None and spec.row_hash.hashing.combine == "sum"
