"""A trainer made of NumPy arrays that writes deltas, and what a model of it serves."""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import forked
import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.serving import delta_files
from tpu_embedding.serving.delta_files import Base, DeltaRows, Header
from tpu_embedding.serving.quantization import converter
from tpu_embedding.serving.signatures import input_name

NOTHING = np.zeros([0], np.int64)
SHAPES = {"a/b.c": (40, 8), "users": (7, 3)}


class Trainer:
    """Tables, and the deltas of one consumer: `model`, loaded of the export `base`."""

    def __init__(
        self,
        folder: pathlib.Path,
        rng: np.random.Generator,
        storage: str | Mapping[str, str] = "float32",
        shapes: Mapping[str, tuple[int, int]] = SHAPES,
        deltas: bool | float = True,
    ) -> None:
        self._rng, self._storage = rng, storage
        self.values = {
            name: rng.normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        self.export(folder, deltas=deltas)
        self.model: Any = tf.saved_model.load(str(folder))
        state = self.model.signatures["delta_state"]()
        self.base = Base.from_json(state["description"].numpy())
        self.sequence, self.follows, self.run = 0, self.base.id, 5

    def export(self, folder: pathlib.Path, **options: Any) -> None:
        tables = {
            te.TableConfig(*values.shape, name=name): tf.Variable(values)
            for name, values in self.values.items()
        }
        storage = self._storage
        if not isinstance(storage, str):
            storage = {table: storage[table.name] for table in tables}
        te.serving.export(
            tables,
            folder,
            feature_config={t.name: te.FeatureConfig(t) for t in tables},
            signatures=["dense"],
            storage=storage,
            **options,
        )

    def change(self) -> dict[str, np.ndarray]:
        """Gives some rows of each table other values; the ids, by name."""
        changed = {}
        for name, values in self.values.items():
            most = len(values)
            ids = self._rng.choice(most, self._rng.integers(most + 1), replace=False)
            changed[name] = np.sort(ids).astype(np.int64)
            values[changed[name]] = self._rng.normal(size=[len(ids), values.shape[1]])
        return changed

    def rows(self, changed: Mapping[str, np.ndarray]) -> Iterator[DeltaRows]:
        """The rows of a delta, two at a time."""
        for index, spec in enumerate(self.base.tables):
            ids, values = changed[spec.name], self.values[spec.name]
            table = converter(spec.storage, spec.dim)
            for some in np.split(ids, range(2, len(ids), 2)):
                if len(some):
                    parts = table.convert(values[some]).parts
                    yield DeltaRows(index, some, NOTHING, parts)

    def header(self, changed: Mapping[str, np.ndarray], **fields: Any) -> Header:
        counts = tuple((len(changed[spec.name]), 0) for spec in self.base.tables)
        known = {
            "base": self.base,
            "run": self.run,
            "follows": self.follows,
            "sequence": self.sequence + 1,
            "counts": counts,
        }
        return Header(**{**known, **fields})

    def write(self, path: pathlib.Path) -> dict[str, np.ndarray]:
        """Changes some rows, and writes the next delta; the ids that it has."""
        changed = self.change()
        delta_files.write_delta(path, self.header(changed), self.rows(changed))
        self.sequence, self.follows = self.sequence + 1, self.run
        return changed

    def expected(self) -> dict[str, np.ndarray]:
        """Today's tables as they are read back, in the form of the export."""
        return {
            input_name(spec.name): converter(spec.storage, spec.dim)
            .convert(self.values[spec.name])
            .values.astype(np.float32)
            for spec in self.base.tables
        }

    def served(self, model: Any) -> dict[str, np.ndarray]:
        """All rows of all tables that a model serves."""
        ids = {
            input_name(name): tf.range(len(values), dtype=tf.int64)
            for name, values in self.values.items()
        }
        answers = model.signatures["dense"](**ids)
        return {name: answer.numpy() for name, answer in answers.items()}


def blocks_of(path: pathlib.Path) -> list[bytes]:
    return list(te.serving.delta_blocks(path))


def send(model: Any, blocks: list[bytes]) -> Any:
    """Sends blocks to the model; its last answer."""
    answer = None
    for block in blocks:
        answer = model.signatures["apply_delta"](block=tf.constant(block))
    return answer


def resealed(block: bytes) -> bytes:
    """A block that was changed on purpose, with the checksum of what it is now."""
    return (
        delta_files.checksum(block[8:]).to_bytes(8, "little", signed=True) + block[8:]
    )


def with_field(block: bytes, field: int, value: int) -> bytes:
    """A block with another number, and the right checksum."""
    changed = bytearray(block)
    struct.pack_into("<q", changed, delta_files.HEAD_BYTES + 8 * field, value)
    return resealed(bytes(changed))


KILLED_AT = ("apply", "save", "rename")
_KILLED = """
import os, signal, sys
import tensorflow as tf
from tpu_embedding.serving import delta_files
module, name = {
    "apply": (delta_files, "apply_delta"),
    "save": (tf.saved_model, "save"),
    "rename": (tf.io.gfile, "rename"),
}[sys.argv[4]]
call = getattr(module, name)
def killed(*arguments, **options):
    if name != "rename":
        call(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(module, name, killed)
delta_files.apply_to_export(sys.argv[1], [sys.argv[2]], sys.argv[3])
"""


def kill_apply(point: str, base: str, delta: str, new: str) -> None:
    """Applies a delta to an export in a process that is killed at a point of it."""
    ended = forked.run(["-c", _KILLED, base, delta, new, point])
    assert ended.returncode == -9
