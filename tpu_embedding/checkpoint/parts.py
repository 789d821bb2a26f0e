"""Tensors of any size as files of TensorFlow's, a part at a time.

SaveV2 wants all its tensors at once, so it is called for one part at a time;
MergeV2Checkpoints then makes one checkpoint of the parts without copying them. Its
index comes last: until it is there, there is no checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint.progress import Progress

_MIN_PART_BYTES = 16 << 20
_MAX_PARTS = 128  # Of large checkpoints: each part becomes a file.


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a matrix.

    Attributes:
      key: Of the matrix in the checkpoint.
      shape: Of the whole matrix.
      start: The first of the rows.
      values: [n, C].
    """

    key: str
    shape: tuple[int, int]
    start: int
    values: np.ndarray

    @property
    def spec(self) -> str:
        """As SaveV2 wants it: the whole shape, then start and length of each axis."""
        rows, columns = self.shape
        if len(self.values) == rows:
            return ""
        return f"{rows} {columns} {self.start},{len(self.values)}:0,{columns}"


def part_bytes(total: int) -> int:
    """The size of a part where `total` bytes are written."""
    return max(_MIN_PART_BYTES, total // _MAX_PARTS)


def write_parts(
    scratch: str, pieces: Iterable[Piece], total: int, progress: Progress
) -> list[str]:
    """Writes pieces as they come, several of them into a file.

    Args:
      scratch: A folder for the files.
      pieces: What is written; one part of them is held at a time.
      total: Their size in bytes.
      progress: Told of each part.

    Returns:
      The prefixes of the parts, for `merge`.
    """
    prefixes = []
    for number, part in enumerate(_grouped(pieces, part_bytes(total))):
        prefixes.append(f"{scratch}/{number}")
        tf.raw_ops.SaveV2(
            prefix=prefixes[-1],
            tensor_names=[piece.key for piece in part],
            shape_and_slices=[piece.spec for piece in part],
            tensors=[piece.values for piece in part],
        )
        progress.advance(sum(piece.values.nbytes for piece in part))
        part.clear()  # Before the next is read.
    return prefixes


def write_values(prefix: str, values: Mapping[str, tf.Tensor]) -> str:
    """Writes whole tensors by key as one part; its prefix."""
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=list(values),
        shape_and_slices=[""] * len(values),
        tensors=list(values.values()),
    )
    return prefix


def merge(parts: Sequence[str], path: str) -> None:
    """Makes one checkpoint of parts, which are gone then."""
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=path, delete_old_dirs=True
    )


def _grouped(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces together up to a size, which only one alone may exceed."""
    part: list[Piece] = []
    size = 0
    for piece in pieces:
        if part and size + piece.values.nbytes > limit:
            yield part
            part, size = [], 0
        part.append(piece)
        size += piece.values.nbytes
    if part:
        yield part
