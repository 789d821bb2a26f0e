"""Exports a trained model as a SavedModel that needs nothing but TensorFlow."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.checkpoint.writing import in_all_processes, require_alike
from tpu_embedding.engines.process_group import calling
from tpu_embedding.errors import check_flag
from tpu_embedding.layout.plan import Plan
from tpu_embedding.lookup.input_rows import MAX_SAMPLES
from tpu_embedding.serving.conversion import Report, Source
from tpu_embedding.serving.delta_files import Base, BaseTable, base_tables, new_id
from tpu_embedding.serving.exported import (
    SERVING_DEFAULT,
    Exported,
    ModelOptions,
    read_source,
    unknown_names,
)
from tpu_embedding.serving.following import Follower
from tpu_embedding.serving.following_tables import GrowingBase, most_changed, most_ids
from tpu_embedding.serving.growing_tables import exported_table, missing_rows
from tpu_embedding.serving.mapping import MappedPart, file_of
from tpu_embedding.serving.quantization import STORAGES, stored_form
from tpu_embedding.serving.saving import require_empty, save
from tpu_embedding.serving.signatures import KINDS, Request, Signature, Tensors
from tpu_embedding.tables.waiting import flush_before

_SHARE = 0.125  # The share of a table's rows that one delta may change by default.


@calling("export")
def export(
    source: Any,
    path: str | os.PathLike[str],
    model: Callable[..., Any] | None = None,
    *,
    feature_config: Any = None,
    signatures: Sequence[str] | Mapping[str, Signature] = KINDS,
    storage: str | Mapping[Any, str] = "float32",
    weighted: Collection[str] = (),
    dense_inputs: Mapping[str, tf.TensorSpec] | None = None,
    invalid_ids: str | None = None,
    most_samples: int = MAX_SAMPLES,
    deltas: bool | float = False,
    mapped: bool = False,
) -> Report:
    """Writes tables and a model as a SavedModel of TensorFlow's ops, without slots.

    The SavedModel loads wherever TensorFlow does, in Python or C, without this package.
    It has the combiners of training and its policy for invalid ids; an id without a row
    in a growing table looks up the same as in training. The first signature is also
    named "serving_default".

    All processes of a job call it with the same arguments. The first one writes, and
    all return the report.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> films = te.TableConfig(8, 4, name="films", initializer=te.RowIdInitializer())
    >>> embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.Adagrad(0.1))
    >>> folder = tempfile.mkdtemp()
    >>> report = te.serving.export(embedding, folder, storage="int8")
    >>> report.tables[0].bytes_after, report.tables[0].max_error
    (64, 0.0)
    >>> served = tf.saved_model.load(folder).signatures["dense"]
    >>> served(film=tf.constant([3, 5], tf.int64))["film"].numpy().tolist()
    [[3.0, 3.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0]]

    Args:
      source: A TPUEmbedding, a TPUEmbeddingV2, a TPUEmbeddingV0, a
        TPUEmbeddingForServing, a te.keras.TPUEmbedding, or a dict of variables,
        tensors or NumPy arrays [vocabulary_size, dim] by TableConfig, as
        `embedding_tables` has them. It may also be a Keras model with
        te.keras.Embedding, whose inputs and outputs then are those of the signature
        "serving_default"; `storage` has the names of these layers.
      path: A folder that does not exist or is empty.
      model: A function of the activations in the structure of the features and, if
        there are `dense_inputs`, of a dict of those. It returns a tensor or a dict of
        tensors. With None the activations are the outputs.
      feature_config: The configuration of a dict of tables.
      signatures: Any of "dense", "sparse", "ragged" and "examples" (serialized
        tf.train.Example); or a dict of your own Signatures by name.
      storage: "float32", "bfloat16", "float16", "int8" or "int4", or a dict of these by
        TableConfig or name; other tables are "float32". Tables whose rows would not get
        smaller stay float32.
      weighted: Paths of the features that come with weights.
      dense_inputs: The further inputs of the model by name, [None, ...] each.
      invalid_ids: For a dict of tables, the policy for those of
        tf.tpu.experimental.embedding.
      most_samples: The number of samples above which sparse input is refused, before
        memory is taken for them.
      deltas: True makes a model that follows its trainer: it has the signatures
        "delta_state" and "apply_delta", and spare rows. A number > 0 is the largest
        share of the rows of a table that one delta may change, 0.125 for True; the
        table gets twice as many spare rows. In a table of up to 4,096 rows all may
        change. A growing table may reach twice its ids plus 4,096, at most `max_rows`.
      mapped: True keeps the tables in files, which the model maps instead of loading
        them: the model loads at once, processes of a machine share the memory, and
        tables may be larger than it. The model must be served at `path`; if it was
        moved, run `python -m tpu_embedding place`.

    Returns:
      A report of the form, size and errors of each table, to be printed.

    Raises:
      TypeError: If `source` or the model's result is of the wrong type.
      ValueError: If an argument is not as above.
      NotImplementedError: If a model with te.keras.Embedding and `deltas` reads a
        whole table.
      tf.errors.InvalidArgumentError: If a table has values that the storage cannot
        hold.
    """
    share = _share(deltas)
    options = ModelOptions(
        model, signatures, weighted, dense_inputs or {}, most_samples
    )
    options.check()
    _check_mapped(mapped, share, os.fspath(path))
    exported = read_source(source, feature_config, invalid_ids)
    named = exported.signatures(options)
    storages = _storages(exported.plan, storage)
    alike = {"storage": storages, "deltas": share, "mapped": mapped}
    _prepare_folder(path, exported, alike)
    follower, sources = None, exported.tables
    if share is None:
        tables = _stored(exported, storages, path if mapped else None)
    else:
        follower, sources = _follower(exported, storages, share)
        tables = follower.tables
    stored = list(zip(sources, tables, strict=True))
    compute = exported.compute(options, {table.name: t for table, t in stored})
    functions = {name: _function(s, compute) for name, s in named.items()}
    functions.setdefault(SERVING_DEFAULT, functions[next(iter(named))])
    if follower is not None:
        exported.require_lookups(v for f in functions.values() for v in f.variables)
        _add_functions(functions, follower)
    reads = [signature.read for signature in named.values()]
    users = exported.users(options)
    return Report(tuple(save(path, stored, users, reads, functions, follower)))


def _prepare_folder(
    path: str | os.PathLike[str], exported: Exported, alike: dict[str, Any]
) -> None:
    """Checks that all processes pass equal arguments, and that the folder is empty."""
    group = exported.tables[0].rows.group
    shapes = {f.path: f.config.output_shape for f in exported.plan.features}
    alike = {"path": os.fspath(path), **alike, "output_shape": shapes}
    require_alike(group, {**alike, "positions": dict(exported.positions)})
    with in_all_processes(group):
        if group is None or group.rank == 0:
            require_empty(path)


def _stored(
    exported: Exported, storages: Sequence[str], mapped: str | os.PathLike[str] | None
) -> list[Any]:
    """Returns the tables in their storages, or in files of a mapped export's folder."""
    tables = []
    for spec, source, storage in zip(
        exported.plan.tables, exported.tables, storages, strict=True
    ):
        make = None if mapped is None else _parts_maker(mapped, spec.index)
        form: Any = stored_form(source, storage, mapped=make)
        grows = source.ids is not None
        tables.append(exported_table(spec, source, form) if grows else form)
    return tables


def _add_functions(functions: dict[str, Any], follower: Follower) -> None:
    """Adds the signatures of deltas."""
    for name, function in follower.functions().items():
        if name in functions:
            raise ValueError(
                f"`signatures` has {name!r}, a name that `deltas` needs. Rename it."
            )
        functions[name] = function


def _share(deltas: Any) -> float | None:
    """Returns the largest share of rows a delta may change, or None for no deltas."""
    if isinstance(deltas, bool):
        return _SHARE if deltas else None
    if not isinstance(deltas, (int, float)) or not 0 < deltas <= 1:
        raise ValueError(
            "`deltas` must be True, False, or the largest share of the rows of a table "
            f"that one delta changes, > 0 and <= 1. Received: {deltas!r}."
        )
    return float(deltas)


def _check_mapped(mapped: Any, share: float | None, path: str) -> None:
    check_flag("mapped", mapped)
    if mapped and share is not None:
        raise ValueError(
            "`mapped` and `deltas` exclude each other, because mapped files cannot "
            "change. Pass only one of them."
        )
    if mapped and "://" in path:
        raise ValueError(
            f"`mapped` needs a local folder. Received: path={path!r}. Export to a "
            "local folder, copy it, and call `python -m tpu_embedding place`."
        )


def _parts_maker(path: str | os.PathLike[str], table: int) -> Callable[..., Any]:
    """Returns a function of (name, shape, dtype) that makes a mapped table's parts."""

    def make(name: str, shape: list[int], dtype: tf.DType) -> MappedPart:
        return MappedPart(os.fspath(path), file_of(table, name), shape, dtype)

    return make


def _follower(
    exported: Exported, storages: Sequence[str], share: float
) -> tuple[Follower, list[Source]]:
    """Returns the Follower, which applies deltas, and the sources of its tables."""
    sources, stored, specs = [], [], []
    growing: dict[str, GrowingBase] = {}

    def add(source: Source, storage: str, table: BaseTable) -> None:
        rows = most_ids(source.shape[0], table.rows)
        most = min(rows, most_changed(rows, share))
        spec = dataclasses.replace(table, rows=rows, most_changed=most)
        spare = spec.height - source.shape[0] + 2 * most
        form: Any = stored_form(source, storage, spare)
        sources.append(source)
        stored.append(form)
        specs.append(dataclasses.replace(spec, storage=form.storage))

    for spec, source, storage in zip(
        exported.plan.tables, exported.tables, storages, strict=True
    ):
        for table in base_tables(spec):
            add(source.last if table.shared else source.known, storage, table)
        if source.ids is not None:
            growing[spec.name] = GrowingBase(source.ids, missing_rows(spec))
    return Follower(Base(new_id(), tuple(specs)), stored, growing), sources


def _storages(plan: Plan, storage: str | Mapping[Any, str]) -> list[str]:
    """Returns the storage of each table, by index."""
    names = {spec.key: spec.name for spec in plan.tables}
    if not isinstance(storage, Mapping):
        storage = dict.fromkeys(names, storage)
    named = [names.get(key, key) for key in storage]
    unknown = [repr(name) for name in named if name not in names.values()]
    if unknown:
        raise unknown_names("storage", unknown, names.values())
    by_name = dict(zip(named, storage.values(), strict=True))
    if len(by_name) < len(named):
        twice = {str(name) for name in named if named.count(name) > 1}
        raise ValueError(
            f"`storage` has table {', '.join(twice)} twice, by TableConfig and by "
            "name. Leave one of them out."
        )
    chosen = [by_name.get(name, "float32") for name in names.values()]
    for value in chosen:
        if value not in STORAGES:
            raise ValueError(
                f"Unknown storage {value!r}. Use one of {', '.join(STORAGES)}."
            )
    return chosen


def _function(signature: Signature, compute: Callable[[Request], Any]) -> Any:
    """Traces the function of a signature."""
    specs = {
        name: tf.TensorSpec(spec.shape, spec.dtype, name=name)
        for name, spec in signature.inputs.items()
    }

    def serve(inputs: Tensors) -> Tensors:
        outputs = compute(signature.read(inputs))
        if tf.is_tensor(outputs):
            return {"output": outputs}
        if not isinstance(outputs, Mapping) or not all(
            map(tf.is_tensor, outputs.values())
        ):
            raise TypeError(
                "The exported model must return a tensor or a dict of tensors. "
                f"Received: {outputs!r}."
            )
        return dict(outputs)

    with flush_before():
        return tf.function(serve).get_concrete_function(specs)
