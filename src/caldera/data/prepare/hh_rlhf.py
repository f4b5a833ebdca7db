"""HH-RLHF: dialogues with a preferred and a rejected last answer.

A row serves both uses: reinforcement learning samples responses to `prompt`, and `chosen` and
`rejected` are the pair that a reward model learns from.
"""

from __future__ import annotations

import re

from caldera.data.chat import Message
from caldera.data.files import Row
from caldera.data.prepare.preparer import HubTable, Source, register_preparer, rl_row, text_of

NAME = "Anthropic/hh-rlhf"
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


@register_preparer(
    "hh_rlhf",
    Source("train", "train", HubTable(NAME, None, "train"), NAME),
    Source("test", "test", HubTable(NAME, None, "test"), NAME),
)
def hh_rlhf_row(raw: Row, source: Source) -> Row | None:
    *prompt, chosen = _messages(text_of(raw, "chosen"))
    *other_prompt, rejected = _messages(text_of(raw, "rejected"))
    is_pair = prompt == other_prompt and chosen["role"] == rejected["role"] == "assistant"
    if not is_pair or not prompt or prompt[-1]["role"] != "user":
        return None
    row = rl_row(
        source.data_source,
        prompt,
        ability="alignment",
        style="model",
        ground_truth=chosen["content"],
    )
    return row | {"chosen": [chosen], "rejected": [rejected]}


def _messages(dialogue: str) -> list[Message]:
    """The turns of a dialogue, in which each speaker is named at the start of a paragraph."""
    _, *parts = TURN.split(dialogue)
    turns = zip(parts[::2], parts[1::2], strict=True)
    messages = [{"role": ROLES[who], "content": text.strip()} for who, text in turns]
    return messages or [{"role": "", "content": dialogue}]
