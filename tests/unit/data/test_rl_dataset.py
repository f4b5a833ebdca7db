from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from caldera.config import DataConfig
from caldera.data import RLHFDataset
from caldera.errors import DataError, UnsupportedError

MakeConfig = Callable[..., DataConfig]
WriteJsonl = Callable[..., str]


def row(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "data_source": "toy", **columns}


def test_an_item_holds_the_row_and_its_tokens(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    source = row(
        "ab",
        reward_model={"style": "rule", "ground_truth": "4"},
        extra_info={
            "index": 5,
            "tools_kwargs": {"search": {"create_kwargs": {"k": 1}}, "other": None},
            "interaction_kwargs": {"name": "teacher"},
        },
    )
    config = make_config(return_full_prompt=True)
    item = RLHFDataset(write_jsonl([source]), tokenizer, config)[0]
    ids: Any = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>", "a", "b"])
    user, assistant, a, b = ids
    assert item["input_ids"].tolist() == [0, 0, 0, 0, user, a, b, assistant]
    assert item["attention_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert item["position_ids"].tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    for key in ("input_ids", "attention_mask", "position_ids"):
        assert item[key].dtype == torch.int64
    assert item["raw_prompt_ids"] == [user, a, b, assistant]
    assert item["raw_prompt"] == source["prompt"]
    assert item["full_prompts"] == "<user>ab<assistant>"
    assert item["index"] == 5
    assert item["tools_kwargs"] == {"search": {"create_kwargs": {"k": 1}}}
    assert item["interaction_kwargs"] == {"name": "teacher"}
    assert {key: item[key] for key in source} == source


def test_optional_fields_and_defaults(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    item = RLHFDataset(write_jsonl([row("ab")]), tokenizer, make_config(return_raw_chat=False))[0]
    assert "raw_prompt" not in item
    assert "full_prompts" not in item
    assert (item["index"], item["tools_kwargs"], item["interaction_kwargs"]) == (0, {}, {})


def test_an_item_can_be_changed_without_harm(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    dataset = RLHFDataset(write_jsonl([row("ab", extra_info={"x": [1]})]), tokenizer, make_config())
    item = dataset[0]
    item["raw_prompt"].append({"role": "assistant", "content": "c"})
    item["raw_prompt"][0]["content"] = "changed"
    item["extra_info"]["x"].append(2)
    assert dataset[0]["raw_prompt"] == [{"role": "user", "content": "ab"}]
    assert dataset[0]["extra_info"] == {"x": [1]}


def test_fields_that_parquet_fills_with_none_do_not_reach_the_template(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, tmp_path: Path
) -> None:
    messages = [
        {"role": "system", "content": "s", "name": "x"},
        {"role": "user", "content": "a", "name": None},
    ]
    pq.write_table(pa.Table.from_pylist([{"prompt": messages}]), tmp_path / "a.parquet")
    dataset = RLHFDataset(
        [str(tmp_path / "a.parquet")], tokenizer, make_config(return_full_prompt=True)
    )
    assert dataset[0]["full_prompts"] == "<system>s!<user>a<assistant>"
    assert dataset[0]["raw_prompt"][1] == {"role": "user", "content": "a"}


@pytest.mark.parametrize(("mode", "kept"), [("left", "bc>"), ("right", "<ab"), ("middle", "<c>")])
def test_truncation(
    tokenizer: PreTrainedTokenizerFast,
    make_config: MakeConfig,
    write_jsonl: WriteJsonl,
    mode: str,
    kept: str,
) -> None:
    config = make_config(max_prompt_length=3, truncation=mode)
    item = RLHFDataset(write_jsonl([row("abc")]), tokenizer, config)[0]
    text = "".join(tokenizer.convert_ids_to_tokens(item["raw_prompt_ids"]))
    assert text.replace("<user>", "<").replace("<assistant>", ">") == kept
    assert item["input_ids"].tolist() == item["raw_prompt_ids"]
    assert item["attention_mask"].tolist() == [1, 1, 1]


def test_an_overlong_prompt_is_an_error_by_default(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    file = write_jsonl([row("a"), row("abc")])
    dataset = RLHFDataset(file, tokenizer, make_config(max_prompt_length=4))
    assert len(dataset[0]["raw_prompt_ids"]) == 3
    with pytest.raises(DataError) as caught:
        dataset[1]
    message = str(caught.value)
    assert f"row 1 of {file}" in message
    assert "5 tokens" in message
    assert "data.max_prompt_length=4" in message
    assert "data.filter_overlong_prompts=true" in message
    assert "data.truncation=left, right or middle" in message


@pytest.mark.parametrize("workers", [1, 2])
def test_the_filter_drops_overlong_prompts(
    tokenizer: PreTrainedTokenizerFast,
    make_config: MakeConfig,
    write_jsonl: WriteJsonl,
    workers: int,
) -> None:
    config = make_config(
        max_prompt_length=4, filter_overlong_prompts=True, filter_overlong_prompts_workers=workers
    )
    file = write_jsonl([row("abc"), row("a"), row("abcd"), row("ab")])
    dataset = RLHFDataset(file, tokenizer, config)
    assert [item["raw_prompt"][0]["content"] for item in map(dataset.__getitem__, range(2))] == [
        "a",
        "ab",
    ]
    assert len(dataset) == 2


def test_max_samples(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    file = write_jsonl([row(str(number), extra_info={"index": number}) for number in range(50)])

    def indices(max_samples: int, **values: Any) -> list[int]:
        dataset = RLHFDataset(file, tokenizer, make_config(**values), max_samples=max_samples)
        return [dataset[i]["index"] for i in range(len(dataset))]

    assert indices(-1) == list(range(50))
    assert indices(50) == list(range(50))
    assert indices(3, shuffle=False) == [0, 1, 2]
    drawn = indices(10, seed=1)
    assert len(set(drawn)) == 10
    assert drawn == indices(10, seed=1)
    assert drawn != indices(10, seed=2)
    assert drawn != list(range(10))


def test_template_kwargs_and_another_prompt_column(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    config = make_config(
        prompt_key="chat", apply_chat_template_kwargs={"suffix": "Z"}, return_full_prompt=True
    )
    file = write_jsonl([{"chat": [{"role": "user", "content": "a"}]}])
    assert RLHFDataset(file, tokenizer, config)[0]["full_prompts"] == "<user>a<assistant>Z"
    with pytest.raises(DataError, match=r"data.prompt_key='prompt': .* its columns are chat"):
        RLHFDataset(file, tokenizer, make_config())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, r"must be text, or a list of messages such as .*; got a int: 5"),
        ([], "got a list"),
        (None, "got a NoneType"),
        (["hello"], "message 0 of row 1"),
        ([{"content": "a"}], "message 0 of row 1"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "the content of message 1"),
        ([{"role": "user", "content": 3}], "must be a string; got a int: 3"),
    ],
)
def test_a_prompt_that_is_no_chat(
    tokenizer: PreTrainedTokenizerFast,
    make_config: MakeConfig,
    write_jsonl: WriteJsonl,
    value: object,
    said: str,
) -> None:
    file = write_jsonl([row("a"), {"prompt": value}])
    with pytest.raises(DataError, match=said) as caught:
        RLHFDataset(file, tokenizer, make_config())
    assert f"row 1 of {file}" in str(caught.value)
    assert "data.prompt_key" in str(caught.value)


def test_typed_content_and_tool_calls_are_messages_too(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "image": None}]},
        {"role": "assistant", "content": None, "tool_calls": [{"x": None}]},
    ]
    dataset = RLHFDataset(
        write_jsonl([{"prompt": messages}]), tokenizer, make_config(max_prompt_length=99)
    )
    assert dataset[0]["raw_prompt"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [{"x": None}]},
    ]


def test_a_template_that_fails_names_the_row(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    file = write_jsonl([{"prompt": [{"role": "forbidden", "content": "a"}]}])
    dataset = RLHFDataset(file, tokenizer, make_config())
    with pytest.raises(DataError, match=f"row 0 of {file}: the chat template .* no such role"):
        dataset[0]


def test_no_chat_template_and_a_processor(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    file = write_jsonl([row("a")])
    with pytest.raises(UnsupportedError, match="text only"):
        RLHFDataset(file, tokenizer, make_config(), processor=object())
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"actor_rollout_ref.model.custom_chat_template"):
        RLHFDataset(file, tokenizer, make_config())


def test_a_missing_file_is_blamed_on_the_key_that_named_it(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, tmp_path: Path
) -> None:
    train, val = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    config = make_config(train_files=[train], val_files=[val])
    with pytest.raises(DataError, match=r"^data.train_files: "):
        RLHFDataset([train], tokenizer, config)
    with pytest.raises(DataError, match=r"^data.val_files: "):
        RLHFDataset([val], tokenizer, config)


def test_extra_info_of_another_type_and_missing_tools_kwargs(
    tokenizer: PreTrainedTokenizerFast,
    make_config: MakeConfig,
    write_jsonl: WriteJsonl,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [row("a", extra_info="x"), row("b", extra_info={"need_tools_kwargs": True})]
    file = write_jsonl(rows)
    dataset = RLHFDataset(file, tokenizer, make_config())
    with pytest.raises(DataError, match=f"row 0 of {file}: extra_info must be a dict, not a str"):
        dataset[0]
    assert dataset[1]["tools_kwargs"] == {}
    assert f"row 1 of {file}: extra_info asks for tools_kwargs" in caplog.text


def test_a_column_that_a_file_lacks(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    files = [
        write_jsonl([row("a", reward_model={}), row("b")], "a.jsonl"),
        write_jsonl([], "empty.jsonl"),
        write_jsonl([row("c")], "c.jsonl"),
    ]
    dataset = RLHFDataset(files, tokenizer, make_config(train_files=files))
    dataset.require_column("data_source", "named by somebody", "Add it")
    with pytest.raises(DataError) as caught:
        dataset.require_column("reward_model", "which holds the ground truth", "Add it")
    assert str(caught.value) == (
        f"data.train_files: {files[2]} has no column 'reward_model', which holds the ground truth; "
        "its columns are prompt, data_source. Add it"
    )
    assert dataset.has_column("reward_model") and not dataset.has_column("answer")


def test_rows_without_verls_columns_are_completed(
    tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
) -> None:
    """File by file: one in verl's schema stays as it is."""
    plain = [
        {"prompt": "a", "answer": "1", "level": 2},
        {"prompt": "b", "answer": None, "solution": "2", "extra_info": {"level": 3}},
        {"prompt": "c", "level": 4},
    ]
    verls = row("d", reward_model={"ground_truth": "4"}, answer="no")
    files = [write_jsonl(plain, "plain.jsonl"), write_jsonl([verls], "verls.jsonl")]
    dataset = RLHFDataset(files, tokenizer, make_config())
    items = [dataset[i] for i in range(4)]
    assert [item["data_source"] for item in items] == ["data", "data", "data", "toy"]
    assert [item["reward_model"]["ground_truth"] for item in items] == ["1", "2", None, "4"]
    assert items[0]["extra_info"] == {"answer": "1", "level": 2, "solution": None}
    assert items[1]["extra_info"] == {"answer": None, "level": 3, "solution": "2"}
    assert items[3]["extra_info"] is None


class TestPlainText:
    def test_it_is_a_message_of_the_user(
        self, tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
    ) -> None:
        config = make_config(return_full_prompt=True)
        item = RLHFDataset(write_jsonl([{"prompt": "ab"}, row("c")]), tokenizer, config)[0]
        assert item["full_prompts"] == "<user>ab<assistant>"
        assert item["raw_prompt"] == [{"role": "user", "content": "ab"}]

    @pytest.mark.parametrize("asked", [None, False])
    def test_it_is_bare_without_a_template_or_where_a_key_says_so(
        self,
        tokenizer: PreTrainedTokenizerFast,
        make_config: MakeConfig,
        write_jsonl: WriteJsonl,
        asked: bool | None,
    ) -> None:
        if asked is None:
            tokenizer.chat_template = None
        config = make_config(
            return_full_prompt=True, apply_chat_template=asked, filter_overlong_prompts=True
        )
        file = write_jsonl([{"prompt": "ab"}, {"prompt": "x" * 9}, {"prompt": "x" * 8}])
        dataset = RLHFDataset(file, tokenizer, config)
        assert len(dataset) == 2  # 8 tokens fit, without any of a template
        item = dataset[0]
        assert item["full_prompts"] == "ab"
        assert item["raw_prompt_ids"] == tokenizer.convert_tokens_to_ids(["a", "b"])
        assert item["raw_prompt"] == [{"role": "user", "content": "ab"}]

    def test_it_begins_as_the_tokenizer_begins_a_text_and_does_not_end(
        self, tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
    ) -> None:
        ids: Any = tokenizer.convert_tokens_to_ids(["<user>", "a", "b", "<eos>"])
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<user> $A <eos>", special_tokens=[("<user>", ids[0]), ("<eos>", ids[3])]
        )
        config = make_config(apply_chat_template=False)
        dataset = RLHFDataset(write_jsonl([{"prompt": "ab"}]), tokenizer, config)
        assert dataset[0]["raw_prompt_ids"] == ids[:3]

    def test_what_cannot_be_rendered(
        self, tokenizer: PreTrainedTokenizerFast, make_config: MakeConfig, write_jsonl: WriteJsonl
    ) -> None:
        def error(prompt: Any, **keys: Any) -> str:
            with pytest.raises(DataError) as caught:
                RLHFDataset(write_jsonl([{"prompt": prompt}]), tokenizer, make_config(**keys))
            return str(caught.value)

        chat = row("a")["prompt"]
        assert "must be plain text with data.apply_chat_template=False; got a list" in error(
            chat, apply_chat_template=False
        )
        assert "(data.prompt_key) is empty text" in error(" ")
        assert "must be text, or a list of messages such as" in error(3)
        tokenizer.chat_template = None
        assert "has no chat template" in error("a", apply_chat_template=True)
        assert "has no chat template" in error(chat)
