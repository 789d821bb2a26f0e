"""The wording of this package's errors: each function returns the exception."""

from __future__ import annotations


def library_unusable(problem: str) -> RuntimeError:
    """The library of kernels is missing, or another TensorFlow's."""
    return RuntimeError(f"The software TPU has no kernels. {problem}")


def foreign_engine(op: str) -> RuntimeError:
    """The TensorFlow that is built for TPUs feeds its own embedding engine."""
    return RuntimeError(
        f"This TensorFlow has its own kernels for {op}, as tensorflow-tpu has. They "
        "feed the hardware, so that a software TPU of v2, v3 or v4 gets no batch. Use "
        "it with tensorflow-cpu."
    )


def too_few_devices(wanted: int, found: int) -> RuntimeError:
    """TensorFlow has started with fewer logical devices than the TPU has."""
    return RuntimeError(
        f"SoftwareTPUStrategy(num_devices={wanted}) needs {wanted} logical CPU "
        f"devices, but TensorFlow has started with {found}, and they cannot be "
        "added later. Create the strategy before anything else of TensorFlow runs, "
        "or put this first:\n"
        "    tf.config.set_logical_device_configuration("
        'tf.config.list_physical_devices("CPU")[0], '
        f"[tf.config.LogicalDeviceConfiguration()] * {wanted})"
    )


def number_of_devices(value: object) -> ValueError:
    """`num_devices` is no positive integer."""
    return ValueError(
        f"Argument `num_devices` must be an integer > 0. Received: {value!r}."
    )


def cores_per_replica(value: object, num_devices: int) -> ValueError:
    """Devices that cannot be dealt to replicas."""
    return ValueError(
        "Argument `cores_per_replica` must be None or an integer > 0 that divides "
        f"`num_devices`, {num_devices}. Received: {value!r}."
    )


def cores_of_generation(generation: str) -> ValueError:
    """Several cores for a replica where the embedding hardware has no such mode."""
    return ValueError(
        "Argument `cores_per_replica` is for v2, v3 and v4, whose embedding engine "
        f"can serve several cores of one replica. Received generation: {generation!r}. "
        "Leave it at None."
    )


def meeting_timeout(value: object) -> ValueError:
    """`meeting_timeout` is no positive number."""
    return ValueError(
        "Argument `meeting_timeout` must be a number of seconds > 0. "
        f"Received: {value!r}."
    )


def merge_call() -> NotImplementedError:
    """A replica asks for cross-replica context."""
    return NotImplementedError(
        "SoftwareTPUStrategy has no merge_call: each replica is a program of its own. "
        "Use tf.distribute.get_replica_context().all_reduce, or do what needs all "
        "replicas outside of strategy.run."
    )
