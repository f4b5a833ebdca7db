"""Sampling with transformers' own `generate`: slower, and a check on the native sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from caldera.config.samplers import SAMPLERS
from caldera.data.loader import left_pad
from caldera.models.forward import base_module
from caldera.rollout.base import (
    ROLLOUTS,
    Completion,
    Decode,
    FinishReason,
    OnFinished,
    Request,
    Rollout,
    RolloutPart,
    SamplingParams,
    completes_a_stop,
)
from caldera.rollout.weights import sampling_dtype, sampling_precision
from caldera.seeds import derive_seed

if TYPE_CHECKING:
    from caldera.config import RolloutConfig

PAD = 0  # any token: it is masked before a prompt, and cut off after a stop token


@ROLLOUTS.register("hf")
class HFRollout(Rollout):
    """Left-padded batches of requests with the same parameters, `max_num_seqs` at a time.

    A batch draws from one random stream, seeded by the seeds of all its requests: the same batch
    gives the same samples, but a sample depends on what it is batched with.
    """

    traits = SAMPLERS["hf"]

    def __init__(self, config: RolloutConfig, module: nn.Module, device: torch.device) -> None:
        super().__init__(config, module, device)
        self._dtype = sampling_dtype(module, config.dtype, device)
        self._raw_log_probs = config.logprobs_mode == "raw_logprobs"

    def wake_up(self, part: RolloutPart | None = None) -> None:
        """Nothing to do: `generate` allocates its cache and frees it."""

    def sleep(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(
        self, requests: Sequence[Request], on_finished: OnFinished | None = None
    ) -> list[Completion]:
        self.check(requests)
        by_params: dict[SamplingParams, list[int]] = {}
        for index, request in enumerate(requests):
            by_params.setdefault(request.params, []).append(index)
        size = self.config.max_num_seqs
        chunks = [
            (params, indices[start : start + size])
            for params, indices in by_params.items()
            for start in range(0, len(indices), size)
        ]
        completions: dict[int, Completion] = {}
        precision = sampling_precision(self.module, self._dtype, self.device)
        with self.sampling_mode(), precision, _own_attention(base_module(self.module)) as model:
            for params, chunk in chunks:
                batch = self._generate(model, [requests[i] for i in chunk], params)
                for index, completion in zip(chunk, batch, strict=True):
                    completions[index] = completion
                    if on_finished is not None:
                        on_finished(index, completion)
        return [completions[index] for index in range(len(requests))]

    def _generate(
        self, model: PreTrainedModel, requests: list[Request], params: SamplingParams
    ) -> list[Completion]:
        prompts = [request.prompt_ids for request in requests]
        width = max(len(prompt) for prompt in prompts)
        input_ids = left_pad(prompts, width, PAD).to(self.device)  # (B, P)
        mask = left_pad([[1] * len(prompt) for prompt in prompts], width, 0).to(self.device)
        recorder = _ChosenLogProbs(width)
        warpers = _warpers(params)
        processors = [recorder, *warpers] if self._raw_log_probs else [*warpers, recorder]
        cuda = [self.device] if self.device.type == "cuda" else []
        seeds = [request.seed for request in requests]
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(derive_seed(seeds[0], *seeds[1:]))
            sequences = model.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=mask,
                generation_config=_generation_config(params),
                logits_processor=LogitsProcessorList(processors),
            )
        log_probs = recorder.finish(sequences)
        stops = frozenset[int]() if params.ignore_eos else params.stop_token_ids
        return [
            self._completion(tokens, values, stops, params)
            for tokens, values in zip(
                sequences[:, width:].tolist(), log_probs.tolist(), strict=True
            )
        ]

    def _completion(
        self,
        tokens: list[int],
        log_probs: list[float],
        stops: frozenset[int],
        params: SamplingParams,
    ) -> Completion:
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
        if params.stop and self.decode is not None:
            end = _end_of_text(tokens[:end], params.stop, self.decode) or end
        reason: FinishReason = "length" if end is None else "stop"
        count = len(tokens[:end])
        versions = ((self.version, count),)
        return Completion(tokens[:end], log_probs[:end], reason, self.version, versions)


def _end_of_text(tokens: list[int], stops: tuple[str, ...], decode: Decode) -> int | None:
    """How many of the tokens there are up to that which completes a string, if any does."""
    ends = range(1, len(tokens) + 1)
    return next((end for end in ends if completes_a_stop(tokens[:end], stops, decode)), None)


class _ChosenLogProbs(LogitsProcessor):
    """Keeps the log-prob of each token that `generate` chose, and logits of one step only."""

    def __init__(self, prompt_width: int) -> None:
        self._width = prompt_width
        self._chosen: list[Tensor] = []  # (B,) a step
        self._log_probs = torch.empty(0)  # (B, V) of the newest step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > self._width:
            self._choose(input_ids[:, -1])
        self._log_probs = scores.float().log_softmax(-1)
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Log-probs (B, R) of all that follows the prompts."""
        steps = sequences.shape[1] - self._width
        if len(self._chosen) < steps:
            self._choose(sequences[:, -1])
        return torch.stack(self._chosen[:steps], dim=1)

    def _choose(self, tokens: Tensor) -> None:
        self._chosen.append(self._log_probs.gather(-1, tokens[:, None]).squeeze(-1))


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if params.temperature == 0:
        return warpers
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers


def _generation_config(params: SamplingParams) -> GenerationConfig:
    """The rest are `generate`'s defaults, which filter nothing but for `top_k`."""
    stops = None if params.ignore_eos else sorted(params.stop_token_ids)
    sampled = params.temperature > 0
    return GenerationConfig(
        max_new_tokens=params.max_tokens,
        do_sample=sampled,
        top_k=0 if sampled else None,  # temperature and filters are in the processors
        eos_token_id=stops or None,
        pad_token_id=PAD,
    )


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model with transformers' attention and none of its own generation defaults."""
    implementation = cast(str, model.config._attn_implementation)
    defaults = model.generation_config
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()
    try:
        yield model
    finally:
        model.generation_config = defaults
        model.set_attn_implementation(implementation)
