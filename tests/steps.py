"""A training step and an evaluation of a class with a queue or without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tpu_embedding as te


def look_up(embedding: Any, features: Any, weights: Any = None) -> tuple[Any, list]:
    """The activations of a step, and what apply_gradients takes after gradients."""
    if isinstance(embedding, te.TPUEmbeddingV2):
        activations, *preserved = embedding(features, weights)
        return activations, preserved
    embedding.enqueue(features, weights)
    return embedding.dequeue(), []


def train_on(
    embedding: Any,
    features: Any,
    gradients: Callable[[tf.Tensor], Any] | Any = tf.ones_like,
    weights: Any = None,
    **options: Any,
) -> Any:
    """Trains a step; the activations. Gradients are values, or follow from them."""
    activations, preserved = look_up(embedding, features, weights)
    if callable(gradients):
        gradients = tf.nest.map_structure(gradients, activations)
    embedding.apply_gradients(gradients, *preserved, **options)
    return activations


def evaluate_on(embedding: te.TPUEmbedding, features: Any, weights: Any = None) -> Any:
    """The activations of an evaluation."""
    embedding.enqueue(features, weights, training=False)
    return embedding.dequeue()
