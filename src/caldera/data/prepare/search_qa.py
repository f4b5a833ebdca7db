"""Questions that are answered by searching a corpus, in two protocols.

`search_qa` is for the tool `search`, which the model calls by tool calls; `search_qa_tags` is for
models that search by writing tags themselves, without tools.
"""

from __future__ import annotations

import hashlib

from caldera.data.chat import Message
from caldera.data.files import Row
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of
from caldera.errors import DataError

HUB = "PeterJinGo/nq_hotpotqa_train"
PREFIX = "searchR1_"
TEST_SHARE = 10  # one question in so many, where the raw file has no splits

SYSTEM = "You are a helpful and harmless assistant."
TOOLS_PROMPT = """Answer the question at the end. Whenever you learn something new, reason about \
it first, between <think> and </think>. If you find that you lack some knowledge, call the search \
engine with a query between <tool_call> and </tool_call>; it returns the best results between \
<tool_response> and </tool_response>. Search as often as you need to. Once nothing is missing, \
give the answer between <answer> and </answer>, without explanations. For example, \
<answer> Beijing </answer>. Question: {question}"""
TAGS_PROMPT = """Answer the question at the end. Whenever you learn something new, reason about it \
first, between <think> and </think>. If you find that you lack some knowledge, ask the search \
engine by <search> query </search>; it returns the best results between <information> and \
</information>. Search as often as you need to. Once nothing is missing, give the answer between \
<answer> and </answer>, without explanations. For example, <answer> Beijing </answer>. \
Question: {question}
"""

SOURCES = (
    Source("train", "train", HubTable(HUB, None, "train"), PREFIX),
    Source("test", "test", HubTable(HUB, None, "test"), PREFIX),
    Source("train", "questions", HubTable(HUB, None, "train"), PREFIX),
    Source("test", "questions", HubTable(HUB, None, "test"), PREFIX),
)


@register_preparer("search_qa", *SOURCES)
def search_qa_row(raw: Row, source: Source) -> Row | None:
    prompt = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": TOOLS_PROMPT.format(question=_question(raw))},
    ]
    row = _row(raw, source, prompt)
    if row is not None:
        create_kwargs = {
            "ground_truth": row["reward_model"]["ground_truth"],
            "question": _question(raw),
            "data_source": row["data_source"],
        }
        tools_kwargs = {"search": {"create_kwargs": create_kwargs}}
        row["extra_info"] |= {"need_tools_kwargs": True, "tools_kwargs": tools_kwargs}
    return row


@register_preparer("search_qa_tags", *SOURCES)
def search_qa_tags_row(raw: Row, source: Source) -> Row | None:
    text = TAGS_PROMPT.format(question=_question(raw))
    return _row(raw, source, [{"role": "user", "content": text}])


def _row(raw: Row, source: Source, prompt: list[Message]) -> Row | None:
    if source.file == "questions" and _split(_question(raw)) != source.split:
        return None
    return rl_row(
        source.data_source + text_of(raw, "source", "data_source"),
        prompt,
        ability="fact-reasoning",
        ground_truth={"target": _answers(raw)},
        question=_question(raw),
    )


def _question(raw: Row) -> str:
    return text_of(raw, "question").strip()


def _split(question: str) -> str:
    """By the question alone, so that it stays where it is when the file grows."""
    digest = hashlib.sha256(question.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % TEST_SHARE == 0 else "train"


def _answers(raw: Row) -> list[str]:
    answers = raw.get("answers") or raw.get("golden_answers")
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"'answers' or 'golden_answers' must be a list of strings, not {answers!r}")
    return answers
