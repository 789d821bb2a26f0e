"""Metrics of predictions, and a baseline without embeddings."""

from __future__ import annotations

import dataclasses

import numpy as np

from movielens.data import Ratings

LIKED = 4.0  # Ratings of at least this count as positive for the AUC.
_SHRINK_USER, _SHRINK_ITEM = 5.0, 3.0


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Metrics of predictions."""

    rmse: float
    auc: float

    def __str__(self) -> str:
        return f"RMSE {self.rmse:.4f}, AUC {self.auc:.4f}"


def evaluate(predicted: np.ndarray, rating: np.ndarray) -> Evaluation:
    """Compares predictions with the true ratings."""
    return Evaluation(rmse(predicted, rating), auc(predicted, rating))


def rmse(predicted: np.ndarray, rating: np.ndarray) -> float:
    """Computes the root of the mean squared error, with predictions clipped to 1..5.

    >>> rmse(np.array([7.0, 1.0]), np.array([5.0, 2.0])) ** 2
    0.5000000000000001
    """
    error = np.clip(predicted, 1, 5).astype(np.float64) - rating
    return float(np.sqrt(np.mean(error**2)))


def auc(predicted: np.ndarray, rating: np.ndarray) -> float:
    """Returns the fraction of pairs in which a liked film is predicted above another.

    >>> auc(np.array([2.0, 3.0, 3.0]), np.array([1.0, 3.0, 5.0]))
    0.75
    """
    liked = rating >= LIKED
    _, group, sizes = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = (np.cumsum(sizes) - (sizes - 1) / 2)[group]  # From 1; ties share a rank.
    positive, negative = int(liked.sum()), int((~liked).sum())
    wins = rank[liked].sum() - positive * (positive + 1) / 2
    return float(wins / (positive * negative))


def biases_alone(ratings: Ratings, known: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Predicts mean + user bias + film bias for `rows`, fitted to the `known` rows.

    Each bias is the mean of the residuals of the other, shrunk towards 0 as if a few
    more ratings had been average. The two are computed in turn until they converge.
    """
    user, item, rating = ratings.user[known], ratings.item[known], ratings.rating[known]
    mean = rating.mean(dtype=np.float64)
    of_user, of_item = np.zeros(ratings.user.max() + 1), np.zeros(0)
    for _ in range(20):
        left = rating - mean - of_user[user]
        of_item = _shrunk_means(left, item, _SHRINK_ITEM, ratings.item.max() + 1)
        left = rating - mean - of_item[item]
        of_user = _shrunk_means(left, user, _SHRINK_USER, len(of_user))
    return mean + of_user[ratings.user[rows]] + of_item[ratings.item[rows]]


def _shrunk_means(
    values: np.ndarray, group: np.ndarray, shrink: float, groups: int
) -> np.ndarray:
    sums = np.bincount(group, values, minlength=groups)
    return sums / (shrink + np.bincount(group, minlength=groups))
