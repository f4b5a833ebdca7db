from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from caldera.config import DataConfig, SFTDataConfig
from caldera.data import RLHFDataset, create_rl_dataset, create_sft_dataset, create_train_loader
from caldera.errors import ConfigError

MakeConfig = Callable[..., DataConfig]
WriteJsonl = Callable[..., str]


@pytest.fixture
def file(write_jsonl: WriteJsonl) -> str:
    return write_jsonl(
        [
            {"prompt": [{"role": "user", "content": text}], "extra_info": {"index": index}}
            for index, text in enumerate("abcd")
        ]
    )


def test_the_default_class_down_to_the_batch(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, file: str
) -> None:
    config = make_config(train_batch_size=2, shuffle=False)
    dataset = create_rl_dataset([file], config, tokenizer, max_samples=3)
    assert type(dataset) is RLHFDataset
    assert len(dataset) == 3
    (batch,) = create_train_loader(dataset, config)
    assert batch["input_ids"].shape == (2, 8)
    assert batch["raw_prompt_ids"].shape == (2,)
    assert list(batch["index"]) == [0, 1]


def test_a_custom_class(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, file: str, tmp_path: Path
) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "from caldera.data import RLHFDataset\n"
        "class Mine(RLHFDataset):\n"
        "    def __getitem__(self, item):\n"
        "        return {**super().__getitem__(item), 'mine': True}\n"
        "class NoDataset: pass\n"
        "def function(): pass\n"
    )
    config = make_config()
    config.custom_cls.path, config.custom_cls.name = str(source), "Mine"
    assert create_rl_dataset([file], config, tokenizer)[0]["mine"] is True
    for name in ("NoDataset", "function"):
        config.custom_cls.name = name
        with pytest.raises(ConfigError, match=f"data.custom_cls: '{name}' .* not a subclass"):
            create_rl_dataset([file], config, tokenizer)
    config.custom_cls.name = None
    with pytest.raises(ConfigError, match=r"data.custom_cls: .* without a name"):
        create_rl_dataset([file], config, tokenizer)
    config.custom_cls.path, config.custom_cls.name = None, "Mine"
    with pytest.raises(ConfigError, match=r"without data.custom_cls.path"):
        create_rl_dataset([file], config, tokenizer)


@pytest.mark.parametrize(
    ("base", "hook", "instead"),
    [
        ("RLHFDataset", "_download", "_read_files_and_tokenize"),
        ("RLHFDataset", "on_batch_end", "data.sampler.class_path"),
        ("SFTDataset", "_read_files_and_tokenize", "__getitem__"),
        ("MultiTurnSFTDataset", "_read_files_and_process", "__getitem__"),
        ("MultiTurnSFTDataset", "_process_single_message", "__getitem__"),
    ],
)
def test_a_hook_that_nobody_calls_is_an_error(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, file: str, tmp_path: Path,
    base: str, hook: str, instead: str,
) -> None:  # fmt: skip
    source = tmp_path / "mine.py"
    source.write_text(
        f"from caldera.data import {base}\n"
        f"class Between({base}):\n"
        f"    def {hook}(self, *args): return args\n"
        "class Mine(Between): pass\n"
    )
    message = rf"data.custom_cls: 'Mine' of .*mine.py defines {hook}, which .*{instead}"
    if base == "RLHFDataset":
        config = make_config()
        config.custom_cls.path, config.custom_cls.name = str(source), "Mine"
        with pytest.raises(ConfigError, match=message):
            create_rl_dataset([file], config, tokenizer)
    else:
        own = SFTDataConfig(train_files=[file])
        own.custom_cls.path, own.custom_cls.name = str(source), "Mine"
        with pytest.raises(ConfigError, match=message):
            create_sft_dataset([file], own, tokenizer)
