"""A run whose trajectories are made by an agent that only knows a URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Lab

ROLLOUT = "actor_rollout_ref.rollout"
AGENT = """
import httpx2


def solve(base_url, session_id, row):
    messages = [dict(message) for message in row["raw_prompt"]]
    with httpx2.Client(base_url=base_url, headers={"x-session-id": session_id}) as client:
        for question in ("1+1", None):
            body = {"messages": messages, "max_tokens": 3, "ignore_eos": True}
            reply = client.post("chat/completions", json=body).raise_for_status()
            said = reply.json()["choices"][0]["message"]
            messages += [said, {"role": "user", "content": question}]
            if len(messages) == 3 and len(said["content"]) == 2:
                raise ValueError("an agent that fails now and then")
    return float(len(set(said["content"])))
"""
LOOPS = """
- name: solver
  _target_: caldera.agent_loop.black_box.BlackBoxAgentLoop
  agent: {file}:solve
  failure_reward: -1.0
"""


def test_two_steps_of_training(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "loops.yaml").write_text(LOOPS.format(file=tmp_path / "agent.py"))
    steps = lab.train(
        tmp_path / "run", f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
        f"{ROLLOUT}.agent.default_agent_loop=solver", f"{ROLLOUT}.n=2",
        "data.max_response_length=12", "trainer.total_training_steps=2", "trainer.test_freq=-1",
        f"{ROLLOUT}.calculate_log_probs=True", f"trainer.rollout_data_dir={tmp_path / 'dumps'}",
    )  # fmt: skip
    assert [step["step"] for step in steps] == [1, 2]
    assert sum(step["black_box/failed"] for step in steps) > 0
    for step in steps:
        # The trainer finds the tokens as likely as the sampler did.
        assert step["training/rollout_probs_diff_max"] < 1e-3
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["black_box/timed_out"] == step["black_box/empty"] == 0
        assert step["black_box/other_trajectories"] == 0
        rows = (tmp_path / f"dumps/{step['step']}.jsonl").read_text().splitlines()
        ends = [(json.loads(row)["timeline"][0]["outcome"], json.loads(row)) for row in rows]
        failed = [row for outcome, row in ends if outcome == "error"]
        assert len(failed) == step["black_box/failed"]
        assert all(row["score"] == -1 and row["__num_turns__"] == 2 for row in failed)
        done = [row for outcome, row in ends if outcome == "ok"]
        assert done
        assert all(row["score"] >= 0 and row["__num_turns__"] == 4 for row in done)
