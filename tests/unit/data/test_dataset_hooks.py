"""What a subclass of RLHFDataset may override, as users of verl write it, by data.custom_cls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from caldera.config import DataConfig
from caldera.data import create_rl_dataset, create_train_loader
from caldera.errors import DataError

Make = Callable[..., Any]
ROWS = [
    {"prompt": [{"role": "user", "content": text}], "extra_info": {"index": index}, "level": index}
    for index, text in enumerate(["a", "bbbb", "c", "dd", "e"])
]


@pytest.fixture
def make(
    tokenizer: PreTrainedTokenizerFast, make_config: Callable[..., DataConfig],
    write_jsonl: Callable[..., str], tmp_path: Path,
) -> Make:  # fmt: skip
    """The data set of a class whose body is given, by the path that a run takes."""

    def go(body: str, rows: list[dict[str, Any]] = ROWS, max_samples: int = -1, **keys: Any) -> Any:
        source = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"  # each is imported once
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        source.write_text(
            "import pandas\nfrom caldera.data import RLHFDataset\n"
            f"class Mine(RLHFDataset):\n{indented}\n"
        )
        config = make_config(return_raw_chat=True, **keys)
        config.custom_cls.path, config.custom_cls.name = str(source), "Mine"
        return create_rl_dataset([write_jsonl(rows)], config, tokenizer, max_samples=max_samples)

    return go


def texts(dataset: Any) -> list[str]:
    return [dataset[i]["raw_prompt"][-1]["content"] for i in range(len(dataset))]


SUPER = "def _read_files_and_tokenize(self):\n    super()._read_files_and_tokenize()\n"


def test_rows_are_filtered_and_mapped_behind_super(make: Make) -> None:
    dataset = make(
        SUPER + "    self.dataframe = self.dataframe.filter(lambda r: r['level'] > 0, num_proc=2)\n"
        "    self.dataframe = self.dataframe.map(self._more, with_indices=True)\n"
        "def _more(self, row, place):\n"
        "    return {'place': place, 'ability': 'x'}"
    )  # fmt: skip
    assert texts(dataset) == ["bbbb", "c", "dd", "e"]
    assert [dataset[i]["place"] for i in range(4)] == [0, 1, 2, 3]
    assert dataset.column_values("ability") == {"x"}
    assert dataset[0]["raw_prompt_ids"] == dataset.tokenizer.encode("<user>bbbb<assistant>")


def test_rows_are_selected_behind_the_length_filter(make: Make) -> None:
    body = SUPER + "    self.dataframe = self.dataframe.select(range(2))"
    dataset = make(body, filter_overlong_prompts=True, max_prompt_length=4)
    assert texts(dataset) == ["a", "c"]  # of a, c, dd, e
    config = dataset.config
    config.train_batch_size, config.shuffle = 2, False
    (batch,) = create_train_loader(dataset, config)
    assert list(batch["index"]) == [0, 2]


GIVEN = {
    "list": "[{'prompt': [{'role': 'user', 'content': text}]} for text in ('xxxxx', 'y')]",
    "pandas": "pandas.DataFrame({'prompt': [[{'role': 'user', 'content': t}] "
    "for t in ('xxxxx', 'y')]})",
}


@pytest.mark.parametrize("kind", GIVEN)
def test_rows_of_its_own(make: Make, kind: str) -> None:
    body = f"def _read_files_and_tokenize(self):\n    self.dataframe = {GIVEN[kind]}"
    assert texts(make(body)) == ["xxxxx", "y"]
    # the keys of the data hold for them, too
    assert texts(make(body, filter_overlong_prompts=True, max_prompt_length=4)) == ["y"]


def test_rows_of_pandas_hold_lists_again(make: Make, tmp_path: Path) -> None:
    dataset = make(
        "def _read_files_and_tokenize(self):\n"
        "    rows = pandas.read_json(self.data_files[0], lines=True)\n"
        f"    rows.to_parquet({str(tmp_path / 'x.parquet')!r})\n"
        f"    self.dataframe = pandas.read_parquet({str(tmp_path / 'x.parquet')!r})"
    )
    assert texts(dataset) == ["a", "bbbb", "c", "dd", "e"]
    assert dataset[3]["index"] == 3


def test_rows_that_are_put_there_later(make: Make) -> None:
    dataset = make(
        "def __init__(self, *args, **kwargs):\n"
        "    super().__init__(*args, **kwargs)\n"
        "    self.dataframe = self.dataframe.select([4, 0])"
    )
    assert texts(dataset) == ["e", "a"]


def test_messages_of_other_columns(make: Make) -> None:
    rows = [{"question": text, "extra_info": {"index": 7}} for text in ("ab", "abcdefgh")]
    body = (
        "def _build_messages(self, example: dict):\n"
        "    return [{'role': 'system', 'content': 's'},\n"
        "            {'role': 'user', 'content': example.pop('question')}]"
    )
    dataset = make(body, rows, max_prompt_length=20)
    assert texts(dataset) == ["ab", "abcdefgh"]
    assert texts(dataset) == ["ab", "abcdefgh"]  # what is popped is a copy's
    assert (
        dataset.tokenizer.decode(dataset[0]["raw_prompt_ids"])
        .replace(" ", "")
        .startswith("<system>s<user>ab")
    )
    assert len(make(body, rows, filter_overlong_prompts=True)) == 1


def test_messages_changed_behind_super(make: Make) -> None:
    dataset = make(
        "def _build_messages(self, example):\n"
        "    messages = super()._build_messages(example)\n"
        "    messages[-1]['content'] += '!'\n"
        "    return messages"
    )
    assert texts(dataset)[:2] == ["a!", "bbbb!"]
    assert texts(dataset)[:2] == ["a!", "bbbb!"]
    assert dataset.dataframe[0]["prompt"][0]["content"] == "a"


def test_another_filter_and_other_items(make: Make) -> None:
    dataset = make(
        "def maybe_filter_out_long_prompts(self, dataframe=None):\n"
        "    return dataframe.filter(lambda row: row['level'] % 2 == 0)\n"
        "def __getitem__(self, item):\n"
        "    return {**super().__getitem__(item), 'raw': self.dataframe[item]['level']}\n"
        "def __len__(self):\n"
        "    return super().__len__() - 1"
    )
    assert [dataset[i]["raw"] for i in range(len(dataset))] == [0, 2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def _read_files_and_tokenize(self):\n    pass", "left self.dataframe at None"),
        (
            "def _read_files_and_tokenize(self):\n    self.dataframe = 3",
            "must be a list of dicts.*got a int",
        ),
        ("def _read_files_and_tokenize(self):\n    self.dataframe = []", "left no rows"),
        ("def maybe_filter_out_long_prompts(self, dataframe):\n    pass", "returned None"),
        (
            "def _build_messages(self, example):\n    return 5",
            r"row 0 of .*: what Mine._build_messages returned must be text, or a list of messages",
        ),
        (
            SUPER + "    self.dataframe = self.dataframe.map(lambda r: r, batched=True)",
            r"takes no batched=True here",
        ),
    ],
)
def test_what_cannot_be_honoured_is_an_error(make: Make, body: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(body)


def test_a_method_of_hugging_face_that_is_not_there(make: Make) -> None:
    with pytest.raises(AttributeError, match=r"not 'train_test_split'.*Dataset.from_list"):
        make(SUPER + "    self.dataframe.train_test_split(0.1)")


def test_a_number_of_samples_that_nobody_heeds(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    body = f"def _read_files_and_tokenize(self):\n    self.dataframe = {GIVEN['list']}"
    with caplog.at_level(logging.WARNING):
        make(body, max_samples=1)
    assert "Mine._read_files_and_tokenize has 2 rows, more than the 1" in caplog.text
    assert texts(make(SUPER, max_samples=2, shuffle=False)) == ["a", "bbbb"]


def test_a_row_is_named_by_its_file_whatever_was_left_out(make: Make) -> None:
    dataset = make(
        SUPER + "    self.dataframe = self.dataframe.select([3, 1])", max_prompt_length=5
    )
    with pytest.raises(DataError, match=r"row 1 of .*rows.jsonl: the prompt has 6 tokens"):
        dataset[1]
