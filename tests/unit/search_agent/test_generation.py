"""Trajectories of the search agent: their tokens, masks and counts."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from caldera.agent_loop.base import ServerManager, TokenOutput
from caldera.agent_loop.output import Timeline
from caldera.config import PPOTrainerConfig
from caldera.search_agent.loop import (
    STOPS,
    Action,
    LLMGenerationManager,
    SearchTrajectory,
    facts_of,
    invalid_text,
    read_action,
    search_metrics,
)
from caldera.tools.search import Document, RetrievalFailed, RetrieverClient

PROMPT = [1, 2, 3]


def limits(answer: int, observation: int, together: int) -> PPOTrainerConfig:
    config = PPOTrainerConfig(max_turns=2)
    config.data.max_response_length, config.data.max_obs_length = answer, observation
    config.actor_rollout_ref.rollout.response_length = together
    return config


ROOMY = limits(100, 500, 2000)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a character."""
    vocabulary = {character: place for place, character in enumerate(string.printable)}
    made = Tokenizer(models.WordLevel(vocabulary, " "))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


class Policy:
    """Says what its script says; a log-prob tells the turn and the place."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, script: Sequence[str]) -> None:
        self.timeline = Timeline(0.0)
        self.contexts: list[list[int]] = []
        self.params: list[Mapping[str, Any]] = []
        self._tokenizer = tokenizer
        self._script = list(script)

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> TokenOutput:
        self.contexts.append(list(prompt_ids))
        self.params.append(sampling_params)
        turn = len(self.contexts)
        said = self._tokenizer.encode(self._script.pop(0), add_special_tokens=False)
        ids = said[: sampling_params["max_tokens"]]
        return TokenOutput(ids, [-turn - place / 1000 for place in range(len(ids))], "stop")


class Library:
    """Knows one passage, and fails on demand."""

    def __init__(self) -> None:
        self.queries: list[str] = []

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        self.queries += queries
        if queries[0] == "fail":
            raise RetrievalFailed("the search engine does not work: no route")
        return [[Document("Rome", "in Italy")] for _ in queries]


def run(
    tokenizer: PreTrainedTokenizerBase, script: Sequence[str], config: PPOTrainerConfig = ROOMY
) -> tuple[SearchTrajectory, Policy, Library]:
    policy, library = Policy(tokenizer, script), Library()
    manager = LLMGenerationManager(tokenizer, cast(RetrieverClient, library), config)
    servers = cast(ServerManager, policy)
    done = asyncio.run(manager.run_llm_loop(servers, PROMPT, {"temperature": 0.5}))
    assert len(done.response_ids) == len(done.response_mask) == len(done.response_logprobs)
    return done, policy, library


def test_a_search_and_an_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    first, last = "hm <search> where is Rome </search>", "so <answer>Italy</answer>"
    done, policy, library = run(tokenizer, [first, last])
    told = "\n\n<information>Doc 1(Title: Rome) in Italy\n</information>\n\n"
    assert tokenizer.decode(done.response_ids) == first + told + last
    assert done.response_mask == [1] * len(first) + [0] * len(told) + [1] * len(last)
    assert library.queries == ["where is Rome"]
    assert policy.contexts == [PROMPT, PROMPT + done.response_ids[: len(first + told)]]
    assert done.response_logprobs == (
        [-1 - place / 1000 for place in range(len(first))]
        + [0.0] * len(told)
        + [-2 - place / 1000 for place in range(len(last))]
    )
    assert policy.params[0] == {"temperature": 0.5, "max_tokens": 100, "stop": STOPS}
    assert facts_of(done) == {
        "search_actions": 2, "search_valid_actions": 2, "search_valid_searches": 1,
        "search_finished": True,
    }  # fmt: skip
    (event,) = policy.timeline.events
    assert event["calls"] == [{"name": "search", "status": "ok"}]


def test_an_invalid_action_is_told_so(tokenizer: PreTrainedTokenizerBase) -> None:
    done, _, library = run(tokenizer, ["I guess Rome", "<answer>Rome</answer>"])
    text = "I guess Rome" + invalid_text() + "<answer>Rome</answer>"
    assert tokenizer.decode(done.response_ids) == text
    assert (done.actions, done.valid_actions, done.valid_searches) == (2, 1, 0)
    assert library.queries == []


def test_the_last_turn_cannot_search(tokenizer: PreTrainedTokenizerBase) -> None:
    search = "<search>a</search>"
    done, policy, library = run(tokenizer, [search, search, search])
    assert library.queries == ["a", "a"]
    assert done.response_mask[-len(search) :] == [1] * len(search), "no observation follows"
    assert (done.actions, done.valid_actions, done.finished) == (3, 2, False)
    assert len(policy.contexts) == 3


def test_a_failing_service_is_told_the_policy(tokenizer: PreTrainedTokenizerBase) -> None:
    done, policy, _ = run(tokenizer, ["<search>fail</search>", "<answer>a</answer>"])
    text = str(tokenizer.decode(done.response_ids))
    assert "<information>The search failed: the search engine does not work: no route" in text
    assert (done.valid_searches, done.failed_searches, done.finished) == (1, 1, True)
    assert policy.timeline.events[0]["calls"] == [{"name": "search", "status": "error"}]


def test_limits_of_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    search = "<search>a</search>"
    config = limits(len(search), 5, 2 * len(search) + 5 + 3)
    done, policy, _ = run(tokenizer, [search, search + "cut off", "never said"], config)
    assert tokenizer.decode(done.response_ids) == search + "\n\n<in" + search
    assert [params["max_tokens"] for params in policy.params] == [len(search)] * 2
    assert sum(done.response_mask) == 2 * len(search), "no room for what the second search brought"


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<search> a\nb </search>", Action("search", "a\nb")),
        ("<answer>x</answer><search>y</search>", Action("answer", "x")),
        ("<search>x</answer>", None),
        ("<search>  </search>", None),
        ("nothing", None),
    ],
)
def test_actions(text: str, action: Action | None) -> None:
    assert read_action(text) == action


def test_metrics() -> None:
    facts = [
        facts_of(SearchTrajectory(actions=3, valid_actions=3, valid_searches=2, finished=True)),
        facts_of(SearchTrajectory(actions=1, valid_actions=0)),
    ]
    response_mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])
    attention_mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]])
    assert search_metrics(facts, response_mask, attention_mask) == {
        "env/number_of_actions/mean": 2.0,
        "env/number_of_actions/max": 3.0,
        "env/number_of_actions/min": 1.0,
        "env/finish_ratio": 0.5,
        "env/number_of_valid_action": 1.5,
        "env/ratio_of_valid_action": 0.75,
        "env/number_of_valid_search": 1.0,
        "state_tokens/total": 4.0,
        "state_tokens/coverage": 0.8,
    }
    assert search_metrics([{}], response_mask, attention_mask) == {}
