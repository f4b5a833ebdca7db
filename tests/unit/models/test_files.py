"""Which files of a model are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from caldera.errors import DataError
from caldera.models.files import find_weight_files


def index(folder: Path, weight_map: object) -> str:
    folder.mkdir(exist_ok=True)
    content = {"metadata": {"total_size": 4}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return str(folder)


def test_an_index_names_files_of_its_folder(tmp_path: Path) -> None:
    path = index(tmp_path / "m", {"w": "part.safetensors", "v": "part.safetensors"})
    save_file({"w": torch.ones(1), "v": torch.ones(1)}, tmp_path / "m/part.safetensors")
    found = find_weight_files(path)
    assert found is not None and found.shapes() == {"w": (1,), "v": (1,)}


@pytest.mark.parametrize("name", ["../other.safetensors", "/x.safetensors", "%2e%2e/x", 3, [1]])
def test_an_index_that_names_other_files_is_refused(tmp_path: Path, name: object) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match=r"model.safetensors.index.json"):
        find_weight_files(index(tmp_path / "m", {"w": name}))


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no index of weights"):
        find_weight_files(index(tmp_path / "m", None))
