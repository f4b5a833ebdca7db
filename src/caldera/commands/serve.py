"""Serve a model until the process is told to end."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from caldera.config import ModelConfig
from caldera.config.machine import log_chosen
from caldera.config.samplers import check_untrained
from caldera.config.serve import ServeConfig, check_serve, resolve_serve, served_sampler
from caldera.data import hf_tokenizer
from caldera.errors import ConfigError
from caldera.models.forward import base_module
from caldera.models.loading import import_external
from caldera.rollout import AsyncSampler, Rollout
from caldera.serving import Account, ChatModel, Recorder, SessionServer
from caldera.tools.formats import TOOL_PARSERS
from caldera.tracking.progress import print_line
from caldera.trainer.entry import ConfigCommand
from caldera.workers.building import stop_tokens
from caldera.workers.generation import MODEL_KEY, build_sampler, load_sampled, untrained_sampler

logger = logging.getLogger(__name__)


ENDS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Serving:
    """A model that is served."""

    rollout: Rollout
    sampler: AsyncSampler
    server: SessionServer

    def close(self, seconds: float) -> Account:
        """Give requests in flight so long to finish, and end all that was started."""
        account = self.server.close(seconds)
        asyncio.run(self.sampler.close())
        self.rollout.close()
        return account


def serve(config: ServeConfig) -> None:
    """Answer requests until SIGTERM or Ctrl-C."""
    with _told_to_end() as ended:
        serving = start(config)
        _introduce(serving.server, config)
        ended.wait()
        logger.info("shutting down: requests in flight are finished first")
        account = serving.close(config.server.shutdown_seconds)
    logger.info(
        "ended: %d requests answered, %d refused, %d given up by clients, %d cut off and told so, "
        "%d lost",
        account.answered,
        account.refused,
        account.cancelled,
        account.cut_off,
        account.lost,
    )


def start(config: ServeConfig) -> Serving:
    """A sampler and its server, which answers already."""
    disable_progress_bar()  # of transformers
    log_chosen(resolve_serve(config, torch.cuda.device_count()))
    model = ModelConfig(
        path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        external_lib=config.model.external_lib,
    )
    import_external(model, MODEL_KEY)
    _check_format(config)
    tokenizer = _tokenizer(config)
    keys = config.rollout
    traits = untrained_sampler(keys.sampler).traits
    check_untrained(keys, traits)
    module = load_sampled(model, keys.sampler, str(keys.dtype), keys.seed)
    length = _longest(config, module)
    device = torch.device(str(config.server.device))
    rollout = build_sampler(served_sampler(config, length, traits), module, device)
    served = ChatModel(
        name=config.server.served_model_name or str(config.model.path),
        tokenizer=tokenizer,
        vocabulary=base_module(module).config.vocab_size,
        stop_tokens=frozenset(stop_tokens(module, tokenizer.eos_token_id)),
        prompt_length=length - 1,
        response_length=length - 1,
        max_length=length,
    )
    rollout.decode = served.text
    sampler = AsyncSampler(rollout)
    server = SessionServer(
        sampler,
        served,
        config.server.host,
        config.server.port,
        seed=keys.seed,
        tool_format=config.server.tool_format,
        recorder=Recorder(config.server.max_sessions),
        restarts=lambda: rollout.restarts,
    )
    return Serving(rollout, sampler, server)


def _check_format(config: ServeConfig) -> None:
    name, known = config.server.tool_format, TOOL_PARSERS.names()
    if name not in known:
        raise ConfigError(f"server.tool_format={name!r}: takes one of {', '.join(known)}")


def _tokenizer(config: ServeConfig) -> PreTrainedTokenizerBase:
    keys = config.model
    key = "model.tokenizer_path" if keys.tokenizer_path else "model.path"
    path = str(keys.tokenizer_path or keys.path)
    return hf_tokenizer(path, keys.trust_remote_code, keys.custom_chat_template, key)


def _longest(config: ServeConfig, module: nn.Module) -> int:
    """Tokens of prompt and answer together at most."""
    asked = config.rollout.max_model_len
    most = getattr(base_module(module).config, "max_position_embeddings", None)
    if asked is not None and most is not None and asked > most:
        raise ConfigError(f"rollout.max_model_len={asked}: the model was made for {most} tokens")
    length = asked or most
    if length is None:
        raise ConfigError("rollout.max_model_len=null: the model names no limit; give one")
    return int(length)


def _introduce(server: SessionServer, config: ServeConfig) -> None:
    """How to reach the server."""
    if server.cannot_append is not None:
        logger.warning(
            "each turn of a session is a trajectory of its own: %s", server.cannot_append
        )
    name = config.server.served_model_name or config.model.path
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    print_line(f"{name} is served at {server.url}. Try:")
    print_line(
        f"curl {server.url}/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}"
    )


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Set by SIGTERM and Ctrl-C, which do nothing else meanwhile."""
    told = threading.Event()
    before = {end: signal.signal(end, lambda *_: told.set()) for end in ENDS}
    try:
        yield told
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


# ---- `caldera serve model.path=MODEL ...`: a model behind OpenAI's protocol

SERVE = ConfigCommand(
    prog="caldera serve",
    description="""\
Serve a model behind OpenAI's protocol: /v1/chat/completions, /v1/completions
and /v1/models, with streaming, tools, log-probs and token ids. Requests with a
session id are recorded, token by token. SIGTERM or Ctrl-C ends it, once
requests in flight have their answers.

  caldera serve model.path=MODEL
  caldera serve model.path=MODEL server.host=0.0.0.0 server.port=8000
  caldera serve model.path=MODEL rollout.enable_prefix_caching=True
""",
    config_name="serve",
    schema=ServeConfig,
    work=serve,
    check=check_serve,
)
main = SERVE.main

if __name__ == "__main__":
    sys.exit(main())
