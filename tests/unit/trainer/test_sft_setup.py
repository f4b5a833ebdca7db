from __future__ import annotations

from typing import Any

import pytest

from caldera.config import SFTTrainerConfig, load_supervised_config
from caldera.errors import CalderaError
from caldera.trainer.sft import build
from caldera.workers.supervised import FINE_TUNING


@pytest.mark.parametrize("key", ["model.partial_pretrain", "model.path", "model.tokenizer_path"])
def test_a_model_that_is_not_there_names_the_key_that_was_set(tmp_path: Any, key: str) -> None:
    given = [f"{key}={tmp_path / 'missing'}", f"data.train_files={tmp_path / 'train.parquet'}"]
    if key == "model.tokenizer_path":
        given.append("model.path=M")
    config = load_supervised_config(given, "sft_trainer", None, SFTTrainerConfig)
    with pytest.raises(CalderaError, match=key.replace(".", r"\.")):
        build(config, FINE_TUNING, lambda pool, recipes: {})
