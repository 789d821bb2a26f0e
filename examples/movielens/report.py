"""The report of the example: a picture of the curves and a table of films."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib as mpl
import numpy as np

from movielens import metrics
from movielens.data import Catalogue, Ratings
from movielens.training import Progress

mpl.use("Agg")  # Draws into files; needs no screen.
from matplotlib import pyplot as plt

MIN_RATINGS = 20
_ROW = "{:>4}  {:<46}  {:<28}  {:>9}  {}"
_HEADER = ("", "film", "genres", "predicted", "true, if in the test part")


def plot(progress: Progress, ratings: Ratings, path: Path) -> None:
    """Draws RMSE and AUC over the epochs into a PNG."""
    train_rmse = progress.train_rmse.numpy()
    epochs = np.arange(1, len(train_rmse) + 1)
    split = ratings.split
    biases = metrics.biases_alone(ratings, split.train, split.validation)
    baseline = metrics.evaluate(biases, ratings.rating[split.validation])
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(epochs, train_rmse, label="training")
    left.plot(epochs, progress.validation_rmse.numpy(), label="validation")
    left.axhline(baseline.rmse, color="gray", ls="--", label="validation, biases alone")
    left.set(title="RMSE", xlabel="epoch")
    right.plot(epochs, progress.validation_auc.numpy(), color="C1", label="validation")
    right.axhline(baseline.auc, color="gray", ls="--", label="validation, biases alone")
    right.set(title="AUC (rating of 4 or more)", xlabel="epoch")
    for axes in (left, right):
        axes.axvline(progress.best_epoch, color="C2", ls=":", label="chosen epoch")
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def recommendations(
    user: int, predicted: np.ndarray, ratings: Ratings, catalogue: Catalogue
) -> str:
    """Makes a table of the ten films that the user would rate highest.

    Films that the user rated in the training and validation parts are left out. Those
    of the test part count as unknown, and the user's true rating is shown beside them.
    Films with few ratings are left out, too: their predictions are mostly chance.

    Args:
      user: The number of the user, from 0.
      predicted: float32 [I], the user's ratings as the model sees them.
      ratings: All ratings.
      catalogue: Titles and genres.
    """
    known = _ratings_of(user, ratings, ratings.split.rest)
    later = _ratings_of(user, ratings, ratings.split.test)
    films = ratings.item[ratings.split.train]
    often = np.bincount(films, minlength=len(predicted)) >= MIN_RATINGS
    best_first = np.argsort(-predicted, kind="stable")
    new = [film for film in best_first if often[film] and film not in known]
    liked = sorted(known, key=lambda film: -known[film])[:5]
    lines = [f"User {user + 1} rated {len(known)} films of the training part, best:"]
    lines += [_row("", film, catalogue, known[film], "") for film in liked]
    lines += [
        "",
        f"Ten films for this user, of those with {MIN_RATINGS} ratings or more:",
    ]
    lines += [_ROW.format(*_HEADER)]
    lines += [
        _row(rank, film, catalogue, min(predicted[film], 5), later.get(film, ""))
        for rank, film in enumerate(new[:10], 1)
    ]
    return "\n".join(line.rstrip() for line in lines)


def _ratings_of(user: int, ratings: Ratings, rows: np.ndarray) -> dict[int, int]:
    own = rows[ratings.user[rows] == user]
    return {int(ratings.item[row]): int(ratings.rating[row]) for row in own}


def _row(
    rank: int | str, film: int, catalogue: Catalogue, rating: float, truth: int | str
) -> str:
    title = textwrap.shorten(catalogue.titles[film], 46, placeholder="...")
    genres = [catalogue.genre_names[genre] for genre in catalogue.genres[film].numpy()]
    text = textwrap.shorten(", ".join(genres), 28, placeholder="...")
    return _ROW.format(rank, title, text, f"{rating:.2f}", truth)
