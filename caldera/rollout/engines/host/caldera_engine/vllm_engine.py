"""vLLM, stepped by whoever uses it."""

from __future__ import annotations

import os
from typing import Any

from .base import Event
from .buckets import Bucket

MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
SEEDS = 2**63


class VllmEngine:
    """The synchronous engine of vLLM, whose core is in this process; see `InferenceEngine`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` are those of vLLM's EngineArgs."""
        os.environ[MULTIPROCESSING] = "0"
        from vllm import EngineArgs, LLMEngine

        reader = f"{__package__}.vllm_worker.WeightReader"
        options = EngineArgs(**arguments, worker_extension_cls=reader)
        self._engine = LLMEngine.from_engine_args(options)
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._version = 0

    def add(self, number: int, prompt_ids: list[int], params: dict[str, Any], seed: int) -> None:
        from vllm import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=prompt_ids)
        self._engine.add_request(str(number), prompt, _sampling_params(params, seed))

    def abort(self, number: int) -> None:
        self._engine.abort_request([str(number)])

    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> list[Event]:
        return [self._event(output) for output in self._engine.step()]

    def load_weights(self, buckets: list[Bucket], version: int) -> None:
        self._engine.collective_rpc("read_weights", args=(buckets,))
        self._forget()
        self._version = version

    def score(self, prompt_ids: list[int]) -> list[float]:
        self.add(-1, prompt_ids, {"max_tokens": 1, "prompt_logprobs": True}, seed=0)
        events: list[Event] = []
        while self.has_work():
            events += self.step()
        found = [event.prompt_log_probs for event in events if event.prompt_log_probs is not None]
        return found[0]

    def sleep(self) -> bool:
        self._forget()
        if self._can_sleep:
            # The weights lie in files already, from which they are read after waking up.
            self._engine.sleep(level=2)
        return self._can_sleep

    def wake_up(self, part: str | None) -> None:
        if self._can_sleep:
            self._engine.wake_up(tags=None if part is None else [part])

    def close(self) -> None:
        core = self._engine.engine_core
        core.shutdown()

    def _forget(self) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _event(self, output: Any) -> Event:
        sampled = output.outputs[0]
        tokens = list(sampled.token_ids)
        ranks = sampled.logprobs or [{} for _ in tokens]
        return Event(
            int(output.request_id),
            tokens,
            [rank[token].logprob for token, rank in zip(tokens, ranks, strict=True)],
            self._version,
            sampled.finish_reason,
            [_ranked(rank) for rank in ranks],
            _of_prompt(output),
        )


def _ranked(rank: dict[int, Any]) -> list[tuple[int, float]]:
    """Most likely first. Beside them, vLLM tells of the sampled token, whatever its rank."""
    ordered = sorted(rank.items(), key=lambda item: int(item[1].rank))
    return [(int(token), float(entry.logprob)) for token, entry in ordered]


def _of_prompt(output: Any) -> list[float] | None:
    if not output.prompt_logprobs:  # not asked for, or told already
        return None
    told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [float(rank[token].logprob) for token, rank in told]


def _sampling_params(params: dict[str, Any], seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    own = {"max_tokens", "stop_token_ids", "ignore_eos", "stop", "logprobs", "prompt_logprobs"}
    same = {name: value for name, value in params.items() if name not in own}
    return SamplingParams(
        **same,
        max_tokens=params["max_tokens"],
        stop_token_ids=[] if params.get("ignore_eos") else sorted(params.get("stop_token_ids", ())),
        ignore_eos=True,  # what ends a completion is among the stop tokens
        logprobs=params.get("logprobs", 0),
        prompt_logprobs=0 if params.get("prompt_logprobs") else None,
        seed=seed % SEEDS,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
