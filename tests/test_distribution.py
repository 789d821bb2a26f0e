"""What the package knows about strategies of TPUs, real ones and the software's."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from described_tpu import HOSTS, PER_HOST, TOPOLOGY, Described, host, tpu

import tpu_embedding as te
from tpu_embedding import distribution, tpu_generations
from tpu_embedding.testing import SoftwareTPUStrategy


def read(strategy: Any) -> distribution.Topology:
    with strategy.scope():
        assert distribution.is_tpu()
        return distribution.current()


def test_tpu_strategy() -> None:
    found = read(tf.distribute.TPUStrategy(Described("V1")))
    assert found.engine == "tpu_v2_v4"
    assert found.num_replicas == 8
    assert found.device == host(0)
    assert found.tpu is not None
    assert found.tpu.devices == tuple(
        (tpu(task, index),) for task in range(HOSTS) for index in range(PER_HOST)
    )
    assert found.tpu.hosts == (host(0), host(1))
    assert found.tpu.cores_per_replica == 1
    assert not found.tpu.assigned
    assert not isinstance(found.tpu, distribution.SoftwareTPUSystem)


@pytest.mark.parametrize("cores", [1, 2, 4])
def test_device_assignment(cores: int) -> None:
    """Several cores for each replica, the replicas in whatever order TensorFlow has."""
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        TOPOLOGY,
        computation_shape=[max(1, cores // 2), 1, 1, min(cores, 2)],
        num_replicas=8 // cores,
    )
    found = read(
        tf.distribute.TPUStrategy(
            Described("V1"), experimental_device_assignment=assignment
        )
    )
    assert found.num_replicas == 8 // cores
    assert found.tpu is not None
    assert found.tpu.cores_per_replica == cores
    assert found.tpu.assigned
    assert found.tpu.hosts == (host(0), host(1))
    for replica, devices in enumerate(found.tpu.devices):
        for core, device in enumerate(devices):
            expected = assignment.tpu_device(replica, core, job="worker")
            task = assignment.host_device(replica, core, job="worker")
            assert tf.DeviceSpec.from_string(expected).make_merged_spec(
                tf.DeviceSpec(replica=0)
            ) == tf.DeviceSpec.from_string(device)
            assert tf.DeviceSpec.from_string(task).task in (0, 1)


def test_part_of_the_system() -> None:
    """Hosts are those of the replicas, by task, not by replica."""
    assignment = tf.tpu.experimental.DeviceAssignment(
        TOPOLOGY, [[[1, 1, 0, 0]], [[1, 0, 0, 1]]]
    )
    strategy = tf.distribute.TPUStrategy(
        Described("V1"), experimental_device_assignment=assignment
    )
    found = read(strategy).tpu
    assert found is not None
    assert found.devices == ((tpu(1, 2),), (tpu(0, 3),))
    assert found.hosts == (host(0), host(1))
    assert strategy.extended.num_hosts == 2


@pytest.mark.parametrize(
    ("feature", "sparse_cores", "engine"),
    [("V1", 0, "tpu_v2_v4"), ("V2", 4, "sparse_core"), ("UNSUPPORTED", 0, "none")],
)
def test_hardware_feature(feature: str, sparse_cores: int, engine: str) -> None:
    found = read(tf.distribute.TPUStrategy(Described(feature, sparse_cores)))
    assert found.engine == engine
    assert found.tpu is not None
    assert found.tpu.generation.sparse_cores_per_device == sparse_cores
    assert found.tpu.generation.name == f"TPU with embedding feature {feature}"


def test_tpu_that_is_not_initialized() -> None:
    strategy = tf.distribute.TPUStrategy(Described(None))
    with strategy.scope(), pytest.raises(RuntimeError, match="initialize_tpu_system"):
        distribution.current()


def test_software_tpu_of_several_cores_for_each_replica() -> None:
    strategy = SoftwareTPUStrategy("v4", 4, cores_per_replica=2)
    found = read(strategy)
    assert found.num_replicas == 2
    assert found.tpu is not None
    assert found.tpu.assigned
    assert found.tpu.cores_per_replica == 2
    names = [found.device[:-1] + str(core) for core in range(4)]
    assert found.tpu.devices == ((names[0], names[1]), (names[2], names[3]))
    assert strategy.extended.worker_devices == (names[0], names[2])


@pytest.mark.parametrize(
    ("name", "engine"), [("v4", "tpu_v2_v4"), ("v6e", "sparse_core")]
)
def test_software_tpu(name: str, engine: str) -> None:
    strategy = SoftwareTPUStrategy(name, 2)
    found = read(strategy)
    assert found.engine == engine
    assert found.num_replicas == 2
    assert found.tpu is not None
    assert found.tpu.generation is tpu_generations.generation(name)
    devices = strategy.extended.worker_devices
    assert found.tpu.devices == tuple((device,) for device in devices)
    assert found.tpu.hosts == (found.device,) == (devices[0],)
    assert isinstance(found.tpu, distribution.SoftwareTPUSystem)
    assert not found.tpu.assigned
    assert found.replica() is None

    def replica_fn() -> tf.Tensor:
        return tf.constant(found.replica())

    numbers = strategy.experimental_local_results(strategy.run(replica_fn))
    assert [int(number) for number in numbers] == [0, 1]


def test_one_device_is_a_replica_too() -> None:
    """Unlike on the host, where one replica needs no strategy.run."""
    assert read(SoftwareTPUStrategy("v6e", 1)).replica() is None
    assert distribution.current().replica() == 0
    assert distribution.current().tpu is None
    assert not distribution.is_tpu()


def test_engine_that_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SoftwareTPUStrategy("v4", 1)
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, "tpu_v2_v4")
    assert read(strategy).engine == "tpu_v2_v4"
    with pytest.raises(ValueError, match="one of host, portable"):
        distribution.current()
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, "portable")
    with strategy.scope(), pytest.raises(ValueError, match="to one of tpu_v2_v4"):
        distribution.current()


@pytest.mark.parametrize("embedding", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_tpu_without_an_engine(embedding: Any) -> None:
    for name, strategy in {
        "TPU with embedding feature UNSUPPORTED": tf.distribute.TPUStrategy(
            Described("UNSUPPORTED")
        ),
        "v5e": SoftwareTPUStrategy("v5e", 2),
    }.items():
        with strategy.scope(), pytest.raises(NotImplementedError) as raised:
            embedding(te.FeatureConfig(te.TableConfig(8, 4)), te.SGD(1.0))
        assert str(raised.value) == (
            f"{name} has no hardware for embeddings. Use TPUEmbeddingV0, whose tables "
            "are ordinary variables of each replica; or create the embedding outside "
            "of the strategy's scope, where it runs on this machine's CPU."
        )
