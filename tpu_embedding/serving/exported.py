"""The sources of an export: an embedding's features and a model, or a Keras model."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.checkpoint.stored import (
    SavesTables,
    StoredTables,
    WeightTables,
    tables_of_weights,
)
from tpu_embedding.embedding_v0 import TPUEmbeddingV0
from tpu_embedding.layout.output_shapes import InputShapes
from tpu_embedding.layout.plan import FeatureSpec, Plan, make_plan
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.lookup.input_rows import MAX_SAMPLES
from tpu_embedding.serving.conversion import Source, rows_of
from tpu_embedding.serving.embedding import TPUEmbeddingForServing, find_table
from tpu_embedding.serving.signatures import (
    KINDS,
    Request,
    Signature,
    SignatureOptions,
    input_name,
    make_signature,
)
from tpu_embedding.tf_configs import convert_features

SERVING_DEFAULT = "serving_default"
Compute = Callable[[Request], Any]


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The arguments of `export` that say what signatures take and compute.

    Attributes:
      model: The function of the activations, or None.
      signatures: Names of kinds of signatures, or signatures by name.
      weighted: Paths of the features with weights.
      dense_inputs: The further inputs of `model`.
      most_samples: The largest number of samples in sparse input.
    """

    model: Callable[..., Any] | None
    signatures: Sequence[str] | Mapping[str, Signature]
    weighted: Collection[str]
    dense_inputs: Mapping[str, tf.TensorSpec]
    most_samples: int

    def check(self) -> None:
        """Checks what does not depend on the tables.

        Raises:
          TypeError: If a string stands for a list of names.
          ValueError: If an argument has no use or is out of range.
        """
        for argument in ("signatures", "weighted"):
            value = getattr(self, argument)
            if isinstance(value, str):
                raise TypeError(
                    f"`{argument}` must be a list of names. Received the string "
                    f"{value!r}; pass [{value!r}]."
                )
        if self.dense_inputs and self.model is None:
            raise ValueError(
                "`dense_inputs` are inputs of the model, but there is no model. Pass "
                "`model`, or leave them out."
            )
        errors.check_int("most_samples", self.most_samples, 1)


@dataclasses.dataclass(frozen=True)
class Exported(abc.ABC):
    """Tables, and what signatures compute with them.

    Attributes:
      plan: The tables and features.
      tables: The sources of the tables by index.
      positions: See `FeatureLookup`.
    """

    plan: Plan
    tables: list[Source]
    positions: Mapping[str, int | None] = dataclasses.field(
        default_factory=dict, kw_only=True
    )

    @abc.abstractmethod
    def signatures(self, options: ModelOptions) -> dict[str, Signature]:
        """Returns the signatures by name.

        Raises:
          ValueError: If an option does not fit these features, or has no use here.
        """

    @abc.abstractmethod
    def compute(self, options: ModelOptions, served: Mapping[str, Any]) -> Compute:
        """Returns the function from a Request to outputs that looks up `served`."""

    @abc.abstractmethod
    def users(self, options: ModelOptions) -> Any:
        """Returns the model or layers whose variables the outputs depend on."""

    def require_lookups(self, variables: Iterable[tf.Variable]) -> None:
        """Refuses deltas if functions that read these variables read whole tables."""
        del variables


@dataclasses.dataclass(frozen=True)
class _FeatureModel(Exported):
    """The features of an embedding, and a function of their activations.

    Attributes:
      structure: Structure of the features.
      check_numerics: Whether weights must be finite.
    """

    structure: FeatureStructure
    check_numerics: bool = False

    def signatures(self, options: ModelOptions) -> dict[str, Signature]:
        features = self.plan.user_features
        named, weighted = options.signatures, options.weighted
        paths = [spec.path for spec in features]
        unknown = [path for path in weighted if path not in paths]
        if unknown:
            raise unknown_names("weighted", unknown, paths)
        for name, spec in options.dense_inputs.items():
            _check_dense_input(name, spec)
        if not named:
            raise ValueError("export needs at least one signature.")
        if isinstance(named, Mapping):
            for argument in ("weighted", "dense_inputs"):
                if getattr(options, argument):
                    raise ValueError(
                        f"`{argument}` applies only to the signatures that export "
                        "creates. Your own Signature passes weights and other inputs "
                        f"in its Request: leave `{argument}` out."
                    )
            made = dict(named)
        else:
            asked = SignatureOptions(
                features, self.structure.pack, weighted, options.dense_inputs
            )
            made = {kind: make_signature(kind, asked) for kind in named}
        if options.model is None:
            _require_different_outputs(features)
        return made

    def compute(self, options: ModelOptions, served: Mapping[str, Any]) -> Compute:
        lookup = FeatureLookup(
            self.plan,
            {spec.index: served[spec.name] for spec in self.plan.tables},
            options.most_samples,
            check_numerics=self.check_numerics,
            any_batch_size=True,
            positions=self.positions,
        )

        def outputs(request: Request) -> Any:
            activations = self._look_up(lookup, request)
            if options.model is None:
                flat = self.structure.flatten("activations", activations)
                names = [input_name(spec.path) for spec in self.plan.user_features]
                return dict(zip(names, flat, strict=True))
            dense = [dict(request.dense)] if request.dense else []
            return options.model(activations, *dense)

        return outputs

    @tf.autograph.experimental.do_not_convert
    def _look_up(self, lookup: FeatureLookup, request: Request) -> Any:
        structure = self.structure
        values = structure.for_plan(structure.flatten("features", request.features))
        weights = structure.for_plan(structure.flatten_weights(request.weights))
        return structure.pack_joined(lookup(self.plan.features, values, weights))

    def users(self, options: ModelOptions) -> Any:
        return options.model


@dataclasses.dataclass(frozen=True)
class _WholeModel(Exported):
    """A Keras model with te.keras.Embedding, from its inputs to its outputs."""

    model: WeightTables

    def signatures(self, options: ModelOptions) -> dict[str, Signature]:
        most = options.most_samples
        unused = {
            "model": options.model,
            "weighted": options.weighted,
            "dense_inputs": options.dense_inputs,
            "most_samples": None if most == MAX_SAMPLES else most,
        }
        for name, value in unused.items():
            if value:
                raise ValueError(
                    f"export does not support `{name}` for a whole Keras model with "
                    "te.keras.Embedding. Leave it out, or use a te.keras.TPUEmbedding."
                )
        named = options.signatures
        if isinstance(named, Mapping):
            return dict(named)
        if tuple(named) != KINDS:
            raise ValueError(
                f"The signatures {', '.join(named)} describe features, but a Keras "
                "model is exported with its own inputs. Leave `signatures` out, or "
                "pass a dict of te.serving.Signature."
            )
        inputs, pack = self.model.inputs_of_model()
        return {SERVING_DEFAULT: Signature(inputs, lambda given: Request(pack(given)))}

    def compute(self, options: ModelOptions, served: Mapping[str, Any]) -> Compute:
        return functools.partial(self._outputs, served)

    @tf.autograph.experimental.do_not_convert
    def _outputs(self, served: Mapping[str, Any], request: Request) -> Any:
        return self.model.call_model(request.features, served)

    def users(self, options: ModelOptions) -> Any:
        return self.model.other_layers()

    def require_lookups(self, variables: Iterable[tf.Variable]) -> None:
        read = {id(variable) for variable in variables}
        for table in self.model.tables().values():
            if any(id(variable) in read for variable in table.variables()):
                raise NotImplementedError(
                    f"The model reads the whole table {table.spec.name!r} (as tied "
                    "logits do), but deltas change only what lookups read. Leave "
                    "`deltas` out, and export the model again."
                )


def read_source(source: Any, feature_config: Any, invalid_ids: Any) -> Exported:
    """Reads the first argument of `export`.

    Raises:
      TypeError: If it is nothing that can be exported.
      ValueError: If `feature_config` or `invalid_ids` do not fit it.
    """
    whole = tables_of_weights(source)
    embeddings = (SavesTables, TPUEmbeddingForServing, TPUEmbeddingV0)
    if whole is None and not isinstance(source, embeddings):
        return _read_dict(source, feature_config, invalid_ids)
    if feature_config is not None:
        raise ValueError(
            "export takes `feature_config` only with a dict of tables: an embedding "
            "has its own. Leave it out."
        )
    if invalid_ids is not None:
        raise ValueError(
            "export takes `invalid_ids` only with a dict of tables: an embedding keeps "
            "the rule that it was created with. Leave it out."
        )
    if whole is not None:
        return _WholeModel(whole.plan, _sources(whole), whole)
    core: Any = source.core
    if isinstance(source, TPUEmbeddingV0):
        tables = _gathered(core.plan, source.embedding_tables)
    else:
        tables = _sources(core)
    plan, positions = _with_known_shapes(core.plan, core.inputs)
    return _FeatureModel(
        plan, tables, core.structure, core.check_numerics, positions=positions
    )


def _read_dict(tables: Any, feature_config: Any, invalid_ids: Any) -> Exported:
    if not isinstance(tables, Mapping):
        raise TypeError(
            "The first argument of export must be a TPUEmbedding, a TPUEmbeddingV2, a "
            "TPUEmbeddingV0, a TPUEmbeddingForServing, a te.keras.TPUEmbedding, a "
            "Keras model with te.keras.Embedding (te.keras.convert replaces "
            "keras.layers.Embedding), or, with `feature_config`, a dict from "
            "TableConfig to table. For a Keras model with a te.keras.TPUEmbedding, "
            "pass that layer, and the rest of the model as `model`. Received: "
            f"{tables!r}."
        )
    if feature_config is None:
        raise ValueError(
            "export needs `feature_config` for a dict of tables, to know which feature "
            "looks up which table."
        )
    plan = make_plan(*convert_features(feature_config, invalid_ids), None, custom=True)
    structure = FeatureStructure(feature_config, plan.features)
    return _FeatureModel(plan, _gathered(plan, tables), structure)


def _sources(tables: StoredTables) -> list[Source]:
    found = []
    tables.refresh()
    for table in tables.tables().values():
        rows, ids = table.ids.served()
        found.append(Source(table.spec.name, rows, ids))
    return found


def _gathered(plan: Plan, tables: Mapping[Any, Any]) -> list[Source]:
    paths = [plan.features[spec.features[0]].path for spec in plan.tables]
    return [
        Source(spec.name, rows_of(find_table(spec, tables, path, arrays=True)))
        for spec, path in zip(plan.tables, paths, strict=True)
    ]


def _with_known_shapes(
    plan: Plan, inputs: InputShapes | None
) -> tuple[Plan, dict[str, int | None]]:
    """Gives features the axes after the batch that build() or training batches had.

    `FeatureConfig.output_shape` takes precedence, and ragged rows fill it. Otherwise
    a ragged row is one sample: of n ids if the inputs of training were [B, n, 1].
    """
    if inputs is None:
        return plan, {}
    features: list[FeatureSpec] = []
    positions: dict[str, int | None] = {}
    for spec in plan.features:
        config, inner = spec.config, inputs.inner(spec.index)
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
    return dataclasses.replace(plan, features=tuple(features)), positions


def _require_different_outputs(features: Sequence[FeatureSpec]) -> None:
    """Checks that no two features have one name where activations are outputs."""
    taken: dict[str, str] = {}
    for spec in features:
        name = input_name(spec.path)
        if name in taken:
            raise ValueError(
                f"Both feature {taken[name]} and feature {spec.path} would be the "
                f"output {name!r} of the exported model. Rename one of them in the "
                "feature configuration, or pass a `model` that names its outputs."
            )
        taken[name] = spec.path


def _check_dense_input(name: str, spec: Any) -> None:
    batched = isinstance(spec, tf.TensorSpec) and spec.shape.rank
    if not batched or None in spec.shape.as_list()[1:] or spec.shape[0] is not None:
        raise ValueError(
            f"`dense_inputs[{name!r}]` must be a tf.TensorSpec whose first axis is the "
            "batch, [None, ...], and whose other axes are known. Received: "
            f"{spec!r}."
        )


def unknown_names(
    argument: str, names: Iterable[str], known: Iterable[str]
) -> ValueError:
    """Returns the error for an argument with names that are not `known`."""
    return ValueError(
        f"`{argument}` names {', '.join(names)}. Known names: {', '.join(known)}."
    )
