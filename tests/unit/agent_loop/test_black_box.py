"""Agents that reach the policy over HTTP: their trajectories are what the sampler sampled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from caldera.agent_loop.black_box import black_box_metrics
from caldera.agent_loop.manager import AgentLoops, read_loops
from caldera.agent_loop.output import COLUMN, TrajectoryFacts
from caldera.errors import ConfigError
from caldera.protocol import DataProto, tensors_of
from caldera.rollout import NativeRollout, SamplingParams
from tests.unit.agent_loop.agent_scripts import equipment

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from caldera.config import PPOTrainerConfig

AGENTS = """
import asyncio, sys, time
import httpx2

SHORT = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "logprobs": True}


def seen(answers):
    choices = [answer["choices"][0] for answer in answers]
    return {
        "tokens": [token for choice in choices for token in choice["token_ids"]],
        "log_probs": [t["logprob"] for choice in choices for t in choice["logprobs"]["content"]],
    }


async def two_turns(base_url, session_id, row):
    headers = {"x-session-id": session_id}
    async with httpx2.AsyncClient(base_url=base_url, headers=headers) as client:
        async def ask(messages, **fields):
            body = {"messages": messages, "model": "whatever", **SHORT, **fields}
            reply = await client.post("chat/completions", json=body)
            reply.raise_for_status()
            return reply.json()

        messages = list(row["raw_prompt"])
        first = await ask(messages)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "."}]
        if row.get("way") == "raises":
            raise ValueError("of its own")
        if row.get("way") == "hangs":
            await asyncio.sleep(60)
        second = await ask(messages)
        if row.get("way") == "begins again":
            await ask([{"role": "user", "content": "x"}], max_tokens=2)
        if row.get("way") == "long prompt":
            await ask([{"role": "user", "content": "x" * 20}], max_tokens=20)
        return {"score": 0.5, **seen([first, second])}


def with_openai(base_url, session_id, row):
    from openai import OpenAI

    headers = {"x-session-id": session_id}
    client = OpenAI(base_url=base_url, api_key="none", default_headers=headers)
    extra = {"ignore_eos": True, "return_token_ids": True}
    messages, answers = list(row["raw_prompt"]), []
    for _ in range(2):
        answer = client.chat.completions.create(
            model="m", messages=messages, max_tokens=6, logprobs=True, extra_body=extra
        )
        answers.append(answer.model_dump())
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "."}]
    return {"score": 0.5, **seen(answers)}


async def asks_nothing(base_url, session_id, row):
    return None


def leaves(base_url, session_id, row):
    if row["way"] == "sleeps":
        time.sleep(30)
    sys.exit(3)


def without_session(base_url, session_id, row):
    body = {"messages": list(row["raw_prompt"]), "max_tokens": 2}
    reply = httpx2.post(base_url + "/chat/completions", json=body)
    return {"score": 1.0, "status": reply.status_code, "told": reply.text}


def returns_text(base_url, session_id, row):
    return "well done"


def returns_its_row(base_url, session_id, row):
    return {"score": 1.0, **row}


def returns_a_coroutine(base_url, session_id, row):
    return two_turns(base_url, session_id, row)


def takes_one(base_url):
    return None
"""
ENTRY = """
- name: black_box_agent
  _target_: caldera.agent_loop.black_box.BlackBoxAgentLoop
  agent: {file}:{function}
"""
PATH = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
DEFAULT = "actor_rollout_ref.rollout.agent.default_agent_loop=black_box_agent"
LENGTHS = ("data.max_prompt_length=12", "data.max_response_length=40")
PARAMS = SamplingParams(max_tokens=40, temperature=0.7, stop_token_ids=frozenset({2}))
PROMPT = [{"role": "user", "content": "20+22?"}]
Run = Callable[..., tuple[DataProto, list[TrajectoryFacts]]]


@pytest.fixture
def model(
    tokenizer: PreTrainedTokenizerFast, tiny_model: Callable[..., PreTrainedModel]
) -> PreTrainedModel:
    return tiny_model(vocab_size=len(tokenizer))


@pytest.fixture
def run(
    load: Callable[..., PPOTrainerConfig], tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel, write: Callable[[str, str], str],
) -> Iterator[Run]:  # fmt: skip
    """The batch that an agent makes of rows, and what is known of its trajectories."""

    def go(
        function: str, rows: list[dict[str, Any]], more: str = "", version: int = 0
    ) -> tuple[DataProto, list[TrajectoryFacts]]:
        text = ENTRY.format(file=write("agents.py", AGENTS), function=function) + more
        config = load(*LENGTHS, DEFAULT, f"{PATH}={write('loops.yaml', text)}")
        rollout = NativeRollout(config.actor_rollout_ref.rollout, model, torch.device("cpu"))
        rollout.version = version
        loops = AgentLoops(config, tokenizer, lambda _, t: equipment(t))
        whole = [{"raw_prompt": PROMPT, "uid": str(i), **row} for i, row in enumerate(rows)]
        seeds = [row.get("seed", 100 + i) for i, row in enumerate(rows)]
        batch = loops(whole, seeds, rollout, PARAMS, 0, None)
        return batch, list(batch.non_tensor_batch[COLUMN])

    yield go


def sampled(batch: DataProto, row: int, key: str) -> list[Any]:
    tensors = tensors_of(batch)
    return list(tensors[key][row][tensors["response_mask"][row].bool()].tolist())


@pytest.mark.parametrize("function", ["two_turns", "with_openai"])
def test_a_trajectory_is_what_the_sampler_sampled(
    run: Run, model: PreTrainedModel, function: str
) -> None:
    if function == "with_openai":
        pytest.importorskip("openai")
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")  # not the sampler's own
    batch, facts = run(function, [{}, {}, {}], version=7)
    tensors = tensors_of(batch)
    with torch.no_grad():
        logits = plain(
            input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"],
        ).logits / PARAMS.temperature  # fmt: skip
    width = tensors["responses"].shape[1]
    log_probs = logits.log_softmax(-1)[:, -width - 1 : -1]  # (B, R, V)
    expected = log_probs.gather(-1, tensors["responses"][..., None])[..., 0]  # (B, R)
    mask = tensors["response_mask"].bool()
    torch.testing.assert_close(
        tensors["rollout_log_probs"][mask], expected[mask], atol=1e-4, rtol=1e-4
    )
    assert not tensors["rollout_log_probs"][~mask].any()
    for row, fact in enumerate(facts):
        told = fact.extra_fields
        assert sampled(batch, row, "responses") == told["tokens"]
        assert sampled(batch, row, "rollout_log_probs") == pytest.approx(told["log_probs"])
        assert len(told["tokens"]) == 12
        # between the turns: (the end of the answer's), the user's, and who speaks next
        assert fact.num_turns == 4 and fact.reward_score == 0.5
        assert set(told["weight_versions"]) == {7, -1}
        masked = [version >= 0 for version in told["weight_versions"]]
        assert masked == mask[row, : len(masked)].tolist()
        (event,) = fact.timeline
        assert (event["kind"], event["outcome"], event["turns"]) == ("agent", "ok", 2)


def test_the_rows_seed_decides(run: Run) -> None:
    rows = [{"seed": 5}, {"seed": 5}, {"seed": 6}]
    one, _ = run("two_turns", rows)
    other, _ = run("two_turns", rows[::-1])
    tokens = [sampled(one, row, "responses") for row in range(3)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert [sampled(other, row, "responses") for row in range(3)] == tokens[::-1]


def test_agents_that_fail_keep_what_there_is(run: Run) -> None:
    rows = [
        {},
        {"way": "raises"},
        {"way": "hangs"},
        {"way": "begins again"},
        {"way": "long prompt"},
    ]
    batch, facts = run("two_turns", rows, "  timeout: 3\n  failure_reward: -1\n")
    assert [len(sampled(batch, row, "responses")) for row in range(5)] == [12, 6, 6, 12, 12]
    assert [fact.reward_score for fact in facts] == [0.5, -1.0, -1.0, 0.5, 0.5]
    outcomes = [fact.extra_fields["agent_outcome"] for fact in facts]
    assert outcomes == ["ok", "error", "timeout", "ok", "ok"]
    assert black_box_metrics([fact.extra_fields for fact in facts]) == {
        "black_box/failed": 1, "black_box/timed_out": 1, "black_box/other_trajectories": 2,
        "black_box/empty": 0,
    }  # fmt: skip
    assert black_box_metrics([{}]) == {}


def test_an_agent_that_asks_nothing_has_an_empty_answer(run: Run) -> None:
    batch, (fact,) = run("asks_nothing", [{}])
    assert not tensors_of(batch)["response_mask"].any()
    assert fact.reward_score is None and fact.num_turns == 1
    assert black_box_metrics([fact.extra_fields])["black_box/empty"] == 1


def test_functions_in_threads_fail_alone(run: Run) -> None:
    _, facts = run("leaves", [{"way": "exits"}, {"way": "sleeps"}], "  timeout: 1\n")
    assert [fact.extra_fields["agent_outcome"] for fact in facts] == ["error", "timeout"]


def test_requests_without_their_session_are_refused(run: Run) -> None:
    _, (fact,) = run("without_session", [{}])
    assert fact.extra_fields["status"] == 400
    assert "x-session-id" in fact.extra_fields["told"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("returns_text", "returned 'well done': takes None, a finite number"),
        ("returns_its_row", "returned raw_prompt, uid: the row has columns of that name"),
    ],
)
def test_what_an_agent_returns_is_read_strictly(
    run: Run, caplog: pytest.LogCaptureFixture, function: str, message: str
) -> None:
    _, (fact,) = run(function, [{}], "  failure_reward: -1\n")
    assert (fact.reward_score, fact.extra_fields["agent_outcome"]) == (-1.0, "error")
    assert message in caplog.text


def test_what_can_be_awaited_is(run: Run) -> None:
    _, (fact,) = run("returns_a_coroutine", [{}])
    assert (fact.reward_score, fact.extra_fields["agent_outcome"]) == (0.5, "ok")


@pytest.mark.parametrize(
    ("function", "more", "message"),
    [
        ("two_turn", "", r"has no 'two_turn' \(did you mean 'two_turns'"),
        ("SHORT", "", "is no function"),
        ("takes_one", "", r"must take \(base_url, session_id, row\)"),
        ("two_turns", "  timeout: 0", r"\[0\].timeout=0: takes seconds"),
        ("two_turns", "  failure_reward: bad", "failure_reward='bad': takes a number"),
        ("two_turns", "  time_out: 3", "time_out=3: takes agent, timeout, failure_reward"),
    ],
)
def test_entries_that_cannot_be_are_refused(
    write: Callable[[str, str], str], function: str, more: str, message: str
) -> None:
    text = ENTRY.format(file=write("agents.py", AGENTS), function=function) + more
    with pytest.raises(ConfigError, match=message):
        read_loops(write("loops.yaml", text))


def test_an_entry_needs_its_function(write: Callable[[str, str], str]) -> None:
    text = "\n".join(ENTRY.splitlines()[:-1])
    with pytest.raises(ConfigError, match=r"\[0\].agent=None: takes file.py:function"):
        read_loops(write("loops.yaml", text))
