"""The wording of every error about checkpoints; each function returns the exception."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tpu_embedding.layout.stacking import TableLayout

_DataLossError = tf.errors.DataLossError
_NotFoundError = tf.errors.NotFoundError


def corrupted(path: str, reason: str) -> tf.errors.DataLossError:
    """A file that is not what its writer wrote."""
    return _DataLossError(
        None,
        None,
        f"The checkpoint file {path} is damaged: {reason}. Nothing was restored. Use "
        "another checkpoint, e.g. one that tf.train.CheckpointManager kept.",
    )


def byte_order(path: str) -> NotImplementedError:
    """Values whose bytes are in the other order."""
    return NotImplementedError(
        f"{path} was written on a big-endian machine. Restore it with tf.train."
        "Checkpoint and save it again."
    )


def not_found(path: str) -> tf.errors.NotFoundError:
    """A path at which no checkpoint is."""
    return _NotFoundError(
        None,
        None,
        f"There is no checkpoint at {path}. Give the prefix of a TensorFlow "
        "checkpoint (without `.index`), its folder, a `.weights.h5` file, a `.npy` or "
        "`.npz` file, or a folder of `.npy` files.",
    )


def exists(path: str) -> tf.errors.AlreadyExistsError:
    """A checkpoint that a save would have to destroy first."""
    return tf.errors.AlreadyExistsError(
        None,
        None,
        f"There is a checkpoint at {path} already, and replacing it would leave none "
        "if the save were interrupted. Save to another path, and delete the old one "
        "afterwards.",
    )


def not_an_embedding(value: object) -> TypeError:
    """An object whose tables cannot be told."""
    return TypeError(
        "checkpoint.save, checkpoint.restore and `assign` of imported tables take a "
        f"TPUEmbedding or a TPUEmbeddingV2. Received: {value!r}. tf.train.Checkpoint "
        "saves and restores others: layers, and TPUEmbeddingForServing."
    )


def deep_copy(what: str) -> TypeError:
    """A deep copy of tables, which are variables of this process and strategy."""
    return TypeError(
        f"A {what} cannot be copied deeply. Make another one of the same configuration "
        "and bring the tables over: tpu_embedding.checkpoint.save and restore, or "
        "tf.train.Checkpoint."
    )


def no_prefix(path: str) -> ValueError:
    """A prefix without a name: the files would be hidden ones, `.index` and others."""
    return ValueError(
        "A checkpoint's path is the beginning of the names of its files and must not "
        f"be empty or end in a slash. Received: {path!r}. Pass e.g. 'folder/model'."
    )


def no_file_name(path: str, name: str) -> ValueError:
    """A table that cannot be a file of a folder."""
    return ValueError(
        f"Table or slot {name!r} cannot be a file below {path}. Rename the table, e.g. "
        "with `--rename OLD=NEW`, to one without the parts '', '.' and '..'."
    )


def no_tables(path: str) -> ValueError:
    """A checkpoint in which no embedding tables can be found."""
    return ValueError(
        f"No embedding tables are found in {path}: no object in it has variables of "
        "rank 2. Look at the names in it with tf.train.list_variables."
    )


def no_keras_tables(path: str) -> ValueError:
    """Keras weights without a layer whose tables can be told."""
    return ValueError(
        f"{path} has no tables of tpu_embedding's Keras layer, nor of a "
        "keras_rs.layers.DistributedEmbedding on a CPU or GPU. Tables on a "
        "SparseCore are stored stacked and without a record of how: save them with "
        "get_embedding_tables() and numpy.savez."
    )


def root_of_arrays(path: str, root: str) -> ValueError:
    """A `root` where there are no objects."""
    return ValueError(
        f"{path} has arrays and no objects, so `root` must be None. Received: {root!r}."
    )


def no_such_root(path: str, root: str, known: Iterable[str]) -> ValueError:
    """A `root` that holds no tables."""
    return ValueError(
        f"The object {root!r} of {path} holds no tables. Objects that do: "
        f"{_listed(known)}."
    )


def several_roots(path: str, known: Iterable[str]) -> ValueError:
    """More than one object could be the embedding."""
    return ValueError(
        f"Several objects in {path} hold tables: {_listed(known)}. Choose one with "
        "`root=`."
    )


def missing_tables(path: str, missing: Sequence[str], found: Iterable[str]) -> KeyError:
    """Tables of the embedding that the checkpoint does not have."""
    return KeyError(
        f"{path} has no table called {_listed(missing)}. It has: {_listed(found)}. "
        "If a table has another name there, say so with `rename={'name in the "
        "embedding': 'name in the checkpoint'}`."
    )


def unknown_table(argument: str, name: str, known: Iterable[str]) -> ValueError:
    """A name that is no table of the embedding."""
    return ValueError(
        f"Argument `{argument}` names the table {name!r}, which the embedding does not "
        f"have. Its tables: {_listed(known)}."
    )


def layout_shape(layout: TableLayout, actual: Sequence[int]) -> ValueError:
    """A layout of a table of another shape."""
    return ValueError(
        f"Table {layout.table_name} has shape {_shape(actual)}, but its layout is for "
        f"shape {_shape(layout.unsharded_shape)}."
    )


def stacked_tables() -> ValueError:
    """tf.train.Checkpoint meets tables that are stacked and in shards."""
    return ValueError(
        "This checkpoint holds the tables stacked and in shards, as SparseCores have "
        "them, which tf.train.Checkpoint cannot restore here. Use "
        "tpu_embedding.checkpoint.restore(embedding, path)."
    )


def no_layouts(path: str) -> ValueError:
    """A checkpoint without a layout record."""
    return ValueError(
        f"{path} has no SparseCore layout record: its tables are stored plain. A "
        "TPUEmbeddingV2 on SparseCores writes one with tf.train.Checkpoint."
    )


def missing_layouts(missing: Iterable[str], surplus: Iterable[str]) -> ValueError:
    """Layouts of other tables than there are."""
    return ValueError(
        f"There must be a layout for each table and no other. Tables without: "
        f"{_listed(missing)}; layouts without a table: {_listed(surplus)}."
    )


def stack_of_two_kinds(stack: str, arrays: Sequence[Sequence[str]]) -> ValueError:
    """Tables with different slots in one stack."""
    kinds = "; ".join(_listed(names) for names in arrays)
    return ValueError(
        f"The tables of stack {stack} must have the same slots. Received: {kinds}. "
        "Give them stacks of their own, or leave the slots out with `slots=False`."
    )


def table_shape(
    table: str, expected: Sequence[int], path: str, actual: Sequence[int]
) -> ValueError:
    """A stored table of another shape than the embedding's."""
    way_out = (
        "Pass `resize=True` to keep the rows that both have."
        if expected[1] == actual[1]
        else "Tables of another dim cannot be restored."
    )
    return ValueError(
        f"Table {table} has shape {_shape(expected)}, but in {path} it has shape "
        f"{_shape(actual)}. {way_out}"
    )


def array_shape(
    table: str, array: str, expected: Sequence[int], found: tuple[str, Sequence[int]]
) -> ValueError:
    """A stored slot of a shape that does not go with the table; (path, shape)."""
    path, actual = found
    return ValueError(
        f"Table {table}: {array} has shape {_shape(expected)}, but in {path} it has "
        f"shape {_shape(actual)}. Pass `slots=False` to restore tables alone."
    )


def stored_dtype(path: str, name: str, dtype: str) -> TypeError:
    """Values that are no floating point numbers, or wider ones than TensorFlow has."""
    return TypeError(
        f"{name} in {path} has dtype {dtype}. Tables and slots are float16, bfloat16, "
        "float32 or float64. Convert the array first, e.g. with `.astype('float32')`."
    )


def empty_matrix(name: str, shape: Sequence[int]) -> ValueError:
    """A table or slot without rows or columns, which no embedding has."""
    return ValueError(
        f"{name} has shape {_shape(shape)}. A table needs at least one row and one "
        "column: leave it out of what is converted."
    )


def rename_argument(rename: str, tables: Iterable[str]) -> ValueError:
    """A `--rename` of the command line that cannot be done."""
    return ValueError(
        f"`--rename` must be OLD=NEW, with a table of the checkpoint and a name that "
        f"no other has. Received: {rename}. Tables: {_listed(tables)}."
    )


def renamed_twice(table: str, names: Sequence[str]) -> ValueError:
    """Two `--rename` for one table, of which only one could be done."""
    return ValueError(
        f"`--rename` gives table {table} two names, {names[0]} and {names[1]}. "
        "Keep one."
    )


def sparse_core_without_like() -> ValueError:
    """Nothing says where the tables go."""
    return ValueError(
        "`--to sparse-core` needs `--like CHECKPOINT`, whose layout record says where "
        "each table goes. Without one, call tpu_embedding.checkpoint.save(layouts=...)."
    )


def like_without_sparse_core(kind: str) -> ValueError:
    """A layout record that would not be used."""
    return ValueError(
        f"`--like` is for `--to sparse-core`; this is `--to {kind}`. Add "
        "`--to sparse-core`, or leave `--like` out."
    )


def large_folder(path: str, most: int) -> ValueError:
    """A folder that would take very long to search."""
    return ValueError(
        f"{path} has more than {most:,} files and folders below it, which is no folder "
        "of tables. Name the checkpoint itself, or the folder of its .npy files."
    )


def new_root_of_arrays() -> ValueError:
    """The name of an object for files that hold arrays alone."""
    return ValueError("`--new-root` is not for `--to numpy`: arrays have no object.")


def other_stacks(path: str) -> ValueError:
    """A checkpoint whose stacks are not those of an embedding on SparseCores."""
    return ValueError(
        f"The tables in {path} are not stacked and cut as those of this embedding on "
        "SparseCores: other tables, devices or SparseCores, or none. Use "
        "tpu_embedding.checkpoint.restore(embedding, path), which moves them."
    )


def other_dtype(path: str, table: str, stored: str, own: str) -> TypeError:
    """A table of another dtype, which tf.train.Checkpoint does not convert."""
    return TypeError(
        f"Table {table} is {own}, but in {path} it is {stored}, and "
        "tf.train.Checkpoint does not convert. Use "
        "tpu_embedding.checkpoint.restore(embedding, path), which does."
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(axis) for axis in shape) + "]"
