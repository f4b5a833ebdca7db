"""Loading of tokenizers."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from caldera.errors import DataError
from caldera.storage import local_path
from caldera.storage.paths import WEIGHT_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def hf_tokenizer(
    path: str,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    key: str = "tokenizer",
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a URL or a Hugging Face model name, with a padding token.

    `key` is the config key that the path came from, for errors.
    """
    from transformers import AutoTokenizer

    path = local_path(path, key, WEIGHT_FILES)
    folder = Path(path).expanduser()
    is_local = folder.exists()
    if not is_local and _must_be_local(path):
        raise DataError(f"{key}={path!r}: the folder {folder} does not exist")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder) if is_local else path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        tried = f"the folder {folder.absolute()}"
        if not is_local:
            tried += " (which does not exist) and the Hugging Face hub"
        first = str(error).splitlines()[0]
        raise DataError(f"{key}={path!r}: no tokenizer; tried {tried}: {first}") from error
    _ensure_pad_token(tokenizer, path)
    if custom_chat_template is not None:
        tokenizer.chat_template = custom_chat_template
    return tokenizer


def _must_be_local(path: str) -> bool:
    # A name on the hub is `model` or `owner/model`.
    return path.startswith(("/", "~", ".")) or path.count("/") > 1


def _ensure_pad_token(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {path!r} has neither a padding nor an end-of-text token")
    tokenizer.pad_token = tokenizer.eos_token
    _warn_no_pad_token(path, str(tokenizer.eos_token))


@cache  # once a tokenizer
def _warn_no_pad_token(path: str, eos_token: str) -> None:
    logger.warning("tokenizer %r has no padding token; padding with %s", path, eos_token)
