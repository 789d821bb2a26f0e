"""Training that can be killed at any moment and resumed with the same result."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from tqdm import tqdm

import tpu_embedding as te
from movielens.data import Batch, Catalogue, Ratings
from movielens.metrics import Evaluation

BATCH = 512
STEPS_BETWEEN_CHECKPOINTS = 50


class Ranker(Protocol):
    """The model that `Run` trains."""

    catalogue: Catalogue
    embedding: te.TPUEmbedding
    dense_part: keras.Model
    optimizer: keras.optimizers.Optimizer

    def train_step(self, batch: Batch) -> tf.Tensor:
        """Trains on one batch; returns its mean squared error."""
        ...

    def evaluate(self, ratings: Ratings, rows: np.ndarray) -> Evaluation:
        """Evaluates the predictions for the ratings of these rows."""
        ...


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Number of epochs, seed of their order, and folder of the checkpoints."""

    epochs: int
    seed: int
    folder: Path


def prepare(schedule: Schedule, *, resume: bool) -> None:
    """Makes the folder of the checkpoints, empty unless a run is to be resumed.

    Raises:
      SystemExit: the run to resume had another schedule.
    """
    path = schedule.folder / "plan.json"
    own = {"epochs": schedule.epochs, "seed": schedule.seed}
    if resume and path.exists():
        theirs = json.loads(path.read_text())
        if theirs != own:
            raise SystemExit(
                f"--resume: {path} says {theirs}, not {own}; give the same."
            )
    else:
        shutil.rmtree(schedule.folder, ignore_errors=True)
        schedule.folder.mkdir(parents=True)
        path.write_text(json.dumps(own))


class Progress(tf.Module):
    """The progress of a training, which each checkpoint saves."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.epoch = tf.Variable(0, dtype=tf.int64)  # Epochs done.
        self.step = tf.Variable(0, dtype=tf.int64)  # Steps done in the current epoch.
        self.squares = tf.Variable(0.0, dtype=tf.float64)  # Their squared errors' sum.
        self.seconds = tf.Variable(0.0, dtype=tf.float64)
        zeros = tf.zeros([schedule.epochs], tf.float64)
        self.train_rmse = tf.Variable(zeros)
        self.validation_rmse = tf.Variable(zeros)
        self.validation_auc = tf.Variable(zeros)

    @property
    def best_epoch(self) -> int:
        """The epoch with the lowest validation RMSE so far, from 1."""
        return int(tf.argmin(self.validation_rmse[: self.epoch])) + 1


class Run:
    """The epochs of one training, from the start or from the latest checkpoint."""

    def __init__(self, ranker: Ranker, ratings: Ratings, schedule: Schedule) -> None:
        self.progress = Progress(schedule)
        self._ranker, self._ratings, self._schedule = ranker, ratings, schedule
        self._ids = ranker.catalogue.ids_per_rating(ratings)
        self._clock = 0.0  # When `seconds` was last brought up to date.
        # A Keras model given whole would be saved without its dropout's random state.
        weights = [variable.value for variable in ranker.dense_part.variables]
        best = {"embedding": ranker.embedding, "weights": weights}
        everything = {**best, "optimizer": ranker.optimizer, "progress": self.progress}
        self._best = _manager(schedule.folder / "best", best)
        self._latest = _manager(schedule.folder / "latest", everything)

    def resume(self) -> None:
        """Restores the latest checkpoint, if there is one."""
        if self._latest.latest_checkpoint:
            _restore(self._latest)
        else:
            print(f"No checkpoint in {self._schedule.folder}: starting anew.")

    def train(self) -> None:
        """Trains the remaining epochs, then restores the best one."""
        self._clock = time.perf_counter()
        total = self._schedule.epochs * int(self._ids[self._ratings.split.train].sum())
        done = self.ids_trained()
        with tqdm(total=total, initial=done, unit="ids", unit_scale=True) as bar:
            while self.progress.epoch < self._schedule.epochs:
                self._train_epoch(bar)
                bar.write(self._end_epoch())
        _restore(self._best)

    def ids_trained(self) -> int:
        """Counts the ids that all steps so far looked up."""
        in_epochs = self.progress.epoch * self._ids[self._ratings.split.train].sum()
        in_steps = self._ids[self._order()[: self._ratings_done()]].sum()
        return int(in_epochs) + int(in_steps)

    def _order(self) -> np.ndarray:
        """Returns the training part in this epoch's order, the same after a resume."""
        rng = np.random.default_rng((self._schedule.seed, int(self.progress.epoch)))
        return rng.permutation(self._ratings.split.train)

    def _ratings_done(self) -> int:
        return int(self.progress.step) * BATCH

    def _train_epoch(self, bar: tqdm) -> None:
        progress, order = self.progress, self._order()
        for batch in self._ratings.batches(order[self._ratings_done() :], BATCH):
            loss = float(self._ranker.train_step(batch))
            rows = order[self._ratings_done() :][: len(batch["rating"])]
            progress.squares.assign_add(loss * len(rows))
            progress.step.assign_add(1)
            state = f"epoch {int(progress.epoch) + 1}, loss {loss:.3f}"
            bar.set_postfix_str(state, refresh=False)
            bar.update(int(self._ids[rows].sum()))
            if progress.step % STEPS_BETWEEN_CHECKPOINTS == 0:
                self._save()

    def _end_epoch(self) -> str:
        progress, split = self.progress, self._ratings.split
        epoch = int(progress.epoch)
        found = self._ranker.evaluate(self._ratings, split.validation)
        progress.train_rmse[epoch].assign((progress.squares / len(split.train)) ** 0.5)
        progress.validation_rmse[epoch].assign(found.rmse)
        progress.validation_auc[epoch].assign(found.auc)
        progress.epoch.assign_add(1)
        progress.step.assign(0)
        progress.squares.assign(0)
        if progress.best_epoch == epoch + 1:
            self._best.save()
        self._save()
        return f"epoch {epoch + 1:2}, validation: {found}"

    def _save(self) -> None:
        now = time.perf_counter()
        self.progress.seconds.assign_add(now - self._clock)
        self._clock = now
        self._latest.save()


def _manager(folder: Path, parts: dict[str, Any]) -> tf.train.CheckpointManager:
    checkpoint = tf.train.Checkpoint(**parts)
    return tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=1)


def _restore(manager: tf.train.CheckpointManager) -> None:
    manager.checkpoint.restore(manager.latest_checkpoint).assert_consumed()
