"""vLLM, stepped by its caller."""

from __future__ import annotations

import os
from typing import Any, get_args

from .base import Event
from .buckets import Adapter, Bucket, check_adapter

MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
SEEDS = 2**63


class VllmEngine:
    """The synchronous engine of vLLM, whose core is in this process; see `InferenceEngine`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """`arguments` are those of vLLM's EngineArgs."""
        os.environ[MULTIPROCESSING] = "0"
        from vllm import EngineArgs, LLMEngine

        reader = f"{__package__}.vllm_worker.WeightReader"
        if "max_lora_rank" in arguments:
            arguments = {**arguments, "max_lora_rank": _allowed_rank(arguments["max_lora_rank"])}
        options = EngineArgs(**arguments, worker_extension_cls=reader)
        self._engine = LLMEngine.from_engine_args(options)
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._version = 0
        self._is_loading = False
        self._adapters = 0  # how many there were
        self._adapter: Any = None

    def add(self, number: int, prompt_ids: list[int], params: dict[str, Any], seed: int) -> None:
        from vllm import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=prompt_ids)
        self._engine.add_request(
            str(number), prompt, _sampling_params(params, seed), lora_request=self._adapter
        )

    def abort(self, number: int) -> None:
        self._engine.abort_request([str(number)])

    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> list[Event]:
        return [self._event(output) for output in self._engine.step()]

    def load_bucket(self, bucket: Bucket, first: bool) -> None:
        self._is_loading = True
        self._engine.collective_rpc("read_weights", args=(bucket, first))

    def use_weights(self, version: int, adapter: Adapter | None) -> None:
        if self._is_loading:
            self._engine.collective_rpc("finish_weights")
            self._is_loading = False
        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = None if adapter is None else self._load_adapter(adapter)
        self._forget()
        self._version = version

    def _load_adapter(self, adapter: Adapter) -> Any:
        """A separate number: vLLM's state by number is not taken for that of another."""
        from vllm.lora.request import LoRARequest

        check_adapter(adapter)
        self._adapters += 1
        request = LoRARequest(f"adapter-{self._adapters}", self._adapters, adapter["path"])
        if not self._engine.add_lora(request):
            raise RuntimeError(f"vLLM does not take the adapter in {adapter['path']}")
        return request

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
            # The weights come again after waking up.
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


def _allowed_rank(rank: int) -> int:
    """The least rank that vLLM has kernels for, and that holds this one."""
    from vllm.config.lora import MaxLoRARanks

    allowed = sorted(get_args(MaxLoRARanks))
    if rank > allowed[-1]:
        raise ValueError(f"adapters of rank {rank}: vLLM takes {allowed[-1]} at most")
    return int(min(each for each in allowed if each >= rank))


def _ranked(rank: dict[int, Any]) -> list[tuple[int, float]]:
    """Most likely first. Beside them, vLLM returns the sampled token, whatever its rank."""
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
