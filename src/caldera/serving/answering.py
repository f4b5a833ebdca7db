"""The response to a request, whole or in the chunks of a stream, in the protocol of OpenAI."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from caldera.rollout import Completion, SamplingParams
from caldera.serving.chat_model import ChatModel
from caldera.serving.reading import CHAT, Asked
from caldera.tools.formats import ParsedCalls, ToolParser

# ---- Text that appears token by token

UNFINISHED = "\ufffd"
"""How a decoder shows bytes that are no character yet."""


class StreamingText:
    """Turns tokens into text that is never taken back: a character comes when all of its bytes
    are there, and what may be the beginning of a stop string when it has turned out not to be."""

    def __init__(self, model: ChatModel, params: SamplingParams) -> None:
        self._model = model
        self._ends = frozenset() if params.ignore_eos else params.stop_token_ids
        self._stops = params.stop
        self._tokens: list[int] = []
        # Tokens from `_begin` to `_decoded` are decoded once more, since a decoder may write a
        # token in another way behind others, such as without the space before it.
        self._begin = self._decoded = 0
        self._held = ""
        self._told = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be sent now."""
        self._tokens += [token for token in tokens if token not in self._ends]
        known = self._model.text(self._tokens[self._begin : self._decoded])
        now = self._model.text(self._tokens[self._begin :])
        if now.endswith(UNFINISHED):
            return ""
        self._begin, self._decoded = self._decoded, len(self._tokens)
        return self._tell(self._held + now[len(known) :])

    def rest(self, whole: str) -> str:
        """The text that is left to send, once the whole is known."""
        return whole[self._told :]

    def _tell(self, text: str) -> str:
        ends = [text.find(stop) for stop in self._stops if stop in text]
        cut = min(ends) if ends else len(text) - self._doubtful(text)
        # Nothing is sent behind a stop string: the response has ended.
        self._held = text[cut:]
        self._told += cut
        return text[:cut]

    def _doubtful(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )


LEAST_LOG_PROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Json = dict[str, Any]


class Answer:
    """Builds the response to one request."""

    def __init__(self, asked: Asked, model: ChatModel, parser: ToolParser) -> None:
        self.asked = asked
        self.model = model
        self._parser = parser
        self._is_chat = asked.path == CHAT
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.malformed_calls: dict[int, int] = {}
        """How many calls of tools in a choice's message could not be read."""
        self._messages: dict[int, Json] = {}
        self._begun: set[int] = set()  # choices whose prompt a stream has told

    # ---- whole

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The response, once all of its samples are there."""
        choices = [self._choice(index, each) for index, each in enumerate(completions)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        answer = self._envelope(kind, choices) | {"usage": self.usage(completions)}
        if self.asked.tells_tokens and self._is_chat:
            answer["prompt_token_ids"] = self.asked.prompts[0]
        return answer

    def _choice(self, index: int, completion: Completion) -> Json:
        choice: Json = {"index": index, "finish_reason": self.finish_reason(index, completion)}
        if self._is_chat:
            choice["message"] = self.message(index, completion)
        else:
            choice["text"] = self.text(index, completion)
        choice["logprobs"] = self.log_probs(completion) if self.asked.log_probs else None
        if self.asked.tells_tokens:
            choice["token_ids"] = completion.token_ids
            choice["weight_versions"] = completion.token_versions()
            if not self._is_chat:
                choice["prompt_token_ids"] = list(self.asked.samples[index].prompt_ids)
        return choice

    def usage(self, completions: Sequence[Completion]) -> Json:
        read = sum(map(len, self.asked.prompts))
        written = sum(len(completion.token_ids) for completion in completions)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }

    # ---- in chunks

    def chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        """An event of a stream."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._envelope(kind, choices) | ({"usage": usage} if self.asked.tells_usage else {})

    def first_chunk(self) -> Json | None:
        """Who speaks, in each choice of a chat."""
        if not self._is_chat:
            return None
        said = {"role": "assistant", "content": ""}
        chunk = self.chunk([self._delta(i, said) for i in range(len(self.asked.samples))])
        if self.asked.tells_tokens:
            chunk["prompt_token_ids"] = self.asked.prompts[0]
        return chunk

    def piece(self, index: int, text: str, sampled: Completion) -> Json:
        """The chunk of some text, and of the tokens that were sampled for it."""
        choice = (
            self._delta(index, {"content": text}) if self._is_chat else self._piece(index, text)
        )
        return self._with_tokens(choice, sampled)

    def whole_piece(self, index: int, completion: Completion) -> Json:
        """The chunk of a choice that comes whole."""
        if not self._is_chat:
            return self.piece(index, self.text(index, completion), completion)
        message = self.message(index, completion)
        delta: Json = {"content": message["content"]}
        if "tool_calls" in message:
            delta["tool_calls"] = [
                {"index": number, **call} for number, call in enumerate(message["tool_calls"])
            ]
        return self._with_tokens(self._delta(index, delta), completion)

    def last_piece(self, index: int, completion: Completion) -> Json:
        """The chunk with the finish reason of a choice."""
        choice = self._delta(index, {}) if self._is_chat else self._piece(index, "")
        choice["finish_reason"] = self.finish_reason(index, completion)
        return self.chunk([choice])

    def _with_tokens(self, choice: Json, sampled: Completion) -> Json:
        if self.asked.log_probs:
            choice["logprobs"] = self.log_probs(sampled)
        if self.asked.tells_tokens:
            choice["token_ids"] = sampled.token_ids
            if not self._is_chat and choice["index"] not in self._begun:
                self._begun.add(choice["index"])
                choice["prompt_token_ids"] = list(self.asked.samples[choice["index"]].prompt_ids)
        return self.chunk([choice])

    @staticmethod
    def _delta(index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    @staticmethod
    def _piece(index: int, text: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    # ---- parts

    def text(self, index: int, completion: Completion) -> str:
        """The text, up to the string that ended it, or with that."""
        params, keeps = self.asked.samples[index].params, self.asked.keeps_stop
        return written(completion, params, self.model, keeps_stop=keeps)

    def message(self, index: int, completion: Completion) -> Json:
        """The assistant's message, with the tool calls in it, if tools were given."""
        if index not in self._messages:
            self._messages[index] = self._read(index, completion)
        return self._messages[index]

    def _read(self, index: int, completion: Completion) -> Json:
        text = self.text(index, completion)
        message: Json = {"role": "assistant", "content": text}
        if not self.asked.finds_tools:
            return message
        parsed = self._parse(index, completion)
        self.malformed_calls[index] = len(parsed.problems)
        if not parsed.calls:
            return message  # a call that cannot be read is shown as it was written
        return message | {
            "content": parsed.content or None,
            "tool_calls": [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ],
        }

    def _parse(self, index: int, completion: Completion) -> ParsedCalls:
        params, keeps = self.asked.samples[index].params, self._parser.keeps_special_tokens
        return self._parser.parse_text(written(completion, params, self.model, keeps))

    def finish_reason(self, index: int, completion: Completion) -> str:
        calls = self._is_chat and "tool_calls" in self.message(index, completion)
        return "tool_calls" if calls else completion.finish_reason

    def log_probs(self, completion: Completion) -> Json:
        show = _chat_log_probs if self._is_chat else _text_log_probs
        return show(completion, self.model)

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.model.name,
            "choices": choices,
        }


def written(
    completion: Completion,
    params: SamplingParams,
    model: ChatModel,
    special: bool = False,
    keeps_stop: bool = False,
) -> str:
    """The text of a completion, without the token or, unless that is kept, the string that ended
    it; with its special tokens if they count."""
    tokens = completion.token_ids
    if completion.finish_reason == "stop" and not params.ignore_eos:
        tokens = tokens[:-1] if tokens[-1:] and tokens[-1] in params.stop_token_ids else tokens
    text = str(model.tokenizer.decode(list(tokens), skip_special_tokens=not special))
    found = [(text.find(stop), len(stop)) for stop in params.stop if stop in text]
    start, length = min(found, default=(len(text), 0))
    return text[: start + length * keeps_stop]


def _ranked(completion: Completion) -> list[list[tuple[int, float]]]:
    return completion.top_log_probs or [[] for _ in completion.token_ids]


def _chat_log_probs(completion: Completion, model: ChatModel) -> Json:
    def shown(token: int, log_prob: float) -> Json:
        text = str(model.tokenizer.decode([token]))
        # The bytes of a part of a character are not known from its text.
        own = None if UNFINISHED in text else list(text.encode())
        return {"token": text, "logprob": _finite(log_prob), "bytes": own}

    sampled = zip(completion.token_ids, completion.log_probs, _ranked(completion), strict=True)
    return {
        "content": [
            shown(token, log_prob) | {"top_logprobs": [shown(*pair) for pair in ranked]}
            for token, log_prob, ranked in sampled
        ]
    }


def _text_log_probs(completion: Completion, model: ChatModel) -> Json:
    texts = [str(model.tokenizer.decode([token])) for token in completion.token_ids]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(log_prob) for log_prob in completion.log_probs],
        "top_logprobs": [
            {str(model.tokenizer.decode([token])): _finite(log_prob) for token, log_prob in ranked}
            for ranked in _ranked(completion)
        ],
    }


def _finite(log_prob: float) -> float:
    return log_prob if math.isfinite(log_prob) else LEAST_LOG_PROB
