"""Lets the launchers of several hosts agree on a cluster, and end a job together.

Every host runs the same command with the address of one of them. The launcher that can
listen there waits for the others, and sends each the addresses of all tasks. While the
processes run, the connections stay open and carry nothing but `_DONE`. If a connection
closes without it, a process of the other host has failed.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

_DONE = b"done\n"
_RETRY_SECONDS = 0.2
# Once enough hosts have come, more hosts may still join for this long.
_LAST_CALL_SECONDS = 30.0
_LOOPBACK = "127.0.0.1"
_KINDS = ("chief", "ps", "worker")

Cluster = dict[str, list[str]]
Ports = Mapping[str, Sequence[int]]


class Meeting:
    """The hosts that take part in one start of a job.

    Attributes:
      cluster: The addresses of all tasks, by kind.
      first: The index of this host's first task, by kind.
    """

    cluster: Cluster
    first: dict[str, int]

    def __init__(self, address: str | None, hosts: range) -> None:
        """Prepares a meeting; `join` forms the cluster.

        Args:
          address: HOST:PORT at which one of the launchers can listen; None if this
            host is alone.
          hosts: The numbers of hosts that may take part.
        """
        self._address, self._hosts = address, hosts
        self._others: list[socket.socket] = []
        self._waited_for: list[socket.socket] = []
        self._leads = True
        self._told = False

    def join(self, ports: Ports, timeout: float) -> None:
        """Waits for the other hosts, for at most `timeout` seconds.

        Args:
          ports: The free ports of this host, by kind of task.
          timeout: The number of seconds.

        Raises:
          TimeoutError: If too few hosts come.
          OSError: If this host must listen at the address, and cannot.
        """
        deadline = time.monotonic() + timeout
        if self._address is None:
            self._form([(_LOOPBACK, ports)])
            return
        host, _, number = self._address.rpartition(":")
        listening = _listen(host, int(number))
        self._leads = listening is not None
        if listening is None:
            self._ask((host, int(number)), ports, timeout, deadline)
        else:
            with listening:
                self._gather(listening, (host, ports), timeout, deadline)
        self._waited_for = list(self._others)

    def _gather(
        self,
        listening: socket.socket,
        local: tuple[str, Ports],
        timeout: float,
        deadline: float,
    ) -> None:
        came = [local]
        wait_until = deadline
        while len(came) < self._hosts[-1]:
            listening.settimeout(max(0.01, wait_until - time.monotonic()))
            try:
                other, (host_of_other, *_) = listening.accept()
            except TimeoutError:
                break
            self._others.append(other)
            other.settimeout(max(0.01, deadline - time.monotonic()))
            came.append((host_of_other, _receive(other)))
            if len(came) in self._hosts:
                last_call = time.monotonic() + _LAST_CALL_SECONDS
                wait_until = min(deadline, last_call)
        if len(came) not in self._hosts:
            raise TimeoutError(
                f"{len(came)} of at least {self._hosts[0]} hosts connected to "
                f"{self._address} within {timeout:g} s (`--timeout`). Run the same "
                "command on each host; each of them must be able to reach `--address`."
            )
        self._form(came)

    def _form(self, came: list[tuple[str, Ports]]) -> None:
        """Assigns numbers to all hosts' tasks, this host's first; tells the others."""
        self.cluster = {
            kind: [f"{host}:{port}" for host, ports in came for port in ports[kind]]
            for kind in _KINDS
            if any(ports[kind] for _, ports in came)
        }
        self.first = dict.fromkeys(self.cluster, 0)
        first = self.first
        for (_, ports), other in zip(came[:-1], self._others, strict=True):
            first = {kind: first[kind] + len(ports[kind]) for kind in first}
            _send(other, {"cluster": self.cluster, "first": first})

    def _ask(
        self, leader: tuple[str, int], ports: Ports, timeout: float, deadline: float
    ) -> None:
        while True:
            try:
                other = socket.create_connection(leader, 1.0)
                self._others = [other]
                # The host at the address has the chief.
                _send(other, {**ports, "chief": []})
                other.settimeout(max(0.01, deadline - time.monotonic()))
                answer = _receive(other)
                self.cluster, self.first = answer["cluster"], answer["first"]
                return
            except (OSError, ValueError) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"No cluster was formed at {self._address} within {timeout:g} "
                        f"s (`--timeout`): {error}. Run the same command on the host "
                        "of `--address`, too."
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def all_done(self, done: bool) -> bool:
        """Takes whether this host's processes are done; returns whether all hosts' are.

        Raises:
          ConnectionError: If another host failed.
        """
        if done and not self._leads:
            self._tell()
        for other in list(self._waited_for):
            other.setblocking(False)
            try:
                content = other.recv(len(_DONE))
            except BlockingIOError:
                continue
            if content != _DONE:
                raise ConnectionError("the processes of another host failed")
            self._waited_for.remove(other)
        if not done or self._waited_for:
            return False
        self._tell()
        return True

    def _tell(self) -> None:
        if not self._told:
            for other in self._others:
                other.sendall(_DONE)
        self._told = True

    def close(self) -> None:
        """Closes the connections: other hosts see that this one failed or is done."""
        for other in self._others:
            other.close()
        self._others = []


def _listen(host: str, port: int) -> socket.socket | None:
    """Returns a listening socket, or None if another launcher is to listen there."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise


def _send(connection: socket.socket, content: Any) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _receive(connection: socket.socket) -> Any:
    """Reads one line of JSON, and nothing of what may follow."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the connection was closed")
        line += byte
    return json.loads(line)
