"""Secrets among config values: what is written about a run has a mask in their place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from caldera.config import config_to_dict

MASK = "***"
SECRET = re.compile(
    r"(api|access|private|account)[_-]?key|secret|passwo?r?d|authorization|credential"
    r"|(seed|recovery|backup)[_-]?(phrase|code)|(access|oauth)[_-]?code|conn(ection)?[_-]?str(ing)?",
    re.I,
)
"""In names of secrets, whatever stands around it."""
WORD_OF_A_SECRET = re.compile(
    r"(^|_)("
    r"auth|bearer|cookie|cookies|cred|creds|csrf|dsn|hmac|jwt|mnemonic|oauth|otp|passcode"
    r"|passkey|passphrase|pat|pw|pwd|sas|signature|tok|totp|webhook"
    r")(_|$)"
)
"""Whole words in names of secrets, whose words are joined by _: an `author` is none."""
KEY_OF_AN_OWNER = re.compile(
    r"(^|_)("
    r"admin|anthropic|auth|aws|azure|bing|cert|certificate|cipher|claude|clearml|client"
    r"|cohere|comet|dashscope|deepseek|deploy|encryption|endpoint|fireworks|gcp|gemini"
    r"|google|grader|groq|hf|hmac|hub|huggingface|judge|kms|license|llm|master|mistral"
    r"|openai|openrouter|replicate|root|serper|server|service|session|sign|signing|ssh|ssl"
    r"|storage|subscription|swanlab|tavily|tls|together|verifier|wandb|xai"
    r")_?keys?$"
)
"""Ends of names of secrets: a `judge_prompt_key` is the name of a column."""
RANDOM = re.compile(r"(?=(?:\D*\d){4})[\w+/=-]{20,}")
"""What a value looks like that makes any `..._key` a secret."""
PASS = re.compile(r"(^|[a-z0-9]*[_-]|user|pg|db)(pass|pw)$", re.I)
SPECIAL = re.compile(r"</?[^<>\s]{1,40}>|\[[A-Z_]{1,40}\]")
"""Special tokens of tokenizers, which are no secret tokens."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
TOKEN = re.compile(
    r"(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!stop_)tokens?$", re.I
)
"""The end of names of secrets, if they hold text: numbers are counts of tokens."""
VARIABLES = "env_vars"
"""The group of variables: all are taken for secrets but those below."""
SHOWN_VARIABLES = (
    "CALDERA_",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_",
    "NCCL_",
    "OMP_",
    "PYTHONHASHSEED",
    "VERL_",
)
"""Beginnings of variables that change what a run does."""
SECRET_WORDS = ("KEY", "PASSW", "SECRET", "TOKEN")
SHAPES = re.compile(
    r"\bsk-[\w-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bAKIA[A-Z0-9]{12,}|\bgh[pousr]_[A-Za-z0-9]{16,}"
    r"|\bglpat-[\w-]{16,}|\bgithub_pat_\w{16,}|\bxox[abeoprs]-[\w-]{10,}|\bxapp-[\w-]{10,}"
    r"|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*"
)
"""What keys of well-known services, web tokens and private keys look like."""
BEARER = re.compile(
    r"\b(Bearer|Basic(?=\s+\S*(?:\d|=|(?-i:[a-z][A-Z]))))(\s+)[\w.~+/=-]{8,}", re.I
)  # "basic instructions" are none
QUERY = re.compile(
    r"([?&;#](?:[\w-]*[_-])?(?:sig|signature|credential|policy|token|key|password|passwd|pass|"
    r"pwd|pw|auth|bearer|jwt|hmac|sas|session|apikey|accesstoken|authtoken|secret|code)=)"
    r"[^&;\s'\"]+",
    re.I,
)
"""Parts of signed URLs."""
WEBHOOK = re.compile(
    r"(api\.telegram\.org/bot|hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[^\s'\"]+",
    re.I,
)
PAIR = re.compile(
    r"((?:api|access|private|account)[_-]?key|[\w-]+[_-]secret|passwo?r?d)(['\"]?\s*[=:]\s*['\"]?)"
    r"[^\s'\",;&*]{4,}",
    re.I,
)
"""A name and its value, in a header, a command or a dictionary that is written as text."""
HEADER = re.compile(
    r"(\b(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:[a-z]+ +(?=\S))?)"
    r"[^\s'\",;*]{4,}+(?! +\*)"
    r"|(\bcookie['\"]?\s*:\s*['\"]?)[\w.-]+=[^'\"\n]+",
    re.I,
)
SETTING = re.compile(r"(['\"]?)\b([\w.-]+)(=['\"]?|\1\s*:\s*['\"])([^\s'\",;&*]{4,})")
"""A variable's value in a command, and a text in a dictionary that is written as text."""
OPTION = re.compile(
    r"((?:^|\s)--?(?:[\w-]*-)?(?:auth|pass|passphrase|passwd|password|pw|secret|token)[= ])"
    r"(?!-)[^\s'\"*]{4,}|(\s(?:-u|--user)[= ]?[^\s:]+:)[^\s*]+",
    re.I,
)
USER_OF_URL = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s@:]*:[^/\s]*@|\b(https?://)[^/\s@]+@", re.I)
"""A password, or with HTTP a user alone: `abfs://container@account` is none."""
NOTHING = re.compile(r"|none|null|true|false|\{\}|\[\]", re.I)
"""Values that hide nothing, as text."""
COUNT = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?", re.I)
PAIRS = re.compile(r"""([\w.-]+)['"]?\s*:\s*['"]?([^,'"{}\[\]]*)""")
"""The names in a dictionary that is written as text, with the values that are no groups."""
ITEMS = re.compile(r"""[^\s,'"\[\]]+""")
"""The texts in a list that is written as text."""


def masked_dict(config: Any) -> dict[str, Any]:
    """The resolved config, without secrets."""
    return masked_values(config_to_dict(config))


def masked_values(values: dict[str, Any]) -> dict[str, Any]:
    """The same of values by their keys."""
    return {key: _masked(value, key) for key, value in values.items()}


def masked_yaml(config: Any) -> str:
    """The same as YAML."""
    return yaml.safe_dump(masked_dict(config), sort_keys=False, allow_unicode=True)


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line, without the secrets among its `key=value` and `--option value`."""
    options = ["", *arguments]
    return [
        MASK if _is_option(option) and _names_a_secret(option, text) else _masked_argument(text)
        for option, text in zip(options, arguments, strict=False)
    ]


def masked_text(text: str) -> str:
    """Without users, passwords and signatures of URLs, and without what looks like a key."""
    text = USER_OF_URL.sub(lambda found: f"{found[1] or found[2]}{MASK}@", text)
    text = QUERY.sub(rf"\g<1>{MASK}", text)
    text = PAIR.sub(rf"\g<1>\g<2>{MASK}", WEBHOOK.sub(rf"\g<1>{MASK}", text))
    text = HEADER.sub(lambda found: f"{found[1] or found[2]}{MASK}", text)
    text = BEARER.sub(rf"\g<1>\g<2>{MASK}", text)
    text = OPTION.sub(lambda found: f"{found[1] or found[2]}{MASK}", text)
    text = SETTING.sub(_masked_setting, text)
    return SHAPES.sub(MASK, text)


def _masked_setting(found: re.Match[str]) -> str:
    whole, name, value = found[0], found[2], found[4]
    is_variable = name.isupper() and _names_a_secret(name, value)  # tokens have names as well
    if is_variable or _is_secret_name(name, value):
        return whole[: -len(value)] + MASK
    return whole


def is_masked(text: str) -> bool:
    return MASK in text


def is_shown_variable(name: str) -> bool:
    """Whether a variable matters for a run, and is nothing secret."""
    if any(word in name for word in SECRET_WORDS):
        return False
    return name.startswith(SHOWN_VARIABLES) and not _names_a_secret(name, "any text")


def _names_a_secret(name: str, value: Any) -> bool:
    text = str(value).strip()
    if NOTHING.fullmatch(text):
        return False
    return _is_secret_name(name, text) or (
        bool(TOKEN.search(name)) and not COUNT.fullmatch(text) and not SPECIAL.fullmatch(text)
    )


def _is_secret_name(name: str, text: str) -> bool:
    """Whatever the value, unless it is a count or `key` alone tells nothing."""
    words = "_".join(WORD.findall(name)).lower()  # `openaiKey` is an `openai_key`
    is_key = KEY_OF_AN_OWNER.search(words) or (
        words.endswith(("key", "keys")) and RANDOM.fullmatch(text)
    )
    is_pass = PASS.search(name) and not COUNT.fullmatch(text)
    return bool(SECRET.search(name) or WORD_OF_A_SECRET.search(words) or is_key or is_pass)


def _is_option(text: str) -> bool:
    return text.startswith("-") and "=" not in text


def _masked(value: Any, name: str = "", is_variable: bool = False) -> Any:
    if isinstance(value, list) and TOKEN.search(name) and not _is_secret_name(name, str(value)):
        return [_masked(item, name) for item in value]  # of special tokens, it may be
    if _names_a_secret(name, value) or (is_variable and not is_shown_variable(name)):
        return MASK
    if isinstance(value, dict):
        is_group = name == VARIABLES
        masked = {key: _masked(item, str(key), is_group) for key, item in value.items()}
        label = value.get("name", value.get("key"))
        if "value" in value and isinstance(label, str):
            masked["value"] = _masked(value["value"], label, is_variable)
        return masked
    if isinstance(value, list | tuple):
        return _masked_list(value)
    return masked_text(value) if isinstance(value, str) else value


def _masked_list(values: Sequence[Any]) -> list[Any]:
    """Pairs of a name and a value, and options before their values, count as names."""
    before = ["", *values]
    return [
        MASK
        if isinstance(name, str)
        and (
            _names_a_secret(name, item)
            if _is_option(name)
            else len(values) == 2 and _is_secret_name(name, str(item))
        )
        else _masked(item)
        for name, item in zip(before, values, strict=False)
    ]


def _masked_argument(text: str) -> str:
    key, is_set, value = text.partition("=")
    if not is_set:
        return masked_text(text)
    parts = key.lstrip("+").split(".")
    if value.lstrip(" '\"").startswith(("{", "[")):
        # Hydra's way to write dictionaries is no YAML; one secret name hides all of it.
        pairs = [
            (parts[-1], value),
            *((name, item or value) for name, item in PAIRS.findall(value)),
        ]
        items = ITEMS.findall(value)
        is_secret = any(name == VARIABLES or _names_a_secret(name, item) for name, item in pairs)
        is_secret = is_secret or (":" not in value and _masked_list(items) != items)
        return f"{key}={MASK}" if is_secret else masked_text(text)
    masked = _masked(value, parts[-1], VARIABLES in parts[:-1])
    return f"{key}={masked}"
