"""Chooses the version of Keras that the layer works with: that of `tf.keras`.

`tf.keras` is Keras 3, unless the environment variable TF_USE_LEGACY_KERAS is "1" when
it is first used; then it is tf_keras, which TFRS and older programs need. `keras_api`
is the module for that version. Both modules have the same names.
"""

from __future__ import annotations

import os
import typing

import tensorflow as tf


def _is_tf_keras() -> bool:
    try:
        layer = typing.cast(typing.Any, tf).keras.layers.Layer
    except ImportError as error:
        if os.environ.get("TF_USE_LEGACY_KERAS") not in ("1", "true", "True"):
            return False  # Importing keras3 below shows the error.
        raise ImportError(
            "TF_USE_LEGACY_KERAS is set, but tf_keras cannot be imported. Install the "
            "tf_keras version that matches TensorFlow, as `pip install "
            "'tpu_embedding[tf-keras]'` does, or unset the variable to use Keras 3."
        ) from error
    return layer.__module__.partition(".")[0] == "tf_keras"


if typing.TYPE_CHECKING or not _is_tf_keras():
    from tpu_embedding.keras import keras3 as keras_api
else:
    from tpu_embedding.keras import keras2 as keras_api

__all__ = ["keras_api", "of_other_keras"]


def of_other_keras(value: object) -> str:
    """Returns what to do with an object of the Keras that is not in use, or ""."""
    packages = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    used = keras_api.Layer.__mro__[1].__module__.partition(".")[0]
    if "tf_keras" in packages and used == "keras":
        return " It is from tf_keras: set TF_USE_LEGACY_KERAS=1 before Python starts."
    if "keras" in packages and used == "tf_keras":
        return " It is from Keras 3: unset TF_USE_LEGACY_KERAS before Python starts."
    return ""
