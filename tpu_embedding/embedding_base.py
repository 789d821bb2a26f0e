"""The base class of TPUEmbedding and TPUEmbeddingV2."""

from __future__ import annotations

from typing import Any, ClassVar

from tpu_embedding import distribution, engines
from tpu_embedding.checkpoint.trackable import TrackableTables
from tpu_embedding.core import Core, do_not_convert
from tpu_embedding.distribution import Topology
from tpu_embedding.engines import EmbeddingOptions
from tpu_embedding.engines.process_group import calling
from tpu_embedding.layout.plan import make_plan
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.tables.growing import FrozenTable
from tpu_embedding.tf_configs import (
    check_batch_size,
    convert_features,
    convert_optimizer,
    freeze_configs,
)
from tpu_embedding.vocabulary import VocabularyContents


class EmbeddingBase(TrackableTables):
    """Tables that an engine holds; an abstract class."""

    # Whether the class hands out stacks, even if the engine stores none.
    _hands_out_stacks: ClassVar[bool] = False
    core: Core

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        options: EmbeddingOptions,
        *,
        invalid_ids: str | None = None,
        custom: bool = False,
    ) -> None:
        """Reads the configuration.

        Args:
          feature_config: A FeatureConfig or a nested structure of them.
          optimizer: The optimizer of tables without one of their own, or None.
          options: The options of the engine.
          invalid_ids: The policy for tables of tf.tpu.experimental.embedding, or None.
          custom: Whether tables may have a CustomOptimizer or a CustomCombiner.

        Raises:
          Exception: The errors of TPUEmbedding and TPUEmbeddingV2.
        """
        converted = convert_features(feature_config, invalid_ids)
        plan = make_plan(
            *converted, convert_optimizer(optimizer), custom=custom, growing=True
        )
        self._structure = FeatureStructure(feature_config, plan.features)
        topology = distribution.current()
        self.core = Core(
            plan,
            self._structure,
            options,
            topology=topology,
            engine_class=engines.choose(topology, plan),
            hands_out_stacks=self._hands_out_stacks,
            on_created=self._track_state,
            made_by=type(self).__name__,
        )
        freeze_configs(feature_config)

    @do_not_convert
    def flush(self) -> None:
        """Applies the update that pipelining left pending, if there is one."""
        self.core.flush()

    @do_not_convert
    def reset(self) -> None:
        """Discards queued batches, owed gradients and pending updates, not the tables.

        Call it after an error or an interrupt in the middle of a step.

        Raises:
          NotImplementedError: On TPU v2 to v4, where only initializing the TPU discards
            them: save a checkpoint before that, and restore it afterwards.
        """
        engine = self.core.engine_to_synchronize()
        if engine is not None:
            engine.reset()

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """The tables, [vocabulary_size, dim] of their dtype.

        The keys are the TableConfigs that the user passed. The values are variables;
        on SparseCores, where tables are stacked and divided, they are tensors with the
        current values. A pending update is applied first.

        Raises:
          RuntimeError: On TPU v2 to v4, because the tables are in the TPU's memory:
            restore a checkpoint of them into an embedding created outside of the
            strategy.
        """
        return {key: table["parameters"] for key, table in self.variables.items()}

    @property
    def vocabularies(self) -> dict[Any, VocabularyContents]:
        """The ids of growing tables, with the row of each.

        The keys are the TableConfigs that the user passed; tables that do not grow are
        left out.

        >>> import tensorflow as tf
        >>> import tpu_embedding as te
        >>> films = te.TableConfig(te.GrowingVocabulary(1000), 2)
        >>> embedding = te.TPUEmbedding(te.FeatureConfig(films), te.SGD(0.5))
        >>> embedding.enqueue(tf.constant([7, -3, 7], tf.int64))
        >>> embedding.apply_gradients(tf.zeros_like(embedding.dequeue()))
        >>> found = embedding.vocabularies[films]
        >>> found.ids.tolist(), found.rows.tolist()
        ([-3, 7], [1, 0])
        """
        return self.core.vocabularies()

    def freeze_vocabulary(self, table: Any) -> FrozenTable:
        """Returns a static copy of a growing table, for any engine.

        Args:
          table: The TableConfig of the growing table.

        Raises:
          ValueError: If the embedding has no such growing table.
          NotImplementedError: With `unknown="initializer"`: each id has its own values.
        """
        return self.core.freeze_vocabulary(table)

    @do_not_convert
    def evict(self, table: Any) -> int:
        """Evicts rows of a growing table now, not when new ids need them.

        With eviction="lru" or "lfu", it evicts rows in that order until `min_rows` are
        left; with "age", it evicts all that are too old. Rows that a lookup will still
        train stay. A pending update is applied first.

        >>> import tensorflow as tf
        >>> import tpu_embedding as te
        >>> vocabulary = te.GrowingVocabulary(1000, eviction="lru", min_rows=1)
        >>> films = te.TableConfig(vocabulary, 2)
        >>> embedding = te.TPUEmbedding(te.FeatureConfig(films), te.SGD(0.5))
        >>> for film in (7, 9, 8):
        ...     embedding.enqueue(tf.constant([film]))
        ...     embedding.apply_gradients(tf.zeros_like(embedding.dequeue()))
        >>> embedding.evict(films), embedding.vocabularies[films].ids.tolist()
        (2, [8])

        Args:
          table: The TableConfig of the growing table.

        Returns:
          The number of evicted rows.

        Raises:
          ValueError: If the embedding has no such table, or its eviction is None.
        """
        return self.core.evict(table)

    @property
    @calling("embedding_tables")
    def variables(self) -> dict[Any, dict[str, Any]]:
        """A dict of "parameters" and slots for each table, as in `embedding_tables`.

        Raises:
          RuntimeError: On TPU v2 to v4, as `embedding_tables` does.
        """
        tables = self.core.create_engine().tables()
        self.flush()
        return {s.key: dict(tables[s.name].values()) for s in self.core.plan.tables}


def per_replica(batch_size: int | None, where: Topology) -> int | None:
    """Returns the batch size of each replica for a global one."""
    check_batch_size("batch_size", batch_size)
    if batch_size is None:
        return None
    if batch_size % where.all_replicas:
        raise ValueError(
            "`batch_size` is global and must be divisible by the number of replicas. "
            f"Received: {batch_size} for {where.all_replicas} replicas."
        )
    return batch_size // where.all_replicas
