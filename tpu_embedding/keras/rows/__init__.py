"""Keras models that train the rows of a batch, with the numbers of Keras.

A step of `te.keras.RowSparseOptimizer` updates each variable in one of three ways. The
optimizer shows them in `updates_rows_by`:

- "op": one op of the library updates the rows of all tables (`rules.py`), by a rule
  that the kernels have: SGD without momentum, Adagrad, Adam, AdamW, Ftrl.
- "rows": TensorFlow's ops read the rows of the gradient, `update_step` of the Keras
  class computes on them, and they are written back (`optimizer.py`): every other
  optimizer, and all of them in XLA, under a strategy and without the library.
- "dense": `update_step` of the Keras class computes on the whole variable, for
  gradients other than tf.IndexedSlices, for variables of other layers, where rows
  cannot be caught up, and, if the op cannot run, with a constraint or `use_ema`.

In the first two ways the other rows of a `te.keras.Embedding` wait, unless `lazy=True`:

    Embedding (embedding.py)           marks its table as a TableVariable
        |  read
    TableVariable (tables/waiting.py)  a tf.Variable whose readers see rows caught up
        |  caught up by
    Waiting (waiting.py)               since when each row waits, and what that does
        |  as described by
    Idle (optimizers/idle.py)          what a step without a gradient does to a row

`counting.py` counts the updates of all three ways for `te.Telemetry`. `converting.py`
converts existing models and processes, and loads models. Checkpoints and exports see
the tables and slots of a model through `tables.py`. Files contain the names of Keras's
own classes (`save_as` of `keras3.py` and `keras2.py`).
"""

__all__: list[str] = []
