"""The output shape of each feature, and the source of that shape.

Shapes are per replica, without the embedding axis, as tuples of int or None.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

from tpu_embedding import errors
from tpu_embedding.config import FeatureConfig
from tpu_embedding.layout.plan import FeatureSpec

Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Declared:
    """A shape and its source, for error messages."""

    shape: Shape
    source: str


def from_input(path: str, feature: FeatureConfig, shape: Shape) -> Shape:
    """Returns the output shape of an input (docs/semantics.md).

    `shape` is the shape of the input, (rows, None) if it is ragged.
    """
    length = feature.max_sequence_length
    if length and len(shape) != 2:
        raise ValueError(
            f"Feature {path} has `max_sequence_length={length}`, so its input must be "
            f"of rank 2. Received: rank {len(shape)}. Reshape the input, or leave "
            "`max_sequence_length` at 0."
        )
    rows = shape if len(shape) == 1 else shape[:-1]
    return (*rows, length) if length else rows


class InputShapes:
    """The shapes of each feature's inputs so far, as far as they agree."""

    def __init__(self, num_features: int) -> None:
        self._inner: list[Shape | None] = [None] * num_features

    def add(self, feature: int, shape: Shape) -> None:
        """Adds the static shape of a dense or sparse input."""
        known, inner = self._inner[feature], shape[1:]
        if known is not None and known != inner and len(known) == len(inner):
            pairs = zip(known, inner, strict=True)
            inner = tuple(a if a == b else None for a, b in pairs)
        self._inner[feature] = inner

    def copy(self) -> InputShapes:
        """Returns a copy that later inputs do not change."""
        copied = InputShapes(0)
        copied._inner = list(self._inner)
        return copied

    def inner(self, feature: int) -> Shape | None:
        """Returns the shape without the first axis; an axis that differs is None."""
        return self._inner[feature]


class OutputShapes:
    """The declared output shapes.

    They come from `FeatureConfig.output_shape`, else build(), else `batch_size`.

    Attributes:
      inputs: The inputs declared or checked so far.
    """

    def __init__(self, features: Sequence[FeatureSpec]) -> None:
        self._features = tuple(features)
        self._declared: list[Declared | None] = [
            None
            if spec.config.output_shape is None
            else Declared(spec.config.output_shape, spec.shape_source)
            for spec in features
        ]
        self._ranks: list[int | None] = [None] * len(self._features)
        self.inputs = InputShapes(len(self._features))
        self._batch_size: int | None = None

    def declare_inputs(self, shapes: Sequence[Shape]) -> None:
        """Declares the input shapes passed to build(), all or none.

        A shape is (batch, ..., last). As in TensorFlow, the shape of a sequence may
        also be (batch, max_sequence_length, last).
        """
        declared = []
        for spec, given in zip(self._features, shapes, strict=True):
            length = spec.config.max_sequence_length
            has_length = length and len(given) == 3 and given[1] == length
            shape = (given[0], given[2]) if has_length else given
            incoming = from_input(spec.path, spec.config, shape)
            declared.append(self._merge(spec, incoming, "build()"))
        self._declared = declared
        for spec, given in zip(self._features, shapes, strict=True):
            self.inputs.add(spec.index, given)

    def set_batch_size(self, batch_size: int) -> None:
        """Declares the rows per replica of every input without an output shape."""
        if self._batch_size not in (None, batch_size):
            raise errors.batch_size_conflict(self._batch_size, batch_size)
        self._batch_size = batch_size

    def allow_any_batch_size(self, feature: int) -> None:
        """Accepts any size of the first axis of a declared shape."""
        declared = self._declared[feature]
        if declared is not None:
            shape = (None, *declared.shape[1:])
            self._declared[feature] = Declared(shape, declared.source)

    @contextlib.contextmanager
    def completed_by(self, shapes: Sequence[Shape], cores: int = 1) -> Iterator[None]:
        """Fills unknown axes from shapes of the first batch, (rows, None) if ragged.

        It restores them if the body of the context raises. A replica has an input for
        each of its `cores`.
        """
        before = list(self._declared)
        for spec, shape in zip(self._features, shapes, strict=True):
            if None not in self.activation(spec.index):
                continue
            first, *others = from_input(spec.path, spec.config, shape)
            first = None if first is None else first * cores
            self._declared[spec.index] = self._filled(spec, (first, *others))
        try:
            yield
        except BaseException:
            self._declared = before
            raise

    @contextlib.contextmanager
    def forgets_refused(self) -> Iterator[None]:
        """Forgets the inputs of a batch if the body of the context refuses it."""
        ranks, inputs = list(self._ranks), self.inputs.copy()
        try:
            yield
        except BaseException:
            self._ranks, self.inputs = ranks, inputs
            raise

    def declared(self, feature: int) -> Declared | None:
        """Returns the shape that each batch of a feature must have, or None."""
        declared = self._declared[feature]
        if declared is None and self._batch_size is not None:
            return Declared(self.activation(feature), "batch_size")
        return declared

    def all_declared(self) -> tuple[Declared | None, ...]:
        """Returns what `declared` returns for each feature."""
        if self._batch_size is None:
            return tuple(self._declared)
        return tuple(map(self.declared, range(len(self._features))))

    def of_inputs(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Returns the known shapes of activations for inputs of these static shapes."""
        found = []
        for spec, shape in zip(self._features, shapes, strict=True):
            known = self.activation(spec.index)
            incoming = from_input(spec.path, spec.config, shape)
            if len(known) == len(incoming):
                pairs = zip(known, incoming, strict=True)
                known = tuple(b if a is None else a for a, b in pairs)
            found.append(known)
        return found

    def activation(self, feature: int) -> Shape:
        """Returns the shape known for all batches; the first one decides its rank."""
        declared = self._declared[feature]
        if declared:
            return declared.shape
        length = self._features[feature].config.max_sequence_length
        if length:
            return (self._batch_size, length)
        return (self._batch_size, *(None,) * ((self._ranks[feature] or 1) - 1))

    def activations(self, shapes: Sequence[Shape] | None) -> list[Shape]:
        """Returns `shapes` of one batch if given, else what all batches share."""
        if shapes is not None:
            return list(shapes)
        return [self.activation(spec.index) for spec in self._features]

    def full(self) -> list[tuple[int, ...]]:
        """Returns each feature's shape, which TPUs must know before the first batch."""
        shapes = []
        for spec in self._features:
            shape = self.activation(spec.index)
            known = tuple(axis for axis in shape if axis is not None)
            if len(known) < len(shape):
                raise ValueError(
                    f"Feature {spec.path}: a TPU must know the output shape before the "
                    f"first batch, but {shape} is not fully known. Set FeatureConfig("
                    "output_shape), give the first batch a static shape, or call "
                    "TPUEmbedding.build(per_replica_input_shapes); the Keras layer "
                    "takes `batch_size`."
                )
            shapes.append(known)
        return shapes

    def check_input(
        self, feature: int, shape: Shape, *, ragged: bool, cores: int = 1
    ) -> None:
        """Checks the static shape of one input; ops check the unknown axes.

        The first input that passes fixes the rank of the output. The rows of a `ragged`
        input fill the output shape. A replica has an input for each of its `cores`.
        """
        spec = self._features[feature]
        incoming = from_input(spec.path, spec.config, shape)
        declared = self._declared[feature]
        source = f"the input of shape {shape}"
        if cores > 1:
            first, *others = incoming
            incoming = (None if first is None else first * cores, *others)
            source += f", one of {cores} for the cores of a replica"
        if declared is None:
            self._check_undeclared(feature, incoming, source)
        elif ragged and not spec.config.max_sequence_length:
            if not _rows_fill(incoming[0], declared.shape):
                raise self._mismatch(spec, declared, incoming, source)
        elif not _compatible(declared.shape, incoming):
            raise self._mismatch(spec, declared, incoming, source)
        if self._ranks[feature] is None:
            self._ranks[feature] = len(incoming)
        if not ragged:
            self.inputs.add(feature, shape)

    def _check_undeclared(self, feature: int, incoming: Shape, source: str) -> None:
        spec = self._features[feature]
        rank = self._ranks[feature]
        if rank is not None and rank != len(incoming):
            first = Declared((None,) * rank, "the first batch")
            raise self._mismatch(spec, first, incoming, source)
        expected, size = self._batch_size, incoming[0]
        if expected is not None and size is not None and size != expected:
            raise ValueError(
                f"Feature {spec.path} has a batch of {size} where {expected} was "
                "expected: every batch must have the size given as `batch_size` or to "
                "build(). Pad the last batch of a data set, or drop it with "
                "`drop_remainder=True`."
            )

    def _filled(self, spec: FeatureSpec, incoming: Shape) -> Declared | None:
        """Returns the declared shape, with unknown axes filled from a batch."""
        declared, source = self._declared[spec.index], "the first batch"
        if declared is None:
            return Declared(incoming, source)
        if len(declared.shape) == len(incoming):
            return self._merge(spec, incoming, source)
        # Ragged rows fill the whole shape, so a single unknown axis follows.
        known = math.prod(axis for axis in declared.shape if axis is not None)
        if incoming[0] is None or declared.shape.count(None) != 1:
            return declared
        shape = tuple(incoming[0] // known if a is None else a for a in declared.shape)
        return Declared(shape, declared.source)

    def _merge(self, spec: FeatureSpec, shape: Shape, source: str) -> Declared:
        """Returns the declared shape, with unknown axes filled from `shape`."""
        declared = self._declared[spec.index]
        if declared is None:
            return Declared(shape, source)
        if not _compatible(declared.shape, shape):
            raise self._mismatch(spec, declared, shape, source)
        merged = tuple(
            b if a is None else a for a, b in zip(declared.shape, shape, strict=True)
        )
        return Declared(merged, declared.source)

    @staticmethod
    def _mismatch(
        spec: FeatureSpec, declared: Declared, shape: Shape, source: str
    ) -> ValueError:
        return ValueError(
            f"Feature {spec.path}: the output shape {declared.shape} given by "
            f"{declared.source} does not match {shape} given by {source}."
        )


def _compatible(a: Shape, b: Shape) -> bool:
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(x is None or y is None or x == y for x, y in pairs)


def _rows_fill(rows: int | None, shape: Shape) -> bool:
    """Returns whether `rows` ragged rows can fill `shape`.

    A row is one sample, or several positions if the shape has several axes.
    """
    known = [axis for axis in shape if axis is not None]
    if rows is None:
        return True
    product = math.prod(known)
    if len(known) == len(shape):
        several = len(shape) > 1 and product > rows > 0 and product % rows == 0
        return rows == product or several
    return product > 0 and rows % product == 0
