"""The fields of a request, in the protocol of OpenAI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caldera.errors import DataError
from caldera.rollout import Request, SamplingParams
from caldera.seeds import derive_seed
from caldera.serving.chat_model import ChatModel
from caldera.web import read_object

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, TEXT)
GREEDY_BELOW = 1e-6
"""Logits that are divided by less leave the range of a float."""
MOST_CHOICES = 128
MOST_ANSWERS = 2048
"""To all prompts of a request together."""
MOST_LOG_PROBS = 20
MOST_STOPS = 16
LONGEST_SESSION_NAME = 256
RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
COMMON = {
    *RANGES,
    "ignore_eos",
    "logprobs",
    "max_tokens",
    "model",
    "n",
    "return_token_ids",
    "seed",
    "session_id",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "top_k",
    "user",
}
KEEPS_STOP = "include_stop_str_in_output"
FIELDS = {
    CHAT: COMMON
    | {
        "chat_template_kwargs",
        "max_completion_tokens",
        "messages",
        "parallel_tool_calls",
        "tool_choice",
        "tools",
        "top_logprobs",
    },
    TEXT: COMMON | {KEEPS_STOP, "prompt"},
}
TOOL_CHOICES = ("auto", "none")
NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    CHAT: {
        "logit_bias": ({},),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
    },
    TEXT: {"echo": (False,), "logit_bias": ({},)},
}
"""Fields of the protocol that nothing here honours, with the values that ask for nothing."""

Fields = Mapping[str, Any]


class BadField(DataError):
    """A field of a request that cannot be honoured."""

    def __init__(self, name: str, value: object, takes: str) -> None:
        super().__init__(f"{name}={value!r:.100}: {takes}")
        self.name = name


@dataclass(frozen=True)
class Asked:
    """The prompts of a request, what is to be sampled for them, n responses each, in order, and
    the contents of the response."""

    path: str
    prompts: list[list[int]]
    samples: list[Request]
    log_probs: bool
    streams: bool
    tells_usage: bool
    """At the end of a stream."""
    tells_tokens: bool
    finds_tools: bool
    """Whether calls of tools are looked for in the responses."""
    keeps_stop: bool = False
    """Whether the text of a response has the stop string that ended it."""

    @property
    def comes_whole(self) -> bool:
        """Whether a response is sent only once it has ended, even in a stream: calls of tools and
        the tokens that were likely, too, are not known before."""
        return self.finds_tools or any(sample.params.logprobs for sample in self.samples)


def read_fields(path: str, body: bytes) -> Fields:
    """The fields of a request, none of which is unknown, without nulls."""
    request = read_object(body)
    fields = {name: value for name, value in request.items() if value is not None}
    neutral = NEUTRAL[path]
    for name, value in fields.items():
        if name in neutral and value not in neutral[name]:
            values = " or ".join(map(repr, neutral[name]))
            raise BadField(name, value, f"nothing but {values} can be honoured")
        if name not in FIELDS[path] and name not in neutral:
            known = ", ".join(sorted({*FIELDS[path], *neutral}))
            raise BadField(name, value, f"there is no such field; takes {known}")
    return {name: value for name, value in fields.items() if name not in neutral}


def session_of(fields: Fields, headers: Mapping[str, str]) -> str | None:
    """The session that a request belongs to, by its body or its header."""
    session = fields.get("session_id", headers.get("x-session-id"))
    if session is None:
        return None
    if not isinstance(session, str) or not 1 <= len(session) <= LONGEST_SESSION_NAME:
        takes = f"takes a text of up to {LONGEST_SESSION_NAME} characters"
        raise BadField("session_id", session, takes)
    return session


def tools_of(fields: Fields) -> list[dict[str, Any]]:
    """The tools of the prompt."""
    tools = fields.get("tools", [])
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        function = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
        raise BadField("tools", tools, f"takes a list of {function}")
    choice = fields.get("tool_choice", "auto")
    if choice not in TOOL_CHOICES:
        takes = f"takes {', '.join(TOOL_CHOICES)}; no call can be forced"
        raise BadField("tool_choice", choice, takes)
    parallel = fields.get("parallel_tool_calls", True)
    if parallel is not True:
        takes = "takes true; the model decides how many calls it writes"
        raise BadField("parallel_tool_calls", parallel, takes)
    return tools if choice == "auto" else []


def read_request(
    path: str,
    fields: Fields,
    prompts: list[list[int]],
    model: ChatModel,
    seed: int | None,
    session: str | None,
) -> Asked:
    """The sampling to do; raises DataError where it is impossible.

    A request without a seed gets this one; where that is None its prompt is the seed.
    """
    wants_log_probs, ranks = _log_probs(path, fields)
    choices = _whole(fields, "n", 1, 1, MOST_CHOICES)
    if len(prompts) * choices > MOST_ANSWERS:
        takes = f"{len(prompts)} prompts; takes {MOST_ANSWERS} responses a request at most"
        raise BadField("n", choices, takes)
    samples = []
    for number, tokens in enumerate(prompts):
        params = _params(fields, tokens, model, ranks)
        root = _whole(fields, "seed", derive_seed(0, *tokens) if seed is None else seed)
        seeds = [derive_seed(root, number, choice) for choice in range(choices)]
        samples += [Request(tokens, params, each, session) for each in seeds]
    streams = _switch(fields, "stream")
    return Asked(
        path,
        prompts,
        samples,
        wants_log_probs,
        streams,
        _tells_usage(fields, streams),
        _switch(fields, "return_token_ids"),
        bool(path == CHAT and tools_of(fields)),
        _switch(fields, KEEPS_STOP),
    )


def text_prompts(fields: Fields, model: ChatModel) -> list[list[int]]:
    """The prompts of a completion, which may be tokens already."""
    given = fields.get("prompt")
    is_one = isinstance(given, str) or (isinstance(given, list) and all(map(_is_whole, given)))
    items = [given] if is_one else given
    if not isinstance(items, list) or not given:
        raise DataError("prompt must be a text, a list of texts, tokens or a list of such")
    return [_tokens(item, model) for item in items]


def _tokens(item: Any, model: ChatModel) -> list[int]:
    if isinstance(item, str):
        check_characters(item, model)
        return list(model.tokenizer.encode(item))
    if not isinstance(item, list) or not all(map(_is_whole, item)):
        raise DataError("prompt must be a text, a list of texts, tokens or a list of such")
    for token in item:
        if not 0 <= token < model.vocabulary:
            raise DataError(f"token {token}: the model knows 0 to {model.vocabulary - 1}")
    return item


def check_characters(text: str, model: ChatModel) -> None:
    """Refuse a text that is far too long."""
    if len(text) > model.most_characters:
        raise DataError(
            f"a prompt of {len(text)} characters: has more tokens than {model.longest_prompt}"
        )


def _is_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _params(fields: Fields, tokens: Sequence[int], model: ChatModel, ranks: int) -> SamplingParams:
    if not 1 <= len(tokens) <= model.longest_prompt:
        raise DataError(f"a prompt of {len(tokens)} tokens: takes from 1 to {model.longest_prompt}")
    room = min(model.response_length, model.max_length - len(tokens))
    usual = model.sampling
    temperature = _number(fields, "temperature", usual.temperature)
    ignores_eos = _switch(fields, "ignore_eos", usual.ignore_eos)
    return SamplingParams(
        max_tokens=_max_tokens(fields, room),
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=_whole(fields, "top_k", usual.top_k, -1, model.vocabulary),
        top_p=_number(fields, "top_p", usual.top_p),
        min_p=_number(fields, "min_p", usual.min_p),
        repetition_penalty=_number(fields, "repetition_penalty", usual.repetition_penalty),
        presence_penalty=_number(fields, "presence_penalty", usual.presence_penalty),
        frequency_penalty=_number(fields, "frequency_penalty", usual.frequency_penalty),
        stop_token_ids=model.stop_tokens | _stop_tokens(fields, model, ignores_eos),
        ignore_eos=ignores_eos,
        stop=tuple(dict.fromkeys((*usual.stop, *_stops(fields)))),
        logprobs=ranks,
    )


def _max_tokens(fields: Fields, room: int) -> int:
    given = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    if len(given) > 1 and fields[given[0]] != fields[given[1]]:
        takes = f"but {given[0]}={fields[given[0]]!r:.100}; takes one of them"
        raise BadField(given[1], fields[given[1]], takes)
    return _whole(fields, given[0] if given else "max_tokens", room, 1, room)


def _number(fields: Fields, name: str, default: float) -> float:
    if name not in fields:
        return default
    value = fields[name]
    least, most = RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise BadField(name, value, f"takes numbers from {least:g} to {most:g}")
    return float(value)


def _whole(fields: Fields, name: str, default: int, least: int | None = None, most: int = 0) -> int:
    """A whole number, from `least` to `most` if there are limits."""
    if name not in fields:
        return default
    value = fields[name]
    if not _is_whole(value) or (least is not None and not least <= value <= most):
        limits = "" if least is None else f" from {least} to {most}"
        raise BadField(name, value, f"takes whole numbers{limits}")
    return int(value)


def _switch(fields: Fields, name: str, default: bool = False) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise BadField(name, value, "takes true or false")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.get("stop", [])
    stops = [given] if isinstance(given, str) else given
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise BadField("stop", given, f"takes a text, or up to {MOST_STOPS} texts")
    return tuple(stops)


def _stop_tokens(fields: Fields, model: ChatModel, ignores_eos: bool) -> set[int]:
    name = "stop_token_ids"
    given = fields.get(name, [])
    if not isinstance(given, list) or not all(map(_is_whole, given)):
        raise BadField(name, given, "takes a list of tokens")
    if not all(0 <= token < model.vocabulary for token in given):
        raise BadField(name, given, f"takes tokens from 0 to {model.vocabulary - 1}")
    if given and ignores_eos:
        raise BadField(name, given, "no token ends a response with ignore_eos=true")
    return set(given)


def _tells_usage(fields: Fields, streams: bool) -> bool:
    given = fields.get("stream_options", {})
    known = isinstance(given, dict) and set(given) <= {"include_usage"}
    if not known or (given and not streams):
        takes = "takes include_usage, in requests with stream=true"
        raise BadField("stream_options", given, takes)
    return _switch(given, "include_usage")


def _log_probs(path: str, fields: Fields) -> tuple[bool, int]:
    """Whether log-probs are asked for, and of how many tokens beside each one."""
    given = fields.get("logprobs", False)
    if path == TEXT:
        if given is False:
            return False, 0
        return True, _whole(fields, "logprobs", 0, 0, MOST_LOG_PROBS)
    if not isinstance(given, bool):
        raise BadField("logprobs", given, "takes true or false; top_logprobs is the number")
    if not given and fields.get("top_logprobs"):
        raise BadField("top_logprobs", fields["top_logprobs"], "needs logprobs=true")
    return given, _whole(fields, "top_logprobs", 0, 0, MOST_LOG_PROBS)
