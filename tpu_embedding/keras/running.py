"""What runs the layer at the moment: a tape, a method of a model, a scope of Keras."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import keras
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.eager import record

# Methods of keras.Model, which users may override.
_EVALUATION = ("test_step", "predict_step")
_TRAINING = ("train_step",)


def is_recording() -> bool:
    """Whether a gradient may be asked of what is computed now.

    True under a tf.GradientTape, also while a tf.function is traced that is called
    under one, or opens one. There is no public function that says so.
    """
    return record.could_possibly_record()


def is_evaluation() -> bool:
    """Whether Keras evaluates or predicts, in a graph that nobody can export."""
    return bool(_models_that_run(_EVALUATION))


def is_tracing_shapes() -> bool:
    """Whether Keras traces shapes only, to build a model.

    There is no public function that tells of this, nor of the next.
    """
    return in_symbolic_scope()


def is_stateless() -> bool:
    """Whether weights are given with the call, as `stateless_call` has it."""
    return in_stateless_scope() and not in_symbolic_scope()


def models_in_training() -> list[keras.Model]:
    """The models whose training step this is, the innermost one first."""
    return _models_that_run(_TRAINING)


def _models_that_run(methods: Sequence[str]) -> list[keras.Model]:
    """The models one of whose methods is being run, by its name."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in methods and frame.f_code.co_argcount:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(owner, keras.Model):
                found.append(owner)
        frame = frame.f_back
    return found
