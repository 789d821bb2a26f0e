"""The wording of this engine's errors: each function returns the exception."""

from __future__ import annotations

from collections.abc import Sequence


def optimizer_required(table: str) -> ValueError:
    """A TPU cannot hold a table without an optimizer."""
    return ValueError(
        f"Table {table} has no optimizer, and a TPU needs one even for evaluation. "
        "Pass `optimizer` to the constructor or to the TableConfig."
    )


def refused(
    table: str, option: str, value: object, way_out: str
) -> NotImplementedError:
    """An option that the engine of TPU v2 to v4 lacks."""
    return NotImplementedError(
        f"Table {table}: TPU v2 to v4 have no `{option}={value!r}`. {way_out}"
    )


def no_numeric_checks() -> NotImplementedError:
    """Gradients inside a TPU program cannot be checked."""
    return NotImplementedError(
        "`check_numerics=True` is not possible under TPUStrategy: a program on a TPU "
        "cannot fail for a value. Leave it at False there."
    )


def shape_not_known(path: str, shape: object) -> ValueError:
    """The TPU must be told the shape of every feature."""
    return ValueError(
        f"Feature {path}: a TPU must know the output shape before the first batch, but "
        f"{shape} is not fully known. Call build(per_replica_input_shapes), set "
        "FeatureConfig(output_shape), or enqueue a batch of static shape first; the "
        "Keras layer takes `batch_size`."
    )


def no_samples(path: str, shape: object) -> ValueError:
    """A TPU is configured for batches of one size, which cannot be 0."""
    return ValueError(
        f"Feature {path}: a TPU is configured for one output shape, but there are no "
        f"samples in {shape}. Skip empty batches."
    )


def not_divisible_by_cores(path: str, shape: object, cores: int) -> ValueError:
    """The batch of a replica cannot be dealt out to its cores."""
    return ValueError(
        f"Feature {path}: {cores} cores work on each replica, so the first axis of its "
        f"output shape must be divisible by {cores}. Received: {shape}."
    )


def already_configured() -> RuntimeError:
    """A second engine on one TPU system."""
    return RuntimeError(
        "The TPU's embedding engine is configured already, by another TPUEmbedding or "
        "Keras layer. A TPU system has one. Use that object: a Keras layer takes other "
        "tables by `load_weights`. Or initialize the TPU system anew and make a new "
        "strategy. tpu_embedding.TPUEmbedding, which is no layer, can share the engine "
        "by `initialize_tpu_embedding=False`."
    )


def ended() -> str:
    """The tables went with the engine; the text of a FailedPreconditionError."""
    return (
        "This embedding's tables are gone: the TPU was initialized again after it was "
        "made (a new SoftwareTPUStrategy does so, too). Make the TPUEmbedding or the "
        "Keras layer anew, and restore a checkpoint."
    )


def not_configured() -> RuntimeError:
    """No engine to share."""
    return RuntimeError(
        "`initialize_tpu_embedding=False` shares the engine that another TPUEmbedding "
        "has configured, but there is none. Leave it at True."
    )


def several_cores_inside(cores: int) -> NotImplementedError:
    """A program has one place for a batch, on the first core of its replica."""
    return NotImplementedError(
        f"Inside strategy.run a batch goes to one core, but {cores} cores work on each "
        "replica. Call enqueue outside of strategy.run, which deals the batch out to "
        "them; the Keras layer and calls of an embedding cannot, and need one core for "
        "each replica."
    )


def shared_count() -> NotImplementedError:
    """The count of updates is in the embedding, not in the engine that is shared."""
    return NotImplementedError(
        "`initialize_tpu_embedding=False` shares the tables of another TPUEmbedding, "
        "but not its count of updates: a learning rate that takes the step would begin "
        "anew. Pass a rate without arguments that reads a tf.Variable, which both may "
        "use."
    )


def tables_on_tpu() -> RuntimeError:
    """The tables are in the TPU's memory."""
    return RuntimeError(
        "The embedding tables are in the TPU's own memory: variables would be stale, "
        "and writing to them would change nothing. Save a checkpoint and restore it "
        "into an embedding made outside of the TPU strategy, or call "
        "tpu_embedding.checkpoint.save."
    )


def not_an_argument(path: str, tensor: object) -> ValueError:
    """An input that was computed inside strategy.run."""
    return ValueError(
        f"Feature {path}: inside strategy.run enqueue takes only tensors that are "
        f"arguments of the function given to strategy.run. Received: {tensor}. Compute "
        "the features before strategy.run, or call enqueue outside of it. If the batch "
        "size is dynamic, pass tf.distribute.RunOptions("
        "experimental_enable_dynamic_batch_size=False)."
    )


def device_inside(device: object) -> ValueError:
    """A program cannot enqueue for another core."""
    return ValueError(
        "Argument `device` of enqueue is for calls outside of strategy.run: inside, "
        f"each replica enqueues for its own core. Received: {device}. Leave it at None."
    )


def device_number(device: object) -> ValueError:
    """A tensor that can be no number of a device."""
    return ValueError(
        "Argument `device` of enqueue must be the name of a TPU device, or an integer "
        f"scalar tensor, its number. Received: {device}."
    )


def number_of_several_hosts(hosts: int) -> ValueError:
    """A number says nothing about the host."""
    return ValueError(
        "Argument `device` of enqueue is a number, which tells a device of one host, "
        f"but this TPU has {hosts}. Give the name of the device."
    )


def unknown_number(known: Sequence[int]) -> tuple[str, str]:
    """What stands before and after a number that no device has."""
    return (
        "Argument `device` of enqueue is ",
        f", but the TPU devices of the strategy are {', '.join(map(str, known))}.",
    )


def input_on_tpu(path: str, device: str) -> ValueError:
    """Ids that were sent to the TPU already."""
    return ValueError(
        f"Feature {path}: ids must be on the host, not on {device}. Distribute the "
        "data set with tf.distribute.InputOptions(experimental_fetch_to_device=False)."
    )


def asynchronous_checkpoint() -> RuntimeError:
    """Tables in a TPU's memory cannot be copied beside the training.

    TensorFlow would take a NotImplementedError as leave to skip the table.
    """
    return RuntimeError(
        "Tables of TPU v2 to v4 cannot be saved asynchronously. Leave "
        "`experimental_enable_async_checkpoint` of tf.train.CheckpointOptions at False."
    )


def saved_model() -> NotImplementedError:
    """A SavedModel cannot hold tables that are in a TPU's memory."""
    return NotImplementedError(
        "tf.saved_model.save cannot save a TPUEmbedding on TPU v2 to v4: its tables "
        "are in the TPU's memory. Save a checkpoint; for serving restore it into an "
        "embedding made outside of the TPU strategy, and call "
        "tpu_embedding.serving.export. Or leave the embedding out of what the module "
        "tracks."
    )


def reset() -> NotImplementedError:
    """A TPU's queues cannot be emptied."""
    return NotImplementedError(
        "A TPU of v2 to v4 cannot forget the batches that it has: TensorFlow has no op "
        "that empties its queues, only its initialization does, which ends all tables "
        "and variables on it. Save a checkpoint, call tf.tpu.experimental."
        "initialize_tpu_system (for the software TPU, the strategy's method of that "
        "name), create the strategy's objects again and restore."
    )
