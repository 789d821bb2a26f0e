"""What a call of the step queue comes to; the texts are those of step_queue.h."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import tensorflow as tf

MOST_UPDATES = 1024  # Those of one replica that wait for the other replicas.


class Refusal(enum.IntEnum):
    """Why a call is wrong; the texts are in `messages`."""

    NONE = 0
    GIVEN_UP_ENQUEUE = 1
    QUEUE_FULL = 2
    TRAINING_DIFFERS = 3
    GIVEN_UP_DEQUEUE = 4
    NOTHING_QUEUED = 5
    OWES_GRADIENTS = 6
    OTHER_REPLICA_OWES = 7
    WAS_EVALUATION = 8
    NOT_DEQUEUED = 9
    NOTHING_OWED = 10
    SUBMITTED_BY_SOME = 11
    ALREADY_SUBMITTED = 12
    TOO_MANY_UPDATES = 13


def messages(capacity: int) -> list[str]:
    """The text of each refusal, by its number; the first one is empty."""
    texts = {
        Refusal.NONE: "",
        Refusal.GIVEN_UP_ENQUEUE: "enqueue: this step was given up because another "
        "replica's input failed its checks. Mend that input and run the step again.",
        Refusal.QUEUE_FULL: f"enqueue: the queue is full ({capacity} batches). Call "
        "dequeue once for each enqueue.",
        Refusal.TRAINING_DIFFERS: "enqueue: the replicas disagree on `training` "
        "within one step. Pass the same value in every replica.",
        Refusal.GIVEN_UP_DEQUEUE: "dequeue: this step was given up because a "
        "replica's input failed its checks. Mend that input and run the step again.",
        Refusal.NOTHING_QUEUED: "dequeue: no batch is enqueued. Call enqueue before "
        "dequeue, once for each dequeue.",
        Refusal.OWES_GRADIENTS: "dequeue: the training batch dequeued before still "
        "owes its gradients. Call apply_gradients first, or enqueue with "
        "training=False; after a step that failed call reset.",
        Refusal.OTHER_REPLICA_OWES: "dequeue: another replica has not applied its "
        "gradients of the step before. Put the loop over steps outside of "
        "strategy.run; after a step that failed call reset.",
        Refusal.WAS_EVALUATION: "apply_gradients: the batch was enqueued with "
        "training=False. Enqueue with training=True to train on it.",
        Refusal.NOT_DEQUEUED: "apply_gradients: the enqueued batch was not dequeued. "
        "Call dequeue first.",
        Refusal.NOTHING_OWED: "apply_gradients: no dequeued batch owes gradients; "
        "they can be applied once per dequeue.",
        Refusal.SUBMITTED_BY_SOME: "lookup: gradients came from some replicas only, "
        "and their update was given up. If a step had failed, run it again. Else take "
        "all lookups of a step before its gradients.",
        Refusal.ALREADY_SUBMITTED: "The gradients of this lookup were applied "
        "already; each lookup takes them once. Call the layer again, or take all "
        "gradients with one tape.gradient call.",
        Refusal.TOO_MANY_UPDATES: f"submit: {MOST_UPDATES} lookups of this replica "
        "wait for those of the others. Make the same lookups in every replica.",
    }
    return [texts[refusal] for refusal in Refusal]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call comes to.

    Attributes:
      refusal: int32 scalar, a `Refusal`; 0 where the call is right.
      matrix: The ledger after the call, as of `Ledger.to_matrix`.
      number: int64 scalar, or [n] for n replicas: the step that it is about.
      answer: bool scalar; its meaning is the call's own.
    """

    refusal: tf.Tensor
    matrix: tf.Tensor
    number: tf.Tensor
    answer: tf.Tensor


def first(refusals: Sequence[tuple[tf.Tensor, Refusal]]) -> tf.Tensor:
    """int32 scalar, the first refusal whose condition holds."""
    code = tf.constant(int(Refusal.NONE), tf.int32)
    for condition, refusal in reversed(refusals):
        code = tf.where(condition, int(refusal), code)
    return code
