from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from optimizer_cases import OPTION_VALUES

from tpu_embedding import optimizers
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.layout.plan import Plan, make_plan, require_options
from tpu_embedding.optimizers.base import ENGINES, Option


def _plan(
    features: dict[str, FeatureConfig], optimizer: optimizers.Optimizer | None = None
) -> Plan:
    keys = {feature.table: f"key of {p}" for p, feature in features.items()}
    return make_plan(list(features), list(features.values()), keys, optimizer)


def _feature(*args: Any, **options: Any) -> FeatureConfig:
    return FeatureConfig(TableConfig(8, 4, *args, **options))


def test_features_keep_their_order_and_point_to_their_tables() -> None:
    shared = TableConfig(8, 4, name="shared")
    plan = _plan(
        {"a": FeatureConfig(shared), "b/0": _feature(), "b/1": FeatureConfig(shared, 3)}
    )
    assert [(f.index, f.path, f.table) for f in plan.features] == [
        (0, "a", 0),
        (1, "b/0", 1),
        (2, "b/1", 0),
    ]
    assert [(t.index, t.name, t.features) for t in plan.tables] == [
        (0, "shared", (0, 2)),
        (1, "table_1", (1,)),
    ]
    assert plan.features[2].config.max_sequence_length == 3
    assert plan.tables[0].config is shared


def test_tables_carry_the_object_that_the_user_passed() -> None:
    plan = _plan({"a": _feature(), "b": _feature()})
    assert [table.key for table in plan.tables] == ["key of a", "key of b"]


def test_unnamed_tables_are_numbered_in_order_of_first_use() -> None:
    plan = _plan({"a": _feature(), "b": _feature(name="x"), "c": _feature()})
    assert [table.name for table in plan.tables] == ["table_0", "x", "table_2"]


def test_a_table_s_own_optimizer_goes_first() -> None:
    own, common = optimizers.SGD(), optimizers.Adam()
    features = {"a": _feature(optimizer=own), "b": _feature()}
    assert [t.optimizer for t in _plan(features, common).tables] == [own, common]
    assert [t.optimizer for t in _plan(features, None).tables] == [own, None]


@pytest.mark.parametrize(
    "features",
    [
        {"a": _feature(name="x"), "b/0": _feature(name="x")},
        {"a": _feature(), "b/0": _feature(name="table_0")},
    ],
)
def test_duplicate_names_are_refused(features: dict[str, FeatureConfig]) -> None:
    with pytest.raises(ValueError, match="feature a and the one of feature b/0"):
        _plan(features)


def test_paths_and_features_must_agree() -> None:
    feature = _feature()
    with pytest.raises(ValueError, match="zip"):
        make_plan(["a", "b"], [feature], {feature.table: None}, None)


def test_a_plan_is_frozen() -> None:
    plan = _plan({"a": _feature()})
    for record, field in [
        (plan, "tables"),
        (plan.tables[0], "name"),
        (plan.features[0], "path"),
    ]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


@pytest.mark.parametrize(
    ("cls", "option"),
    [
        pytest.param(cls, option, id=f"{name}-{option.name}")
        for name, cls in optimizers.OPTIMIZERS.items()
        for option in cls().options
        if option.lacking and option.name in {f.name for f in dataclasses.fields(cls)}
    ],
)
def test_an_option_is_refused_by_the_engines_that_lack_it(
    cls: Any, option: Option
) -> None:
    value = OPTION_VALUES[option.name]
    table = TableConfig(8, cls.table_dim or 4, name="films")
    plan = _plan({"a": FeatureConfig(table)}, cls(**{option.name: value}))
    text = re.escape(f"'films': `{option.name}={value!r}` of its optimizer is not supp")
    for engine in ENGINES:
        if engine in option.lacking:
            with pytest.raises(NotImplementedError, match=text):
                require_options(plan, engine)
        else:
            require_options(plan, engine)
