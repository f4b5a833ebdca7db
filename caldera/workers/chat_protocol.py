"""What a server of a language model is asked and answers, in the protocol of OpenAI."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from caldera.data.chat import chat_messages, tokenize_chat
from caldera.errors import DataError
from caldera.models.seeds import derive_seed
from caldera.rollout import Completion, Request, SamplingParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY_BELOW = 1e-6
"""Logits that are divided by less leave the range of a float."""
MOST_CHOICES = 128
MOST_LOG_PROBS = 20
MOST_STOPS = 16
LEAST_LOG_PROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
COMMON = {*RANGES, "model", "max_tokens", "n", "seed", "stop", "logprobs", "stream", "user"}
FIELDS = {
    CHAT: COMMON | {"messages", "max_completion_tokens", "top_logprobs"},
    TEXT: COMMON | {"prompt"},
}


@dataclass(frozen=True)
class ChatModel:
    """What a server must know of its model."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    """Tokens from here on do not exist."""
    stop_tokens: frozenset[int]
    prompt_length: int
    """Tokens of a prompt at most."""
    response_length: int
    """Tokens of an answer at most, and of one whose request does not say."""
    max_length: int
    """Tokens of both together at most."""

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


@dataclass(frozen=True)
class Asked:
    """The prompts of a request, and what is to be sampled for them: n answers each, in order."""

    prompts: list[list[int]]
    samples: list[Request] = field(default_factory=list)
    log_probs: bool = False


def read(path: str, body: bytes, model: ChatModel) -> Asked:
    """What is asked for; raises DataError where it cannot be answered."""
    try:
        request = json.loads(body)
        json.dumps(request, ensure_ascii=False).encode()  # half a character is no text
    except (ValueError, RecursionError) as error:
        raise DataError(f"the request is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise DataError("the request must be a JSON object")
    request = {name: value for name, value in request.items() if value is not None}
    for name, value in request.items():
        if name not in FIELDS[path]:
            raise DataError(f"{name}={value!r:.100}: takes {', '.join(sorted(FIELDS[path]))}")
    if request.get("stream", False) is not False:
        raise DataError(f"stream={request['stream']!r:.100}: answers come whole; takes false")
    prompts = _chat_prompt(request, model) if path == CHAT else _text_prompts(request, model)
    wants_log_probs, ranks = _log_probs(path, request)
    choices = _whole(request, "n", 1, 1, MOST_CHOICES)
    samples = []
    for number, tokens in enumerate(prompts):
        params = _params(request, tokens, model, ranks)
        # Without a seed the request itself is one, so that a run can be repeated.
        root = _whole(request, "seed", derive_seed(0, *tokens))
        seeds = [derive_seed(root, number, choice) for choice in range(choices)]
        samples += [Request(tokens, params, seed) for seed in seeds]
    return Asked(prompts, samples, wants_log_probs)


def answer(
    path: str, asked: Asked, completions: Sequence[Completion], model: ChatModel
) -> dict[str, Any]:
    """The answer to a request, once all of its samples are there."""
    choices = []
    for index, (sample, completion) in enumerate(zip(asked.samples, completions, strict=True)):
        text = _text(completion, sample.params.stop, model)
        choice: dict[str, Any] = {"index": index, "finish_reason": completion.finish_reason}
        if path == CHAT:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        show = _chat_log_probs if path == CHAT else _text_log_probs
        choice["logprobs"] = show(completion, model) if asked.log_probs else None
        choices.append(choice)
    read_tokens = sum(map(len, asked.prompts))
    written = sum(len(completion.token_ids) for completion in completions)
    return {
        "id": f"{'chatcmpl' if path == CHAT else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if path == CHAT else "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": choices,
        "usage": {
            "prompt_tokens": read_tokens,
            "completion_tokens": written,
            "total_tokens": read_tokens + written,
        },
    }


# ---- prompts


def _chat_prompt(request: Mapping[str, Any], model: ChatModel) -> list[list[int]]:
    if model.tokenizer.chat_template is None:
        raise DataError(f"{model.name} has no chat template; takes POST {TEXT}")
    messages = chat_messages(request.get("messages"), "messages")
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(map(_text_part, message["content"]))
    return [tokenize_chat(model.tokenizer, messages, {})]


def _text_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise DataError(f"a part of a message is {part!r:.100}: takes {{'type': 'text', ...}}")
    return text


def _text_prompts(request: Mapping[str, Any], model: ChatModel) -> list[list[int]]:
    given = request.get("prompt")
    is_one = isinstance(given, str) or (isinstance(given, list) and all(map(_is_whole, given)))
    items = [given] if is_one else given
    if not isinstance(items, list) or not given:
        raise DataError("prompt must be a text, a list of texts, tokens or a list of such")
    return [_tokens(item, model) for item in items]


def _tokens(item: Any, model: ChatModel) -> list[int]:
    if isinstance(item, str):
        return list(model.tokenizer.encode(item))
    if not isinstance(item, list) or not all(map(_is_whole, item)):
        raise DataError("prompt must be a text, a list of texts, tokens or a list of such")
    for token in item:
        if not 0 <= token < model.vocabulary:
            raise DataError(f"token {token}: the model knows 0 to {model.vocabulary - 1}")
    return item


# ---- parameters


def _params(
    request: Mapping[str, Any], tokens: Sequence[int], model: ChatModel, ranks: int
) -> SamplingParams:
    longest = min(model.prompt_length, model.max_length - 1)
    if not 1 <= len(tokens) <= longest:
        raise DataError(f"a prompt of {len(tokens)} tokens: takes from 1 to {longest}")
    room = min(model.response_length, model.max_length - len(tokens))
    name = "max_completion_tokens" if "max_completion_tokens" in request else "max_tokens"
    temperature = _number(request, "temperature", 1.0)
    return SamplingParams(
        max_tokens=_whole(request, name, room, 1, room),
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=_number(request, "top_p", 1.0),
        presence_penalty=_number(request, "presence_penalty", 0.0),
        frequency_penalty=_number(request, "frequency_penalty", 0.0),
        stop_token_ids=model.stop_tokens,
        stop=_stops(request),
        logprobs=ranks,
    )


def _number(request: Mapping[str, Any], name: str, default: float) -> float:
    value = request.get(name, default)
    least, most = RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise DataError(f"{name}={value!r:.100}: takes numbers from {least:g} to {most:g}")
    return float(value)


def _whole(
    request: Mapping[str, Any], name: str, default: int, least: int | None = None, most: int = 0
) -> int:
    """A whole number, from `least` to `most` if there are limits."""
    value = request.get(name, default)
    if not _is_whole(value) or (least is not None and not least <= value <= most):
        limits = "" if least is None else f" from {least} to {most}"
        raise DataError(f"{name}={value!r:.100}: takes whole numbers{limits}")
    return int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stops(request: Mapping[str, Any]) -> tuple[str, ...]:
    given = request.get("stop", [])
    stops = [given] if isinstance(given, str) else given
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise DataError(f"stop={given!r:.100}: takes a text, or up to {MOST_STOPS} texts")
    return tuple(stops)


def _log_probs(path: str, request: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether log-probs are asked for, and of how many tokens beside each one."""
    given = request.get("logprobs", False)
    if path == TEXT:
        if given is False:
            return False, 0
        return True, _whole(request, "logprobs", 0, 0, MOST_LOG_PROBS)
    if not isinstance(given, bool):
        raise DataError(f"logprobs={given!r:.100}: takes true or false; top_logprobs says how many")
    if not given and request.get("top_logprobs"):
        raise DataError(f"top_logprobs={request['top_logprobs']!r:.100}: needs logprobs=true")
    return given, _whole(request, "top_logprobs", 0, 0, MOST_LOG_PROBS)


# ---- answers


def _text(completion: Completion, stops: Sequence[str], model: ChatModel) -> str:
    """What was written, up to the string that ended it."""
    tokens = completion.token_ids
    if completion.finish_reason == "stop" and tokens and tokens[-1] in model.stop_tokens:
        tokens = tokens[:-1]
    text = model.text(tokens)
    return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]


def _ranked(completion: Completion) -> list[list[tuple[int, float]]]:
    return completion.top_log_probs or [[] for _ in completion.token_ids]


def _chat_log_probs(completion: Completion, model: ChatModel) -> dict[str, Any]:
    def shown(token: int, log_prob: float) -> dict[str, Any]:
        text = str(model.tokenizer.decode([token]))
        return {
            "token": text, "logprob": _finite(log_prob), "bytes": list(text.encode()),
        }  # fmt: skip

    sampled = zip(completion.token_ids, completion.log_probs, _ranked(completion), strict=True)
    return {
        "content": [
            shown(token, log_prob) | {"top_logprobs": [shown(*pair) for pair in ranked]}
            for token, log_prob, ranked in sampled
        ]
    }


def _text_log_probs(completion: Completion, model: ChatModel) -> dict[str, Any]:
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
