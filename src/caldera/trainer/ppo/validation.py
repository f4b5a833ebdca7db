"""Validation: sample responses to the held-out prompts, score them, keep and summarise them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from caldera.config import PPOTrainerConfig
from caldera.data import FixedLoader
from caldera.protocol import DataProto, tensors_of
from caldera.reward import VALUE, AnswerFormats, RewardManager
from caldera.reward.answer_formats import PRED, has_answer
from caldera.tracking import Generation, dump_generations, select_val_generations
from caldera.trainer.ppo.agents import DUMPED, facts_in, spread_of, with_agent_columns
from caldera.trainer.ppo.prompts import stamp_rows
from caldera.trainer.ppo.rewards import score_responses, takes_part

if TYPE_CHECKING:
    from caldera.trainer.ppo.trainer import PPOTrainer

# ---- Metrics: mean, best, worst and majority of several responses to the same prompt
#
# They are per data source and variable, such as `acc`, and averaged over prompts, of which each has
# N samples:
#
#     mean@N, std@N           over the samples
#     best@n/{mean,std}       of the best of n samples, for n in 2, 4, 8, ... and N
#     worst@n/{mean,std}      of the worst of n samples
#     maj@n/{mean,std}        of the answer (`pred`) that most of n samples give
#
# What n samples would give is estimated by drawing them from the N, with replacement, many times.

DRAWS = 1000
PROMPTS_AT_ONCE = 64  # bounds the memory of a majority vote: 64 x 1000 x N floats

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
ValidationMetrics = dict[str, dict[str, dict[str, float]]]
"""By data source, variable and metric."""


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> ValidationMetrics:
    """The metrics of all numeric variables in `infos_dict`, whose lists hold one item a sample.

    Samples with the same data source and uid answer the same prompt. A variable that some samples
    of a data source lack (None or NaN) gets only its mean there, over the samples that have it.
    """
    prompts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        prompts[source][uid].append(row)
    numbers = {
        name: numeric
        for name, items in infos_dict.items()
        if (numeric := _as_numbers(items)) is not None
    }
    votes = _as_votes(infos_dict.get("pred", [None] * len(sample_uids)))
    return {
        source: _source_metrics(list(rows_by_uid.values()), numbers, votes, seed)
        for source, rows_by_uid in prompts.items()
    }


def name_validation_metrics(metrics: ValidationMetrics) -> dict[str, float]:
    """Flat names: `val-core/{source}/{variable}/{metric}` for what matters, else `val-aux/...`.

    What matters is how well the core variable (`acc`, or else `reward`) did with the largest N:
    its mean, its majority vote and its best.
    """
    named: dict[str, float] = {}
    for source, variables in metrics.items():
        core_variable = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            largest = max(_sample_count(metric) for metric in values)
            for metric, value in values.items():
                is_core = (
                    variable == core_variable
                    and metric.startswith(("mean@", "maj@", "best@"))
                    and _sample_count(metric) == largest
                )
                section = "val-core" if is_core else "val-aux"
                named[f"{section}/{source}/{variable}/{metric}"] = value
    return named


def _as_numbers(items: Sequence[Any]) -> Floats | None:
    """The items as floats, NaN for None; or None if the variable is not numeric."""
    numeric = (bool, int, float, np.bool_, np.number)
    if not all(item is None or isinstance(item, numeric) for item in items):
        return None
    return np.array([np.nan if item is None else float(item) for item in items])


def _as_votes(predictions: Sequence[Any]) -> Integers:
    """Equal predictions as equal integers; -1 for None, which is a vote like any other."""
    codes: dict[str, int] = {}
    votes = [-1 if p is None else codes.setdefault(str(p), len(codes)) for p in predictions]
    return np.array(votes, dtype=np.int64)


def _source_metrics(
    prompts: list[list[int]], numbers: Mapping[str, Floats], votes: Integers, seed: int
) -> dict[str, dict[str, float]]:
    """The metrics of one data source, given the rows of each of its prompts."""
    source_rows = [row for rows in prompts for row in rows]
    present = {name: ~np.isnan(values[source_rows]) for name, values in numbers.items()}
    complete = {name: values for name, values in numbers.items() if present[name].all()}
    has_votes = bool((votes[source_rows] >= 0).any())

    per_prompt: dict[str, dict[str, list[Floats]]] = {
        name: defaultdict(list) for name in numbers if present[name].any()
    }
    for rows in _stack_by_count(prompts):  # (prompts, N)
        count = rows.shape[1]
        for name, metrics in per_prompt.items():
            metrics[f"mean@{count}"].append(_mean_of_present(numbers[name][rows]))
        if count == 1:
            continue
        for name, values in complete.items():
            per_prompt[name][f"std@{count}"].append(values[rows].std(axis=1))
        for size in _subset_sizes(count):
            draws = np.random.RandomState(seed).choice(count, size=(DRAWS, size), replace=True)
            winners = _majority_winners(votes[rows], draws) if has_votes else None
            for name, values in complete.items():
                for metric, results in _drawn_metrics(values[rows], draws, winners).items():
                    per_prompt[name][metric].append(results)
    return {
        name: {metric: float(np.concatenate(found).mean()) for metric, found in metrics.items()}
        for name, metrics in per_prompt.items()
    }


def _stack_by_count(prompts: list[list[int]]) -> list[Integers]:
    """The prompts' rows as matrices (prompts, N), one for each number of samples N."""
    by_count: dict[int, list[list[int]]] = defaultdict(list)
    for rows in prompts:
        by_count[len(rows)].append(rows)
    return [np.array(by_count[count], dtype=np.int64) for count in sorted(by_count)]


def _mean_of_present(values: Floats) -> Floats:
    """Each prompt's mean over the samples that are not NaN; prompts that have none are left out."""
    counts = (~np.isnan(values)).sum(axis=1)  # (prompts,)
    return np.asarray(np.nansum(values, axis=1)[counts > 0] / counts[counts > 0])


def _subset_sizes(count: int) -> list[int]:
    """2, 4, 8, ... below `count`, and `count` itself."""
    return [*(2**k for k in range(1, (count - 1).bit_length())), count]


def _drawn_metrics(values: Floats, draws: Integers, winners: Integers | None) -> dict[str, Floats]:
    """Mean and standard deviation over the draws, for each prompt.

    `values` is (prompts, N), `draws` (DRAWS, n), `winners` (prompts, DRAWS).
    """
    size = draws.shape[1]
    by_sample = np.ascontiguousarray(values.T)  # (N, prompts)
    best = by_sample[draws[:, 0]]  # (DRAWS, prompts)
    worst = best.copy()
    for drawn in draws.T[1:]:
        candidates = by_sample[drawn]
        np.maximum(best, candidates, out=best)
        np.minimum(worst, candidates, out=worst)
    outcomes = {f"best@{size}": best, f"worst@{size}": worst}
    if winners is not None:
        outcomes[f"maj@{size}"] = np.take_along_axis(values, winners, axis=1).T
    metrics: dict[str, Floats] = {}
    for name, outcome in outcomes.items():
        metrics[f"{name}/mean"] = outcome.mean(axis=0)
        metrics[f"{name}/std"] = outcome.std(axis=0)
    return metrics


def _majority_winners(votes: Integers, draws: Integers) -> Integers:
    """The sample that speaks for each draw's most frequent vote, as an index: (prompts, DRAWS).

    It is the first in the draw that voted so; of equally frequent votes, the one cast first wins.
    `votes` is (prompts, N), `draws` (DRAWS, n).
    """
    count, size = votes.shape[1], draws.shape[1]
    every_draw = np.arange(len(draws))
    times_drawn = np.zeros((len(draws), count))
    first_position = np.full((len(draws), count), float(size))  # `size` for samples not drawn
    for position in reversed(range(size)):
        times_drawn[every_draw, draws[:, position]] += 1
        first_position[every_draw, draws[:, position]] = position

    winners = np.empty((len(votes), len(draws)), dtype=np.int64)
    for start in range(0, len(votes), PROMPTS_AT_ONCE):
        part = slice(start, start + PROMPTS_AT_ONCE)
        same_vote = votes[part, :, None] == votes[part, None, :]  # (part, N, N)
        support = times_drawn @ same_vote.astype(np.float64)  # (part, DRAWS, N)
        # More support wins; among equals, the earlier position. A sample that was not drawn may
        # share a vote with one that was, and then stands behind it.
        winners[part] = (support * (size + 1) - first_position).argmax(axis=2)
    return winners


def _sample_count(metric: str) -> int:
    """The n of `best@n/mean`."""
    return int(metric.partition("@")[2].partition("/")[0])


LOOKED_AT = 256  # responses of the first training batch


# ---- Responses to the held-out prompts


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
        return spread_of("val-aux/num_turns", turns) if turns else {}

    def failures(self) -> dict[str, float]:
        """`val-aux/{source}/reward_failed/count`: responses that could not be scored."""
        states = self.extras.get("reward_state", [None] * len(self.scores))
        counts = dict.fromkeys(self.sources, 0.0)
        for source, state in zip(self.sources, states, strict=True):
            counts[source] += state not in (None, VALUE)
        return {f"val-aux/{source}/reward_failed/count": n for source, n in counts.items()}

    def answered(self) -> dict[str, dict[str, float]]:
        """`parsed` of each source, where the run's function tells what it has found, as `pred`."""
        found: dict[str, list[bool]] = {}
        for source, pred in zip(self.sources, self.extras.get(PRED, ()), strict=False):
            found.setdefault(source, []).append(has_answer(pred))
        return {source: {"parsed": sum(told) / len(told)} for source, told in found.items()}

    def read_by_scorers(self) -> tuple[list[str], list[str]]:
        """(data sources, texts) of the responses that a scorer has read."""
        rows = [row for row, is_of_agent in enumerate(self.is_of_agent) if not is_of_agent]
        return [self.sources[row] for row in rows], [self.outputs[row] for row in rows]


class Validator:
    """Runs the whole validation set through a sampler and a scorer."""

    def __init__(
        self, trainer: PPOTrainer, loader: FixedLoader | None, reward_fn: RewardManager
    ) -> None:
        """`trainer` has the sampler."""
        self._trainer = trainer
        self._config = trainer.config
        self._loader = loader
        self._reward_fn = reward_fn
        self._shown: list[Generation] = []
        self.formats = AnswerFormats.of(reward_fn)

    def run(self, step: int) -> dict[str, float]:
        """Metrics `val-core/...` and `val-aux/...`; none without rows to validate on."""
        if self._loader is None:
            return {}
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
                self._trainer.tokenizer,
                self._config.data.reward_fn_key,
            )
        self._keep(step, responses)
        self._trainer.first_scores.check(responses.extras)
        variables = responses.variables()
        by_source = process_validation_metrics(responses.sources, responses.uids, variables)
        metrics = name_validation_metrics(by_source) | responses.failures() | responses.turns()
        return metrics | self._format_metrics(responses)

    def _format_metrics(self, responses: Responses) -> dict[str, float]:
        """`val-aux/{source}/{parsed,format_...}/mean@n`: where a scorer found an answer, by its own
        `pred` or as those by data source do, and how it was written."""
        counts = self.formats.counts(*responses.read_by_scorers())
        self.formats.warn(counts)
        shares = {source: counted.shares() for source, counted in counts.items()}
        if not self.formats.are_known:
            shares = responses.answered()
        n = self._config.actor_rollout_ref.rollout.val_kwargs.n
        return {
            f"val-aux/{source}/{name}/mean@{n}": share
            for source, named in shares.items()
            for name, share in named.items()
        }

    def take_shown(self) -> list[Generation]:
        """The responses that the last validation shows, once."""
        shown, self._shown = self._shown, []
        return shown

    def _sample(self, rows: Any, number: int) -> DataProto:
        rollout = self._config.actor_rollout_ref.rollout
        # The step is no part of the place: validations at different steps draw the same numbers.
        place = ("validation", number)
        meta = {**self._trainer.meta, "validate": True}
        prompts, batch = stamp_rows(
            rows, rollout.val_kwargs.n, rollout.seed, place, meta, self._trainer.sends_rows
        )
        responses = self._trainer.sampler.generate_sequences(prompts)
        return batch.union(with_agent_columns(responses))

    def _keep(self, step: int, responses: Responses) -> None:
        trainer = self._config.trainer
        if trainer.validation_data_dir:
            dump_generations(
                Path(trainer.validation_data_dir).expanduser(),
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
    dump_generations(
        Path(folder).expanduser(),
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
