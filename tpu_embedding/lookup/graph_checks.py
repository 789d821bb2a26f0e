"""Errors out of stock ops: the same in graphs as eagerly, before anything changes.

Eagerly an error is a plain exception. In a graph an op has to fail; what follows a
check must take the control inputs that the check returns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_MOST_BRANCHES = 8  # Of one switch; a feature has up to eight checks.

# Makes the ops of a change that an error brings with it.
Change = Callable[[], list[Any]]


def no_change() -> list[Any]:
    """For errors that change nothing."""
    return []


@dataclasses.dataclass(frozen=True)
class Check:
    """What has to hold of a caller's values.

    Attributes:
      ok: bool of any shape, true everywhere. Masks are passed as they are: those of
        all checks are reduced at once.
      message: Makes the string scalar to fail with. Called in the failing branch.
    """

    ok: tf.Tensor
    message: Callable[[], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A check that one number is at most another; those of all are compared at once.

    Attributes:
      low: int64 scalar.
      high: int64 scalar.
      message: As of a Check.
    """

    low: tf.Tensor
    high: tf.Tensor
    message: Callable[[], tf.Tensor]

    @property
    def ok(self) -> tf.Tensor:
        """Bool scalar, of this one alone."""
        return self.low <= self.high


def text(*parts: Any) -> tf.Tensor:
    """The parts in a row as one string scalar; tensors must be scalars."""
    return tf.strings.join(
        [
            part if isinstance(part, str) else tf.strings.as_string(part)
            for part in parts
        ]
    )


def require(
    checks: Sequence[Check | Bound], on_failure: Change = no_change
) -> list[Any]:
    """Fails with the message of the first check that does not hold.

    Args:
      checks: In order; each `ok` must be computable even if those before fail.
      on_failure: What is to change, where a check fails, before the error.

    Returns:
      The control inputs for all that must not happen after a failure.

    Raises:
      tf.errors.InvalidArgumentError: Eagerly at once, in a graph when it runs: by an
        op that quotes a text it cannot read as a number. (Assert would do, but it
        escapes the quotes in a message.)
    """
    if tf.executing_eagerly():
        _require_now(checks, on_failure)
        return []
    if not checks:
        return []

    def fail() -> tf.Tensor:
        with tf.control_dependencies(_failing_ops(checks, on_failure)):
            return tf.constant(False)

    return [tf.cond(all_hold(checks), lambda: True, fail)]


def guard(
    holds: tf.Tensor,
    checks: Callable[[], Sequence[Check | Bound]],
    tensors: Sequence[tf.Tensor],
    on_failure: Change = no_change,
) -> list[tf.Tensor]:
    """As `require` unless `holds`; gives the tensors back for all that has to wait.

    Unlike with tf.cond the branch that checks stays a function that is called or not:
    its many ops would else be part of the graph, and each run would pass them by. The
    tensors go through it, lest TensorFlow infer the shapes that are checked from what
    is done with the tensors afterwards, and leave the checks out.

    Args:
      holds: Bool scalar of a graph; only where it is false is anything checked.
      checks: Makes the checks, in that branch: so that it takes what they are made
        of, and not each of their many parts.
      tensors: Of integers, for which no gradient is needed.
      on_failure: As for `require`.
    """
    tensors = [t if tf.is_symbolic_tensor(t) else tf.identity(t) for t in tensors]

    def check() -> list[tf.Tensor]:
        with tf.control_dependencies(require(checks(), on_failure)):
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


def _require_now(checks: Sequence[Check | Bound], on_failure: Change) -> None:
    for check in checks:
        if not tf.reduce_all(check.ok):
            on_failure()
            message = tf.compat.as_str(check.message().numpy())
            raise tf.errors.InvalidArgumentError(None, None, message)


def all_hold(
    checks: Sequence[Check | Bound], masks: Sequence[tf.Tensor] = ()
) -> tf.Tensor:
    """Whether all do and the masks are true, a bool scalar in as few ops as it takes.

    Args:
      checks: In a graph; with `masks` at least one.
      masks: Bool vectors.
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


def _failing_ops(checks: Sequence[Check | Bound], on_failure: Change) -> list[Any]:
    """Fails with the message of the first check that does not hold."""
    holds = tf.stack([tf.reduce_all(check.ok) for check in checks])
    first = tf.argmin(tf.cast(holds, tf.int32), output_type=tf.int32)
    message = _one_of([check.message for check in checks], first)
    with tf.control_dependencies(on_failure()):
        failure = tf.strings.to_number(message, name="invalid_argument")
    # To be stateful, lest the branch be optimised away.
    return [tf.raw_ops.Assert(condition=False, data=[failure])]


def _one_of(makers: Sequence[Callable[[], tf.Tensor]], index: tf.Tensor) -> tf.Tensor:
    """What `makers[index]` makes.

    Each branch of a switch takes the inputs of all: with hundreds of branches that is
    most of the time of tracing, so that many go in two levels.
    """
    if len(makers) <= _MOST_BRANCHES:
        return tf.switch_case(index, list(makers))
    inner = index % _MOST_BRANCHES
    parts = [
        functools.partial(_one_of, makers[start : start + _MOST_BRANCHES], inner)
        for start in range(0, len(makers), _MOST_BRANCHES)
    ]
    return tf.switch_case(index // _MOST_BRANCHES, parts)


def refuse(
    code: tf.Tensor, messages: Sequence[str], on_failure: Change = no_change
) -> list[Any]:
    """Fails with `messages[code]`, unless the code is 0.

    Args:
      code: int32 scalar.
      messages: By code; the first is never used.
      on_failure: As in `require`.

    Returns:
      The control inputs for all that must not happen after a failure.

    Raises:
      tf.errors.FailedPreconditionError: Eagerly at once, in a graph when it runs.
    """
    if tf.executing_eagerly():
        if code != 0:
            on_failure()
            message = messages[int(code)]
            raise tf.errors.FailedPreconditionError(None, None, message)
        return []

    def fail() -> tf.Tensor:
        with tf.control_dependencies(on_failure()):
            return tf.switch_case(code - 1, [_failing(m) for m in messages[1:]])

    return [tf.cond(tf.equal(code, 0), lambda: True, fail)]


def _failing(message: str) -> Callable[[], tf.Tensor]:
    """A branch that fails with FailedPreconditionError.

    The one stock op that does so reads a variable that does not exist, and says
    its name: the name is the message.
    """

    def fail() -> tf.Tensor:
        missing = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=message)
        return tf.raw_ops.ReadVariableOp(resource=missing, dtype=tf.bool)

    return fail
