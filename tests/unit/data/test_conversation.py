"""What is trained of a conversation, in the chat templates of Qwen2.5, Qwen3 and SmolLM2."""

from __future__ import annotations

from typing import Any

import pytest

from caldera.data.conversation import ConversationMismatch, ConversationTokenizer, TokenRow
from tests.template_tokenizers import real

QWEN2, QWEN3, SMOLLM2 = "qwen2.5", "qwen3", "smollm2"
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOL_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def marked(name: str, row: TokenRow) -> str:
    """The text, with what is trained in brackets."""
    parts: list[tuple[bool, list[int]]] = []
    for token, trained in zip(row.ids, row.trained, strict=True):
        if not parts or parts[-1][0] != trained:
            parts.append((trained, []))
        parts[-1][1].append(token)
    decode = real(name).backend_tokenizer.decode
    texts = [(trained, decode(ids, skip_special_tokens=False)) for trained, ids in parts]
    return "".join(f"[{text}]" if trained else text for trained, text in texts)


def whole(name: str, *messages: dict[str, Any], **template_kwargs: Any) -> str:
    """What is trained; the text must be that of the template, and so must its tokens."""
    tokenizer = real(name)
    row = ConversationTokenizer(tokenizer, template_kwargs).whole([*messages])
    text = tokenizer.apply_chat_template([*messages], tokenize=False, **template_kwargs)
    assert row.ids == tokenizer.encode(text, add_special_tokens=False)
    return marked(name, row)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def said(text: str) -> str:
    return f"<|im_start|>assistant\n[{text}<|im_end|>\n]"


@pytest.mark.parametrize(
    ("name", "system"),
    [(QWEN2, turn("system", QWEN_SYSTEM)), (SMOLLM2, turn("system", SMOL_SYSTEM))],
)
def test_the_answers_of_every_turn(name: str, system: str) -> None:
    found = whole(
        name, message("user", "Hi"), message("assistant", "Hello."),
        message("user", "1+1?"), message("assistant", "It is 2.\n\nSure."),
    )  # fmt: skip
    assert found == (
        system + turn("user", "Hi") + said("Hello.") + turn("user", "1+1?")
        + said("It is 2.\n\nSure.")
    )  # fmt: skip


@pytest.mark.parametrize("name", [QWEN2, SMOLLM2])
def test_a_system_prompt_of_ones_own(name: str) -> None:
    found = whole(
        name, message("system", "Be brief."), message("user", "Hi"), message("assistant", "Yes")
    )
    assert found == turn("system", "Be brief.") + turn("user", "Hi") + said("Yes")


def test_qwen3_writes_thinking_into_the_last_turn_alone() -> None:
    found = whole(
        QWEN3, message("user", "1+1"), message("assistant", "<think>\nsum\n</think>\n\n2"),
        message("user", "2+2"), message("assistant", "<think>\ntwice\n</think>\n\n4"),
    )  # fmt: skip
    assert found == (
        turn("user", "1+1") + said("2") + turn("user", "2+2")
        + said("<think>\ntwice\n</think>\n\n4")
    )  # fmt: skip


def test_qwen3_learns_that_it_did_not_think() -> None:
    found = whole(QWEN3, message("user", "1+1"), message("assistant", "2"))
    assert found == turn("user", "1+1") + said("<think>\n\n</think>\n\n2")


def test_qwen3_without_thinking_has_it_in_the_generation_prompt() -> None:
    found = whole(
        QWEN3, message("user", "1+1"), message("assistant", "2"), message("user", "2+2"),
        message("assistant", "4"), enable_thinking=False,
    )  # fmt: skip
    last = "<|im_start|>assistant\n<think>\n\n</think>\n\n[4<|im_end|>\n]"
    assert found == turn("user", "1+1") + said("2") + turn("user", "2+2") + last


def test_qwen3_with_reasoning_apart_from_the_content() -> None:
    found = whole(
        QWEN3, message("user", "1+1"), message("assistant", "2", reasoning_content="of course")
    )
    assert found == turn("user", "1+1") + said("<think>\nof course\n</think>\n\n2")


@pytest.mark.parametrize("name", [QWEN2, QWEN3])
def test_calls_of_tools_are_trained_and_their_answers_are_not(name: str) -> None:
    found = whole(
        name, message("user", "1+1"), message("assistant", "", tool_calls=[CALL, CALL]),
        message("tool", "2"), message("tool", "3"), message("assistant", "Two."),
        message("user", "Thanks"), message("assistant", "Bye."), tools=TOOLS,
    )  # fmt: skip
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    answers = "".join(f"\n<tool_response>\n{n}\n</tool_response>" for n in (2, 3))
    head, _, dialogue = found.partition("</tool_call><|im_end|>\n")  # of the system prompt
    assert '"name": "add"' in head
    assert "[" not in head.replace("[]", "").split("<tools>")[0]
    last = "<think>\n\n</think>\n\nBye." if name == QWEN3 else "Bye."
    assert dialogue == (
        turn("user", "1+1") + said(f"{call}\n{call}") + f"<|im_start|>user{answers}<|im_end|>\n"
        + said("Two.") + turn("user", "Thanks") + said(last)
    )  # fmt: skip


@pytest.mark.parametrize("name", [QWEN2, QWEN3, SMOLLM2])
def test_an_assistant_may_speak_first(name: str) -> None:
    found = whole(
        name, message("assistant", "Hello!"), message("user", "Hi"), message("assistant", "So?")
    )
    assert said("Hello!") + turn("user", "Hi") in found


def test_the_mask_stands_at_the_token_before() -> None:
    row = TokenRow([7, 8, 9, 10], [False, False, True, True])
    assert row.loss_mask() == [0, 1, 1, 0]


class TestMismatch:
    def test_tokens_that_would_join(self) -> None:
        """The header's newline and the answer's are one token of the whole."""
        with pytest.raises(ConversationMismatch, match="the tokens of its messages are not those"):
            whole(QWEN2, message("user", "Hi"), message("assistant", "\nHello"))

    def test_one_by_one(self) -> None:
        messages = [
            message("user", "Hi"), message("assistant", "\nHello"), message("user", "So"),
            message("assistant", "Yes"),
        ]  # fmt: skip
        row = ConversationTokenizer(real(QWEN2), {}).one_by_one(messages)
        assert marked(QWEN2, row) == (
            turn("system", QWEN_SYSTEM) + turn("user", "Hi") + said("\nHello")
            + turn("user", "So") + said("Yes")
        )  # fmt: skip

    def test_one_by_one_of_qwen3_lacks_what_the_whole_adds(self) -> None:
        messages = [message("user", "1+1"), message("assistant", "2")]
        row = ConversationTokenizer(real(QWEN3), {}).one_by_one(messages)
        assert marked(QWEN3, row) == turn("user", "1+1") + said("2")

    def test_one_by_one_without_thinking(self) -> None:
        """A lone message has a header that is not the generation prompt."""
        messages = [message("user", "1+1"), message("assistant", "2")]
        kwargs = {"enable_thinking": False}
        row = ConversationTokenizer(real(QWEN3), kwargs).one_by_one(messages)
        assert marked(QWEN3, row) == turn("user", "1+1") + said("2")

    def test_thinking_where_there_is_to_be_none(self) -> None:
        told = (
            r"^message 1, the assistant's, cannot be .*: it thinks, and enable_thinking=False has"
        )
        with pytest.raises(ConversationMismatch, match=told):
            whole(
                QWEN3, message("user", "1+1"), message("assistant", "2", reasoning_content="so"),
                enable_thinking=False,
            )  # fmt: skip

    def test_a_template_without_a_generation_prompt(self) -> None:
        tokenizer = real(SMOLLM2)
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        kwargs = {"chat_template": template, "enable_thinking": False}
        conversations = ConversationTokenizer(tokenizer, kwargs)
        with pytest.raises(ConversationMismatch, match=r"makes of the whole conversation$"):
            conversations.whole([message("user", "Hi"), message("assistant", "Yes")])
