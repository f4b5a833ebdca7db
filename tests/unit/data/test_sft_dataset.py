from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from caldera.config.data import CustomClassConfig
from caldera.config.sft import MultiTurnDataConfig, SFTDataConfig
from caldera.data import create_sft_dataset, engine_rows, token_batch
from caldera.errors import ConfigError, DataError

WriteRows = Callable[..., str]


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    def write(*rows: dict[str, Any], name: str = "train.parquet") -> str:
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / name
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows]), path)
        return str(path)

    return write


def trained(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """The whole text, and what the loss sees of it."""
    kept = row["attention_mask"].bool()
    ids, mask = row["input_ids"][kept], row["loss_mask"][kept].bool()
    assert not mask[-1]
    assert not row["loss_mask"][~kept].any()
    seen = ids[1:][mask[:-1]]
    return "".join(tokenizer.convert_ids_to_tokens(ids)), "".join(
        tokenizer.convert_ids_to_tokens(seen)
    )


class TestAnswers:
    def test_the_answer_and_its_end_are_trained(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        file = write_rows({"question": "1+1?", "answer": "2"}, {"question": "?", "answer": "no"})
        rows = create_sft_dataset([file], SFTDataConfig(), tokenizer)
        assert len(rows) == 2
        assert trained(rows[0], tokenizer) == ("<user>1+1?<assistant>2<eos>", "2<eos>")
        assert trained(rows[1], tokenizer) == ("<user>?<assistant>no<eos>", "no<eos>")

    def test_right_padding(self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
        file = write_rows({"question": "a", "answer": "b"})
        config = SFTDataConfig(max_length=9, pad_mode="right")
        (row,) = create_sft_dataset([file], config, tokenizer)
        assert {key: value.tolist() for key, value in row.items()} == {
            "input_ids": [*tokenizer.encode("<user>a<assistant>b<eos>"), 0, 0, 0, 0],
            "attention_mask": [1, 1, 1, 1, 1, 0, 0, 0, 0],
            "position_ids": [0, 1, 2, 3, 4, 4, 4, 4, 4],
            "loss_mask": [0, 0, 1, 1, 0, 0, 0, 0, 0],
        }

    def test_values_inside_columns(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        file = write_rows({"info": {"deep": {"q": "x"}, "a": "y"}})
        config = SFTDataConfig(
            prompt_key="info", response_key="info", prompt_dict_keys=["deep", "q"],
            response_dict_keys=["a"],
        )  # fmt: skip
        (row,) = create_sft_dataset([file], config, tokenizer)
        assert trained(row, tokenizer) == ("<user>x<assistant>y<eos>", "y<eos>")

    @pytest.mark.parametrize(
        ("truncation", "text", "seen"),
        [("left", "b<assistant>12<eos>", "12<eos>"), ("right", "<user>ab<assistant>1", "1")],
    )
    def test_truncation(
        self,
        write_rows: WriteRows,
        tokenizer: PreTrainedTokenizerFast,
        truncation: str,
        text: str,
        seen: str,
    ) -> None:
        file = write_rows({"question": "ab", "answer": "12"})
        config = SFTDataConfig(max_length=5, truncation=truncation)
        (row,) = create_sft_dataset([file], config, tokenizer)
        batch = token_batch([row], pad_id=0)
        shown = batch["responses"][0][batch["response_mask"][0].bool()]
        assert "".join(tokenizer.convert_ids_to_tokens(row["input_ids"])) == text
        assert "".join(tokenizer.convert_ids_to_tokens(shown.tolist())) == seen

    def test_a_cut_in_the_answer(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        file = write_rows({"question": "ab", "answer": "12"})
        config = SFTDataConfig(max_length=3, truncation="left")
        (row,) = create_sft_dataset([file], config, tokenizer)
        assert trained(row, tokenizer) == ("12<eos>", "2<eos>")  # the 1 follows nothing


class TestConversations:
    def test_what_the_assistant_says(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        talk = [
            {"role": "user", "content": "a", "name": None},
            {"role": "assistant", "content": "b", "name": None},
            {"role": "user", "content": "c", "name": "Ann"},
            {"role": "assistant", "content": "d", "name": None},
        ]
        file = write_rows({"talk": talk, "tools": None, "enable_thinking": None})
        multiturn = MultiTurnDataConfig(enable=True, messages_key="talk")
        (row,) = create_sft_dataset([file], SFTDataConfig(multiturn=multiturn), tokenizer)
        # `!` stands for a name that was given
        assert trained(row, tokenizer) == ("<user>a<assistant>b<user>c!<assistant>d", "bd")

    @pytest.mark.parametrize("tools", [[{"name": "t", "gap": None}], '[{"name": "t"}]'])
    def test_tools_and_thinking(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, tools: Any
    ) -> None:
        tokenizer.chat_template = (
            "{{ tools | length }}{{ tools[0] | length }}{{ enable_thinking }}{{ extra }}"
            + str(tokenizer.chat_template)
        )
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rows = [{"messages": talk, "tools": tools, "enable_thinking": value} for value in (0, 1)]
        config = SFTDataConfig(
            multiturn=MultiTurnDataConfig(enable=True), apply_chat_template_kwargs={"extra": "!"}
        )
        one, two = create_sft_dataset([write_rows(*rows)], config, tokenizer)
        assert trained(one, tokenizer) == ("11False!<user>a<assistant>b", "b")
        assert trained(two, tokenizer) == ("11True!<user>a<assistant>b", "b")

    NULL: ClassVar[dict[str, Any]] = {"name": "t", "default": None}

    @pytest.mark.parametrize("tools", [[NULL], json.dumps([NULL])])
    def test_nulls_of_json_stay(
        self, write_jsonl: WriteRows, tokenizer: PreTrainedTokenizerFast, tools: Any
    ) -> None:
        tokenizer.chat_template = (
            "{{ tools | tojson }}{% for m in messages if m.tool_calls %}"
            "{{ m.tool_calls | tojson }}{% endfor %}" + str(tokenizer.chat_template)
        )
        talk = [{"role": "assistant", "content": "a", "tool_calls": [{"x": None}]}]
        config = SFTDataConfig(multiturn=MultiTurnDataConfig(enable=True))
        rows = create_sft_dataset(
            [write_jsonl([{"messages": talk, "tools": tools}])], config, tokenizer
        )
        assert json.dumps([self.NULL]) + '[{"x": null}]' in trained(rows[0], tokenizer)[0]

    def test_nulls_of_json_text_in_a_column_stay(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        tokenizer.chat_template = "{{ tools | tojson }}" + str(tokenizer.chat_template)
        talk = [{"role": "assistant", "content": "a"}]
        file = write_rows({"messages": talk, "tools": json.dumps([self.NULL])})
        config = SFTDataConfig(multiturn=MultiTurnDataConfig(enable=True))
        (row,) = create_sft_dataset([file], config, tokenizer)
        assert trained(row, tokenizer)[0].startswith(json.dumps([self.NULL]))

    def test_a_mismatch_names_the_row(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        file = write_rows({"messages": good})
        config = SFTDataConfig(multiturn=MultiTurnDataConfig(enable=True))
        with pytest.raises(DataError) as raised:
            create_sft_dataset([file], config, tokenizer)[0]
        assert str(raised.value) == (
            f"row 0 of {file}: message 1, the assistant's, cannot be found in what the chat "
            "template makes of the whole conversation; data.ignore_input_ids_mismatch=True trains "
            "on its messages as the template writes each of them alone"
        )
        config.ignore_input_ids_mismatch = True
        row = create_sft_dataset([file], config, tokenizer)[0]
        assert trained(row, tokenizer) == ("<user>a<assistant>b", "<assistant>b")


class TestBatches:
    def test_the_first_token_is_the_prompt(self) -> None:
        batch = engine_rows([([5, 6, 7], [0, 1, 0]), ([8, 9], [1, 1])], pad_id=3)
        assert {key: value.tolist() for key, value in batch.items()} == {
            "input_ids": [[5, 6, 7], [8, 9, 3]],
            "attention_mask": [[1, 1, 1], [1, 1, 0]],
            "responses": [[6, 7], [9, 3]],
            "response_mask": [[0, 1], [1, 0]],  # nothing follows the last token of a row
        }

    def test_a_single_token_has_an_empty_response(self) -> None:
        batch = engine_rows([([5], [1])], pad_id=3)
        assert batch["responses"].shape == (1, 1)
        assert not batch["response_mask"].any()

    def test_padding_is_dropped_wherever_it_is(self) -> None:
        row = {
            "input_ids": torch.tensor([3, 3, 5, 6, 3]),
            "attention_mask": torch.tensor([0, 0, 1, 1, 0]),
            "loss_mask": torch.tensor([0, 0, 1, 0, 0]),
        }
        batch = token_batch([row], pad_id=9)
        assert batch["input_ids"].tolist() == [[5, 6]]
        assert batch["response_mask"].tolist() == [[1]]


class TestMistakes:
    """What a user is told, word by word; FILE stands for the file."""

    ROWS = (
        {"question": "a", "answer": "b", "info": {"q": "c"}, "turns": [1]},
        {"question": None, "answer": "b", "info": {"q": "c"}, "turns": [1]},
    )
    CASES: ClassVar[dict[str, tuple[dict[str, Any], str]]] = {
        "no such column": (
            {"prompt_key": "query"},
            "data.prompt_key='query': FILE has no such column; its columns are question, answer, "
            "info, turns",
        ),
        "no text": (
            {},
            "row 1 of FILE: the value of 'question' (data.prompt_key) must be text, not a NoneType",
        ),
        "a dictionary": (
            {"prompt_key": "info"},
            "row 0 of FILE: the value of 'info' (data.prompt_key) must be text, not a dict; "
            "data.prompt_dict_keys=[...] names one of q",
        ),
        "no such path": (
            {"prompt_key": "info", "prompt_dict_keys": ["x"]},
            "row 0 of FILE: the value of 'info' (data.prompt_key) has no 'x' "
            "(data.prompt_dict_keys=['x']); it holds: q",
        ),
        "a path into text": (
            {"response_dict_keys": ["x"], "prompt_key": "answer"},
            "row 0 of FILE: the value of 'answer' (data.response_key) has no 'x' "
            "(data.response_dict_keys=['x']); it holds: str",
        ),
        "a conversation": (
            {"prompt_key": "turns"},
            "row 0 of FILE: the value of 'turns' (data.prompt_key) must be text, not a list; rows "
            "of whole conversations need data.multiturn.enable=True",
        ),
        "no messages": (
            {"multiturn": MultiTurnDataConfig(enable=True)},
            "data.multiturn.messages_key='messages': FILE has no such column; its columns are "
            "question, answer, info, turns",
        ),
        "no message": (
            {"multiturn": MultiTurnDataConfig(enable=True, messages_key="turns")},
            "message 0 of row 0 of FILE: the value of 'turns' (data.multiturn.messages_key) must "
            "be part of a list of messages such as [{'role': 'user', 'content': 'What is 1 + "
            "1?'}]; got a int: 1",
        ),
    }

    @pytest.mark.parametrize(("values", "message"), CASES.values(), ids=CASES)
    def test_a_mistake_is_told_before_training(
        self,
        write_rows: WriteRows,
        tokenizer: PreTrainedTokenizerFast,
        values: dict[str, Any],
        message: str,
    ) -> None:
        file = write_rows(*self.ROWS)
        with pytest.raises(DataError) as raised:
            create_sft_dataset([file], SFTDataConfig(**values), tokenizer)
        assert str(raised.value).replace(file, "FILE") == message

    def test_too_long(self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
        file = write_rows({"question": "abc", "answer": "b"})
        rows = create_sft_dataset([file], SFTDataConfig(max_length=6), tokenizer)
        with pytest.raises(DataError) as raised:
            rows[0]
        assert str(raised.value) == (
            f"row 0 of {file}: the sample has 7 tokens, more than data.max_length=6; raise that, "
            "or cut such samples with data.truncation=left or right"
        )

    def test_nothing_is_left_to_train_on(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        file = write_rows({"question": "abc", "answer": "b"})
        config = SFTDataConfig(max_length=3, truncation="right")
        rows = create_sft_dataset([file], config, tokenizer)
        with pytest.raises(DataError) as raised:
            rows[0]
        assert str(raised.value) == (
            f"row 0 of {file}: the sample has 7 tokens, and none is trained of those within "
            "data.max_length=3 (data.truncation=right); raise that, or cut the other side"
        )

    @pytest.mark.parametrize("value", ["false", 2])
    def test_thinking_that_is_neither_on_nor_off(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, value: Any
    ) -> None:
        talk = [{"role": "assistant", "content": "a"}]
        file = write_rows({"messages": talk, "enable_thinking": value})
        config = SFTDataConfig(multiturn=MultiTurnDataConfig(enable=True))
        with pytest.raises(DataError) as raised:
            create_sft_dataset([file], config, tokenizer)
        assert str(raised.value) == (
            f"row 0 of {file}: the value of 'enable_thinking' (data.multiturn.enable_thinking_key) "
            f"must be true or false; got {value!r}"
        )

    def test_a_tokenizer_without_an_end(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        file = write_rows({"question": "a", "answer": "b"})
        tokenizer.eos_token = None
        with pytest.raises(DataError, match="has no end token"):
            create_sft_dataset([file], SFTDataConfig(), tokenizer)

    def test_nothing_to_train_on(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        file = write_rows({"messages": [{"role": "user", "content": "a"}]})
        config = SFTDataConfig(multiturn=MultiTurnDataConfig(enable=True))
        with pytest.raises(DataError, match="nothing to train on: no message of 'assistant', only"):
            create_sft_dataset([file], config, tokenizer)

    @pytest.mark.parametrize(
        ("tools", "message"), [("{", "is no JSON"), ("3", "must be a list of schemas")]
    )
    def test_tools(
        self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, tools: str, message: str
    ) -> None:
        talk = [{"role": "assistant", "content": "a"}]
        file = write_rows({"messages": talk, "tools": tools})
        config = SFTDataConfig(multiturn=MultiTurnDataConfig(enable=True))
        with pytest.raises(DataError, match=rf"'tools' \(data\.multiturn\.tools_key\) {message}"):
            create_sft_dataset([file], config, tokenizer)

    def test_no_template(self, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizer.chat_template = None
        with pytest.raises(DataError, match=r"has no chat template; set data\.chat_template$"):
            create_sft_dataset([], SFTDataConfig(), tokenizer)


class TestOwnClass:
    SOURCE = """
import torch
from torch.utils.data import Dataset

class Own(Dataset):
    def __init__(self, parquet_files, tokenizer, config):
        self.files, self.tokenizer, self.config = parquet_files, tokenizer, config
    def __len__(self):
        return 1
    def __getitem__(self, item):
        ids = torch.tensor([4, 5, 6])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), OTHER: ids > 4}

class NoDataset:
    pass
"""

    def make(self, tmp_path: Path, name: str, mask: str = "loss_mask") -> SFTDataConfig:
        path = tmp_path / f"own_{mask}.py"
        path.write_text(self.SOURCE.replace("OTHER", repr(mask)))
        return SFTDataConfig(custom_cls=CustomClassConfig(path=str(path), name=name))

    def test_it_is_used(self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        rows = create_sft_dataset(["a"], self.make(tmp_path, "Own"), tokenizer)
        assert rows.files == ["a"]
        assert token_batch([rows[0]], 0)["response_mask"].tolist() == [[0, 1]]

    def test_rows_without_a_mask(self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        rows = create_sft_dataset(["a"], self.make(tmp_path, "Own", "mask"), tokenizer)
        with pytest.raises(DataError, match=r"has no tensor loss_mask \(data\.custom_cls\)"):
            token_batch([rows[0]], 0)

    def test_no_dataset(self, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(ConfigError, match=r"data\.custom_cls: 'NoDataset' of .* is not a sub"):
            create_sft_dataset(["a"], self.make(tmp_path, "NoDataset"), tokenizer)
