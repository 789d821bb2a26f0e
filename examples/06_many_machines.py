"""Trains the MovieLens model in several processes that divide the tables.

    python examples/06_many_machines.py [--processes 2] [--parameter-servers] [--kill]

The example starts the processes of a tf.distribute.MultiWorkerMirroredStrategy on this
machine by `python -m tpu_embedding launch`, as a cluster would on several; each process
trains on a part of each batch. Then it trains on whole batches in one process, and
compares: two processes have tables with the same bits as one. With --kill one process
is killed in the middle; all start again from the last checkpoint and reach the same
tables.

`worker` is the program of one process; comments mark what it needs beyond the program
for a single process.

With --parameter-servers the tables are on two servers, and each process trains on
batches of its own as fast as it can: `coordinator` is the program. The order of the
updates is not that of one process, so the tables differ; both predict about as well.
With --kill a worker is killed and started again, and each batch is still applied once.
Servers and workers run only `python -m tpu_embedding server`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# oneDNN and the number of threads change how a matrix product is rounded.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from movielens import data, model

import tpu_embedding as te

BUILD = Path(__file__).resolve().parents[1] / "build"
BATCH = 256  # The samples of a process.
STEPS_PER_CHECKPOINT = 10
KILLED_AT = 15  # The step after which --kill ends process 1.
SERVERS = 2


class Options(argparse.Namespace):
    """The command line."""

    processes: int
    steps: int
    kill: bool
    parameter_servers: bool
    data: Path | None
    out: Path
    quick: bool
    worker: bool


def parse_options(argv: Sequence[str] | None) -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Trains in several processes.")
    add = parser.add_argument
    add("--processes", type=int, default=2, help="default: 2")
    add("--steps", type=int, default=100, help="training steps; default: 100")
    add("--kill", action="store_true", help="kill a process, then resume")
    add("--parameter-servers", action="store_true", help="tables on two servers")
    add("--data", type=Path, help="folder with ml-100k.*; default: download them")
    add("--out", type=Path, default=BUILD / "many_machines")
    add("--quick", action="store_true", help="25 steps, to see that everything works")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv, namespace=Options())
    options.steps = 25 if options.quick else options.steps
    if options.processes < 2:
        parser.error("--processes must be at least 2.")
    if options.kill and options.steps <= KILLED_AT:
        parser.error(f"--kill needs more than {KILLED_AT} steps.")
    return options


class Trainer:
    """The model, and training steps on the parts of a batch that this process gets."""

    def __init__(self, options: Options, strategy: tf.distribute.Strategy) -> None:
        ratings, self.catalogue = data.find(options.data, BUILD / "data")
        self.strategy = strategy
        keras.utils.set_random_seed(1)
        features = model.make_feature_config(self.catalogue.vocabulary_sizes)
        with strategy.scope():
            self.embedding = te.TPUEmbedding(features, te.Adagrad(0.05))
            self.embedding.build()
        # Servers also keep the dense weights; without them every process has a copy.
        with strategy.scope() if options.parameter_servers else nullcontext():
            self.dense_part = model.make_dense_part(features, ratings.mean())
        train = np.random.default_rng(1).permutation(ratings.split.train)
        size = options.processes * BATCH
        self.rows = train[: len(train) // size * size]  # Whole batches.
        self.ratings = ratings

    def batch(self, step: int, part: int, parts: int) -> data.Batch:
        """Returns part `part` of the batch of a step."""
        size = BATCH * parts
        first = step * size % len(self.rows) + part * BATCH
        rows = self.rows[first : first + BATCH]
        return next(iter(self.ratings.batches(rows, BATCH)))

    def gradients(self, activations: Any, dense: Any, rating: Any) -> Any:
        """Returns the gradients of the loss by activations and by dense weights."""
        weights = self.dense_part.trainable_variables
        with tf.GradientTape() as tape:
            tape.watch(activations)
            predicted = self.dense_part({**activations, "numbers": dense})
            loss = tf.reduce_sum((predicted - rating) ** 2)
        return tape.gradient(loss, (activations, weights))

    def apply(self, of_weights: Any) -> None:
        """Updates the dense weights with the sum over the parts."""
        weights = self.dense_part.trainable_variables
        for weight, gradient in zip(weights, of_weights, strict=True):
            weight.assign_sub(1e-5 * gradient)

    def train_tables(self, batch: data.Batch) -> Any:
        """Updates the tables; returns the gradients of the dense weights."""
        ids, dense = self.catalogue.inputs(batch)
        self.embedding.enqueue(ids)
        activations = self.embedding.dequeue()
        of_activations, of_weights = self.gradients(activations, dense, batch["rating"])
        self.embedding.apply_gradients(of_activations)
        return of_weights

    @tf.function(reduce_retracing=True)
    def train_part(self, batch: data.Batch) -> None:
        """Trains one step on the part of a batch that this process gets."""
        of_weights = self.train_tables(batch)
        # Beyond a single process: sum the dense gradients of all processes.
        context = tf.distribute.get_replica_context()
        self.apply(context.all_reduce(tf.distribute.ReduceOp.SUM, of_weights))

    @tf.function(reduce_retracing=True)
    def train_alone(self, batch: data.Batch) -> None:
        """Trains one step in one process, or in a worker with parameter servers."""
        self.apply(self.train_tables(batch))

    @tf.function(reduce_retracing=True)
    def errors(self, batch: data.Batch) -> tf.Tensor:
        """Returns the squared errors of the predictions."""
        ids, dense = self.catalogue.inputs(batch)
        self.embedding.enqueue(ids, training=False)
        activations = self.embedding.dequeue()
        predicted = self.dense_part({**activations, "numbers": dense})
        return (predicted - batch["rating"]) ** 2

    def error(self) -> float:
        """Returns the root of the mean squared error on the test ratings."""
        batches = self.ratings.batches(self.ratings.split.test, 4096)
        return float(np.sqrt(np.concatenate([self.errors(b) for b in batches]).mean()))

    @tf.function(reduce_retracing=True)
    def train_whole(self, parts: list[data.Batch]) -> None:
        """Trains one step in one process on all parts of a batch."""
        inputs = [self.catalogue.inputs(part) for part in parts]
        names = inputs[0][0]
        self.embedding.enqueue({n: _join([ids[n] for ids, _ in inputs]) for n in names})
        activations = self.embedding.dequeue()
        found = []
        for number, (part, (_, dense)) in enumerate(zip(parts, inputs, strict=True)):
            samples = slice(number * BATCH, (number + 1) * BATCH)
            of_part = {name: a[samples] for name, a in activations.items()}
            found.append(self.gradients(of_part, dense, part["rating"]))
        of_activations = [of for of, _ in found]
        self.embedding.apply_gradients(
            {name: _join([of[name] for of in of_activations]) for name in activations}
        )
        self.apply([tf.add_n(list(same)) for same in zip(*(w for _, w in found))])  # noqa: B905


def _join(parts: Sequence[Any]) -> Any:
    return tf.concat(list(parts), 0)


def worker(options: Options) -> None:
    """Runs one process of the job, which TF_CONFIG describes."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    trainer = Trainer(options, strategy)
    step = first = latest_step(options.out)
    if step:  # Every process reads its rows of the checkpoint, and all dense weights.
        te.checkpoint.restore(trainer.embedding, str(options.out / f"tables-{step}"))
        dense = np.load(options.out / f"dense-{step}.npz")
        variables = dense_variables(trainer)
        for variable, value in zip(variables, dense.values(), strict=True):
            variable.assign(value)
        if rank == 0:
            print(f"All start again from step {step}.", flush=True)
    while step < options.steps:
        batch = trainer.batch(step, rank, options.processes)
        strategy.run(trainer.train_part, args=(batch,))
        step += 1
        if options.kill and rank == 1 and step == KILLED_AT and not first:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % STEPS_PER_CHECKPOINT == 0 or step == options.steps:
            if rank == 0:
                values = [v.numpy() for v in dense_variables(trainer)]
                np.savez(options.out / f"dense-{step}.npz", *values)
            # Every process writes its part of one checkpoint; its index comes last.
            te.checkpoint.save(trainer.embedding, str(options.out / f"tables-{step}"))


def coordinator(options: Options) -> None:
    """Runs the coordinator of parameter servers; TF_CONFIG lists the other tasks."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    workers = te.ClusterCoordinator(strategy)
    trainer = Trainer(options, strategy)
    for step in range(options.steps):
        for part in range(options.processes):
            batch = trainer.batch(step, part, options.processes)
            workers.schedule(trainer.train_alone, args=(batch,))
        if step == KILLED_AT:
            (options.out / "now").touch()
            while options.kill and (options.out / "now").exists():
                time.sleep(0.1)
    workers.join()
    te.checkpoint.save(trainer.embedding, str(options.out / "tables"))
    print(f"Test RMSE with parameter servers: {trainer.error():.4f}", flush=True)
    os._exit(0)  # The servers do not end by themselves.


def run_servers(options: Options, argv: Sequence[str]) -> int:
    """Starts servers, workers and the coordinator; returns its exit code."""
    with te.testing.LocalServers(SERVERS, options.processes) as job:
        with socket.create_server(("127.0.0.1", 0)) as bound:
            chief = [f"127.0.0.1:{bound.getsockname()[1]}"]
        task = {"type": "chief", "index": 0}
        config = {"cluster": {**job.cluster, "chief": chief}, "task": task}
        # TensorFlow logs each message that it sends to a worker that is gone.
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_CONFIG": json.dumps(config)}
        process = subprocess.Popen(
            [sys.executable, __file__, *argv, "--worker"], env={**os.environ, **quiet}
        )
        while options.kill and process.poll() is None:
            time.sleep(0.1)
            if (options.out / "now").exists():
                job.processes["worker", 1].kill()
                job.start("worker", 1)
                print("A worker was killed and started again.", flush=True)
                (options.out / "now").unlink()
                break
        return process.wait()


def compare_servers(options: Options) -> None:
    """Trains in one process on the workers' batches, and compares the tables."""
    trainer = Trainer(options, tf.distribute.get_strategy())
    for step in range(options.steps):
        for part in range(options.processes):
            trainer.train_alone(trainer.batch(step, part, options.processes))
    stored = te.checkpoint.read(str(options.out / "tables"))
    for table, variable in trainer.embedding.embedding_tables.items():
        own, theirs = variable.numpy(), stored[table.name].parameters.numpy()
        print(f"{table.name}: largest difference {float(np.abs(own - theirs).max())}")
    print(f"Test RMSE of one process: {trainer.error():.4f}")


def dense_variables(trainer: Trainer) -> list[Any]:
    """Returns the dense weights."""
    return list(trainer.dense_part.variables)


def latest_step(out: Path) -> int:
    """Returns the step of the last complete checkpoint, or 0."""
    found = [int(path.stem.split("-")[1]) for path in out.glob("tables-*.index")]
    return max(found, default=0)


def run_job(options: Options, argv: Sequence[str]) -> int:
    """Runs the processes, and with --kill a second time; returns the exit code."""
    launch = ("-m", "tpu_embedding", "launch", "--restarts", str(int(options.kill)))
    program = ("--processes", str(options.processes), __file__, *argv, "--worker")
    return subprocess.call([sys.executable, *launch, *program])


def main(argv: Sequence[str] | None = None) -> None:
    """Trains in several processes, then in one, and compares."""
    given = sys.argv[1:] if argv is None else list(argv)
    options = parse_options(given)
    # The rounding of a matrix product depends on the number of threads.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Grappler may write the sums of the dense model in another order.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    if options.worker:
        (coordinator if options.parameter_servers else worker)(options)
        return
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    if options.parameter_servers:
        if run_servers(options, given):
            raise SystemExit("The coordinator failed; see above.")
        compare_servers(options)
        return
    if run_job(options, given):
        raise SystemExit("A process failed; see above.")

    trainer = Trainer(options, tf.distribute.get_strategy())
    for step in range(options.steps):
        parts = [
            trainer.batch(step, part, options.processes)
            for part in range(options.processes)
        ]
        trainer.train_whole(parts)
    stored = te.checkpoint.read(str(options.out / f"tables-{options.steps}"))
    for table, variable in trainer.embedding.embedding_tables.items():
        own, theirs = variable.numpy(), stored[table.name].parameters.numpy()
        print(f"{table.name}: largest difference {float(np.abs(own - theirs).max())}")
        # The sum of two dense gradients does not depend on their order. That of more
        # does, and may differ by one bit for each further process and step.
        bits = options.steps * (options.processes - 2)
        np.testing.assert_allclose(theirs, own, rtol=0, atol=bits * 2.0**-24)
    print(f"{options.processes} processes and one process have the same tables.")


if __name__ == "__main__":
    main()
