"""TPU strategies without a TPU: a resolver that describes one is enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.tpu import topology_pb2

HOSTS, PER_HOST = 2, 4
# Two hosts of a 2x2 mesh, two cores a chip.
TOPOLOGY = tf.tpu.experimental.Topology(
    mesh_shape=[2, 2, 1, 2],
    device_coordinates=[
        [[x, y, 0, core] for x in range(2) for core in range(2)] for y in range(HOSTS)
    ],
)
LOCAL_TOPOLOGY = tf.tpu.experimental.Topology(
    mesh_shape=[2, 1, 1, 2],
    device_coordinates=[[[x, 0, 0, core] for x in range(2) for core in range(2)]],
)


class Described:
    """A cluster resolver that describes TPUs which are not there.

    The `feature` of a system that is not initialized is None. A `local` one has this
    process as its host, so that variables can be made on it.
    """

    def __init__(
        self, feature: str | None = "V1", sparse_cores: int = 0, *, local: bool = False
    ) -> None:
        self._local = local
        self.tpu_hardware_feature = None
        if feature is not None:
            proto: Any = vars(topology_pb2)["TPUHardwareFeature"]
            self.tpu_hardware_feature = proto(
                embedding_feature=proto.EmbeddingFeature.Value(feature),
                num_embedding_devices_per_chip=sparse_cores,
            )

    def get_tpu_system_metadata(self) -> Any:
        @dataclasses.dataclass
        class Device:
            name: str

        if self._local:
            devices = [Device(local_tpu(index)) for index in range(PER_HOST)]
            return tf.tpu.experimental.TPUSystemMetadata(
                num_cores=PER_HOST,
                num_hosts=1,
                num_of_cores_per_host=PER_HOST,
                topology=LOCAL_TOPOLOGY,
                devices=devices,
            )
        names = [tpu(task, i) for task in range(HOSTS) for i in range(PER_HOST)]
        return tf.tpu.experimental.TPUSystemMetadata(
            num_cores=HOSTS * PER_HOST,
            num_hosts=HOSTS,
            num_of_cores_per_host=PER_HOST,
            topology=TOPOLOGY,
            devices=[Device(name) for name in [host(0), host(1), *names]],
        )


def tpu(task: int, index: int) -> str:
    return f"/job:worker/replica:0/task:{task}/device:TPU:{index}"


def host(task: int) -> str:
    return f"/job:worker/replica:0/task:{task}/device:CPU:0"


def local_tpu(index: int) -> str:
    return f"/job:localhost/replica:0/task:0/device:TPU:{index}"
