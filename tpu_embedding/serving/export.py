"""A trained model as a SavedModel that needs nothing but TensorFlow."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.checkpoint.trackable import (
    SavesTables,
    WeightTables,
    tables_of_weights,
)
from tpu_embedding.checkpoint.writing import in_all_processes, require_alike
from tpu_embedding.embedding_v0 import TPUEmbeddingV0
from tpu_embedding.engines.process_group import calling
from tpu_embedding.errors import argument_type
from tpu_embedding.layout.output_shapes import InputShapes
from tpu_embedding.layout.plan import FeatureSpec, Plan
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.lookup.input_rows import MAX_SAMPLES
from tpu_embedding.serving.conversion import SomeRows, Source, rows_of
from tpu_embedding.serving.delta_files import Base, BaseTable, new_id
from tpu_embedding.serving.embedding import TPUEmbeddingForServing
from tpu_embedding.serving.following import Follower
from tpu_embedding.serving.following_tables import (
    GrowingBase,
    height_of,
    most_changed,
    most_ids,
)
from tpu_embedding.serving.growing_tables import (
    exported_table,
    missing_rows,
)
from tpu_embedding.serving.lookup import find_table, plan_of
from tpu_embedding.serving.mapping import MappedPart, file_of
from tpu_embedding.serving.quantization import STORAGES, stored_form
from tpu_embedding.serving.report import Report
from tpu_embedding.serving.saving import require_empty, save
from tpu_embedding.serving.signatures import (
    KINDS,
    Request,
    Signature,
    SignatureOptions,
    Tensors,
    input_name,
    make_signature,
)
from tpu_embedding.tables.waiting import flush_before
from tpu_embedding.tf_configs import convert_features

_SERVING_DEFAULT = "serving_default"
_SHARE = 0.125  # Of the rows of a table that one delta may change.


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
    It uses the combiners and the policy for invalid ids of training, and an id without
    a row in a growing table looks up what it does there. The first signature is also
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
        `embedding_tables` has them. Or a whole Keras model with te.keras.Embedding:
        its inputs and outputs are those of the signature "serving_default", and
        `storage` has the names of these layers.
      path: A folder that does not exist or is empty.
      model: A function of the activations in the structure of the features and, if
        there are `dense_inputs`, a dict of those. It returns a tensor or a dict of
        tensors. None: the activations are the outputs.
      feature_config: The configuration of a dict of tables.
      signatures: Any of "dense", "sparse", "ragged" and "examples" (serialized
        tf.train.Example); or by name Signatures of your own.
      storage: "float32", "bfloat16", "float16", "int8" or "int4", or one of them by
        TableConfig or name, "float32" for the others. Tables of rows that would not
        get smaller stay float32.
      weighted: Paths of the features that come with weights.
      dense_inputs: By name the further inputs of the model, [None, ...] each.
      invalid_ids: For a dict of tables, the policy for those of
        tf.tpu.experimental.embedding.
      most_samples: Sparse input that claims more samples is refused, before memory
        is taken for them.
      deltas: True makes a model that follows its trainer: it has the signatures
        "delta_state" and "apply_delta", and spare rows. A number > 0 is the largest
        share of the rows of a table that one delta may change, 0.125 for True; the
        table takes twice as many spare rows. Tables of up to 4,096 rows may change
        whole. A growing table has room for twice its ids and 4,096, or `max_rows`.
      mapped: True keeps the tables in files, which the model maps instead of loading
        them: it is loaded at once, processes of a machine share the memory, and tables
        may be larger than it. `path` is then the place where the model is served;
        `python -m tpu_embedding place` tells a model that was moved.

    Returns:
      The form, size and errors of each table. Print it.

    Raises:
      TypeError: If `source` or the model's result is of the wrong type.
      ValueError: If an argument is not as above.
      tf.errors.InvalidArgumentError: If a table has values that the storage cannot
        hold.
    """
    for argument, value in (("signatures", signatures), ("weighted", weighted)):
        if isinstance(value, str):
            raise TypeError(
                f"`{argument}` must be a list of names. Received the string {value!r}; "
                f"pass [{value!r}]."
            )
    if dense_inputs and model is None:
        raise ValueError(
            "`dense_inputs` go to the model, and there is none. Pass `model`, or leave "
            "them out."
        )
    if not isinstance(most_samples, int) or most_samples < 1:
        raise ValueError(
            f"`most_samples` must be an int >= 1. Received: {most_samples!r}."
        )
    share = _share(deltas)
    _check_mapped(mapped, share, os.fspath(path))
    exported = _with_known_shapes(_read_source(source, feature_config, invalid_ids))
    plan, whole = exported.plan, exported.whole
    if whole is not None:
        arguments = {
            "model": model,
            "weighted": weighted,
            "dense_inputs": dense_inputs,
            "deltas": share,
            "most_samples": None if most_samples == MAX_SAMPLES else most_samples,
        }
        named = _signatures_of_model(whole, signatures, arguments)
    else:
        named = _make_signatures(signatures, exported, weighted, dense_inputs or {})
        if model is None:
            _require_different_outputs(plan)
    storages = _storages(plan, storage)
    group = exported.tables[0].rows.group
    alike: dict[str, Any] = {
        "path": os.fspath(path),
        "storage": storages,
        "deltas": share,
        "mapped": mapped,
        "output_shape": {f.path: f.config.output_shape for f in plan.features},
        "positions": dict(exported.positions),
    }
    require_alike(group, alike)
    with in_all_processes(group):
        if group is None or group.rank == 0:
            require_empty(path)
    follower, sources = None, exported.tables
    tables: list[Any] = []
    if share is None:
        for spec, table, kept in zip(
            plan.tables, exported.tables, storages, strict=True
        ):
            make = _parts_maker(path, spec.index) if mapped else None
            form: Any = stored_form(table, kept, mapped=make)
            grows = table.ids is not None
            tables.append(exported_table(spec, table, form) if grows else form)
    else:
        follower, sources = _follower(exported, storages, share)
        tables = follower.tables
    served = {source.name: t for source, t in zip(sources, tables, strict=True)}
    if whole is not None:
        compute: Any = functools.partial(_outputs_of_model, whole, served)
    else:
        lookup = FeatureLookup(
            plan,
            {spec.index: served[spec.name] for spec in plan.tables},
            most_samples,
            check_numerics=exported.check_numerics,
            any_batch_size=True,
            positions=exported.positions,
        )
        compute = _Served(exported, lookup, model).outputs
    functions = {name: _function(s, compute) for name, s in named.items()}
    functions.setdefault(_SERVING_DEFAULT, functions[next(iter(named))])
    if follower is not None:
        for name, function in follower.functions().items():
            if name in functions:
                raise ValueError(
                    f"`signatures` has {name!r}, a name that `deltas` needs. Rename it."
                )
            functions[name] = function
    stored = list(zip(sources, tables, strict=True))
    reads = [signature.read for signature in named.values()]
    users = model if whole is None else whole.other_layers()
    return Report(tuple(save(path, stored, users, reads, functions, follower)))


def _share(deltas: Any) -> float | None:
    """The largest share of rows that one delta may change, or None for no deltas."""
    if isinstance(deltas, bool):
        return _SHARE if deltas else None
    if not isinstance(deltas, (int, float)) or not 0 < deltas <= 1:
        raise ValueError(
            "`deltas` must be True, False, or the largest share of the rows of a table "
            f"that one delta changes, > 0 and <= 1. Received: {deltas!r}."
        )
    return float(deltas)


def _check_mapped(mapped: Any, share: float | None, path: str) -> None:
    if not isinstance(mapped, bool):
        raise argument_type("mapped", mapped, "a bool")
    if mapped and share is not None:
        raise ValueError(
            "`mapped` and `deltas` exclude each other: a file that is mapped does not "
            "change. Pass one of them."
        )
    if mapped and "://" in path:
        raise ValueError(
            f"`mapped` needs a folder of this machine, and `path` is {path!r}. Export "
            "to a local folder, copy it, and call `python -m tpu_embedding place`."
        )


def _parts_maker(path: str | os.PathLike[str], table: int) -> Callable[..., Any]:
    """What makes the parts of a table that is mapped, by name, shape and dtype."""

    def make(name: str, shape: list[int], dtype: tf.DType) -> MappedPart:
        return MappedPart(os.fspath(path), file_of(table, name), shape, dtype)

    return make


def _follower(
    exported: _Exported, storages: Sequence[str], share: float
) -> tuple[Follower, list[Source]]:
    """What applies deltas, and the sources of its tables in their order."""
    sources, stored, specs = [], [], []
    growing: dict[str, GrowingBase] = {}

    def add(source: Source, storage: str, rows: int, **kind: Any) -> None:
        most = min(rows, most_changed(rows, share))
        spec = BaseTable(source.name, rows, source.shape[1], storage, most, **kind)
        spare = height_of(spec) - source.shape[0] + 2 * most
        table: Any = stored_form(source, storage, spare)
        sources.append(source)
        stored.append(table)
        specs.append(dataclasses.replace(spec, storage=table.storage))

    for spec, source, storage in zip(
        exported.plan.tables, exported.tables, storages, strict=True
    ):
        vocabulary = spec.config.vocabulary
        if vocabulary is None or source.ids is None:
            hashing = "" if spec.hashing is None else str(spec.hashing)
            add(source, storage, source.shape[0], hashing=hashing)
            continue
        size = len(source.ids)
        known, last = (
            dataclasses.replace(source, rows=SomeRows(source.rows, *bounds))
            for bounds in ((0, size), (size, size + 1))
        )
        if vocabulary.unknown == "shared_row":
            add(last, storage, 1, shared=True)
        room = most_ids(size, vocabulary.max_rows)
        growing[spec.name] = GrowingBase(source.ids, missing_rows(spec))
        add(known, storage, room, grows=True, mixed=True)
    return Follower(Base(new_id(), tuple(specs)), stored, growing), sources


@dataclasses.dataclass(frozen=True)
class _Exported:
    """Tables and features to export.

    Attributes:
      plan: The tables and features.
      structure: Structure of the features.
      tables: By index.
      check_numerics: Whether weights must be finite.
      inputs: The inputs that the source has had, or None if it does not know.
      positions: See `FeatureLookup`.
      whole: The tables of a model that is exported as a whole.
    """

    plan: Plan
    structure: FeatureStructure
    tables: list[Source]
    check_numerics: bool = False
    inputs: InputShapes | None = None
    positions: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    whole: WeightTables | None = None


def _read_source(source: Any, feature_config: Any, invalid_ids: Any) -> _Exported:
    whole = tables_of_weights(source)
    kinds = (SavesTables, TPUEmbeddingForServing, TPUEmbeddingV0)
    if whole is not None or isinstance(source, kinds):
        if feature_config is not None:
            raise ValueError(
                "export takes `feature_config` only with a dict of tables: an "
                "embedding has its own. Leave it out."
            )
        if invalid_ids is not None:
            raise ValueError(
                "export takes `invalid_ids` only with a dict of tables: an embedding "
                "keeps the rule it was made with. Leave it out."
            )
        core: Any = source.core if whole is None else whole
        if isinstance(source, TPUEmbeddingV0):
            tables = _gathered(core.plan, source.embedding_tables)
        else:
            tables = []
            for table in core.current_tables().values():
                rows, ids = table.ids.served()
                tables.append(Source(table.spec.name, rows, ids))
        return _Exported(
            core.plan,
            core.structure,
            tables,
            core.check_numerics,
            core.inputs,
            whole=whole,
        )
    if not isinstance(source, Mapping):
        raise TypeError(
            "The first argument of export must be a TPUEmbedding, a TPUEmbeddingV2, a "
            "TPUEmbeddingV0, a TPUEmbeddingForServing, a te.keras.TPUEmbedding, or, "
            "together with `feature_config`, a dict of tables by TableConfig; or a "
            "Keras model with te.keras.Embedding, which te.keras.convert makes of "
            "keras.layers.Embedding. Of a Keras model with a te.keras.TPUEmbedding "
            "pass its layer, and what follows it as `model`. "
            f"Received: {source!r}."
        )
    if feature_config is None:
        raise ValueError(
            "export needs `feature_config` for a dict of tables: it says which feature "
            "looks up which table."
        )
    plan = plan_of(convert_features(feature_config, invalid_ids))
    structure = FeatureStructure(feature_config, plan.features)
    return _Exported(plan, structure, _gathered(plan, source))


def _with_known_shapes(exported: _Exported) -> _Exported:
    """With the axes that build() or batches gave to features, after the batch.

    `FeatureConfig.output_shape` goes before them, and ragged rows fill it. Of other
    shapes a ragged row is a sample: with training's inputs [B, n, 1] it has n ids.
    """
    if exported.inputs is None:
        return exported
    features: list[FeatureSpec] = []
    positions: dict[str, int | None] = {}
    for spec in exported.plan.features:
        config, inner = spec.config, exported.inputs.inner(spec.index)
        declared = config.output_shape is not None and (
            spec.shape_source == FeatureSpec.shape_source
        )
        if inner is None or len(inner) < 2 or declared or config.max_sequence_length:
            features.append(spec)
            continue
        sizes = [size for size in inner if size]
        known = inner[-1] == 1 and len(sizes) == len(inner)
        positions[spec.path] = math.prod(sizes) if known else None
        config = dataclasses.replace(config, output_shape=(None, *inner[:-1]))
        source = "build() or the batches of training"
        features.append(dataclasses.replace(spec, config=config, shape_source=source))
    plan = dataclasses.replace(exported.plan, features=tuple(features))
    return dataclasses.replace(exported, plan=plan, positions=positions)


def _require_different_outputs(plan: Plan) -> None:
    """Checks that no two features have one name where activations are outputs."""
    taken: dict[str, str] = {}
    for spec in plan.user_features:
        name = input_name(spec.path)
        if name in taken:
            raise ValueError(
                f"Both feature {taken[name]} and feature {spec.path} would be the "
                f"output {name!r} of the exported model. Rename one of them in the "
                "feature configuration, or pass a `model` that names its outputs."
            )
        taken[name] = spec.path


def _gathered(plan: Plan, tables: Mapping[Any, Any]) -> list[Source]:
    paths = [plan.features[spec.features[0]].path for spec in plan.tables]
    return [
        Source(spec.name, rows_of(find_table(spec, tables, path, arrays=True)))
        for spec, path in zip(plan.tables, paths, strict=True)
    ]


def _make_signatures(
    signatures: Sequence[str] | Mapping[str, Signature],
    exported: _Exported,
    weighted: Collection[str],
    dense_inputs: Mapping[str, tf.TensorSpec],
) -> dict[str, Signature]:
    paths = [spec.path for spec in exported.plan.user_features]
    unknown = [path for path in weighted if path not in paths]
    if unknown:
        raise _unknown_names("weighted", unknown, paths)
    for name, spec in dense_inputs.items():
        batched = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        if not batched or None in spec.shape.as_list()[1:] or spec.shape[0] is not None:
            raise ValueError(
                f"`dense_inputs[{name!r}]` must be a tf.TensorSpec whose first axis is "
                "the batch, [None, ...], and whose other axes are known. Received: "
                f"{spec!r}."
            )
    if not signatures:
        raise ValueError("export needs at least one signature.")
    if isinstance(signatures, Mapping):
        for argument, value in (("weighted", weighted), ("dense_inputs", dense_inputs)):
            if value:
                raise ValueError(
                    f"`{argument}` is for the signatures that export makes by itself. "
                    "A Signature of your own has its weights and further inputs in its "
                    f"Request: leave `{argument}` out."
                )
        return dict(signatures)
    options = SignatureOptions(
        exported.plan.user_features, exported.structure.pack, weighted, dense_inputs
    )
    return {kind: make_signature(kind, options) for kind in signatures}


def _storages(plan: Plan, storage: str | Mapping[Any, str]) -> list[str]:
    """By index of the table."""
    names = {spec.key: spec.name for spec in plan.tables}
    if not isinstance(storage, Mapping):
        storage = dict.fromkeys(names, storage)
    named = [names.get(key, key) for key in storage]
    unknown = [repr(name) for name in named if name not in names.values()]
    if unknown:
        raise _unknown_names("storage", unknown, names.values())
    by_name = dict(zip(named, storage.values(), strict=True))
    if len(by_name) < len(named):
        twice = {str(name) for name in named if named.count(name) > 1}
        raise ValueError(
            f"`storage` has table {', '.join(twice)} by TableConfig and by name. Leave "
            "one of them out."
        )
    chosen = [by_name.get(name, "float32") for name in names.values()]
    for value in chosen:
        if value not in STORAGES:
            raise ValueError(
                f"Unknown storage {value!r}. Known are {', '.join(STORAGES)}."
            )
    return chosen


def _unknown_names(
    argument: str, names: Iterable[str], known: Iterable[str]
) -> ValueError:
    return ValueError(
        f"`{argument}` names {', '.join(names)}; known are {', '.join(known)}."
    )


def _signatures_of_model(
    whole: WeightTables, signatures: Any, arguments: Mapping[str, Any]
) -> dict[str, Signature]:
    """Returns the signatures of the user, or one of the model's inputs."""
    for name, value in arguments.items():
        if value:
            raise ValueError(
                f"export does not support `{name}` for a whole Keras model with "
                "te.keras.Embedding. Leave it out, or use a te.keras.TPUEmbedding."
            )
    if isinstance(signatures, Mapping):
        return dict(signatures)
    if tuple(signatures) != KINDS:
        raise ValueError(
            f"The signatures {', '.join(signatures)} are those of features, and the "
            "signature of a Keras model is its inputs. Leave `signatures` out, or pass "
            "a dict of te.serving.Signature."
        )
    inputs, pack = whole.inputs_of_model()
    return {_SERVING_DEFAULT: Signature(inputs, lambda given: Request(pack(given)))}


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


@tf.autograph.experimental.do_not_convert
def _outputs_of_model(
    whole: WeightTables, tables: Mapping[str, Any], request: Request
) -> Any:
    return whole.call_model(request.features, tables)


@dataclasses.dataclass(frozen=True)
class _Served:
    """From the features of a request to outputs."""

    exported: _Exported
    lookup: FeatureLookup
    model: Callable[..., Any] | None

    def outputs(self, request: Request) -> Any:
        """Returns the activations, or what the model makes of them."""
        activations = self._look_up(request.features, request.weights)
        if self.model is None:
            return {
                input_name(spec.path): activation
                for spec, activation in zip(
                    self.exported.plan.user_features,
                    self.exported.structure.flatten("activations", activations),
                    strict=True,
                )
            }
        dense = [dict(request.dense)] if request.dense else []
        return self.model(activations, *dense)

    @tf.autograph.experimental.do_not_convert
    def _look_up(self, features: Any, weights: Any) -> Any:
        structure, specs = self.exported.structure, self.exported.plan.features
        values = structure.for_plan(structure.flatten("features", features))
        flat = structure.for_plan(structure.flatten_weights(weights))
        return structure.pack_joined(self.lookup(specs, values, flat))
