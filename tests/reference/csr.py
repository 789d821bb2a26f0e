"""The partitioned CSR of one stacked table, in a slow version of docs/formats.md.

`entries` reproduces the float32 arithmetic of Google's ops: weights of an id that
follows itself are added first, then multiplied by the reciprocal of the divisor.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

FILL_ID = 2**31 - 1
FILL_GAIN = np.float32(2**31)
NUM_BUCKETS = 64
F32 = np.float32


@dataclasses.dataclass(frozen=True)
class Feature:
    """Ids and weights by sample, and their place in the stack."""

    ids: Sequence[np.ndarray]
    weights: Sequence[np.ndarray]
    combiner: str
    sample_offset: int
    row_offset: int
    rotation: int


@dataclasses.dataclass(frozen=True)
class Stack:
    sparse_cores_per_device: int
    num_shards: int
    samples: int
    rows: int


def factor(weights: np.ndarray, combiner: str) -> np.float32:
    """Returns what the weights of a sample are multiplied by."""
    if combiner == "sum":
        return F32(1)
    total = F32(0)
    for w in weights:
        total = F32(total + (w if combiner == "mean" else F32(w * w)))
    if total == 0:
        return F32(0)
    return F32(F32(1) / (total if combiner == "mean" else np.sqrt(total)))


def entries(feature: Feature, stack: Stack) -> list[list[tuple[int, int, np.float32]]]:
    """Per SparseCore (row of the stacked batch, row of the stacked table, gain)."""
    cores, shards = stack.sparse_cores_per_device, stack.num_shards
    per_core = len(feature.ids) // cores
    out: list[list[tuple[int, int, np.float32]]] = [[] for _ in range(cores)]
    for s, (ids, weights) in enumerate(zip(feature.ids, feature.weights, strict=True)):
        core = s // per_core
        sample = (
            core * (stack.samples // cores)
            + feature.sample_offset // cores
            + s % per_core
        )
        scale = factor(weights, feature.combiner)
        runs: list[list] = []  # [id, sum of the weights]
        for i, w in zip(ids, weights, strict=True):
            if runs and runs[-1][0] == i:
                runs[-1][1] = F32(runs[-1][1] + w)
            else:
                runs.append([int(i), F32(w)])
        for i, w in runs:
            shard = (i + feature.rotation) % shards
            row = feature.row_offset + i // shards * shards + shard
            out[core].append((sample, row, F32(w * scale)))
    return out


def sort(
    lists: Sequence[Sequence[tuple[int, int, np.float32]]], stack: Stack
) -> list[tuple[int, int, int, np.float32]]:
    """Sorts and merges the (shard, token, sample, gain) of one SparseCore."""
    per_core = stack.samples // stack.sparse_cores_per_device
    flat = [
        (row % stack.num_shards, row // stack.num_shards, sample % per_core, gain)
        for one in lists
        for sample, row, gain in one
    ]
    merged: list[tuple[int, int, int, np.float32]] = []
    for entry in sorted(flat, key=lambda e: e[:2]):  # stable
        if merged and merged[-1][:3] == entry[:3]:
            merged[-1] = (*entry[:3], F32(merged[-1][3] + entry[3]))
        else:
            merged.append(entry)
    return merged


def bounds(splits: int) -> list[int]:
    """The first bucket of each minibatch, and 64."""
    cuts = []
    for bit in range(NUM_BUCKETS - 1):
        if splits >> bit & 1:
            level = (bit + 1).bit_length() - 1
            width = NUM_BUCKETS >> level
            cuts.append((bit + 1 - (1 << level)) * width + width // 2)
    return [0, *sorted(cuts), NUM_BUCKETS]


@dataclasses.dataclass
class Csr:
    row_pointers: list[int] = dataclasses.field(default_factory=list)
    sample_ids: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    gains: list[np.float32] = dataclasses.field(default_factory=list)
    dropped: int = 0

    def append(self, token: int, sample: int, gain: np.float32) -> None:
        self.token_ids.append(token)
        self.sample_ids.append(sample)
        self.gains.append(gain)

    def close_partition(self) -> None:
        self.row_pointers.append(len(self.gains))
        while len(self.gains) % 8:
            self.append(FILL_ID, FILL_ID, FILL_GAIN)


def to_csr(
    cores: Sequence[Sequence[tuple[int, int, int, np.float32]]],
    stack: Stack,
    splits: int = 0,
    capacity: int = 2**31,
) -> Csr:
    """Lays out what `sort` gives for each SparseCore."""
    csr = Csr()
    width = -(-stack.rows // NUM_BUCKETS)
    cuts = bounds(splits)
    for core in cores:
        for low, high in itertools.pairwise(cuts):
            for shard in range(stack.num_shards):
                for of, token, sample, gain in core:
                    bucket = (token * stack.num_shards + shard) // width
                    if of != shard or not low <= bucket < high:
                        continue
                    if len(csr.gains) < capacity:
                        csr.append(token, sample, gain)
                    else:
                        csr.dropped += 1
                csr.close_partition()
            for _ in range(-stack.num_shards % 8):
                csr.row_pointers.append(len(csr.gains))
    return csr
