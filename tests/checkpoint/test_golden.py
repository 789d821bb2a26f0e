"""Files written at earlier commits load with the same bits.

tests/golden/checkpoints/README.md says how they were made.
"""

from __future__ import annotations

import base64
import io
import json
import pathlib
import zipfile

import numpy as np
import pytest
from checkpoint import golden_growing, golden_models
from checkpoint.golden_models import Case

# The commits that wrote files, and what each could write.
CASES = {
    "36ee9cc": golden_models.CASES,
    "e08f784": golden_models.CASES,
    "8e5844c": {
        name: golden_growing.CASES[name]
        for name in ("growing-tensorflow", "growing-layer", "rows")
    },
    "0f9d891": golden_growing.CASES,
}
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "checkpoints"

# Sequences carry a mask by now, which the Flatten of this model drops.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Layer .* was passed an input with a mask:UserWarning"
)


@pytest.mark.parametrize(
    ("name", "commit", "case"),
    [
        pytest.param(name, commit, case, id=f"{name}-{commit}")
        for commit, cases in CASES.items()
        for name, case in cases.items()
    ],
)
def test_files_of_earlier_commits(
    name: str, commit: str, case: Case, tmp_path: pathlib.Path
) -> None:
    file = GOLDEN / commit / f"{name}.zip.base64"
    packed = base64.decodebytes(file.read_bytes())
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        archive.extractall(tmp_path)
        expected = json.loads(archive.read("expected.json"))
    found = case.load(str(tmp_path))
    assert found.keys() == expected.keys()
    if "variables" in expected:  # A model, whose dense layer may round elsewhere.
        np.testing.assert_allclose(
            found.pop("outputs"), expected.pop("outputs"), rtol=1e-6
        )
    assert json.loads(json.dumps(found)) == expected
