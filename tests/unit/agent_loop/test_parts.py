"""Files of loops, sampling parameters, and the batch that trajectories make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from caldera.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from caldera.agent_loop.manager import find_loop, loop_class, read_loops
from caldera.agent_loop.output import COLUMN, Timeline, batch_of, facts_of, fitted
from caldera.agent_loop.sampling import TrajectorySampler
from caldera.agent_loop.tool_agent import ToolAgentLoop
from caldera.errors import ConfigError, DataError, RolloutError, UnsupportedError
from caldera.protocol import tensors_of
from caldera.rollout import Completion, Request, SamplingParams
from caldera.seeds import derive_seed

if TYPE_CHECKING:
    from tests.unit.agent_loop.agent_scripts import Run

Write = Callable[[str, str], str]
OWN = """
from caldera.agent_loop.tool_agent import ToolAgentLoop

class Mine(ToolAgentLoop):
    def __init__(self, *args, patience, **kwargs):
        super().__init__(*args, **kwargs)
        self.patience = patience
"""


class Recorder:
    """Keeps the requests that it is asked to sample."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        return Completion([5, 2], [-0.1, -0.2], "stop", 3)


PARAMS = SamplingParams(max_tokens=8, temperature=0.7, stop_token_ids=frozenset({2}))


def turns(recorder: Recorder, params: SamplingParams = PARAMS) -> TrajectorySampler:
    sampler: Any = recorder
    server: Any = None  # none of these is reached over HTTP
    return TrajectorySampler(sampler, params, 11, 10, Timeline(time.perf_counter()), server)


def ask(sampler: TrajectorySampler, prompt: list[int], **params: Any) -> Any:
    return asyncio.run(sampler.generate("name", prompt, params))


def test_every_turn_has_a_seed_of_its_own() -> None:
    recorder = Recorder()
    sampler = turns(recorder)
    for _ in range(3):
        assert ask(sampler, [4]).token_ids == [5, 2]
    seeds = [request.seed for request in recorder.requests]
    assert seeds == [11, derive_seed(11, "turn", 1), derive_seed(11, "turn", 2)]


def test_the_turns_of_a_trajectory_are_a_session() -> None:
    recorder = Recorder()
    for sampler in (turns(recorder), turns(recorder)):
        ask(sampler, [4])
        ask(sampler, [4, 5])
    first, second, *other = [request.session for request in recorder.requests]
    assert first == second is not None and set(other).isdisjoint({first})


def test_what_a_loop_does_not_say_stays_as_the_run_says() -> None:
    recorder = Recorder()
    ask(turns(recorder), [4, 4, 4], top_k=5, stop="</x>", logprobs=True, max_new_tokens=100)
    params = recorder.requests[0].params
    assert (params.temperature, params.top_k, params.stop) == (0.7, 5, ("</x>",))
    assert params.stop_token_ids == frozenset({2})
    assert params.max_tokens == 7  # of a model that takes ten
    assert params.logprobs == 0


def test_the_stops_of_a_run_end_turns_beside_those_of_a_loop() -> None:
    recorder = Recorder()
    params = SamplingParams(
        max_tokens=8, stop_token_ids=frozenset({2}), stop=("END",), min_p=0.1, presence_penalty=0.5
    )
    ask(turns(recorder, params), [4])
    ask(turns(recorder, params), [4], stop=["</x>", "END"], stop_token_ids=[5])
    plain, own = [request.params for request in recorder.requests]
    assert (plain.stop, plain.stop_token_ids) == (("END",), frozenset({2}))
    assert (plain.min_p, plain.presence_penalty) == (0.1, 0.5)
    assert (own.stop, own.stop_token_ids) == (("END", "</x>"), frozenset({2, 5}))


def test_a_full_model_answers_nothing() -> None:
    recorder = Recorder()
    answer = ask(turns(recorder), [4] * 10)
    assert (answer.token_ids, answer.stop_reason, recorder.requests) == ([], "length", [])


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(RolloutError, match="'best_of'; there are max_tokens, temperature"):
        ask(turns(Recorder()), [4], best_of=2)
    with pytest.raises(UnsupportedError):
        asyncio.run(turns(Recorder()).generate("name", [4], {}, image_data=["x"]))


# ---------------------------------------------------------------------- files


def test_loops_of_a_file_get_what_it_says(write: Write, run: Run) -> None:
    code = write("mine.py", OWN)
    own = read_loops(write("loops.yaml", f"- name: mine\n  _target_: {code}:Mine\n  patience: 3\n"))
    assert loop_class(find_loop("mine", own)).calls_tools
    assert find_loop("mine", own).keywords == {"patience": 3}  # type: ignore[attr-defined]
    assert loop_class(find_loop("tool_agent", own)) is ToolAgentLoop


def test_classes_go_by_the_names_that_verl_gives_them(write: Write) -> None:
    target = "verl.experimental.agent_loop.tool_agent.ToolAgentLoop"
    own = read_loops(write("loops.yaml", f"- name: mine\n  _target_: {target}\n"))
    assert loop_class(own["mine"]) is ToolAgentLoop


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1", "must hold a list"),
        ("- {name: a}", r"\[0\]\._target_ is missing"),
        ("- [a]", "takes a mapping"),
        (
            "- {name: a, _target_: json.JSONDecoder}",
            "is no such class; takes a class derived from AgentLoopBase .*file.py:MyClass",
        ),
        ("- {name: a, _target_: no.such.thing}", "cannot be imported"),
        ("- {", "not valid YAML"),
        ("- {name: a, _target_: caldera.agent_loop.base.AgentLoopBase}", "has no run"),
        (
            "- {name: a, _target_: caldera.agent_loop.tool_agent.ToolAgentLoop, max_truns: 1}",
            "ToolAgentLoop takes no max_truns",
        ),
        (
            "- &x {name: a, _target_: caldera.agent_loop.tool_agent.ToolAgentLoop}\n- *x",
            "is there twice",
        ),
    ],
)
def test_mistakes_in_a_file_of_loops(write: Write, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"agent_loop_config_path=.*{problem}"):
        read_loops(write("loops.yaml", text))


def test_what_a_loop_needs_is_in_its_file(write: Write) -> None:
    code = write("mine.py", OWN)
    with pytest.raises(ConfigError, match=r"\[0\]: Mine cannot be made of this: .*'patience'"):
        read_loops(write("loops.yaml", f"- name: mine\n  _target_: {code}:Mine\n"))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_loops("nowhere.yaml")
    assert read_loops(None) == {}


# ---------------------------------------------------------------------- batches


def output(prompt: int = 2, **changes: Any) -> AgentLoopOutput:
    fields: dict[str, Any] = {
        "prompt_ids": [7] * prompt,
        "response_ids": [1, 2, 3, 4],
        "response_mask": [1, 0, 1, 0],
        "response_logprobs": [-0.1, -9.0, -0.3, 0.0],
        "turn_rewards": [(0, 0.5), (3, 1.0)],
    }
    return AgentLoopOutput(**(fields | changes))


def test_tokens_behind_the_last_sampled_one_are_left_out() -> None:
    kept = fitted(output(), 4, 6)
    assert (kept.response_ids, kept.response_mask) == ([1, 2, 3], [1, 0, 1])
    assert kept.response_logprobs == [-0.1, -9.0, -0.3]
    assert kept.turn_rewards == [(0, 0.5)]
    assert fitted(output(), 4, 2).response_ids == [1], "and those beyond the batch's width"
    assert fitted(output(response_mask=[0] * 4), 4, 6).response_ids == []


def test_a_prompt_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(DataError, match=r"5 tokens, more than data\.max_prompt_length=4"):
        fitted(output(prompt=5), 4, 6)


def test_batches_are_padded_on_both_sides() -> None:
    outputs = [fitted(output(), 4, 5), fitted(output(prompt=3, response_mask=[1] * 4), 4, 5)]
    batch = batch_of(outputs, [facts_of(each, []) for each in outputs], 4, 5, 0, True)
    tensors = tensors_of(batch)
    assert tensors["prompts"].tolist() == [[0, 0, 7, 7], [0, 7, 7, 7]]
    assert tensors["responses"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 0]]
    assert tensors["response_mask"].tolist() == [[1, 0, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert tensors["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert tensors["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4]
    assert torch.equal(
        tensors["rollout_log_probs"][0], torch.tensor([-0.1, 0.0, -0.3, 0.0, 0.0])
    ), "a log-prob of what was not sampled is no log-prob"
    assert [fact.num_turns for fact in batch.non_tensor_batch[COLUMN]] == [0, 0]


def test_a_loop_that_gives_no_log_probs_where_they_are_kept() -> None:
    one = fitted(output(response_logprobs=None), 4, 5)
    with pytest.raises(RolloutError, match="calculate_log_probs=false"):
        batch_of([one], [facts_of(one, [])], 4, 5, 0, True)
    assert "rollout_log_probs" not in tensors_of(
        batch_of([one], [facts_of(one, [])], 4, 5, 0, False)
    )


def test_outputs_are_checked_and_take_plain_metrics() -> None:
    with pytest.raises(RolloutError, match="4 response_ids and 1 response_mask"):
        output(response_mask=[1])
    with pytest.raises(UnsupportedError):
        output(multi_modal_data={"image": [1]})
    assert output(metrics={"tool_calls": 2.0}).metrics == AgentLoopMetrics(tool_calls=2.0)
