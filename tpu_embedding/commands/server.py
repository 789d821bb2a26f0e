"""`python -m tpu_embedding server`: a parameter server or worker."""

from __future__ import annotations

import tensorflow as tf

from tpu_embedding import cluster_config
from tpu_embedding.ops import library

_TF_CONFIG = (
    'Set TF_CONFIG to {"cluster": {"chief": ["host:port"], "ps": [...], "worker": '
    '[...]}, "task": {"type": "ps", "index": 0}}.'
)


def run(_: object) -> None:
    """Runs the parameter server or worker of TF_CONFIG; does not return.

    Raises:
      RuntimeError: If the library of tpu_embedding cannot be loaded, or the server
        cannot listen at its address.
      ValueError: If TF_CONFIG names no such task, or a task without a port.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    kind = index = address = None
    try:
        kind, index = resolver.task_type, resolver.task_id
        cluster = resolver.cluster_spec()
        if kind in ("ps", "worker") and index is not None:
            address = cluster.task_address(kind, index)
    except Exception as error:  # Of any type: TensorFlow does not check what it reads.
        raise ValueError(
            "The environment variable TF_CONFIG names no task of a cluster: "
            f"{type(error).__name__}: {error}. {_TF_CONFIG}"
        ) from error
    if address is None:
        raise ValueError(
            "`python -m tpu_embedding server` runs a task of type 'ps' or 'worker', as "
            'the environment variable TF_CONFIG says in its "task". Received: type '
            f"{kind!r}, index {index!r}. {_TF_CONFIG}"
        )
    found = cluster_config.problem()
    if found:
        raise ValueError(
            f"The environment variable TF_CONFIG is wrong: {found}. {_TF_CONFIG}"
        )
    library.load()
    try:
        server = tf.distribute.Server(
            cluster,
            job_name=kind,
            task_index=index,
            protocol=resolver.rpc_layer or "grpc",
        )
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"The server of {kind} {index} cannot listen at {address}, its address in "
            f"the environment variable TF_CONFIG: {error.message.rstrip('.')}. Its "
            "port must not be in use by another process of this machine."
        ) from error
    server.join()
