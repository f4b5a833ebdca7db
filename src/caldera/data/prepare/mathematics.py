"""Mathematical problems: GSM8K, MATH, DAPO-Math-17k and AIME."""

from __future__ import annotations

import re

from caldera.data.chat import Message, chat_messages
from caldera.data.files import Row
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of
from caldera.errors import DataError

TEMPLATE = """Work through the math problem below step by step. End your response with a line of \
the form Answer: $Answer, where $Answer is your final answer to the problem.

{problem}

Keep in mind that the last line has to start with "Answer:" and give the final answer."""


def answer_line_prompt(problem: str) -> str:
    return TEMPLATE.format(problem=problem)


GSM8K = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
GSM8K_ANSWER = re.compile(r"#### \$?(-?[0-9.,]+)")


@register_preparer(
    "gsm8k",
    Source("train", "train", HubTable(GSM8K, "main", "train"), GSM8K),
    Source("test", "test", HubTable(GSM8K, "main", "test"), GSM8K),
)
def gsm8k_row(raw: Row, source: Source) -> Row:
    question, answer = text_of(raw, "question"), text_of(raw, "answer")
    final = GSM8K_ANSWER.findall(answer)
    if not final:
        raise DataError(f"no number after '#### ' in the answer {answer!r}")
    return rl_row(
        source.data_source,
        f"{question} {GSM8K_INSTRUCTION}",
        ability="math",
        ground_truth=final[-1].replace(",", ""),
        question=question,
        answer=answer,
    )


MATH = "DigitalLearningGmbH/MATH-lighteval"
MATH_500 = "HuggingFaceH4/MATH-500"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{$]+))")
BRACE = re.compile(r"(?<!\\)[{}]")


@register_preparer(
    "math",
    Source("train", "train", HubTable(MATH, "default", "train"), MATH),
    Source("test", "math500", HubTable(MATH_500, None, "test"), MATH_500),
    Source("test", "test", HubTable(MATH, "default", "test"), MATH),
)
def math_row(raw: Row, source: Source) -> Row | None:
    problem, answer = text_of(raw, "problem"), raw.get("answer")
    if answer == "" and not raw.get("solution"):
        return None
    return rl_row(
        source.data_source,
        f"{problem} {INSTRUCTION}",
        ability="math",
        ground_truth=str(answer) if answer else boxed_answer(text_of(raw, "solution")),
        question=problem,
        answer=raw.get("solution"),
        level=raw.get("level"),
        subject=raw.get("subject") or raw.get("type"),
    )


def boxed_answer(solution: str) -> str:
    """The contents of the last `\\boxed{...}` (or `\\fbox`) of a solution."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        raise DataError(f"no \\boxed{{}} in the solution {solution!r}")
    box = boxes[-1]
    if box["bare"]:
        return box["bare"]
    depth = 1
    for brace in BRACE.finditer(solution, box.end()):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return solution[box.end() : brace.start()]
    raise DataError(f"the last \\boxed{{}} is not closed in the solution {solution!r}")


@register_preparer(
    "dapo_math",
    Source(
        "train",
        "dapo-math-17k",
        HubTable("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
        "math_dapo",
    ),
    Source(
        "train",
        "train",
        HubTable("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
        "math_dapo",
    ),
    unique_prompts=True,  # the published file holds each problem about a hundred times
)
def dapo_math_row(raw: Row, source: Source) -> Row:
    """Published rows have their prompt already; others are a problem with its answer."""
    return rl_row(
        source.data_source,
        _prompt(raw),
        ability="math",
        ground_truth=_answer(raw),
        id=(raw.get("extra_info") or {}).get("index"),
    )


def _answer(raw: Row) -> str:
    published = (raw.get("reward_model") or {}).get("ground_truth")
    answers = {"ground_truth": published, "answer": raw.get("answer")}
    given = {name: str(value) for name, value in answers.items() if value is not None}
    return text_of(raw | given, "ground_truth", "answer", "solution")


def _prompt(raw: Row) -> str | list[Message]:
    if isinstance(raw.get("prompt"), list):
        return chat_messages(raw["prompt"], "the prompt")
    return answer_line_prompt(text_of(raw, "problem", "question", "prompt"))


YEAR_IN_ADDRESS = re.compile(r"(20\d\d)_AIME")


@register_preparer(
    "aime", Source("test", "test", HubTable("HuggingFaceH4/aime_2024", None, "train"), "aime")
)
def aime_row(raw: Row, source: Source) -> Row:
    problem = text_of(raw, "problem", "question")
    answer = str(raw.get("answer", "")).strip()
    if not answer.isdecimal():
        raise DataError(f"the answer {answer!r} is not a whole number")
    return rl_row(
        f"{source.data_source}{_year(raw)}",
        answer_line_prompt(problem),
        ability="math",
        # 033 in the answer key is 33 in a response.
        ground_truth=str(int(answer)),
        question=problem,
        answer=raw.get("solution"),
        url=raw.get("url"),
    )


def _year(raw: Row) -> str:
    address = YEAR_IN_ADDRESS.search(str(raw.get("url", "")))
    return str(raw.get("year") or (address[1] if address else ""))
