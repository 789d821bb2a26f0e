"""The wording of this package's errors: each function returns the exception."""

from __future__ import annotations

import tensorflow as tf


def no_engine(generation: str) -> NotImplementedError:
    """A TPU without hardware for embeddings."""
    return NotImplementedError(
        f"{generation} has no hardware for embeddings. Use TPUEmbeddingV0, whose "
        "tables are ordinary variables of each replica; or build this outside of the "
        "strategy's scope, where it runs on this machine's CPU."
    )


def no_queue(what: str, engine: str) -> NotImplementedError:
    """A class or method that queues batches."""
    return NotImplementedError(
        f"{what} queues batches, which the engine {engine!r} cannot. Use "
        "TPUEmbeddingV2, whose lookup hands the batch out and whose apply_gradients "
        "takes it back; or build it outside of the strategy's scope, where it runs on "
        "this machine's CPU."
    )


def no_batches(what: str, engine: str) -> NotImplementedError:
    """A class or method that hands its batches out."""
    return NotImplementedError(
        f"{what} hands out the batch that it looked up, which the engine {engine!r} "
        "cannot: it has one queue. Use TPUEmbedding with enqueue, dequeue and "
        "apply_gradients; or build it outside of the strategy's scope, where it runs "
        "on this machine's CPU."
    )


def second_submit() -> tf.errors.FailedPreconditionError:
    """The gradients of one lookup, twice in one TPU program."""
    return tf.errors.FailedPreconditionError(
        None,
        None,
        "The gradients of this lookup were applied already; each lookup takes them "
        "once. Look the batch up again, or take all gradients with one tape.gradient "
        "call.",
    )


def second_lookup() -> NotImplementedError:
    """A lookup in a TPU program before the gradients of the one before."""
    return NotImplementedError(
        "On TPU v2 to v4 a lookup of a training step waits until the gradients of the "
        "one before were applied, so that a step cannot look up twice before its "
        "backward pass. Call the layer once, with more features over the same tables; "
        "or take the gradients of the first call before the second; or use a TPU with "
        "SparseCores."
    )


def in_control_flow() -> RuntimeError:
    """Enqueue in a part of a TPU program."""
    return RuntimeError(
        "A batch was given to enqueue, or to a layer, inside control flow or a "
        "tf.function inside strategy.run, where a TPU program cannot take it in. Call "
        "it at the top of the function given to strategy.run, or outside of "
        "strategy.run."
    )
