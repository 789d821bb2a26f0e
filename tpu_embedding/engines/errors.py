"""The wording of this package's errors: each function returns the exception."""

from __future__ import annotations


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


def no_lookups(what: str, engine: str) -> NotImplementedError:
    """A class or method that looks up past a queue."""
    return NotImplementedError(
        f"{what} looks a batch up at once, which the engine {engine!r} cannot: its "
        "lookups go through one queue. Use TPUEmbedding with enqueue, dequeue and "
        "apply_gradients; or build it outside of the strategy's scope, where it runs "
        "on this machine's CPU."
    )


def in_control_flow() -> RuntimeError:
    """Enqueue in a part of a TPU program."""
    return RuntimeError(
        "enqueue was called inside control flow or a tf.function inside strategy.run, "
        "where a TPU program cannot take in a batch. Call it at the top of the "
        "function given to strategy.run, or outside of strategy.run."
    )
