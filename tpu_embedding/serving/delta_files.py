"""Files of deltas: the rows of tables that changed since the previous delta.

docs/online.md draws the format. A file is a sequence of blocks, each of which carries
its own checksum, so that a served model checks every block that it is sent:

    file      "TPUEMBD1", then the length (int64) and the bytes of each block
    block     checksum, kind, number, then by kind
      begin   base, run, follows, sequence, tables,
              (upserts, deletions) of each table, then the header as JSON
      rows    table, upserts, deletions, the keys of both, the parts of the rows
      end     the checksum of all blocks before it

All numbers are int64, little-endian. A checksum is FarmHash's Fingerprint64, which
TensorFlow's op `Fingerprint` computes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint.errors import data_loss
from tpu_embedding.checkpoint.writing import completed, one_writer
from tpu_embedding.layout.plan import TableSpec

STATE, APPLY = "delta_state", "apply_delta"  # Signatures of models that take deltas.
MAGIC = b"TPUEMBD1"
BEGIN, ROWS, END = range(3)  # Kinds of blocks.
HEAD_BYTES = 24  # Checksum, kind and number.
BEGIN_FIELDS, ROWS_FIELDS = 5, 3  # int64 numbers after the head.
BLOCK_BYTES = 1 << 20  # The most bytes of keys and rows in one block.
_LARGEST_BLOCK = 1 << 31


class TableIdentity(NamedTuple):
    """Names what a table of a trainer and one of an export have in common.

    Attributes:
      name: Name of the table.
      rows: Number of rows, or "grows".
      dim: Number of columns.
      hashing: The text of a hashed table's Hashing, or None.
    """

    name: str
    rows: int | str
    dim: int
    hashing: str | None

    def __str__(self) -> str:
        hashing = f", {self.hashing}" if self.hashing else ""
        return f"{self.name!r} (rows: {self.rows}, dim: {self.dim}{hashing})"


@dataclasses.dataclass(frozen=True)
class BaseTable:
    """A table of an export that takes deltas.

    Attributes:
      name: Name of the table.
      rows: Number of rows; for a growing table the largest number of ids.
      dim: Number of columns.
      storage: The form in which it is stored; "" before an export chooses it.
      most_changed: The largest number of rows that one delta may change; 0 before an
        export chooses it.
      grows: Whether it is a growing table, whose deltas list rows and deletions by id.
      shared: Whether its only row is the one that ids without a row share in the
        growing table of the same name.
      mixed: Whether the hash table of its ids has their mixed bits as keys. Deltas
        have the ids themselves.
      hashing: The text of a hashed table's Hashing, or ""; deltas of it list rows.
    """

    name: str
    rows: int
    dim: int
    storage: str = ""
    most_changed: int = 0
    grows: bool = False
    shared: bool = False
    mixed: bool = False
    hashing: str = ""

    @property
    def most_deleted(self) -> int:
        """The largest number of ids that one delta may delete."""
        return self.most_changed if self.grows else 0

    @property
    def height(self) -> int:
        """The length of the index: `rows`, and spare numbers if ids come and go."""
        return self.rows + 2 * self.most_deleted

    @property
    def identity(self) -> TableIdentity:
        """The properties that the tables of trainer and export must share."""
        rows = "grows" if self.grows else self.rows
        return TableIdentity(self.name, rows, self.dim, self.hashing or None)


def base_tables(spec: TableSpec) -> list[BaseTable]:
    """Describes a table as in deltas, before an export chooses storage and sizes.

    The shared row of a growing table counts as a table of its own, which comes first.
    """
    config, grows = spec.config, spec.config.vocabulary is not None
    hashing = "" if spec.hashing is None else str(spec.hashing)
    table = BaseTable(
        *(spec.name, config.max_rows, config.dim),
        grows=grows,
        mixed=grows,
        hashing=hashing,
    )
    shared = BaseTable(spec.name, 1, config.dim, shared=True)
    return [shared, table] if config.shares_row else [table]


@dataclasses.dataclass(frozen=True)
class Base:
    """An export that takes deltas.

    Attributes:
      id: A number that no other export has.
      tables: The tables in the order in which deltas number them.
    """

    id: int
    tables: tuple[BaseTable, ...]

    @functools.cached_property
    def growing(self) -> dict[int, BaseTable]:
        """The growing tables by index."""
        return {i: table for i, table in enumerate(self.tables) if table.grows}

    def to_json(self) -> str:
        """Returns the text that the export and each delta hold."""
        fields = dataclasses.asdict(self)
        for table in fields["tables"]:
            if not table["hashing"]:
                del table["hashing"]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str | bytes) -> Base:
        """Parses what `to_json` wrote."""
        fields = json.loads(text)
        return cls(fields["id"], tuple(BaseTable(**t) for t in fields["tables"]))


@dataclasses.dataclass(frozen=True)
class Header:
    """The content of the first block of a delta.

    Attributes:
      base: The export that the delta follows.
      run: The run of the trainer that wrote the delta.
      follows: The run that wrote the previous delta, or the id of the base.
      sequence: The number of the delta: 1 for the first one after the base.
      counts: The numbers (upserts, deletions) of each table.
    """

    base: Base
    run: int
    follows: int
    sequence: int
    counts: tuple[tuple[int, int], ...]


class DeltaRows(NamedTuple):
    """Some changed rows of one table.

    Attributes:
      table: The index of the table in the base.
      keys: Rows or ids, int64 [n], ascending, each once in the delta.
      deleted: Ids that lost their rows, int64 [d], ascending, each once in the delta.
      parts: One array [n, C] for each part of the stored table.
    """

    table: int
    keys: np.ndarray
    deleted: np.ndarray
    parts: Sequence[np.ndarray]


def new_id() -> int:
    """Returns a random number for a base or a run, from 1 on."""
    return secrets.randbelow(2**63 - 1) + 1


def checksum(content: bytes) -> int:
    """Returns FarmHash's Fingerprint64, as an int64.

    >>> checksum(b"rows")
    -792035360574078867
    """
    data = np.frombuffer(content, np.uint8)[np.newaxis]
    found = tf.raw_ops.Fingerprint(data=data, method="farmhash64").numpy()
    return int(found.view("<i8")[0, 0])


def chained(before: int, added: int) -> int:
    """Returns the checksum of a sequence of checksums and one more."""
    return checksum(struct.pack("<qq", before, added))


def rows_of_block(row_bytes: int) -> int:
    """Returns the most rows that a block holds."""
    return max(1, BLOCK_BYTES // (8 + row_bytes))


def write_delta(
    path: str | os.PathLike[str], header: Header, rows: Iterable[DeltaRows]
) -> int:
    """Writes a delta beside `path`, and renames it when it is complete.

    The rows come table by table, as many at a time as a block holds. Returns the size
    of the file.
    """
    place = os.fspath(path)
    if not place:
        raise ValueError("`path` must name the file of the delta. Received: ''.")
    with one_writer(place):
        if tf.io.gfile.exists(place):
            raise ValueError(f"{place} already exists. Give each delta its own path.")
        size = 0
        with (
            completed(place) as unfinished,
            tf.io.gfile.GFile(unfinished, "wb") as file,
        ):
            for piece in _pieces(header, rows):
                file.write(piece)
                size += len(piece)
    return size


def _pieces(header: Header, rows: Iterable[DeltaRows]) -> Iterator[bytes]:
    yield MAGIC
    total = 0
    for block in _blocks(header, rows):
        total = chained(total, struct.unpack_from("<q", block)[0])
        yield struct.pack("<q", len(block)) + block
        number = struct.unpack_from("<q", block, 16)[0]
    last = _block(END, number + 1, struct.pack("<q", total))
    yield struct.pack("<q", len(last)) + last


def _blocks(header: Header, rows: Iterable[DeltaRows]) -> Iterator[bytes]:
    """Yields all blocks but the last."""
    fields = (header.base.id, header.run, header.follows, header.sequence)
    counts = np.array([len(header.counts), *np.ravel(header.counts)], "<i8")
    text = header.base.to_json().encode()
    yield _block(BEGIN, 0, struct.pack("<4q", *fields), counts, text)
    for number, some in enumerate(rows, 1):
        head = struct.pack("<3q", some.table, len(some.keys), len(some.deleted))
        keys = [np.asarray(ids, "<i8") for ids in (some.keys, some.deleted)]
        yield _block(ROWS, number, head, *keys, *some.parts)


def _block(kind: int, number: int, *parts: bytes | np.ndarray) -> bytes:
    pieces = [p if isinstance(p, bytes) else p.tobytes() for p in parts]
    content = struct.pack("<2q", kind, number) + b"".join(pieces)
    return struct.pack("<q", checksum(content)) + content


def delta_blocks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yields the blocks of a delta, which a served model takes in this order.

    A client of a server sends each one as the input "block" of the signature
    "apply_delta". Only the lengths are read here: the model checks the rest.

    Args:
      path: A delta.

    Yields:
      The bytes of a block, at most a MiB unless a row is longer.

    Raises:
      tf.errors.DataLossError: If the file is not a delta or is truncated.
    """
    place = os.fspath(path)
    with tf.io.gfile.GFile(place, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise data_loss(f"{place} is not a delta of this package.")
        number = 0
        while length := file.read(8):
            size = struct.unpack("<q", length)[0] if len(length) == 8 else -1
            block = file.read(size) if 0 <= size <= _LARGEST_BLOCK else b""
            if len(block) != size:
                raise data_loss(f"Delta {place} is truncated in block {number}.")
            yield block
            number += 1


def read_header(path: str | os.PathLike[str]) -> Header:
    """Checks all of a delta, and returns its header."""
    header, total, kind = None, 0, None
    for number, block in enumerate(delta_blocks(path)):
        found = _head(block)
        if found is None or found != (checksum(block[8:]), found[1], number):
            raise data_loss(f"Block {number} of delta {os.fspath(path)} is damaged.")
        kind = found[1]
        if number == 0:
            header = _header(block)
        elif kind == END and struct.unpack_from("<q", block, HEAD_BYTES)[0] != total:
            raise data_loss(
                f"The blocks of delta {os.fspath(path)} are in the wrong order."
            )
        total = chained(total, found[0])
    if header is None or kind != END:
        name = os.fspath(path)
        raise data_loss(f"Delta {name} is truncated: the last block is missing.")
    return header


def _head(block: bytes) -> tuple[int, int, int] | None:
    """Returns the checksum, kind and number of a block, or None if it is too short."""
    return struct.unpack_from("<3q", block) if len(block) >= HEAD_BYTES else None


def _header(block: bytes) -> Header:
    _, run, follows, sequence, tables = struct.unpack_from("<5q", block, HEAD_BYTES)
    start = HEAD_BYTES + 8 * BEGIN_FIELDS
    counts = np.frombuffer(block, "<i8", 2 * tables, start).reshape(tables, 2)
    base = Base.from_json(block[start + counts.nbytes :])
    pairs = tuple((int(upserts), int(deletions)) for upserts, deletions in counts)
    return Header(base, run, follows, sequence, pairs)


def apply_delta(model: Any, path: str | os.PathLike[str]) -> int:
    """Applies a delta to a loaded model, which may answer calls meanwhile.

    A lookup sees each row as it was before the delta or after it. The delta must be
    the one that follows the delta applied last; the model checks that, and every block
    of it, before it serves any new row.

    Args:
      model: What tf.saved_model.load returned for an export with `deltas`.
      path: The delta.

    Returns:
      The number of the delta, which is now the one applied last.

    Raises:
      ValueError: If the model does not take deltas.
      tf.errors.DataLossError: If the file is not a delta or is truncated.
      tf.errors.InvalidArgumentError: If the delta was applied before, or one before it
        is missing, or it follows another export or another run of the trainer, or it
        is damaged. The model then serves what it served before.
    """
    apply = getattr(model, "signatures", {}).get(APPLY)
    if apply is None:
        raise ValueError(
            "The model does not take deltas. Export it with te.serving.export(..., "
            "deltas=True), and pass what tf.saved_model.load returns."
        )
    state: dict[str, tf.Tensor] = {}
    for block in delta_blocks(path):
        state = apply(block=tf.constant(block))
    if not state or state["next_block"]:
        raise data_loss(
            f"Delta {os.fspath(path)} is truncated: the last block is missing."
        )
    return int(state["sequence"])


def apply_to_export(
    path: str, deltas: Sequence[str | os.PathLike[str]], destination: str
) -> int:
    """Writes a copy of an export with deltas applied, which takes the next deltas.

    Args:
      path: An export with `deltas`; it stays as it is.
      deltas: Deltas in their order.
      destination: A folder that does not exist yet.

    Returns:
      The number of the delta applied last.

    Raises:
      ValueError: If `destination` exists, or the model does not take deltas.
      tf.errors.OpError: As `apply_delta` does.
    """
    with one_writer(destination):
        if tf.io.gfile.exists(destination):
            raise ValueError(
                f"{destination} already exists. Pass a new path for the new export."
            )
        model: Any = tf.saved_model.load(path)
        sequence = 0
        for delta in deltas:
            sequence = apply_delta(model, delta)
        with completed(destination) as unfinished:
            tf.saved_model.save(model, unfinished, signatures=dict(model.signatures))
    return sequence
