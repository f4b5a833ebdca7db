"""Whose each token of a trajectory is, in chat templates of real models and in a hostile one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.template_tokenizers import REWRITING, real, tokenizer_with
from tests.unit.agent_loop.agent_scripts import CALL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tests.unit.agent_loop.agent_scripts import Run

ENDS = "<|im_end|>"
FIRST = f"<think>\n20 and  22 \n</think>\n\n{CALL}  {ENDS}"  # spaces that a template would strip
THEN = f"<think>\nsum\n</think>\n\n{CALL}{ENDS}"
LAST = f"It is 42.{ENDS}"
SHAPES = {"qwen2.5": real("qwen2.5"), "qwen3": real("qwen3"), "smollm2": real("smollm2"),
          "hostile": tokenizer_with(REWRITING)}  # fmt: skip


@pytest.fixture(params=list(SHAPES))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return SHAPES[request.param]


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    text: str = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    return text


def pieces(output: Any) -> list[tuple[int, list[int], list[float]]]:
    """(mask, tokens, log-probs) of each stretch of one mask."""
    found: list[tuple[int, list[int], list[float]]] = []
    columns = (output.response_mask, output.response_ids, output.response_logprobs)
    for mask, token, log_prob in zip(*columns, strict=True):
        if not found or found[-1][0] != mask:
            found.append((mask, [], []))
        found[-1][1].append(token)
        found[-1][2].append(log_prob)
    return found


@pytest.mark.parametrize("loop", ["tool_agent", "react_agent"])
def test_tokens_masks_and_log_probs(
    run: Run, tokenizer: PreTrainedTokenizerFast, loop: str
) -> None:
    lengths = ["data.max_prompt_length=2048", "data.max_response_length=2048"]
    output, script = run(FIRST, THEN, LAST, overrides=lengths, loop=loop)
    said = [tokenizer.encode(text, add_special_tokens=False) for text in (FIRST, THEN, LAST)]
    stretches = pieces(output)
    assert [mask for mask, _, _ in stretches] == [1, 0, 1, 0, 1]
    assert [ids for mask, ids, _ in stretches if mask] == said  # to the token, as sampled
    for mask, ids, log_probs in stretches:
        places = range(len(ids))
        assert log_probs == ([-0.5 - 0.001 * i for i in places] if mask else [0.0 for _ in places])
    for _, told, _ in (stretches[1], stretches[3]):
        text = text_of(tokenizer, told)
        assert "42" in text and text.count(ENDS) == 1 and CALL not in text
        assert text.rstrip("\n").endswith("<|im_start|>assistant")
    # Each turn is sampled behind the very tokens of those before.
    whole = output.prompt_ids + output.response_ids
    assert len(script.prompts) == 3
    assert all(whole[: len(prompt)] == prompt for prompt in script.prompts)


@pytest.mark.parametrize("tokenizer", ["qwen2.5", "smollm2"], indirect=True)
def test_the_text_is_the_templates_own(run: Run, tokenizer: PreTrainedTokenizerFast) -> None:
    """These keep earlier turns as they are: appending gives what they render at once."""
    lengths = ["data.max_prompt_length=2048", "data.max_response_length=2048"]
    output, _ = run(f"{CALL}{ENDS}", LAST, overrides=lengths)
    messages = [
        {"role": "user", "content": "20+22?"}, {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."},
    ]  # fmt: skip
    prompt = text_of(tokenizer, output.prompt_ids)
    begun = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    shown = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(shown, str) and isinstance(begun, str) and shown.startswith(begun)
    assert text_of(tokenizer, output.response_ids) == shown[len(begun) :].rstrip("\n")
    assert prompt.endswith("<|im_start|>assistant\n")
