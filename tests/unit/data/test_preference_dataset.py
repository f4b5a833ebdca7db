from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from caldera.config.preference import PreferenceDataConfig
from caldera.data.preference_dataset import PreferenceDataset
from caldera.errors import DataError

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
Write = Callable[..., str]
QUESTION = [{"role": "user", "content": "2+2?"}]
CHOSEN, REJECTED = "It is 4.", "5"


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def dataset(file: str, tokenizer: Any, **keys: Any) -> PreferenceDataset:
    return PreferenceDataset(file, tokenizer, PreferenceDataConfig(**keys))


def text_of(tokenizer: Any, tokens: tuple[list[int], list[int]]) -> tuple[str, str]:
    """The whole text, and that of the tokens which the mask is about."""
    ids, mask = tokens
    assert len(ids) == len(mask)
    assert mask[-1] == 0, "nothing follows the last token"
    answer = [after for after, kept in zip(ids[1:], mask, strict=False) if kept]
    return text(tokenizer, ids), text(tokenizer, answer)


def text(tokenizer: Any, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize(
    "prompt", ["2+2?", QUESTION, [{"role": "system", "content": "Hm."}, *QUESTION]]
)
@pytest.mark.parametrize(
    "form",
    [
        lambda prompt, text: text,
        lambda prompt, text: [assistant(text)],
        lambda prompt, text: [*prompt, assistant(text)],
    ],
    ids=["text", "message", "whole conversation"],
)
def test_prompt_and_answers_in_every_form(
    tokenizer: Any, write_jsonl: Write, prompt: Any, form: Callable[[Any, str], Any]
) -> None:
    messages = QUESTION if isinstance(prompt, str) else prompt
    row = {
        "prompt": prompt,
        "chosen": form(messages, CHOSEN),
        "rejected": form(messages, REJECTED),
    }
    item = dataset(write_jsonl([row]), tokenizer)[0]
    assert item.keys() == {"chosen", "rejected"}
    system = "<system>Hm." if len(messages) > 1 else ""
    for name, answer in (("chosen", CHOSEN), ("rejected", REJECTED)):
        whole, trained = text_of(tokenizer, item[name])
        assert whole == f"{system}<user>2+2?<assistant>{answer}<eos>"
        assert trained == f"{answer}<eos>"


def test_columns_of_other_names_and_margins(tokenizer: Any, write_jsonl: Write) -> None:
    rows = [{"question": "a", "good": "b", "bad": "c", "distance": m} for m in (1, 0.5)]
    keys = {"prompt_key": "question", "chosen_key": "good", "rejected_key": "bad"}
    pairs = dataset(write_jsonl(rows), tokenizer, **keys, margin_key="distance")
    assert len(pairs) == 2
    assert [pairs[i]["margin"] for i in range(2)] == [1.0, 0.5]
    assert text_of(tokenizer, pairs[0]["rejected"])[1] == "c<eos>"


def test_further_arguments_of_the_template(tokenizer: Any, write_jsonl: Write) -> None:
    file = write_jsonl([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    item = dataset(file, tokenizer, apply_chat_template_kwargs={"suffix": "!"})[0]
    assert text_of(tokenizer, item["chosen"]) == ("<user>a<assistant>!b<eos>", "b<eos>")


def test_what_prepared_hh_rlhf_has(tokenizer: Any, tmp_path: Path) -> None:
    """Messages in a parquet file, as `caldera data prepare hh_rlhf` writes them."""
    from caldera.data.prepare.command import parser, run

    raw = Path(__file__).parents[2] / "data" / "raw" / "hh_rlhf"
    arguments = ["prepare", "hh_rlhf", "--raw", str(raw), "--output", str(tmp_path)]
    assert run(parser().parse_args(arguments), lambda source: None) == 0
    pairs = dataset(str(tmp_path / "train.parquet"), tokenizer)
    texts = [
        tuple(text_of(tokenizer, pairs[i][name])[1] for name in ("chosen", "rejected"))
        for i in range(len(pairs))
    ]
    assert ("Hello, how can I help?<eos>", "<eos>") in texts
    whole = [text_of(tokenizer, pairs[i]["rejected"])[0] for i in range(len(pairs))]
    assert any(
        one.endswith("<user>No.<assistant>I do not know.<eos>")
        and one.startswith("<user>What goes well with rice?<assistant>Beans do.")
        for one in whole
    )


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("qwen2.5", {}), ("smollm2", {}), ("qwen3", {"enable_thinking": False}), ("qwen3", {})],
)
def test_real_chat_templates(write_jsonl: Write, name: str, kwargs: dict[str, Any]) -> None:
    """Tokens are those of the whole conversation, up to the end of the answer."""
    tokenizer = templated(name)
    prompt = [*QUESTION, assistant("4\n\n"), {"role": "user", "content": "Sure?"}]
    row = {"prompt": prompt, "chosen": "Yes.\n\nIt is.", "rejected": [assistant("No.")]}
    item = dataset(write_jsonl([row]), tokenizer, apply_chat_template_kwargs=kwargs)[0]
    for column, answer in (("chosen", "Yes.\n\nIt is."), ("rejected", "No.")):
        ids, _ = item[column]
        whole, trained = text_of(tokenizer, item[column])
        assert trained == f"{answer}<|im_end|>"
        conversation: Any = tokenizer.apply_chat_template(
            [*prompt, assistant(answer)], tokenize=False, **kwargs
        )
        if name == "qwen3" and not kwargs:
            # The template adds an empty thought, which the text of the answer would have itself.
            conversation = conversation.replace("<think>\n\n</think>\n\n", "")
        assert conversation == f"{whole}\n"
        assert ids == tokenizer.encode(conversation, add_special_tokens=False)[:-1]


def templated(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of characters with a real chat template and its special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    characters = [chr(code) for code in (10, *range(32, 127))]
    vocabulary = {token: number for number, token in enumerate([*special, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|endoftext|>", eos_token="<|im_end|>",
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(),
    )  # fmt: skip


def test_fields_that_only_some_messages_have(tokenizer: Any, tmp_path: Path) -> None:
    """A parquet column gives every message the fields of all."""
    rows = [
        {
            "prompt": [{"role": "user", "content": "a", "name": None}],
            "chosen": [assistant("b")],
            "rejected": [{"role": "user", "content": "a", "name": None}, assistant("c")],
        }
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    item = dataset(str(path), tokenizer)[0]
    assert text_of(tokenizer, item["rejected"]) == ("<user>a<assistant>c<eos>", "c<eos>")


def test_fields_that_say_nothing(tokenizer: Any, write_jsonl: Write) -> None:
    chosen = [{**assistant("b"), "reasoning_content": "", "tool_calls": [], "name": None}]
    item = dataset(write_jsonl([{"prompt": "a", "chosen": chosen, "rejected": "c"}]), tokenizer)[0]
    assert text_of(tokenizer, item["chosen"])[1] == "b<eos>"


def test_cut_on_the_right(tokenizer: Any, write_jsonl: Write) -> None:
    file = write_jsonl([{"prompt": "abc", "chosen": "defg", "rejected": "h"}])
    item = dataset(file, tokenizer, max_length=7, truncation="right")[0]
    assert text_of(tokenizer, item["chosen"]) == ("<user>abc<assistant>de", "de")
    assert text_of(tokenizer, item["rejected"]) == ("<user>abc<assistant>h<eos>", "h<eos>")


@pytest.mark.parametrize("length", [3, 5])
def test_nothing_of_an_answer_is_left(tokenizer: Any, write_jsonl: Write, length: int) -> None:
    file = write_jsonl([{"prompt": "abc", "chosen": "d", "rejected": "e"}])
    pairs = dataset(file, tokenizer, max_length=length, truncation="right")
    with pytest.raises(DataError, match=r"^row 0 of .*: the prompt alone has 5 tokens, .*=left$"):
        pairs[0]


def test_cut_on_the_left_both_answer_the_same_prompt(tokenizer: Any, write_jsonl: Write) -> None:
    file = write_jsonl([{"prompt": "abc", "chosen": "defg", "rejected": "h"}])
    item = dataset(file, tokenizer, max_length=7, truncation="left")[0]
    assert text_of(tokenizer, item["chosen"]) == ("c<assistant>defg<eos>", "defg<eos>")
    assert text_of(tokenizer, item["rejected"]) == ("c<assistant>h<eos>", "h<eos>")


def test_an_answer_longer_than_all_that_fits(tokenizer: Any, write_jsonl: Write) -> None:
    file = write_jsonl([{"prompt": "abc", "chosen": "defg", "rejected": "h"}])
    item = dataset(file, tokenizer, max_length=4, truncation="left")[0]
    # Of the first token nobody can say how likely it is.
    assert text_of(tokenizer, item["chosen"]) == ("efg<eos>", "fg<eos>")
    assert text_of(tokenizer, item["rejected"]) == ("<assistant>h<eos>", "h<eos>")


def test_too_long(tokenizer: Any, write_jsonl: Write) -> None:
    file = write_jsonl([{"prompt": "abc", "chosen": "defg", "rejected": "h"}])
    dataset(file, tokenizer, max_length=10)[0]
    with pytest.raises(
        DataError, match=r"^row 0 of .*rows\.jsonl: .* 10 tokens, more than data\.max_length=9; "
    ):
        dataset(file, tokenizer, max_length=9)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 3}, r"row 0 of .*: the value of 'prompt' \(data\.prompt_key\) must be text"),
        ({"chosen": 3}, r"row 0 of .*: the value of 'chosen' \(data\.chosen_key\) must be a list"),
        ({"chosen": [{"role": "user", "content": "x"}]}, r"'chosen' .*got messages of user$"),
        ({"rejected": [assistant("x")] * 2}, r"'rejected' .*got messages of assistant, assistant$"),
        ({"rejected": QUESTION}, r"'rejected' .*got messages of none$"),
        (
            {"chosen": [{**assistant("x"), "reasoning_content": "so", "tool_calls": [{}]}]},
            r"'chosen' .* message of the assistant with reasoning_content, tool_calls, which cann",
        ),
        (
            {"margin": "large"},
            r"row 0 of .*'margin' \(data\.margin_key\) must be a number; got 'la",
        ),
    ],
)
def test_rows_that_are_wrong(
    tokenizer: Any, write_jsonl: Write, change: dict[str, Any], message: str
) -> None:
    row = {"prompt": QUESTION, "chosen": "a", "rejected": "b", "margin": 1.0, **change}
    with pytest.raises(DataError, match=message):
        dataset(write_jsonl([row]), tokenizer, margin_key="margin")


def test_a_prompt_that_the_template_refuses(tokenizer: Any, write_jsonl: Write) -> None:
    prompt = [{"role": "forbidden", "content": "x"}]
    pairs = dataset(write_jsonl([{"prompt": prompt, "chosen": "a", "rejected": "b"}]), tokenizer)
    with pytest.raises(DataError, match=r"^row 0 of .*: the chat template failed on the prompt"):
        pairs[0]


def test_a_column_that_is_missing_names_its_key(tokenizer: Any, write_jsonl: Write) -> None:
    file = write_jsonl([{"prompt": "a", "chosen": "b"}])
    with pytest.raises(DataError, match=r"^data\.rejected_key='rejected': .* has no such column"):
        dataset(file, tokenizer)
    with pytest.raises(DataError, match=r"^data\.margin_key='far': .* has no such column"):
        dataset(file, tokenizer, rejected_key="chosen", margin_key="far")


def test_a_tokenizer_without_an_end(tokenizer: Any, write_jsonl: Write) -> None:
    file = write_jsonl([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no end token"):
        dataset(file, tokenizer)
