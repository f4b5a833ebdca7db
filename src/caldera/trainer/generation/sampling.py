"""Answers from samplers of the run's own: one for each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from caldera.config import ModelConfig, RolloutConfig
from caldera.config.offline import GenerationConfig
from caldera.data import hf_tokenizer, object_array
from caldera.data.chat import require_chat_template, tokenize_chat
from caldera.errors import ConfigError, DataError
from caldera.models.loading import import_external
from caldera.protocol import DataProto, DataProtoConfig
from caldera.rollout import ROLLOUTS
from caldera.seeds import derive_seed
from caldera.single_controller import ClassWithInitArgs, ResourcePool, WorkerGroup
from caldera.trainer.generation.questions import Questions
from caldera.workers import SamplerWorker
from caldera.workers.sampler import MODEL_KEY, PROMPT_IDS, RESPONSE_IDS, SEEDS

ROLE = "sampler"
MakeGroups = Callable[[ResourcePool, dict[str, ClassWithInitArgs]], dict[str, WorkerGroup]]
"""(places, how to make the worker of each role) -> a group of each role."""


class Samplers:
    """Samples in a worker group, which lives while this is entered."""

    def __init__(
        self, config: GenerationConfig, questions: Questions, rows: Iterable[int],
        make_groups: MakeGroups,
    ) -> None:  # fmt: skip
        """Every one of the rows is tokenised at once, so that a prompt too long is told at once."""
        disable_progress_bar()  # of transformers, in loading: it would tear our own
        self._config = config
        self._model = ModelConfig(
            path=config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            external_lib=config.model.external_lib,
        )
        import_external(self._model, MODEL_KEY)
        if config.rollout.name not in ROLLOUTS:
            known = ", ".join(ROLLOUTS.names())
            raise ConfigError(f"rollout.name={config.rollout.name!r}: takes one of {known}")
        self._tokenizer = hf_tokenizer(
            str(config.model.path), config.model.trust_remote_code, key="model.path"
        )
        self._tokens = _tokenize(self._tokenizer, config, questions, rows)
        self._make_groups = make_groups

    def __enter__(self) -> Samplers:
        trainer = self._config.trainer
        eos, device = self._tokenizer.eos_token_id, str(trainer.device)
        recipe = ClassWithInitArgs(
            SamplerWorker, self._model, rollout_config(self._config), eos, device
        )
        places = ResourcePool([trainer.n_gpus_per_node or 1] * trainer.nnodes)
        self._group = self._make_groups(places, {ROLE: recipe})[ROLE]
        try:
            self._group.init_model()
        except BaseException:
            self._group.shutdown()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._group.shutdown()

    def answers(self, rows: range) -> list[list[str]]:
        """The texts of all samples of each row."""
        root, samples = self._config.rollout.seed, range(self._config.data.n_samples)
        columns = {
            PROMPT_IDS: object_array([self._tokens[row] for row in rows]),
            SEEDS: object_array([[derive_seed(root, row, k) for k in samples] for row in rows]),
        }
        # A batch need not divide by the number of ranks.
        meta = {DataProtoConfig.auto_padding_key: True}
        sampled = self._group.generate_sequences(DataProto(None, columns, meta))
        return [
            [str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]
            for answers in sampled.non_tensor_batch[RESPONSE_IDS]
        ]


def rollout_config(config: GenerationConfig) -> RolloutConfig:
    """What the samplers of training take."""
    rollout = config.rollout
    return RolloutConfig(
        name=rollout.name,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty,
        frequency_penalty=rollout.frequency_penalty,
        stop_token_ids=rollout.stop_token_ids,
        stop=rollout.stop,
        n=config.data.n_samples,
        seed=rollout.seed,
        prompt_length=rollout.prompt_length,
        response_length=rollout.response_length,
        dtype=rollout.dtype,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        ignore_eos=rollout.ignore_eos,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        max_num_seqs=rollout.max_num_seqs,
        calculate_log_probs=False,
        tensor_model_parallel_size=rollout.tensor_model_parallel_size,
        engine_python=rollout.engine_python,
        engine_kwargs={str(rollout.name): rollout.engine_kwargs},
        remote=rollout.remote,
    )


def _tokenize(
    tokenizer: PreTrainedTokenizerBase,
    config: GenerationConfig,
    questions: Questions,
    rows: Iterable[int],
) -> dict[int, list[int]]:
    require_chat_template(tokenizer, {}, "model.path to a folder whose tokenizer has one")
    most = config.rollout.prompt_length
    tokens = {row: tokenize_chat(tokenizer, questions.prompts[row], {}) for row in rows}
    long = [row for row, ids in tokens.items() if len(ids) > most]
    if long:
        raise DataError(
            f"{questions.where(long[0])}: the prompt has {len(tokens[long[0]])} tokens, more than "
            f"rollout.prompt_length={most} ({len(long)} such prompts in all): set "
            f"rollout.prompt_length={max(len(tokens[row]) for row in long)}, or leave them out"
        )
    return tokens
