"""Validation: sample responses to the held-out prompts, score them, keep and summarise them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from caldera.config import PPOTrainerConfig
from caldera.data import FixedLoader
from caldera.protocol import DataProto, tensors_of
from caldera.reward import VALUE, AnswerFormats, RewardManager
from caldera.tracking import Generation, GenerationDump, select_val_generations
from caldera.trainer.ppo.agents import DUMPED, facts_in, with_agent_columns
from caldera.trainer.ppo.prompts import stamp_rows
from caldera.trainer.ppo.rewards import FirstScores, score_responses, takes_part
from caldera.trainer.ppo.validation_metrics import (
    name_validation_metrics,
    process_validation_metrics,
)

LOOKED_AT = 256  # responses of the first training batch


class Responses:
    """Every validation response, as text, with its score and whatever the scorer said of it."""

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.ground_truths: list[Any] = []
        self.scores: list[float] = []
        self.is_rewarded: list[bool] = []
        self.is_of_agent: list[bool] = []
        """Whether the agent loop gave the score."""
        self.sources: list[str] = []
        self.uids: list[str] = []
        self.extras: dict[str, list[Any]] = {}
        self.of_agents: dict[str, list[Any]] = {}
        """Columns of trajectories, which are written down and not averaged."""

    def add(
        self,
        batch: DataProto,
        scores: list[float],
        extras: dict[str, list[Any]],
        is_rewarded: list[bool],
        tokenizer: PreTrainedTokenizerBase,
        source_key: str,
    ) -> None:
        columns = batch.non_tensor_batch
        seen = len(self.scores)
        self.inputs += decode_prompts(batch, tokenizer)
        self.outputs += decode_responses(batch, tokenizer)
        self.ground_truths += ground_truths(batch)
        self.scores += scores
        self.is_rewarded += is_rewarded
        facts = facts_in(batch)
        self.is_of_agent += [fact.reward_score is not None for fact in facts]
        self.is_of_agent += [False] * (len(scores) - len(facts))
        self.sources += [str(source) for source in columns[source_key]]
        self.uids += [str(uid) for uid in columns["uid"]]
        for key in self.extras.keys() | extras.keys():
            # A scorer of one data source may say what another's does not.
            held = self.extras.setdefault(key, [None] * seen)
            held += extras.get(key, [None] * len(scores))
        for key in DUMPED if facts else ():
            self.of_agents.setdefault(key, []).extend(columns.get(key, [None] * len(scores)))

    def variables(self) -> dict[str, list[Any]]:
        """What is averaged over responses: those without a reward are left out."""
        pairs = zip(self.scores, self.is_rewarded, strict=True)
        rewards = [score if is_there else None for score, is_there in pairs]
        return {"reward": rewards, **self.extras}

    def turns(self) -> dict[str, float]:
        """`val-aux/num_turns/{min,max,mean}` of trajectories."""
        turns = self.of_agents.get("__num_turns__")
        if not turns:
            return {}
        spread = {"min": min(turns), "max": max(turns), "mean": sum(turns) / len(turns)}
        return {f"val-aux/num_turns/{name}": float(value) for name, value in spread.items()}

    def failures(self) -> dict[str, float]:
        """`val-aux/{source}/reward_failed/count`: responses that could not be scored."""
        states = self.extras.get("reward_state", [None] * len(self.scores))
        counts = dict.fromkeys(self.sources, 0.0)
        for source, state in zip(self.sources, states, strict=True):
            counts[source] += state not in (None, VALUE)
        return {f"val-aux/{source}/reward_failed/count": n for source, n in counts.items()}

    def read_by_scorers(self) -> tuple[list[str], list[str]]:
        """(data sources, texts) of the responses that a scorer has read."""
        rows = [row for row, is_of_agent in enumerate(self.is_of_agent) if not is_of_agent]
        return [self.sources[row] for row in rows], [self.outputs[row] for row in rows]


class Validator:
    """Runs the whole validation set through a sampler and a scorer."""

    def __init__(
        self,
        config: PPOTrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        loader: FixedLoader,
        reward_fn: RewardManager,
        generate: Callable[[DataProto], DataProto],
        meta: dict[str, Any],
        sends_rows: bool,
        first_scores: FirstScores,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._loader = loader
        self._reward_fn = reward_fn
        self._sends_rows = sends_rows
        self._first_scores = first_scores
        self._generate = generate
        self._meta = meta
        self._shown: list[Generation] = []
        self.formats = AnswerFormats.of(reward_fn)

    def run(self, step: int) -> dict[str, float]:
        """Metrics `val-core/...` and `val-aux/...`."""
        responses = Responses()
        for number, rows in enumerate(self._loader):
            batch = self._sample(rows, number)
            rewards, extras = score_responses(batch, self._reward_fn, self._config)
            is_rewarded = takes_part(extras, len(batch), self._config).tolist()
            responses.add(
                batch,
                rewards.sum(-1).tolist(),
                extras,
                is_rewarded,
                self._tokenizer,
                self._config.data.reward_fn_key,
            )
        self._keep(step, responses)
        self._first_scores.check(responses.extras)
        variables = responses.variables()
        by_source = process_validation_metrics(responses.sources, responses.uids, variables)
        metrics = name_validation_metrics(by_source) | responses.failures() | responses.turns()
        return metrics | self._format_metrics(responses)

    def _format_metrics(self, responses: Responses) -> dict[str, float]:
        """`val-aux/{source}/{parsed,format_...}/mean@n`: where a scorer found an answer, and how
        it was written."""
        counts = self.formats.counts(*responses.read_by_scorers())
        self.formats.warn(counts)
        n = self._config.actor_rollout_ref.rollout.val_kwargs.n
        return {
            f"val-aux/{source}/{name}/mean@{n}": share
            for source, counted in counts.items()
            for name, share in counted.shares().items()
        }

    def take_shown(self) -> list[Generation]:
        """The responses that the last validation shows, once."""
        shown, self._shown = self._shown, []
        return shown

    def _sample(self, rows: Any, number: int) -> DataProto:
        rollout = self._config.actor_rollout_ref.rollout
        # The step is no part of the place: validations at different steps draw the same numbers.
        place = ("validation", number)
        meta = {**self._meta, "validate": True}
        prompts, batch = stamp_rows(
            rows, rollout.val_kwargs.n, rollout.seed, place, meta, self._sends_rows
        )
        return batch.union(with_agent_columns(self._generate(prompts)))

    def _keep(self, step: int, responses: Responses) -> None:
        trainer = self._config.trainer
        if trainer.validation_data_dir:
            with GenerationDump(Path(trainer.validation_data_dir).expanduser()) as dump:
                dump.write(
                    step,
                    responses.inputs,
                    responses.outputs,
                    responses.ground_truths,
                    responses.scores,
                    {**responses.extras, **responses.of_agents, "uid": responses.uids},
                )
        self._shown = select_val_generations(
            responses.inputs, responses.outputs, responses.scores, trainer.log_val_generations
        )


def check_formats(
    batch: DataProto,
    tokenizer: PreTrainedTokenizerBase,
    config: PPOTrainerConfig,
    formats: AnswerFormats,
) -> None:
    """Warn of responses in a format that their scorer does not read, by the first of a batch."""
    part = batch[:LOOKED_AT]
    if formats.are_known and not any(fact.reward_score is not None for fact in facts_in(part)):
        sources = [str(source) for source in part.non_tensor_batch[config.data.reward_fn_key]]
        formats.warn(formats.counts(sources, decode_responses(part, tokenizer)))


def dump_responses(
    batch: DataProto,
    extra_keys: list[str],
    tokenizer: PreTrainedTokenizerBase,
    folder: str,
    step: int,
) -> None:
    """Write the responses of a scored batch, with these of its columns."""
    columns = batch.non_tensor_batch
    with GenerationDump(Path(folder).expanduser()) as dump:
        dump.write(
            step,
            decode_prompts(batch, tokenizer),
            decode_responses(batch, tokenizer),
            ground_truths(batch),
            tensors_of(batch)["token_level_scores"].sum(-1).tolist(),
            {key: list(columns[key]) for key in [*extra_keys, "uid"]},
        )


def decode_prompts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The prompts as text, special tokens left out."""
    return list(tokenizer.batch_decode(tensors_of(batch)["prompts"], skip_special_tokens=True))


def decode_responses(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The responses as text, special tokens left out."""
    return list(tokenizer.batch_decode(tensors_of(batch)["responses"], skip_special_tokens=True))


def ground_truths(batch: DataProto) -> list[Any]:
    """What each row's scorer compares with; None where there is nothing to compare with."""
    rows = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    return [row.get("ground_truth") if isinstance(row, Mapping) else None for row in rows]
