"""What the user passed to the layer, and what is checked of it at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tpu_embedding import distribution
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.errors import argument_type
from tpu_embedding.keras import errors

EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
# What each hint may be besides None, in words and in classes.
_HINTS: dict[str, Any] = {
    "embedding_feature": ("an EmbeddingFeature", EmbeddingFeature),
    "sparse_core_embedding_config": (
        "a SparseCoreEmbeddingConfig",
        (
            SparseCoreEmbeddingConfig,
            tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig,
        ),
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """What the user passed, as it is: Keras would wrap lists and dicts."""

    feature_config: Any
    optimizer: Any
    batch_size: int | None
    embedding_feature: Any
    sparse_core_embedding_config: Any
    trainable_tables: bool
    loss_scale: Any
    invalid_ids: str | None
    check_numerics: bool


def check_hints(arguments: Arguments) -> None:
    """Checks what says something of TPUs.

    Raises:
      TypeError: If it is of the wrong type.
      ValueError: If the strategy's TPUs are others.
    """
    for option, (words, classes) in _HINTS.items():
        value = getattr(arguments, option)
        if value is not None and not isinstance(value, classes):
            raise argument_type(option, value, f"None or {words}")
    hint, where = arguments.embedding_feature, distribution.current()
    if hint is not None and not where.has_feature(hint.name):
        assert where.tpu is not None
        raise errors.embedding_feature(hint.name, where.tpu.generation.name)
