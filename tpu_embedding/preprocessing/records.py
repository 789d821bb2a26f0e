"""What preprocessing takes besides the batch, and what it gives."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from tpu_embedding.layout.csr import PartitionedCsrFormatTensor


class PartitionedBatch(NamedTuple):
    """The batch of one replica. The dicts go by the name of a stacked table.

    Attributes:
      tables: The CSR of each table.
      row_pointers_sizes: int32 scalars: what is set of `row_pointers`.
      ids_sizes: int32 scalars: what is set of the other tensors.
      sorted_pos_ids: int32, beside `sorted_sample_ids`: each entry's position in its
        sample. Of the tables that keep positions only.
      dropped_ids: int64 scalars: entries left out because the id buffer was full, by
        the name of their own, unstacked table.
      required_ids: int64 scalars: the id buffer that would have held all.
      max_ids: int64 scalars: entries in the fullest partition.
      max_unique_ids: int64 scalars: different rows in the partition with most.
      splits: int64 scalars: where the batch was cut into minibatches.
    """

    tables: dict[str, PartitionedCsrFormatTensor]
    row_pointers_sizes: dict[str, tf.Tensor]
    ids_sizes: dict[str, tf.Tensor]
    sorted_pos_ids: dict[str, tf.Tensor]
    dropped_ids: dict[str, tf.Tensor]
    required_ids: dict[str, tf.Tensor]
    max_ids: dict[str, tf.Tensor]
    max_unique_ids: dict[str, tf.Tensor]
    splits: dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class PartitionOptions:
    """What may differ from call to call.

    Attributes:
      padded: Give the tensors the size of the buffers, which is known while tracing.
        What lies past the sizes of the batch is then not set. Otherwise they end there.
      check_numerics: Fail on a weight that is not finite.
      host_ops: "library", "stock" or, to let the machine decide, None; see
        `choice.choose`.
      device: The host that preprocesses, "" for this process. It places no ops: that
        is for tf.device.
    """

    padded: bool = True
    check_numerics: bool = False
    host_ops: str | None = None
    device: str = ""
