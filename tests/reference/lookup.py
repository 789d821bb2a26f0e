"""Sections 1, 2, 5 and 6: samples, gains, looked-up activations."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

Entry = tuple[int, float]  # (id, weight)


class InvalidIdError(ValueError):
    """An id outside of its table, under invalid_ids="error"."""


@dataclasses.dataclass
class Samples:
    """What one feature looks up.

    Attributes:
      entries: For each sample its (id, weight) pairs, in input order.
      shape: The activations' shape without D; its product is the number of samples.
      cut: Entries past the end of a sequence. They are not looked up, but an
        invalid id among them is still an error.
    """

    entries: list[list[Entry]]
    shape: tuple[int, ...]
    cut: list[Entry] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Quantization:
    """The arguments of quantization, as in section 6."""

    num_buckets: int
    lower: float
    upper: float


def samples_of(
    value: Any,
    weights: Any = None,
    max_sequence_length: int = 0,
    output_shape: tuple[int | None, ...] | None = None,
) -> Samples:
    """Calls `to_samples` for a TensorFlow tensor of any of the three kinds."""
    if hasattr(value, "row_splits"):
        kind, ids, structure = "ragged", value.values, np.asarray(value.row_splits)
    elif hasattr(value, "dense_shape"):
        kind, ids = "sparse", value.values
        structure = (np.asarray(value.indices), np.asarray(value.dense_shape))
    else:
        kind, ids, structure = "dense", value, None
    weights = getattr(weights, "values", weights)  # a method on no dense tensor
    return to_samples(
        kind,
        np.asarray(ids),
        structure,
        None if weights is None else np.asarray(weights),
        max_sequence_length,
        output_shape,
    )


def to_samples(
    kind: str,
    ids: np.ndarray,
    structure: Any = None,
    weights: np.ndarray | None = None,
    max_sequence_length: int = 0,
    output_shape: tuple[int | None, ...] | None = None,
) -> Samples:
    """Converts an input to samples, as in section 2.

    Args:
      kind: "dense", "sparse" or "ragged".
      ids: The dense input itself, else the values [n].
      structure: None for dense; (indices [n, r], dense_shape [r]) for sparse;
        row_splits for ragged.
      weights: As `ids`, or None for ones.
      max_sequence_length: L, 0 for a feature that is no sequence.
      output_shape: The declared shape, or None; an open axis is None.

    Raises:
      ValueError: If the shapes do not fit.
    """
    if weights is None:
        weights = np.ones(np.shape(ids))
    if np.shape(weights) != np.shape(ids):
        raise ValueError(f"weights {np.shape(weights)}, ids {np.shape(ids)}")
    if max_sequence_length and output_shape is not None:
        raise ValueError("max_sequence_length together with output_shape")
    rows, rows_shape, rank = _READERS[kind](ids, structure, weights)
    if max_sequence_length:
        if rank != 2:
            raise ValueError(f"max_sequence_length with an input of rank {rank}")
        return _positions(rows, max_sequence_length, (*rows_shape, max_sequence_length))
    if kind == "ragged" and output_shape is not None:
        return _fill(rows, output_shape)
    if output_shape is not None and not _fits(rows_shape, output_shape):
        raise ValueError(f"output shape {rows_shape}, declared {output_shape}")
    return Samples([[entry for _, entry in row] for row in rows], rows_shape)


# A row is a list of (position, (id, weight)). Each reader returns the rows, their
# shape and the rank of the input.


def _dense_rows(ids: np.ndarray, structure: None, weights: np.ndarray) -> Any:
    shape = np.shape(ids)
    if len(shape) == 1:
        ids, weights = ids[:, np.newaxis], weights[:, np.newaxis]
    rows = []
    for index in np.ndindex(*ids.shape[:-1]):
        row = []
        for position in range(ids.shape[-1]):
            at = (*index, position)
            row.append((position, (int(ids[at]), float(weights[at]))))
        rows.append(row)
    return rows, ids.shape[:-1], len(shape)


def _sparse_rows(ids: np.ndarray, structure: Any, weights: np.ndarray) -> Any:
    indices, dense_shape = structure
    shape = tuple(int(size) for size in dense_shape)
    rows = {index: [] for index in np.ndindex(*shape[:-1])}  # row-major order
    for index, id_, weight in zip(indices, ids, weights, strict=True):
        *row, position = (int(i) for i in index)
        rows[tuple(row)].append((position, (int(id_), float(weight))))
    return list(rows.values()), shape[:-1], len(shape)


def _ragged_rows(ids: np.ndarray, splits: np.ndarray, weights: np.ndarray) -> Any:
    rows = []
    for begin, end in itertools.pairwise(splits):
        row = []
        for position, at in enumerate(range(int(begin), int(end))):
            row.append((position, (int(ids[at]), float(weights[at]))))
        rows.append(row)
    return rows, (len(rows),), 2


_READERS = {"dense": _dense_rows, "sparse": _sparse_rows, "ragged": _ragged_rows}


def _positions(rows: list, length: int, shape: tuple[int, ...]) -> Samples:
    """Each of the first `length` positions of a row is a sample of its own."""
    samples = Samples([], shape)
    for row in rows:
        for position in range(length):
            samples.entries.append([entry for at, entry in row if at == position])
        samples.cut += [entry for at, entry in row if at >= length]
    return samples


def _fill(rows: list, output_shape: tuple[int | None, ...]) -> Samples:
    """Lays out ragged rows over a declared shape of any number of axes."""
    known = math.prod(size for size in output_shape if size is not None)
    num_open = sum(size is None for size in output_shape)
    shape = tuple(
        len(rows) // max(known, 1) if size is None else size for size in output_shape
    )
    product = math.prod(shape)
    if num_open <= 1 and product == len(rows):
        return Samples([[entry for _, entry in row] for row in rows], shape)
    several = len(output_shape) > 1
    if several and num_open == 0 and rows and product % len(rows) == 0:
        return _positions(rows, product // len(rows), shape)
    raise ValueError(f"{len(rows)} ragged rows do not fill {output_shape}")


def _fits(shape: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    return len(shape) == len(declared) and all(
        want is None or want == size for size, want in zip(shape, declared, strict=True)
    )


def resolve_ids(
    samples: Samples, vocabulary_size: int, invalid_ids: str = "error"
) -> list[list[Entry]]:
    """Returns the entries of each sample with ids in [0, V), as in section 5.

    Raises:
      InvalidIdError: If `invalid_ids` is "error" and an id is outside.
    """
    if invalid_ids == "error":
        for sample, entries in enumerate([*samples.entries, samples.cut]):
            for id_, _ in entries:
                if not 0 <= id_ < vocabulary_size:
                    raise InvalidIdError(f"sample {sample}: {id_} in {vocabulary_size}")
    resolved = []
    for entries in samples.entries:
        kept = []
        for id_, weight in entries:
            if invalid_ids == "mod":
                kept.append((id_ % vocabulary_size, weight))
            elif 0 <= id_ < vocabulary_size:
                kept.append((id_, weight))
        resolved.append(kept)
    return resolved


def gains(weights: list[float], combiner: str) -> list[float]:
    """Returns the gain of each entry of one sample, as in section 1."""
    if combiner == "sum":
        return list(weights)
    if combiner == "mean":
        divisor = sum(weights)
    elif combiner == "sqrtn":
        divisor = math.sqrt(sum(w * w for w in weights))
    else:
        raise ValueError(combiner)
    return [w / divisor if divisor != 0 else 0.0 for w in weights]


def quantize(x: np.ndarray, quantization: Quantization | None) -> np.ndarray:
    """Quantizes as in section 6."""
    if quantization is None:
        return x
    lower, upper = quantization.lower, quantization.upper
    step = (upper - lower) / (quantization.num_buckets - 1)
    x = np.clip(x, lower, upper)
    return np.floor((x - lower) / step + 0.5) * step + lower


def lookup(
    table: np.ndarray,
    samples: Samples,
    combiner: str,
    quantization: Quantization | None = None,
    invalid_ids: str = "error",
) -> np.ndarray:
    """Section 1: activations, float64 [S, D], for the S samples of `samples`."""
    entries_of = resolve_ids(samples, len(table), invalid_ids)
    activations = np.zeros((len(entries_of), table.shape[1]))
    for sample, entries in enumerate(entries_of):
        sample_gains = gains([weight for _, weight in entries], combiner)
        for (id_, _), gain in zip(entries, sample_gains, strict=True):
            row = quantize(table[id_].astype(np.float64), quantization)
            activations[sample] += gain * row
    return activations
