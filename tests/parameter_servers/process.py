"""The process of the cluster, which runs the tests of this folder.

Two parameter servers, two workers and the coordinator live in it: a cluster needs an
eager context of its own.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import tensorflow as tf
from multi_process import worker
from parameter_servers.cluster import JOB, features, start_cluster

import tpu_embedding as te
from tpu_embedding.ops import library


def run(name: str, arguments: dict[str, Any]) -> Any:
    """Runs a test, or what one asks for, "module.function"."""
    module, _, function = name.rpartition(".")
    test = getattr(importlib.import_module(f"parameter_servers.{module}"), function)
    try:
        return test(**arguments)
    except pytest.fail.Exception as failed:  # Not an Exception.
        raise AssertionError(str(failed)) from failed


def main() -> None:
    library.load()
    cluster, servers = start_cluster(int(os.environ.get("TEST_SERVERS", "2")))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc"
    )
    JOB.strategy = tf.distribute.ParameterServerStrategy(resolver)
    with JOB.strategy.scope():  # Creates TensorFlow's coordinator.
        te.TPUEmbedding(features(), te.SGD(0.1))
    JOB.coordinator = tf.distribute.coordinator.ClusterCoordinator(JOB.strategy)
    worker.serve(run)
    del servers


if __name__ == "__main__":
    main()
    os._exit(0)
