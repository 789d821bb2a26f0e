"""The servers and workers of a ParameterServerStrategy as processes of this machine."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

_PACKAGE = pathlib.Path(__file__).parents[2]
_COMMAND = (sys.executable, "-P", "-m", "tpu_embedding", "server")


class LocalServers:
    """Starts parameter servers and workers on this machine, for a `with` block.

    Their logs are removed at its end, unless it ends with an error.

    Use it in tests, examples and benchmarks of ParameterServerStrategy:

        with te.testing.LocalServers(servers=2, workers=2) as job:
            strategy = tf.distribute.ParameterServerStrategy(job.resolver())

    Attributes:
      cluster: The addresses of the tasks, by job: "ps" or "worker".
      processes: The process of each task by (job, task).
    """

    def __init__(
        self,
        servers: int = 1,
        workers: int = 1,
        commands: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Starts the processes on free ports of the loopback interface.

        Args:
          servers: Number of parameter servers.
          workers: Number of workers.
          commands: Other commands that run tasks, by job.
        """
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._commands = {"ps": _COMMAND, "worker": _COMMAND, **(commands or {})}
        self._logs = pathlib.Path(tempfile.mkdtemp(prefix="tpu_embedding_servers_"))
        tasks = [("ps", k) for k in range(servers)]
        tasks += [("worker", k) for k in range(workers)]
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in tasks]
        self.cluster: dict[str, list[str]] = {}
        for (job, _), bound in zip(tasks, sockets, strict=True):
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            self.cluster.setdefault(job, []).append(address)
            bound.close()
        try:
            for task in tasks:
                self.start(*task)
        except OSError:
            self.close()
            raise

    def start(self, job: str, task: int) -> None:
        """Starts one task, or restarts it after its process has ended.

        Args:
          job: "worker" or "ps".
          task: The number of the task in its job.
        """
        configuration = {"cluster": self.cluster, "task": {"type": job, "index": task}}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(configuration),
            "PYTHONPATH": str(_PACKAGE),
        }
        with self.log(job, task).open("ab") as log:
            self.processes[job, task] = subprocess.Popen(
                self._commands[job],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, job: str, task: int) -> pathlib.Path:
        """Returns the path of the file with what a task has printed.

        Args:
          job: "worker" or "ps".
          task: The number of the task in its job.
        """
        return self._logs / f"{job}{task}.log"

    def resolver(self) -> Any:
        """Returns the cluster resolver that ParameterServerStrategy takes."""
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(self.cluster), rpc_layer="grpc"
        )

    def close(self) -> None:
        """Kills the processes and removes their logs."""
        self._end()
        shutil.rmtree(self._logs, ignore_errors=True)

    def _end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def __enter__(self) -> LocalServers:
        return self

    def __exit__(self, error: object, *rest: object) -> None:
        if error is None:
            self.close()
            return
        self._end()
        logging.warning("What the servers and workers printed is in %s.", self._logs)
