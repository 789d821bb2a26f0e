"""Deltas sent by TensorFlow Serving's API: its protos and its service, over gRPC.

TensorFlow Serving itself is in no package registry. The server here does what its
Predict does with a SavedModel: it runs a signature in a session.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
import numpy as np
import pytest
import tensorflow as tf
from serving.deltas import Trainer
from tensorflow_serving.apis import (  # pyright: ignore[reportMissingImports]
    predict_pb2,
    prediction_service_pb2_grpc,
)
from threads import repeated

import tpu_embedding as te

SHAPES = {"films": (5000, 64)}


class Server(prediction_service_pb2_grpc.PredictionServiceServicer):
    """Answers Predict from a session of one SavedModel."""

    def __init__(self, path: str) -> None:
        self._session = tf.compat.v1.Session(graph=tf.Graph())
        with self._session.graph.as_default():
            loaded = tf.compat.v1.saved_model.load(self._session, ["serve"], path)
        self._signatures = loaded.signature_def

    def Predict(self, request: Any, context: Any) -> Any:  # noqa: N802 - its name
        signature = self._signatures[request.model_spec.signature_name]
        assert request.inputs.keys() == signature.inputs.keys()
        feeds = {
            signature.inputs[key].name: tf.make_ndarray(value)
            for key, value in request.inputs.items()
        }
        fetches = {key: info.name for key, info in signature.outputs.items()}
        response = predict_pb2.PredictResponse(model_spec=request.model_spec)
        try:
            found = self._session.run(fetches, feeds)
        except tf.errors.InvalidArgumentError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        for key, value in found.items():
            response.outputs[key].CopyFrom(tf.make_tensor_proto(value))
        return response


class Client:
    """Calls a server as clients of TensorFlow Serving do."""

    def __init__(self, address: str) -> None:
        channel = grpc.insecure_channel(address)
        self._stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

    def predict(self, signature: str, **inputs: Any) -> dict[str, np.ndarray]:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "films"
        request.model_spec.signature_name = signature
        for key, value in inputs.items():
            request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
        answer = self._stub.Predict(request, timeout=60)
        return {key: tf.make_ndarray(value) for key, value in answer.outputs.items()}

    def send(self, path: pathlib.Path) -> int:
        """Applies a delta; the number of the one applied last."""
        found = {}
        for block in te.serving.delta_blocks(path):
            found = self.predict("apply_delta", block=block)
        return int(found["sequence"])


@pytest.fixture(name="trainer")
def exported(tmp_path: pathlib.Path) -> Trainer:
    rng = np.random.default_rng(0)
    return Trainer(tmp_path / "base", rng, "int8", SHAPES, deltas=1.0)


@pytest.fixture(name="client")
def served(trainer: Trainer, tmp_path: pathlib.Path) -> Iterator[Client]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        Server(str(tmp_path / "base")), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Client(f"127.0.0.1:{port}")
    server.stop(None).wait()


def rows(client: Client) -> np.ndarray:
    return client.predict("dense", films=np.arange(SHAPES["films"][0]))["films"]


def test_a_model_follows_by_predict(
    trainer: Trainer, client: Client, tmp_path: pathlib.Path
) -> None:
    """Each delta has blocks of at most a MiB: gRPC's limit is 4."""
    for number in (1, 2):
        path = tmp_path / f"{number}.delta"
        trainer.write(path)
        state = client.predict("delta_state")
        assert (int(state["base"]), int(state["sequence"])) == (
            trainer.base.id,
            number - 1,
        )
        assert client.send(path) == number
        np.testing.assert_array_equal(rows(client), trainer.expected()["films"])


def test_bad_deltas_are_refused_by_name(
    trainer: Trainer, client: Client, tmp_path: pathlib.Path
) -> None:
    paths = [tmp_path / f"{number}.delta" for number in (1, 2)]
    for path in paths:
        trainer.write(path)
    before = rows(client)
    blocks = list(te.serving.delta_blocks(paths[0]))
    damaged = bytearray(blocks[0])
    damaged[40] ^= 1
    for block, words in (
        (next(te.serving.delta_blocks(paths[1])), "Delta 1 is missing"),
        (bytes(damaged), "Block 0 of a delta is damaged"),
        (blocks[0][:9], "truncated"),
        (blocks[1], "no delta has begun"),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            client.predict("apply_delta", block=block)
        error: Any = raised.value
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert words in error.details()
    np.testing.assert_array_equal(rows(client), before)
    assert [client.send(path) for path in paths] == [1, 2]
    with pytest.raises(grpc.RpcError, match="Delta 2 is repeated"):
        client.send(paths[1])


def test_clients_read_meanwhile(
    trainer: Trainer, client: Client, tmp_path: pathlib.Path
) -> None:
    """Each row has one number, that of a delta."""
    number, dim = SHAPES["films"]
    trainer.values["films"][:] = 0
    changed, torn = {"films": np.arange(number)}, list[int]()

    def read(_: int) -> None:
        found = rows(client)
        torn.append(int((found.min(axis=1) != found.max(axis=1)).sum()))

    def follow(delta: int) -> None:
        trainer.values["films"][:] = delta
        path = tmp_path / f"{delta}.delta"
        te.serving.delta_files.write_delta(
            path, trainer.header(changed), trainer.rows(changed)
        )
        trainer.sequence, trainer.follows = delta, trainer.run
        assert client.send(path) == delta

    follow(1)
    with repeated(read, 2):
        for delta in range(2, 9):
            follow(delta)
    assert len(torn) > 0
    assert sum(torn) == 0
    assert rows(client).shape == (number, dim)
