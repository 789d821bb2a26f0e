"""Reads tables and slots from checkpoints that TPUEstimator wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding import errors
from tpu_embedding.checkpoint.errors import not_an_embedding
from tpu_embedding.checkpoint.tensorflow_format import Bundle
from tpu_embedding.checkpoint.trackable import TrackableTables
from tpu_embedding.compat.interop import columns
from tpu_embedding.compat.interop import parameters as v1
from tpu_embedding.compat.interop.columns import TableConfig
from tpu_embedding.compat.interop.embedding_config_spec import require_spec
from tpu_embedding.tables.rows import PARAMETERS, MutableTableRows

_GLOBAL_STEP = "global_step"


def open_estimator_checkpoint(path: str | os.PathLike[str]) -> Bundle:
    """Opens a prefix, or the latest checkpoint of a folder."""
    prefix = tf.train.latest_checkpoint(path) or os.fspath(path)
    if not tf.io.gfile.exists(prefix + ".index"):
        raise ValueError(
            f"There is no checkpoint at {os.fspath(path)!r}. Pass the prefix of a "
            "checkpoint (without .index), or the folder of a model whose file "
            "`checkpoint` names the latest one."
        )
    with _readable(prefix):
        return Bundle(prefix)


def _read(bundle: Bundle, name: str) -> Any:
    with _readable(bundle.prefix):
        return bundle.restore(name)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Adds the file's name to TensorFlow's error about a damaged checkpoint."""
    try:
        yield
    except tf.errors.OpError as error:
        raise ValueError(
            f"The checkpoint {path!r} cannot be read: {error}. Copy its .index and "
            "all of its .data files again."
        ) from error


class ImportedTables(dict[str, dict[str, np.ndarray]]):
    """Holds "parameters" and the slots of each table of a checkpoint.

    Attributes:
      global_step: The global step of the checkpoint, or None.
    """

    global_step: int | None = None

    def assign(self, embedding: TrackableTables) -> None:
        """Puts the tables and slots into an embedding of any engine, all or none.

        The embedding's tables must have the same names, as in the result of
        `spec.to_tpu_embedding()`. Slots that the checkpoint lacks keep their initial
        values, with a warning; an embedding without optimizers takes only the tables.

        Args:
          embedding: A TPUEmbedding or TPUEmbeddingV2.

        Raises:
          TypeError: If `embedding` is neither of them.
          ValueError: If a table, slot or shape has no counterpart.
        """
        if not isinstance(embedding, TrackableTables):
            raise not_an_embedding(embedding)
        ours = embedding.core.checkpoint_targets()
        if set(ours) != set(self):
            raise ValueError(
                f"The imported tables are {errors.quoted(sorted(self))}, but the "
                f"embedding has the tables {errors.quoted(sorted(ours))}. Create the "
                "embedding with `spec.to_tpu_embedding()`, or give its TableConfigs "
                "these names."
            )
        pairs = []
        for table, arrays in self.items():
            lookups_only = set(ours[table]) == {PARAMETERS}
            for name, value in arrays.items():
                if name != PARAMETERS and lookups_only:
                    continue
                pairs.append((_rows(table, name, value, ours[table]), value))
            _warn_of_missing(table, set(ours[table]) - set(arrays))
        # The pending update is applied before the tables are assigned.
        embedding.core.refresh()
        for rows, value in pairs:
            rows.assign(value)
        embedding.core.load_checkpoint_rows()
        updates = embedding.core.checkpoint_updates()
        if updates is not None and self.global_step is not None:
            updates.assign(self.global_step)


def import_estimator_checkpoint(
    path: str | os.PathLike[str],
    spec: Any,
    *,
    num_hosts: int = 1,
    partition_strategy: str | None = None,
    name_map: Mapping[str, str] | None = None,
) -> ImportedTables:
    """Reads the tables and slots of a spec from a TPUEstimator's checkpoint.

    The table of a column is the variable "<scope>/<column name>/embedding_weights",
    that of shared columns is "<scope>/<collection name>", and a table of
    `table_to_config_dict` is named by its key. The name of a slot is the name of its
    table, a slash, and the name that TPU or CPU runs gave the slot.

    Runs on several hosts with "mod" wrote row i of host h for id i * num_hosts + h, one
    host after the other; here rows are put in the order of ids. (Derived from
    the documentation of TensorFlow's protos; no such file of real hardware was seen.)

    Args:
      path: A checkpoint's prefix, or a folder, whose latest checkpoint is read.
      spec: The EmbeddingConfigSpec of the model.
      num_hosts: The number of hosts of the TPU that wrote the file.
      partition_strategy: "div" or "mod"; None means that of the spec.
      name_map: Names in the file, by "<table>" or "<table>/<slot>", for those that
        the rules above do not find. Table and slot are called as in the result.

    Returns:
      The "parameters", float32 [V, D], of each table of the spec, and those slots of
      its optimization parameters that the file holds.

    Raises:
      NotImplementedError: If the spec has columns of the tensor core.
      ValueError: If there is no checkpoint, it cannot be read, a table has no
        variable or more than one, a shape does not fit, or an argument is wrong.
      TypeError: If `spec` is not an EmbeddingConfigSpec.
    """
    require_spec(spec)
    errors.check_int("num_hosts", num_hosts, 1)
    strategy = partition_strategy
    if strategy is None:
        strategy = spec.partition_strategy
    if strategy not in ("div", "mod"):
        raise ValueError(
            'Argument `partition_strategy` must be "div" or "mod". Received: '
            f"{strategy!r}."
        )
    refused = spec.tensor_core_feature_columns
    columns.refuse_tensor_core("import_estimator_checkpoint", refused)
    checkpoint = open_estimator_checkpoint(path)
    wanted = [
        _Wanted(key, config, _pattern(key, spec), _sources(config, spec))
        for key, config in spec.table_to_config().items()
    ]
    names = _NameMap(dict(name_map or {}), wanted)
    hosts = num_hosts if strategy == "mod" else 1
    result = ImportedTables()
    for table in wanted:
        result[table.key] = _read_table(checkpoint, table, names, (num_hosts, hosts))
    if _GLOBAL_STEP in checkpoint.shapes:
        result.global_step = int(_read(checkpoint, _GLOBAL_STEP))
    return result


def rows_by_id(rows: np.ndarray, num_hosts: int) -> np.ndarray:
    """Sorts the rows of a "mod" checkpoint, host after host, by their ids.

    >>> rows_by_id(np.array([0, 2, 4, 1, 3]), num_hosts=2).tolist()
    [0, 1, 2, 3, 4]
    """
    ids = np.concatenate([np.arange(h, len(rows), num_hosts) for h in range(num_hosts)])
    ordered = np.empty_like(rows)
    ordered[ids] = rows
    return ordered


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """One table to be found in the checkpoint.

    Attributes:
      key: The key of the table in the spec.
      config: The table's configuration in the spec.
      pattern: A pattern that matches the whole name of its variable.
      sources: The slots of the table.
    """

    key: str
    config: TableConfig
    pattern: str
    sources: tuple[v1.SlotSource, ...]


class _NameMap:
    """The user's names for the wanted tables and slots."""

    def __init__(self, names: dict[str, str], wanted: list[_Wanted]) -> None:
        known = [table.key for table in wanted]
        known += [f"{t.key}/{source.name}" for t in wanted for source in t.sources]
        for key in names:
            if key not in known:
                raise ValueError(
                    f"`name_map` has the key {key!r}, but the spec has "
                    f"{errors.quoted(sorted(known))}."
                )
        self._names = names

    def get(self, key: str, checkpoint: Bundle) -> str | None:
        """Returns the given name, which must be there, or None."""
        name = self._names.get(key)
        if name is not None and name not in checkpoint.shapes:
            raise _no_single_variable(key, [], checkpoint)
        return name


def _pattern(key: str, spec: Any) -> str:
    for column in spec.embedding_columns():
        if columns.table_key(column) == key:
            name = re.escape(column.get_embedding_var_name())
            if columns.is_shared(column):
                return f"(.*/)?{name}"
            return f"(.*/)?{re.escape(column.name)}/embedding_weights"
    return re.escape(key)


def _sources(config: TableConfig, spec: Any) -> tuple[v1.SlotSource, ...]:
    own = config.optimization_parameters
    return v1.slot_sources(spec.optimization_parameters if own is None else own)


def _read_table(
    checkpoint: Bundle, table: _Wanted, names: _NameMap, hosts: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Reads a table; `hosts` says how many hosts padded and how many permuted it."""
    variable = names.get(table.key, checkpoint)
    variable = variable or _find(checkpoint, table.key, table.pattern)
    found = {PARAMETERS: variable}
    for source in table.sources:
        key = f"{table.key}/{source.name}"
        given = names.get(key, checkpoint)
        spellings = [f"{variable}/{spelling}" for spelling in source.spellings]
        there = [name for name in spellings if name in checkpoint.shapes]
        if given or there:
            found[source.name] = given or there[0]
    _warn_of_missing(table.key, {s.name for s in table.sources} - set(found))
    size, dimension = table.config.vocabulary_size, table.config.dimension
    padded = (max(size, hosts[0]), dimension)  # Each host has one row at least.
    parts = {}
    for part, name in found.items():
        shape = tuple(checkpoint.shapes[name])
        if shape not in (padded, (size, dimension)):
            raise ValueError(
                f"Table {table.key!r}, {part}: the checkpoint's variable {name!r} has "
                f"shape {tuple(shape)}, but the spec requires {tuple(padded)}. Correct "
                "the spec, or name another variable with `name_map`."
            )
        parts[part] = rows_by_id(_read(checkpoint, name), hosts[1])[:size]
    return parts


def _find(checkpoint: Bundle, key: str, pattern: str) -> str:
    found = [name for name in checkpoint.shapes if re.fullmatch(pattern, name)]
    if len(found) != 1:
        raise _no_single_variable(key, found, checkpoint)
    return found[0]


def _no_single_variable(
    key: str, found: Sequence[str], checkpoint: Bundle
) -> ValueError:
    matches = (
        f"{len(found)} match: {errors.quoted(sorted(found))}" if found else "none does"
    )
    return ValueError(
        f"Exactly one variable of the checkpoint {checkpoint.prefix!r} must belong to "
        f"{key!r}, but {matches}. The checkpoint has "
        f"{errors.quoted(sorted(checkpoint.shapes))}. Name the right one with "
        f"name_map={{{key!r}: ...}}."
    )


def _rows(
    table: str, name: str, value: np.ndarray, parts: Mapping[str, MutableTableRows]
) -> MutableTableRows:
    """Returns the rows that `value` goes into."""
    if name not in parts:
        raise ValueError(
            f"Table {table!r}: the imported slot {name!r} has no counterpart among "
            f"{errors.quoted(list(parts))} of the embedding. Give the table the "
            "optimizer of the spec."
        )
    shape = parts[name].shape
    if shape != value.shape:
        raise ValueError(
            f"Table {table!r}, {name}: the imported array has shape "
            f"{tuple(value.shape)}, but the embedding's variable has shape "
            f"{tuple(shape)}."
        )
    return parts[name]


def _warn_of_missing(table: str, slots: set[str]) -> None:
    for slot in sorted(slots):
        logging.warning(
            "Table %r: the checkpoint has no slot %r; it starts at its initial value.",
            table,
            slot,
        )
