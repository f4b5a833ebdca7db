"""Turns that are appended to what was sampled, in the chat templates of real models."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from caldera.data.chat import Appending, TurnAppender
from caldera.errors import ConfigError
from tests.template_tokenizers import REWRITING, real, tokenizer_with

NUMBERED = (
    "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # earlier turns of the assistant are left out
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SILENT = (  # tools may speak, and are not heard
    "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)


def grow(tokenizer: Any, *turns: tuple[str, list[dict[str, Any]]]) -> tuple[list[int], list[int]]:
    """(tokens, mask) of a conversation that starts with a question, as a loop would make it."""
    appender = TurnAppender(tokenizer)
    ids = appender.prompt([{"role": "user", "content": "What is 2 + 2?"}])
    mask = [0] * len(ids)
    for said, new in turns:
        sampled = tokenizer.encode(said, add_special_tokens=False)
        added = appender.continuation(new, sampled[-1]) if new else []
        ids += sampled + added
        mask += [1] * len(sampled) + [0] * len(added)
    return ids, mask


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "qwen3"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_appended_turns_are_those_of_the_template(name: str, role: str) -> None:
    tokenizer = real(name)
    new = [{"role": role, "content": "4"}]
    ids, mask = grow(tokenizer, ("Let me see.<|im_end|>", new), ("It is 4.<|im_end|>", []))
    # A short answer without thoughts is one that the templates of all three leave alone.
    whole: Any = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "content": "Let me see."},
            *new,
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    if name == "qwen3" and role == "tool":  # it opens and closes a thought before such an answer
        whole = whole.replace("<think>\n\n</think>\n\nLet me see.", "Let me see.")
    assert text_of(tokenizer, ids) == whole + "It is 4.<|im_end|>"
    chosen = [token for token, own in zip(ids, mask, strict=True) if own]
    assert text_of(tokenizer, chosen) == "Let me see.<|im_end|>It is 4.<|im_end|>"


def test_several_answers_of_tools_come_in_one_turn() -> None:
    tokenizer = real("qwen2.5")
    new = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    added = TurnAppender(tokenizer).continuation(new, tokenizer.eos_token_id)
    assert text_of(tokenizer, added) == (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_that_the_model_did_not_end_is_ended() -> None:
    tokenizer = real("qwen2.5")
    appender = TurnAppender(tokenizer)
    new = [{"role": "user", "content": "Go on."}]
    own_end = appender.continuation(new, tokenizer.eos_token_id)
    cut = appender.continuation(new, tokenizer.encode("x")[0])
    other: Any = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    other_end = appender.continuation(new, other)
    assert cut == other_end == [tokenizer.eos_token_id, *own_end]


def test_sampled_tokens_stay_as_they_were_sampled() -> None:
    # two ways to spell the same text: encoding again would join them
    tokenizer = real("qwen2.5")
    appender = TurnAppender(tokenizer)
    pieces = [tokenizer.encode(letter)[0] for letter in "user"]
    assert tokenizer.encode("user") != pieces
    prompt = appender.prompt([{"role": "user", "content": "a"}])
    sampled = [*pieces, tokenizer.eos_token_id]
    grown = (
        prompt + sampled + appender.continuation([{"role": "user", "content": "b"}], sampled[-1])
    )
    assert grown[len(prompt) : len(prompt) + len(sampled)] == sampled


def test_what_the_mark_might_meet_changes_nothing() -> None:
    tokenizer = real("qwen2.5")
    appender = TurnAppender(tokenizer)
    content = "caldera:what-the-model-said"
    added = appender.continuation([{"role": "user", "content": content}], tokenizer.eos_token_id)
    assert text_of(tokenizer, added).count(content) == 1


def test_the_template_says_how_turns_are_appended() -> None:
    assert TurnAppender(real("qwen2.5")).check() is Appending.EXACT
    assert TurnAppender(real("smollm2")).check() is Appending.EXACT
    # it drops the thoughts of earlier turns
    assert TurnAppender(real("qwen3")).check() is Appending.AS_SAMPLED


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (NUMBERED, "depends on the turns before"),
        (FORGETFUL, "leaves out what the assistant said"),
        (NO_TOOLS, "no tools"),
        (SILENT, "'tool' appended: it leaves out what the message says"),
    ],
)
def test_templates_that_cannot_are_refused(template: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TurnAppender(tokenizer_with(template)).check()


def test_a_template_without_tools_takes_turns_of_users() -> None:
    assert TurnAppender(tokenizer_with(NO_TOOLS)).check(["user"]) is Appending.EXACT


def test_a_template_that_rewrites_earlier_turns_is_told() -> None:
    assert TurnAppender(tokenizer_with(REWRITING)).check() is Appending.AS_SAMPLED


def test_tools_are_in_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    tokenizer = real("qwen2.5")
    text = text_of(
        tokenizer, TurnAppender(tokenizer).prompt([{"role": "user", "content": "a"}], tools)
    )
    assert '"name": "add"' in text and text.endswith("<|im_start|>assistant\n")
