"""Matrices that lie in files as arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tpu_embedding.layout.table_arrays import Rows


@dataclasses.dataclass(frozen=True)
class ArrayRows(Rows):
    """An array of rank 2 whose shape and dtype are known before it is read.

    Attributes:
      array_shape: Of rank 2.
      array_dtype: Of the values.
    """

    array_shape: tuple[int, ...]
    array_dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.array_shape
        return rows, columns

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array_dtype
