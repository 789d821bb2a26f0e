"""translate_keras_optimizer takes the optimizers of tf_keras, legacy ones too."""

from __future__ import annotations

from typing import Any

import pytest
import tf_keras  # pyright: ignore[reportMissingImports]
from keras_layer import optimizer_contract as contract

PACKAGES = {"new": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}
each_package = pytest.mark.parametrize("package", PACKAGES)
each_class = pytest.mark.parametrize("name", contract.CARRIED)


@each_package
@each_class
def test_options_are_carried(package: str, name: str):
    contract.check_options_are_carried(PACKAGES[package], name)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *(
            (name, option, value)
            for name, refused in contract.REFUSED.items()
            for option, value in {**contract.REFUSED_ALIKE, **refused}.items()
        ),
        ("Adam", "adaptive_epsilon", True),
    ],
)
def test_options_are_refused_by_name(name: str, option: str, value: Any):
    contract.check_option_is_refused(getattr(tf_keras.optimizers, name), option, value)


LEGACY_ALIKE = {"clipnorm": 1.0, "global_clipnorm": 1.0, "decay": 0.1}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (name, option, value)
        for name, refused in contract.REFUSED.items()
        for option, value in {**LEGACY_ALIKE, **refused}.items()
    ],
)
def test_options_of_legacy_classes_are_refused_by_name(
    name: str, option: str, value: Any
):
    cls = getattr(tf_keras.optimizers.legacy, name)
    contract.check_option_is_refused(cls, option, value)


@each_package
def test_a_plain_rate_is_read_at_each_update(package: str):
    contract.check_a_plain_rate_is_read_at_each_update(PACKAGES[package])


def test_a_schedule_is_evaluated_at_the_layers_own_count():
    contract.check_a_schedule_is_evaluated_at_the_layers_own_count(tf_keras.optimizers)
