"""The Keras layer: lookups in the forward pass, updates in the backward pass."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tpu_embedding import distribution
from tpu_embedding.checkpoint.stored import SavesTables
from tpu_embedding.checkpoint.trackable import RestoresLayouts
from tpu_embedding.config import (
    DistributedOptions,
    FeatureConfig,
    SparseCoreEmbeddingConfig,
)
from tpu_embedding.errors import argument_type, check_flag
from tpu_embedding.keras import gradient_hook, serialization, symbols
from tpu_embedding.keras.conversion import Features, convert_features, convert_serving
from tpu_embedding.keras.gradient_hook import (
    check_loss_scale,
    encode_loss_scale,
    loss_scale_missing,
)
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.layer_tables import (
    EngineTrainedTables,
    KerasTrainedTables,
    LayerTables,
)
from tpu_embedding.keras.serialization import ServingFeatures
from tpu_embedding.layout.plan import refuse_growing
from tpu_embedding.packing import flatten_batch
from tpu_embedding.tables.growing import FrozenTable
from tpu_embedding.tables.trackable import LogicalVariable, SavesNothing
from tpu_embedding.tables.waiting import is_recording
from tpu_embedding.vocabulary import VocabularyContents

_EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
_SparseCoreConfigs = (
    SparseCoreEmbeddingConfig,
    tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Arguments:
    """The constructor's arguments, for `get_config`."""

    feature_config: Any
    optimizer: Any
    pipeline_execution_with_tensor_core: bool
    batch_size: int | None
    embedding_feature: Any
    sparse_core_embedding_config: Any
    trainable_tables: bool
    loss_scale: Any
    invalid_ids: str | None
    check_numerics: bool
    distributed_options: DistributedOptions | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Built:
    """The state of the layer in one object: Keras would wrap lists and dicts."""

    arguments: _Arguments
    features: Features
    tables: LayerTables


@keras_api.register
class TPUEmbedding(SavesTables, RestoresLayouts, keras_api.Layer):
    """Embedding tables as a Keras layer; each table has its own optimizer.

    >>> import keras
    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> import tpu_embedding.keras
    >>> films = te.TableConfig(8, 2, initializer=te.RowIdInitializer())
    >>> layer = te.keras.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    >>> inputs = {"film": keras.Input((), dtype="int64", name="film")}
    >>> model = keras.Model(inputs, layer(inputs)["film"])
    >>> model({"film": tf.constant([3, 5])}).numpy().tolist()
    [[3.0, 3.0], [5.0, 5.0]]

    The tables do not appear in `trainable_variables`; a single scalar, the placeholder
    variable, represents them. Computing the gradient of a loss with respect to it
    applies the gradients of the activations: the optimizers update the tables at once.
    Custom loops and `model.fit` therefore train the tables without
    changes. Each call of the layer is a batch with its own update; all calls of a step
    see the tables as they were before the first of these updates. Calls without a
    tf.GradientTape update nothing.

    Tables and slots are weights that are not trainable: `get_weights`, `summary` and
    callbacks such as EarlyStopping see them. Files contain them by name, without the
    placeholder variable.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        pipeline_execution_with_tensor_core: bool = False,
        batch_size: int | None = None,
        embedding_feature: Any = None,
        sparse_core_embedding_config: Any = None,
        *,
        trainable_tables: bool = False,
        loss_scale: Any = None,
        invalid_ids: str | None = None,
        check_numerics: bool = False,
        distributed_options: DistributedOptions | None = None,
        **kwargs: Any,
    ) -> None:
        """Checks the configuration; `build` or the first call creates the tables.

        Args:
          feature_config: A FeatureConfig or a nested dict, list, tuple or namedtuple
            of them, of this package or of tf.tpu.experimental.embedding.
          optimizer: The optimizer of tables without their own: one of this package, of
            tf.tpu.experimental.embedding, of Keras 3 or tf_keras (see
            `tpu_embedding.keras.translate_keras_optimizer`), or "sgd", "adagrad" (with
            a learning rate of 0.001, as in Keras), "adam" or "ftrl" for those of this
            package; None: lookups only. TableConfig.optimizer accepts the same.
          pipeline_execution_with_tensor_core: On TPU v2 to v4, delay each update by
            one step. Elsewhere the layer logs a warning and updates at once.
          batch_size: The global size of every batch, or None for any. Exported graphs
            accept any size. TPUs need it, unless the shapes of the inputs or
            FeatureConfig.output_shape contain the batch size of a replica.
          embedding_feature: None, or the EmbeddingFeature of TensorFlow that the
            strategy's TPUs must have. Ignored on CPU and GPU.
          sparse_core_embedding_config: A SparseCoreEmbeddingConfig, of this package or
            of TensorFlow, or None for its defaults. Ignored without SparseCores.
          trainable_tables: Make the tables ordinary trainable weights, which the
            optimizer of the model trains, as TFRS does on a CPU.
          loss_scale: The factor of the loss: None, a number, a Keras optimizer (a
            LossScaleOptimizer, or one with a `loss_scale_factor`) or a callable that
            returns one of these. The layer divides gradients by it. If a divided
            gradient of a call is not finite, all gradients of the call count as 0, or
            raise an error with `check_numerics`. Required whenever the loss is scaled.
          invalid_ids: The policy for tables of tf.tpu.experimental.embedding: "error"
            (the default), "drop" or "mod". A TableConfig of this package has its own.
          check_numerics: Raise an error for weights and gradients that are not finite.
          distributed_options: How the processes of a MultiWorkerMirroredStrategy share
            the tables; None means the defaults of DistributedOptions.
          **kwargs: Arguments of keras.layers.Layer: name, trainable, dtype.

        Raises:
          ValueError: If the configuration is wrong, an option is not supported, or
            `trainable_tables` is combined with an option for updates.
          TypeError: If an argument is of the wrong type.
          NotImplementedError: If an argument is not supported by this release.
          RuntimeError: If Keras does not run on TensorFlow.
        """
        super().__init__(**kwargs)
        arguments = _Arguments(
            feature_config=feature_config,
            optimizer=optimizer,
            pipeline_execution_with_tensor_core=pipeline_execution_with_tensor_core,
            batch_size=batch_size,
            embedding_feature=embedding_feature,
            sparse_core_embedding_config=sparse_core_embedding_config,
            trainable_tables=trainable_tables,
            loss_scale=loss_scale,
            invalid_ids=invalid_ids,
            check_numerics=check_numerics,
            distributed_options=distributed_options,
        )
        check_flag(
            "pipeline_execution_with_tensor_core",
            arguments.pipeline_execution_with_tensor_core,
        )
        check_flag("trainable_tables", arguments.trainable_tables)
        check_loss_scale(arguments.loss_scale)
        topology = distribution.current()
        _check_hints(arguments, topology)
        features = convert_features(
            arguments.feature_config, arguments.optimizer, arguments.invalid_ids
        )
        tables = _create_tables(arguments, features, topology)
        self._built = _Built(arguments, features, tables)
        self._has_tables = False
        self._refused_load = None

    def build(self, input_shape: Any = None) -> None:
        """Creates tables and slots.

        Args:
          input_shape: The shapes of a replica's inputs, in the structure of
            `feature_config`. Only TPUs need them, to learn the batch size if no
            argument of the layer contains it.

        Raises:
          ValueError: If the loss will be scaled and `loss_scale` is not given, or if a
            TPU needs a shape that is not known.
        """
        if self._has_tables:
            return
        arguments, tables = self._built.arguments, self._built.tables
        scaled = keras_api.policy_of_scaled_loss(self)
        if scaled and not arguments.trainable_tables and arguments.loss_scale is None:
            raise loss_scale_missing(f"Under the dtype policy {scaled!r}")
        tables.build(self, input_shape)
        self._has_tables = True
        for name, child in (tables.variables() | tables.core.growing()).items():
            keras_api.track(self, child, name)
        self.built = True

    def __call__(
        self,
        features: Any,
        weights: Any = None,
        serving_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """See `call`."""
        if not self._has_tables:
            self.built = False  # Keras sets it after `build_from_config`.
        if (
            serving_config is not None
            and not isinstance(serving_config, (ServingFeatures, str))
            and keras_api.is_symbolic((features, weights))
        ):
            # Keras saves the arguments of symbolic calls.
            self._convert_serving(serving_config)  # Raises errors for wrong ones.
            serving_config = keras_api.saved_argument(
                ServingFeatures.of(serving_config, self._table_keys())
            )
        return super().__call__(
            features, weights=weights, serving_config=serving_config, **kwargs
        )

    def call(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """Looks up a batch.

        Args:
          features: The structure of `feature_config` (or of `serving_config`), with a
            tf.Tensor, tf.SparseTensor or tf.RaggedTensor of int32, int64 or whole
            floating point numbers for each feature; or, except in a functional model, a
            result of `te.pack`. On CPUs an id may be a scalar, with activation [dim].
          weights: None, or the same structure with floating point weights, each in
            the layout of its feature, or None for features without weights. On CPUs a
            tf.GradientTape computes their gradients, as for any input.
          serving_config: FeatureConfigs of other features of the layer's tables.
            Such a lookup consists of TensorFlow ops and updates nothing.

        Returns:
          The activations in the same structure, each [output shape..., dim], of the
          layer's compute dtype.

        Raises:
          ValueError: If features or weights are refused; TPUEmbedding.enqueue lists all
            errors.
          NotImplementedError: In `stateless_call`, unless `trainable_tables=True`.
        """
        if keras_api.is_stateless() and not self._built.arguments.trainable_tables:
            raise NotImplementedError(
                "`stateless_call` passes the values of all weights, but the tables of "
                "tpu_embedding.keras.TPUEmbedding are looked up and updated in place. "
                "Call the layer, or create it with `trainable_tables=True`."
            )
        if keras_api.is_inferring_shapes():
            return self.compute_output_spec(features, weights, serving_config)
        return self._look_up(features, weights, serving_config)

    @tf.autograph.experimental.do_not_convert
    def compute_output_spec(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """Checks the arguments of a call without values; returns KerasTensors.

        Keras calls it while it builds a functional model.
        """
        wanted = self._built.features
        if serving_config is not None:
            wanted = self._convert_serving(serving_config)
        structure = wanted.structure
        values, flat_weights = flatten_batch(structure, features, weights)
        ids = [keras_api.symbol(value) for value in values]
        of_weights = [
            None if weight is None else keras_api.symbol(weight)
            for weight in flat_weights
        ]
        alone = [
            self._stands_alone(spec.config, symbol.dense_rank)
            for spec, symbol in zip(wanted.plan.features, ids, strict=True)
        ]
        shapes = symbols.output_shapes(
            wanted.plan,
            symbols.as_samples(ids, alone),
            symbols.as_samples(of_weights, alone),
        )
        core = self._built.tables.core
        if serving_config is None and core is not None:
            for spec, symbol in zip(wanted.plan.features, ids, strict=True):
                core.inputs.add(spec.index, symbol.shape)
        shapes = [
            (*symbol.shape, shape[-1]) if each else shape
            for symbol, shape, each in zip(ids, shapes, alone, strict=True)
        ]
        joined = structure.join_shapes(shapes)
        return structure.pack(
            [keras_api.placeholder(shape, self.compute_dtype) for shape in joined]
        )

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shapes of the activations.

        Args:
          input_shape: The shape of each feature with its batch axis, in the structure
            of `feature_config`.
        """
        plan, structure = self._built.features.plan, self._built.features.structure
        leaves = structure.flatten("input_shape", input_shape, container_leaves=True)
        ids = [
            symbols.from_shape(spec.path, leaf)
            for spec, leaf in zip(plan.features, leaves, strict=True)
        ]
        return structure.pack(symbols.output_shapes(plan, ids, [None] * len(ids)))

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """The table variables, [vocabulary_size, dim] of TableConfig.dtype.

        The keys are the TableConfigs that the user passed. Reading this property builds
        the layer. Under a TPU strategy the values are not variables, but are read and
        assigned like variables, outside of graphs.

        Raises:
          RuntimeError: While a tf.GradientTape records, unless the tables are ordinary
            weights or not trainable: a gradient would not reach them.
        """
        self._ensure_built()
        by_engine = self.trainable and not self._built.arguments.trainable_tables
        if by_engine and is_recording():
            raise RuntimeError(
                "`embedding_tables` was read while a tf.GradientTape records. Values "
                "computed from a table, such as tied logits, would not train it: only "
                "lookups do. Create the layer with `trainable_tables=True`, or use "
                "tpu_embedding.keras.Embedding; or, if these values need not train the "
                "table, read it before the tape or within `tape.stop_recording()`."
            )
        found = self._built.tables.parameters()
        return {s.key: found[s.name] for s in self._built.features.plan.tables}

    @property
    def vocabularies(self) -> dict[Any, VocabularyContents]:
        """The ids of growing tables; see `TPUEmbedding.vocabularies`."""
        if self._built.arguments.trainable_tables:
            return {}
        return self.core.vocabularies()

    def freeze_vocabulary(self, table: Any) -> FrozenTable:
        """See `TPUEmbedding.freeze_vocabulary`."""
        return self.core.freeze_vocabulary(table)

    def evict(self, table: Any) -> int:
        """See `TPUEmbedding.evict`."""
        return self.core.evict(table)

    def update_embedding_table(self, table: Any, embedding_table: Any) -> None:
        """Assigns new values to a table and keeps its slots.

        Args:
          table: A key of `embedding_tables`.
          embedding_table: The values, [vocabulary_size, dim] of any floating dtype; a
            bfloat16 table takes the nearest ones.

        Raises:
          ValueError: If the layer has no such table, or the shape differs.
        """
        tables = self.embedding_tables
        if table not in tables:
            raise ValueError(
                f"The layer has no table for {table!r}. The keys of "
                "`layer.embedding_tables` are its TableConfig objects."
            )
        tables[table].assign(tf.cast(embedding_table, tables[table].dtype))

    @property
    def core(self) -> Any:
        # The tables for other modules of this package. Builds the layer.
        self._ensure_built()
        return self._built.tables.core

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as JSON.

        Raises:
          ValueError: If an initializer, a learning rate or another object cannot be
            serialized by Keras, or features are in a namedtuple.
        """
        arguments = self._built.arguments
        hint, distributed = arguments.embedding_feature, arguments.distributed_options
        return {
            **super().get_config(),  # pyright: ignore[reportAttributeAccessIssue]
            **vars(arguments),
            "feature_config": serialization.encode_features(
                arguments.feature_config, arguments.invalid_ids
            ),
            "optimizer": serialization.encode_optimizer(
                arguments.optimizer, "the layer"
            ),
            "embedding_feature": None if hint is None else hint.name,
            "sparse_core_embedding_config": serialization.encode_sparse_core(
                arguments.sparse_core_embedding_config
            ),
            "loss_scale": encode_loss_scale(arguments.loss_scale),
            "invalid_ids": None,  # The tables of `feature_config` have it.
            "distributed_options": distributed and dataclasses.asdict(distributed),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Creates a layer from `get_config`, with new TableConfig objects."""
        arguments = dict(config)
        arguments["feature_config"] = serialization.decode_features(
            config["feature_config"]
        )
        arguments["invalid_ids"] = None  # Old files have it beside the tables.
        arguments["optimizer"] = serialization.decode_optimizer(config["optimizer"])
        arguments["loss_scale"] = serialization.decode_object(config["loss_scale"])
        hint = config["embedding_feature"]
        arguments["embedding_feature"] = hint and _EmbeddingFeature[hint]
        stacks = config["sparse_core_embedding_config"]
        arguments["sparse_core_embedding_config"] = stacks and (
            SparseCoreEmbeddingConfig(**stacks)
        )
        distributed = config.get("distributed_options")  # Old files lack it.
        arguments["distributed_options"] = distributed and (
            DistributedOptions(**distributed)
        )
        return cls(**arguments)

    def get_build_config(self) -> dict[str, Any] | None:
        """Returns a config without shapes, as copies may differ; None if not built."""
        return {"input_shape": None} if self._has_tables else None

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Builds a layer that is being loaded, unless a TPU needs shapes first."""
        del config
        if self._built.tables.can_build():
            self.build()

    def save_own_variables(self, store: Any) -> None:
        """Writes tables and slots by name, without the placeholder variable."""
        self._ensure_built()
        tables = self._built.tables
        serialization.save_state(tables.variables(), tables.core.growing(), store)
        serialization.save_hashings(self._built.features.plan, store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote.

        Raises:
          ValueError: If the file lacks a table or slot, or one has another shape or
            another Hashing.
        """
        self._ensure_built()
        tables = self._built.tables
        try:
            serialization.check_hashings(self._built.features.plan, store)
            serialization.load_state(
                self.name, tables.variables(), tables.core.growing(), store
            )
        except ValueError as error:
            # Keras tries again at other places of the file and shows the last error.
            if store.keys() or self._refused_load is None:
                self._refused_load = error
                raise
            raise ValueError(
                f"The layer {self.name!r} cannot load its data, and the file has no "
                f"other data for it. The first error: {self._refused_load}"
            ) from error
        self._refused_load = None
        tables.core.tables_replaced()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "checkpoint":
            if gradient_hook.is_export():  # tf_keras looks for hash tables here.
                stored = enumerate(self._built.tables.stored())
                modules = {f"_{i}": v for i, v in stored if isinstance(v, tf.Module)}
                children = {**children, **modules}
            return children  # Tables and slots; the views for Keras are not attributes.
        # Exported graphs refer to tables and to the placeholder variable, not to slots.
        tables = self._built.tables
        stored = tables.stored()
        slots: set[int] = set()
        if not keras_api.saves_training():
            saved = tables.variables() | tables.core.growing()
            slots.update(map(id, saved.values()))
            slots.difference_update(map(id, stored))
        kept = [*stored, *map(keras_api.value_of, self.weights)]
        found = {
            **{n: c for n, c in children.items() if not isinstance(c, LogicalVariable)},
            **{f"_weight_{i}": v for i, v in enumerate(kept) if _is_saved(v)},
        }
        return {name: child for name, child in found.items() if id(child) not in slots}

    @property
    def _hashing_records(self) -> Mapping[str, Any]:
        core = self._built.tables.core  # None before it is built on TPUs.
        return {} if core is None else core.hashing_records

    @property
    def _table_names(self) -> list[str]:
        return [spec.name for spec in self._built.features.plan.tables]

    @tf.autograph.experimental.do_not_convert  # tf_keras converts `call`.
    def _look_up(self, features: Any, weights: Any, serving_config: Any) -> Any:
        built = self._built
        wanted = built.features
        if serving_config is not None:
            wanted = self._convert_serving(serving_config)
        structure = wanted.structure
        with self._refusing(serving_config):
            values, flat_weights = flatten_batch(structure, features, weights)
        if keras_api.is_tracing_shapes():
            values = _with_integer_ids(values)
        given = values
        alone = [
            self._stands_alone(spec.config, _rank_of(value))
            for spec, value in zip(wanted.plan.features, values, strict=True)
        ]
        if any(alone):
            values = _as_samples(values, alone)
            flat_weights = _as_samples(flat_weights, alone)
        if serving_config is None:
            activations = built.tables.look_up(
                values, flat_weights, trainable=self.trainable
            )
        else:
            activations = built.tables.serve(
                wanted.plan, values, flat_weights, trainable=self.trainable
            )
        if self.compute_dtype != "float32":
            activations = [tf.cast(a, self.compute_dtype) for a in activations]
        if any(alone):
            activations = [
                _of_shape(activation, value) if each else activation
                for activation, value, each in zip(
                    activations, given, alone, strict=True
                )
            ]
        activations = structure.join(activations)
        specs = wanted.plan.user_features
        sequences = any(f.config.max_sequence_length for f in specs)
        # A TPU program takes only its arguments.
        if sequences and distribution.current().program() is None:
            ids_of_user = structure.of_user(values)
            for spec, ids, activation in zip(
                specs, ids_of_user, activations, strict=True
            ):
                if spec.config.max_sequence_length:
                    masked: Any = activation
                    masked._keras_mask = _sequence_mask(spec.config, ids)
        return structure.pack(activations)

    def _refusing(self, serving_config: Any) -> contextlib.AbstractContextManager[None]:
        if serving_config is not None:  # Such a lookup is not collective.
            return contextlib.nullcontext()
        return self._built.tables.refusing(trainable=self.trainable)

    def _stands_alone(self, config: FeatureConfig, rank: int | None) -> bool:
        """Returns whether each id of a dense input of this rank must become a sample.

        A scalar always must. Other ids must if the layer keeps the axes of dense ids,
        unless the configuration says what the axes are.
        """
        if rank is None or rank == 1:
            return False
        declared = config.output_shape is not None or config.max_sequence_length
        return rank == 0 or (self._keeps_axes() and not declared)

    def _keeps_axes(self) -> bool:
        """Returns whether dense [..., k] gives [..., k, dim]; subclasses may do so."""
        return False

    def _convert_serving(self, serving_config: Any) -> Features:
        """Converts a `serving_config`, also one that was encoded for a file."""
        if isinstance(serving_config, str):  # See `keras_api.saved_argument`.
            serving_config = ServingFeatures(**json.loads(serving_config))
        if isinstance(serving_config, ServingFeatures):
            serving_config = serving_config.over(self._table_keys())
        return convert_serving(serving_config, self._built.features)

    def _table_keys(self) -> list[Any]:
        return [spec.key for spec in self._built.features.plan.tables]

    def _ensure_built(self) -> None:
        if not self._has_tables:
            with keras_api.name_scope(self):
                self.build()


def _is_saved(value: Any) -> bool:
    kinds = (tf.Variable, tf.Module)  # A growing table is a module.
    return isinstance(value, kinds) and not isinstance(value, SavesNothing)


def _with_integer_ids(values: Sequence[Any]) -> list[Any]:
    """Casts the ids of a call that Keras traces for shapes only.

    With several replicas, `fit` and `evaluate` build a model with the mean of the
    replicas' first batches, in which ids are floating point.
    """
    return [
        tf.cast(value, tf.int64)
        if tf.is_tensor(value) and value.dtype.is_floating
        else value
        for value in values
    ]


def _sequence_mask(config: FeatureConfig, ids: Any) -> tf.Tensor:
    """Returns which positions of a sequence have an entry, bool [B, L]."""
    length, table = config.max_sequence_length, config.table
    flat = ids if isinstance(ids, tf.Tensor) else ids.values
    valid = tf.ones_like(flat, tf.bool)
    if table.invalid_ids == "drop":
        valid = (flat >= 0) & (flat < table.vocabulary_size)
    if isinstance(ids, tf.SparseTensor):
        # tf.sparse.to_dense cannot be used, because a row may have any length.
        present = valid & (ids.indices[:, 1] < length)
        places = tf.boolean_mask(ids.indices, present)
        shape = (ids.dense_shape[0], length)
        return tf.scatter_nd(places, tf.ones_like(places[:, 0]), shape) > 0
    rows: Any = tf.RaggedTensor
    rows = rows.from_tensor(valid) if flat is ids else ids.with_values(valid)
    return rows.to_tensor(False, shape=(None, length))


def _rank_of(value: Any) -> int | None:
    """Returns the rank of a dense input, else None."""
    return value.shape.rank if isinstance(value, tf.Tensor) else None


def _as_samples(values: Sequence[Any], alone: Sequence[bool]) -> list[Any]:
    """Makes each id or weight that stands alone a sample, as TFRS takes it."""
    return [
        tf.reshape(value, [-1]) if each and isinstance(value, tf.Tensor) else value
        for value, each in zip(values, alone, strict=True)
    ]


def _of_shape(activation: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Gives the activations of ids that stand alone the shape of the ids."""
    axes = tf.concat([tf.shape(ids), tf.shape(activation)[1:]], 0)
    shaped = tf.reshape(activation, axes)
    return tf.ensure_shape(shaped, ids.shape.concatenate(activation.shape[1:]))


def _check_hints(arguments: _Arguments, topology: distribution.Topology) -> None:
    """Checks the arguments that describe TPUs."""
    hint = arguments.embedding_feature
    if hint is not None and not isinstance(hint, _EmbeddingFeature):
        raise argument_type("embedding_feature", hint, "None or an EmbeddingFeature")
    config = arguments.sparse_core_embedding_config
    if config is not None and not isinstance(config, _SparseCoreConfigs):
        raise argument_type(
            "sparse_core_embedding_config",
            config,
            "None or a SparseCoreEmbeddingConfig",
        )
    if hint is not None and not topology.has_feature(hint.name):
        assert topology.tpu is not None
        raise ValueError(
            f"`embedding_feature` is {hint.name}, but the strategy's TPUs are "
            f"{topology.tpu.generation.name}. Leave it at None: the layer uses the "
            "TPUs of the strategy."
        )


def _create_tables(
    arguments: _Arguments, features: Features, topology: distribution.Topology
) -> LayerTables:
    pipelined = arguments.pipeline_execution_with_tensor_core
    if arguments.trainable_tables:
        reason = "`trainable_tables=True` does not support"
        refuse_growing(features.plan.tables, reason)
        for option in ("batch_size", "loss_scale", "distributed_options"):
            value = getattr(arguments, option)
            if value is not None:
                raise ValueError(
                    "With `trainable_tables=True` the tables are ordinary weights, "
                    f"which do not support `{option}={value!r}`. Leave it at None."
                )
    if pipelined and (arguments.trainable_tables or topology.engine != "tpu_v2_v4"):
        # Evaluation, export, get_weights and callbacks read the tables without a
        # chance to apply a pending update first; TPU v2 to v4 apply it themselves.
        logging.log_first_n(
            logging.WARNING,
            "tpu_embedding.keras.TPUEmbedding ignores "
            "`pipeline_execution_with_tensor_core=True` except on TPU v2 to v4: it "
            "applies each update at once. To pipeline on other devices, use "
            "tpu_embedding.TPUEmbedding or TPUEmbeddingV2 in a custom loop.",
            1,
        )
        pipelined = False
    if arguments.trainable_tables:
        return KerasTrainedTables(
            features, topology, check_numerics=arguments.check_numerics
        )
    return EngineTrainedTables(
        features,
        topology,
        pipelined=pipelined,
        batch_size=arguments.batch_size,
        sparse_core=arguments.sparse_core_embedding_config,
        loss_scale=arguments.loss_scale,
        check_numerics=arguments.check_numerics,
        distributed=arguments.distributed_options,
    )
