"""Telemetry of the layers of a model while Keras fits it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.errors import check_int
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.layer import TPUEmbedding
from tpu_embedding.keras.rows.embedding import Embedding
from tpu_embedding.telemetry import Telemetry


class _RowEmbeddings(NamedTuple):
    """Holds the tables of all `te.keras.Embedding`s of a model, as one layer."""

    name: str
    core: Any


class TelemetryCallback(keras_api.Callback):
    """Writes the telemetry of the embedding layers of a model for TensorBoard.

    Tags begin with the name of a TPUEmbedding layer or, for all `te.keras.Embedding`s
    together, with the name of the model.

    >>> import tempfile
    >>> import keras
    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> import tpu_embedding.keras
    >>> films = te.TableConfig(8, 2, name="films")
    >>> layer = te.keras.TPUEmbedding(te.FeatureConfig(films), te.SGD(0.5))
    >>> ids = keras.Input((), dtype="int64")
    >>> model = keras.Sequential([ids, layer, keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> callback = te.keras.TelemetryCallback(tempfile.mkdtemp(), every=1)
    >>> history = model.fit(tf.constant([3, 5]), tf.ones([2, 1]), verbose=0,
    ...                     callbacks=[callback])
    >>> callback.read()[layer.name]["films"]["rows_touched"]
    Figure(value=2, exact=True)
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        every: int = 100,
        write_every: int | None = None,
    ) -> None:
        """Counts from the first step of `fit` on.

        Args:
          log_dir: The directory of the logs.
          every: See Telemetry.
          write_every: The number of batches between writes, which also wait until
            Keras reports the end of `steps_per_execution`; None: after each epoch.

        Raises:
          ValueError: If `every` is not an int >= 1, or `write_every` neither None nor
            an int >= 1.
        """
        super().__init__()
        check_int("every", every, 1)
        if write_every is not None:
            check_int("write_every", write_every, 1)
        self._log_dir = os.fspath(log_dir)
        self._every, self._write_every = every, write_every
        self._telemetry: dict[str, Telemetry] = {}
        self._writer: Any = None
        self._counted_model: Any = None
        self._batches = self._batches_before_epoch = 0

    def read(self) -> dict[str, dict[str, Any]]:
        """Returns what `Telemetry.read` gives, by the name of the layer or model."""
        return {name: each.read() for name, each in self._telemetry.items()}

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count, once for all calls of `fit`.

        Raises:
          ValueError: If the model has no such layer or two of one name, or if the
            callback was used with another model.
          NotImplementedError, RuntimeError: As Telemetry does.
        """
        del logs
        model: Any = self.model
        if self._telemetry:
            if model is not self._counted_model:
                raise ValueError(
                    "This TelemetryCallback already counts another model. Create one "
                    "callback for each model."
                )
            return
        layers = list(model._flatten_layers(include_self=False))
        found: list[Any] = [x for x in layers if isinstance(x, TPUEmbedding)]
        if any(isinstance(layer, Embedding) for layer in layers):
            found.append(_RowEmbeddings(model.name, Embedding.core_of_model(model)))
        if not found:
            raise ValueError(
                "TelemetryCallback found no te.keras.TPUEmbedding and no "
                "te.keras.Embedding in the model. Make the layer an attribute of the "
                "model."
            )
        names = [layer.name for layer in found]
        if len({*names}) < len(names):
            raise ValueError(
                "TelemetryCallback tells layers apart by their names, but the "
                f"TPUEmbedding layers of the model are called {', '.join(names)}. Give "
                "each a different `name`."
            )
        self._counted_model = model
        for layer in found:
            self._telemetry[layer.name] = Telemetry(layer, every=self._every)
        self._writer = tf.summary.create_file_writer(self._log_dir)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the number of batches before this epoch.

        Raises:
          RuntimeError: If something else now counts for one of the layers.
        """
        del epoch, logs
        for name, telemetry in self._telemetry.items():
            if not telemetry.is_counting:
                raise RuntimeError(
                    f"This TelemetryCallback no longer counts for the layer {name}: it "
                    "was stopped, or replaced by a later TelemetryCallback or "
                    "Telemetry. Pass one TelemetryCallback to `fit`, and create a new "
                    "one after another has counted."
                )
        self._batches_before_epoch = self._batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes after every `write_every` batches."""
        del logs
        # With `steps_per_execution` Keras calls this after several batches, with the
        # number of the last one, or a higher number if the epoch has fewer batches.
        steps = (self.params or {}).get("steps")
        done = batch + 1 if steps is None else min(batch + 1, steps)
        before, self._batches = self._batches, self._batches_before_epoch + done
        every = self._write_every
        if every and self._batches // every > before // every:
            self._write()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes, unless `write_every` is set."""
        del epoch, logs
        if not self._write_every:
            self._write()

    def _write(self) -> None:
        with self._writer.as_default():
            for name, telemetry in self._telemetry.items():
                telemetry.write(self._batches, name=name)
        self._writer.flush()
