"""What a layer asks of its tables, however they are trained."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding.keras.resolve import Resolved


class LayerTables(abc.ABC):
    """What holds the tables, looks them up and lets gradients through.

    The features are those that the layer was made with, unless said otherwise.
    """

    @abc.abstractmethod
    def build(self, layer: keras.layers.Layer) -> None:
        """Makes the tables, and those weights of the layer that Keras is to know."""

    @abc.abstractmethod
    def variables(self) -> dict[str, Any]:
        """Everything to be saved, by its name in checkpoints."""

    @abc.abstractmethod
    def stored(self) -> list[Any]:
        """The tf.Variables that hold the tables, which exported graphs refer to.

        They hold what is to be exported.
        """

    @abc.abstractmethod
    def look_up(
        self, values: Sequence[Any], weights: Sequence[Any], *, trainable: bool
    ) -> list[tf.Tensor]:
        """The activations of one batch, float32.

        Args:
          values: For each feature its ids.
          weights: For each feature its weights or None.
          trainable: Whether a gradient may change the tables.
        """

    @abc.abstractmethod
    def serve(
        self,
        resolved: Resolved,
        values: Sequence[Any],
        weights: Sequence[Any],
        *,
        trainable: bool,
    ) -> list[tf.Tensor]:
        """As `look_up`, for other features over the tables, in stock ops."""
