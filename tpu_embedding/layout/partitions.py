"""What the preprocessor must know to cut a batch into partitions.

Tables of one width are *stacked*: their rows stand one above the other in a stacked
table, and the samples of their features likewise in one stacked batch. Row r of the
stack lives on shard `r % num_shards`, at `r // num_shards` there. A *partition* is what
one SparseCore has to fetch from one shard.
"""

from __future__ import annotations

import dataclasses
import zlib


@dataclasses.dataclass(frozen=True)
class PartitionedFeature:
    """One feature, placed in the stack of its table.

    An id i is row `row_offset + i // num_shards * num_shards + (i + shift) %
    num_shards` of the stack.

    Attributes:
      path: Where it stands in the user's structure, for messages.
      table: The name of its own, unstacked table, for messages.
      vocabulary_size: Ids of its table are in [0, vocabulary_size).
      combiner: "sum", "mean" or "sqrtn"; "sum" where a CustomCombiner combines.
      invalid_ids: What other ids do: "error", "drop" or "mod".
      samples: Its samples per replica, a multiple of the SparseCores of a device.
      sample_offset: Its first sample in the stacked batch, such a multiple too.
      row_offset: The first row of its table in the stack, a multiple of the shards.
      shift: By how many shards its table is rotated.
      output_shape: The shape of its activations per replica without the embedding
        axis; its product is `samples`.
      sequence_length: As FeatureConfig.max_sequence_length; 0 for none.
      max_valency: The most ids per sample that its CustomCombiner takes; 0 for any.
    """

    path: str
    table: str
    vocabulary_size: int
    combiner: str
    invalid_ids: str
    samples: int
    sample_offset: int
    row_offset: int
    shift: int
    output_shape: tuple[int, ...]
    sequence_length: int = 0
    max_valency: int = 0


@dataclasses.dataclass(frozen=True)
class PartitionedTable:
    """One stacked table and the features that look it up.

    Attributes:
      name: The name of the stack.
      rows: Its rows, with the padding of each table: a multiple of the shards.
      samples: Samples of the stacked batch per replica.
      features: Indices into `Partitioning.features`, in the order in which their
        entries are laid out.
      max_ids_per_partition: More entries than this in one partition are an error.
      max_unique_ids_per_partition: So are more rows than this.
      positions: Whether each entry's position in its sample is kept
        (`sorted_pos_ids`), which a CustomCombiner needs.
    """

    name: str
    rows: int
    samples: int
    features: tuple[int, ...]
    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    positions: bool = False


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """All stacked tables of an embedding, and the hardware they are cut for.

    Attributes:
      num_sparse_cores: SparseCores per device.
      num_replicas: Devices that share the tables.
      features: In the order of the user's structure.
      tables: The stacks; every feature is in one of them.
      max_ids_per_chip_per_sample: Times the stacked samples it is the size of the id
        buffer of one device.
      allow_id_dropping: Drop the entries that do not fit into the id buffer instead
        of failing.
      max_minibatches: Into how many minibatches a batch may be cut.
      minibatching: Cut a batch that exceeds the limits of a partition instead of
        failing.
    """

    num_sparse_cores: int
    num_replicas: int
    features: tuple[PartitionedFeature, ...]
    tables: tuple[PartitionedTable, ...]
    max_ids_per_chip_per_sample: int = 64
    allow_id_dropping: bool = False
    max_minibatches: int = 64
    minibatching: bool = False

    @property
    def num_shards(self) -> int:
        """Parts that each stacked table is cut into: one per SparseCore of all."""
        return self.num_sparse_cores * self.num_replicas

    @property
    def marks(self) -> tuple[int, int, int]:
        """Devices, SparseCores of each, and a number for all the rest."""
        rest = (self.features, self.tables, self.max_ids_per_chip_per_sample)
        number = zlib.crc32(repr(rest).encode())
        return self.num_replicas, self.num_sparse_cores, number

    @property
    def num_row_pointers(self) -> int:
        """Row pointers of a device's buffers: those of a minibatch come in eights."""
        padded_shards = -(-self.num_shards // 8) * 8
        return self.num_sparse_cores * self.max_minibatches * padded_shards
