"""The layer that programs get in place of TensorFlow Recommenders' TPUEmbedding."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tpu_embedding import distribution
from tpu_embedding.keras import layer
from tpu_embedding.packing import PackedFeatures


class TPUEmbedding(layer.TPUEmbedding):
    """`te.keras.TPUEmbedding` that keeps the axes of dense ids on CPUs, as TFRS's does.

    A dense input [..., k] gives [..., k, dim].
    """

    # Saved models then name the public class, which loads without TFRS.
    __module__ = layer.TPUEmbedding.__module__

    @tf.autograph.experimental.do_not_convert  # tf_keras converts `call`.
    def _look_up(self, features: Any, weights: Any, serving_config: Any) -> Any:
        if isinstance(features, PackedFeatures) and self._keeps_axes():
            raise NotImplementedError(
                "As a replacement of TFRS's layer, this layer keeps the shape of dense "
                "ids, which a packed batch lacks. Pass the features themselves, or use "
                "tpu_embedding.keras.TPUEmbedding directly."
            )
        return super()._look_up(features, weights, serving_config)

    def _keeps_axes(self) -> bool:
        return distribution.current().tpu is None
