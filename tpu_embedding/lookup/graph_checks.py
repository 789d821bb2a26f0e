"""Raises errors by TensorFlow's ops: the same errors in graphs as eagerly.

Eagerly a failed check raises an exception. In a graph an op fails, so ops that must
not run after a failed check need the control inputs that the check returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Check:
    """A condition on the caller's values.

    Attributes:
      ok: bool of any shape; the check holds if all elements are true. Do not reduce
        masks: those of all checks are reduced at once.
      message: Makes the error message, a string scalar, in the branch that runs after
        a failure. That branch makes the messages of all checks and picks one: each
        must be computable whichever checks fail (`first`, `element`).
    """

    ok: tf.Tensor
    message: Callable[[], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A check that low <= high, which is made for all bounds at once.

    Attributes:
      low: The smaller number, an int64 scalar.
      high: The larger number, an int64 scalar.
      message: As in `Check`.
    """

    low: tf.Tensor
    high: tf.Tensor
    message: Callable[[], tf.Tensor]

    @property
    def ok(self) -> tf.Tensor:
        """Whether the bound holds, a bool scalar."""
        return self.low <= self.high


def text(*parts: Any) -> tf.Tensor:
    """Joins the parts to one string scalar; tensors must be scalars."""
    return tf.strings.join(
        [
            part if isinstance(part, str) else tf.strings.as_string(part)
            for part in parts
        ]
    )


def first(mask: tf.Tensor) -> tf.Tensor:
    """Returns the first index at which a bool vector is true, or its size; int64."""
    return tf.argmax(tf.concat([mask, [True]], 0))


def element(vector: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns `vector[index]`, or zero if the index is too large."""
    size = tf.size(vector, tf.int64)
    return tf.gather(tf.pad(vector, [[0, 1]]), tf.minimum(index, size))


def require(checks: Sequence[Check | Bound]) -> list[Any]:
    """Fails with the message of the first check that does not hold.

    Args:
      checks: The checks in order; each `ok` must be computable if earlier ones fail.

    Returns:
      Control inputs for all ops that must not run after a failure.

    Raises:
      tf.errors.InvalidArgumentError: Eagerly at once, in a graph when it runs. In a
        graph tf.strings.to_number raises it, which quotes a text that is no number;
        Assert would escape the quotes in a message.
    """
    if tf.executing_eagerly():
        for check in checks:
            if not tf.reduce_all(check.ok):
                message = tf.compat.as_str(check.message().numpy())
                raise tf.errors.InvalidArgumentError(None, None, message)
        return []
    if not checks:
        return []

    def fail() -> tf.Tensor:
        with tf.control_dependencies(_failing_ops(checks)):
            return tf.constant(False)

    return [tf.cond(all_hold(checks), lambda: True, fail)]


def guard(
    holds: tf.Tensor,
    checks: Callable[[], Sequence[Check | Bound]],
    tensors: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Fails as `require`, but makes the checks in a branch that runs unless `holds`.

    TensorFlow inlines the branches of tf.cond, so every run would have to skip the
    many ops of the checks. The branches of this op stay functions. The tensors pass
    through them. Otherwise TensorFlow would infer the shapes under test from later
    uses of the tensors, and remove the checks.

    Args:
      holds: A bool scalar of a graph.
      checks: Makes the checks. Called in the branch, so that the inputs of the branch
        are the inputs of the checks and not their many intermediate results.
      tensors: Integer tensors, which need no gradient.

    Returns:
      The tensors, for all ops that must not run after a failure.
    """
    tensors = [t if tf.is_symbolic_tensor(t) else tf.identity(t) for t in tensors]

    def check() -> list[tf.Tensor]:
        with tf.control_dependencies(require(checks())):
            return [tf.identity(tensor) for tensor in tensors]

    checking: Any = tf.function(check, autograph=False).get_concrete_function()
    inputs = checking.captured_inputs
    places = {id(tensor): place for place, tensor in enumerate(inputs)}
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]

    def go_on(*captured: tf.Tensor) -> list[tf.Tensor]:
        return [captured[places[id(tensor)]] for tensor in tensors]

    passing: Any = tf.function(go_on, input_signature=specs, autograph=False)
    return tf.raw_ops.If(
        cond=holds,
        input=inputs,
        Tout=[tensor.dtype for tensor in tensors],
        then_branch=passing.get_concrete_function(),
        else_branch=checking,
        output_shapes=[tensor.shape for tensor in tensors],
    )


def all_hold(
    checks: Sequence[Check | Bound], masks: Sequence[tf.Tensor] = ()
) -> tf.Tensor:
    """Returns whether all checks and bool vectors hold, in as few ops as possible.

    There must be at least one of them.
    """
    bounds = [check for check in checks if isinstance(check, Bound)]
    oks = [check.ok for check in checks if isinstance(check, Check)]
    scalars = [ok for ok in oks if ok.shape.rank == 0]
    parts = [*masks, *(_flat(ok) for ok in oks if ok.shape.rank != 0)]
    if scalars:
        parts.append(tf.stack(scalars))
    if bounds:
        lows = tf.stack([bound.low for bound in bounds])
        parts.append(lows <= tf.stack([bound.high for bound in bounds]))
    return tf.reduce_all(parts[0] if len(parts) == 1 else tf.concat(parts, 0))


def _flat(mask: tf.Tensor) -> tf.Tensor:
    return mask if mask.shape.rank == 1 else tf.reshape(mask, [-1])


def _failing_ops(checks: Sequence[Check | Bound]) -> list[Any]:
    """Fails with the message of the first check that does not hold."""
    holds = tf.stack([tf.reduce_all(check.ok) for check in checks])
    messages = tf.stack([check.message() for check in checks])
    message = tf.gather(messages, first(~holds))
    failure = tf.strings.to_number(message, name="invalid_argument")
    # Assert is stateful, so TensorFlow does not remove the branch.
    return [tf.raw_ops.Assert(condition=False, data=[failure])]


def refuse(code: tf.Tensor, messages: Sequence[str]) -> list[Any]:
    """Raises FailedPreconditionError as `require` would, unless `code` is 0.

    The message is `messages[code]`.
    """
    if tf.executing_eagerly():
        if code != 0:
            message = messages[int(code)]
            raise tf.errors.FailedPreconditionError(None, None, message)
        return []

    def fail() -> tf.Tensor:
        return tf.switch_case(code - 1, [_failing(m) for m in messages[1:]])

    return [tf.cond(tf.equal(code, 0), lambda: True, fail)]


def _failing(message: str) -> Callable[[], tf.Tensor]:
    """Makes a branch that raises FailedPreconditionError.

    The only op of TensorFlow that does so reads a variable that does not exist. The
    error quotes the name of the variable, which is the message here.
    """

    def fail() -> tf.Tensor:
        missing = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=message)
        return tf.raw_ops.ReadVariableOp(resource=missing, dtype=tf.bool)

    return fail
