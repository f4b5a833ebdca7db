"""GRPO in one file: from a data set to a better model, without Caldera's trainer.

    python3 examples/single_file_grpo/grpo.py

A model pi answers questions q that have a right answer. One step of group relative policy
optimisation (Shao et al., DeepSeekMath, arXiv:2402.03300, outcome supervision, without KL):

    1. sample    for each of B questions, draw n responses o_1 ... o_n ~ pi_old(. | q)
    2. score     r_i = 1 if o_i is right, else 0
    3. advantage A_i = (r_i - mean(r_1 ... r_n)) / (std(r_1 ... r_n) + eps): better than its group?
    4. update    per token t, with the ratio rho = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t),
                 minimise the mean over all tokens of -min(rho A, clip(rho, 1 - c, 1 + c) A)

This file has these four steps as functions, in that order, below the settings and the data. It
stands on the seams that every run of `caldera train` stands on: `NativeRollout` samples (continuous
batching over a paged cache), `LocalEngine` computes log-probs and takes optimiser steps (packed,
without padding), `DataProto` is the batch between them. Its numbers are those of `caldera train`
with the same settings: tests/e2e/test_recipes.py compares them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel

from caldera.config import FSDPConfig, ModelConfig, OptimizerConfig, RolloutConfig
from caldera.core_algos import LossScale
from caldera.data import (
    StatefulLoader,
    compute_position_ids,
    hf_tokenizer,
    left_pad,
    right_pad,
    tokenize_chat,
)
from caldera.engine import EngineOptions, ForwardPlan, LocalEngine, Outputs
from caldera.models.loading import load_policy
from caldera.protocol import DataProto, tensors_of
from caldera.reward_score import default_compute_score
from caldera.rollout import Completion, NativeRollout, Request, SamplingParams
from caldera.seeds import derive_seed
from caldera.tracking import Series, svg_curve

# ----------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Settings:
    """The defaults fit the task of `caldera demo`: sums of two-digit numbers."""

    questions: int = 64  # B, of a step
    samples: int = 8  # n, of a question
    mini_batch: int = 32  # questions of an optimiser step: two a batch
    prompt_tokens: int = 8  # most tokens of a prompt
    response_tokens: int = 4  # most tokens of a response
    temperature: float = 1.0
    clip: float = 0.2  # c
    dual_clip: float = 3.0  # where A < 0, the loss of a token is at most 3 |A| (Ye et al., 2020)
    lr: float = 5e-4
    warmup_steps: int = 10
    max_grad_norm: float = 1.0
    steps: int = 120
    test_every: int = 10
    seed: int = 42


EPSILON = 1e-6

# ----------------------------------------------------------------------------- the data

Question = dict[str, Any]


def read_questions(path: Path, tokenizer: Any) -> list[Question]:
    """Rows of verl's schema (docs/data.md): a chat, and what the scorer compares with."""
    return [
        {
            "prompt_ids": tokenize_chat(tokenizer, row["prompt"], {}),
            "data_source": row["data_source"],
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        for row in pq.read_table(path).to_pylist()
    ]


def batches(questions: list[Question], settings: Settings) -> Iterator[list[Question]]:
    """Batches of questions without end: each epoch in another order, drawn from the seed."""
    loader = StatefulLoader(questions, settings.questions, seed=settings.seed)
    while True:
        for columns in loader:
            rows = zip(*columns.values(), strict=True)
            yield [dict(zip(columns, values, strict=True)) for values in rows]


# ----------------------------------------------------------------------------- the model


class Policy:
    """One set of weights: the sampler reads the module that the engine trains."""

    def __init__(self, folder: str, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = hf_tokenizer(folder)
        self.module = cast(
            PreTrainedModel,
            load_policy(ModelConfig(path=folder), torch.float32, settings.seed, "model"),
        )
        optimizer = OptimizerConfig(
            lr=settings.lr,
            lr_warmup_steps=settings.warmup_steps,
            lr_scheduler_type="cosine",
            total_training_steps=settings.steps,
        )
        told = EngineOptions(FSDPConfig(), optimizer, settings.max_grad_norm)
        self.engine = LocalEngine(self.module, self.device, told)
        self.sampler = NativeRollout(
            RolloutConfig(
                prompt_length=settings.prompt_tokens,
                response_length=settings.response_tokens,
                max_model_len=settings.prompt_tokens + settings.response_tokens,
                max_num_seqs=512,
            ),
            self.module,
            self.device,
        )

    def sample(
        self, questions: list[Question], seeds: list[int], temperature: float
    ) -> list[Completion]:
        """One response to each question; a seed decides the random numbers of its response."""
        params = SamplingParams(
            self.settings.response_tokens,
            temperature,
            stop_token_ids=frozenset([self.tokenizer.eos_token_id]),
        )
        requests = [
            Request(question["prompt_ids"], params, seed)
            for question, seed in zip(questions, seeds, strict=True)
        ]
        self.sampler.version = self.engine.version  # what is cached of older weights is void
        self.sampler.wake_up()
        completions = self.sampler.generate(requests)
        self.sampler.sleep()  # the cache's memory is the engine's now
        return completions

    def text(self, completion: Completion) -> str:
        return str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))


# ----------------------------------------------------------------------------- 1. sample


def sample_groups(
    policy: Policy, questions: list[Question], step: int
) -> tuple[list[Question], list[Completion]]:
    """n responses to each question, side by side: (the question of each response, responses)."""
    settings = policy.settings
    repeated = [question for question in questions for _ in range(settings.samples)]
    seeds = [
        derive_seed(settings.seed, "train", step, place, sample)
        for place in range(len(questions))
        for sample in range(settings.samples)
    ]
    return repeated, policy.sample(repeated, seeds, settings.temperature)


# ----------------------------------------------------------------------------- 2. score


def score(policy: Policy, questions: list[Question], completions: list[Completion]) -> Tensor:
    """r (B n,): 1 for a right response, 0 for any other, by the scorer of the data source."""
    rewards = []
    for question, completion in zip(questions, completions, strict=True):
        found = default_compute_score(
            question["data_source"], policy.text(completion), question["ground_truth"]
        )
        rewards.append(found["score"] if isinstance(found, dict) else found)
    return torch.tensor(rewards, dtype=torch.float32)


# ----------------------------------------------------------------------------- 3. advantage


def group_advantages(rewards: Tensor, samples: int) -> Tensor:
    """A (B n,): each reward less the mean of its group, over the group's standard deviation."""
    groups = rewards.view(-1, samples)
    centred = groups - groups.mean(-1, keepdim=True)
    return (centred / (groups.std(-1, keepdim=True) + EPSILON)).flatten()


# ----------------------------------------------------------------------------- 4. update


def make_batch(
    policy: Policy, questions: list[Question], completions: list[Completion], advantages: Tensor
) -> DataProto:
    """The tensors of a batch: prompts padded on the left (B n, P), responses on the right
    (B n, R). A token's advantage is that of its response."""
    settings, pad = policy.settings, policy.tokenizer.pad_token_id
    prompts = [question["prompt_ids"] for question in questions]
    responses = [completion.token_ids for completion in completions]
    prompt_mask = left_pad([[1] * len(ids) for ids in prompts], settings.prompt_tokens, 0)
    response_mask = right_pad([[1] * len(ids) for ids in responses], settings.response_tokens, 0)
    response_ids = right_pad(responses, settings.response_tokens, pad)
    attention_mask = torch.cat([prompt_mask, response_mask], -1)
    return DataProto.from_dict(
        {
            "responses": response_ids,
            "input_ids": torch.cat(
                [left_pad(prompts, settings.prompt_tokens, pad), response_ids], -1
            ),
            "attention_mask": attention_mask,
            "position_ids": compute_position_ids(attention_mask),
            "response_mask": response_mask,
            "advantages": advantages[:, None] * response_mask,
        }
    )


def update(policy: Policy, batch: DataProto) -> dict[str, float]:
    """One optimiser step a mini-batch; returns the means of their metrics, and the rate."""
    settings = policy.settings
    plan = ForwardPlan(
        ("log_probs",),
        by_tokens=True,
        micro_batch_size=None,
        max_tokens=16384,
        temperature=settings.temperature,
    )
    tensors = tensors_of(batch)
    tensors["old_log_probs"] = policy.engine.infer(batch, plan)["log_probs"]  # of pi_old

    def clipped_loss(
        outputs: Outputs, rows: DataProto, scale: LossScale
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Of some rows of the mini-batch; `scale` knows how many tokens all of it has."""
        given = tensors_of(rows)
        advantages = given["advantages"]
        ratio = (outputs["log_probs"] - given["old_log_probs"]).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        bounded = torch.minimum(losses, -advantages * settings.dual_clip)
        losses = torch.where(advantages < 0, bounded, losses)
        loss = scale.aggregate(losses, given["response_mask"], "token-mean")
        return loss, {"loss": loss.detach()}

    taken = [
        policy.engine.train(mini_batch, clipped_loss, plan)
        for mini_batch in batch.split(settings.mini_batch * settings.samples)
    ]
    metrics = {name: sum(one[name].item() for one in taken) / len(taken) for name in taken[0]}
    return metrics | {"lr": policy.engine.step_schedule()}


# ----------------------------------------------------------------------------- the whole


def accuracy(policy: Policy, questions: list[Question]) -> float:
    """Share of the questions that the most likely response answers."""
    greedy = policy.sample(questions, [0] * len(questions), temperature=0.0)
    return score(policy, questions, greedy).mean().item()


def train(
    policy: Policy, training: list[Question], held_out: list[Question]
) -> Iterator[dict[str, float]]:
    """The metrics of each step; those of step 0 are of the model as it was."""
    settings = policy.settings
    yield {"step": 0, "accuracy": accuracy(policy, held_out)}
    drawn = batches(training, settings)
    for step in range(1, settings.steps + 1):
        questions, completions = sample_groups(policy, next(drawn), step)
        rewards = score(policy, questions, completions)
        advantages = group_advantages(rewards, settings.samples)
        metrics = update(policy, make_batch(policy, questions, completions, advantages))
        metrics |= {"step": step, "reward": rewards.mean().item()}
        if step % settings.test_every == 0 or step == settings.steps:
            metrics["accuracy"] = accuracy(policy, held_out)
        yield metrics


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("--data", type=Path, default=Path("outputs/demo-tiny"),
                        help="folder with train.parquet, test.parquet and the model `start`; "
                             "made where it is missing")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("runs/single_file_grpo"))
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    options = parser.parse_args()
    if not (options.data / "start").exists():
        from caldera.demo.run import prepare_tiny

        options.data.mkdir(parents=True, exist_ok=True)
        prepare_tiny(options.data)

    policy = Policy(str(options.data / "start"), Settings(steps=options.steps, seed=options.seed))
    training = read_questions(options.data / "train.parquet", policy.tokenizer)
    held_out = read_questions(options.data / "test.parquet", policy.tokenizer)
    options.output.mkdir(parents=True, exist_ok=True)
    began, rows = time.perf_counter(), []
    with (options.output / "metrics.jsonl").open("w") as file:
        for row in train(policy, training, held_out):
            rows.append(row)
            data = {key: value for key, value in row.items() if key != "step"}
            print(json.dumps({"step": row["step"], "data": data}), file=file, flush=True)
            if "accuracy" in row:
                seconds = time.perf_counter() - began
                print(f"step {row['step']:3}  {seconds:4.0f} s  held out {row['accuracy']:.1%}")
    curves = [
        Series(name, [(row["step"], row[key]) for row in rows if key in row])
        for name, key in (("held-out accuracy, greedy", "accuracy"), ("mean reward", "reward"))
    ]
    drawing = svg_curve(curves, "GRPO in one file", "training step", "share right", standalone=True)
    (options.output / "curve.svg").write_text(drawing)
    policy.module.save_pretrained(options.output / "model")
    policy.tokenizer.save_pretrained(options.output / "model")


if __name__ == "__main__":
    main()
