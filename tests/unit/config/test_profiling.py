"""The keys of profilers: what is to be recorded is said completely."""

from __future__ import annotations

import pytest

from caldera.config import load_config
from caldera.errors import ConfigError

ACTOR = "actor_rollout_ref.actor.profiler"
WHOLE = ["global_profiler.tool=torch", "global_profiler.steps=[1]"]
ENABLED = [f"{ACTOR}.enable=True", f"{ACTOR}.ranks=[0]"]


def test_roles_follow_the_global_keys_and_sampling_the_actor(required: list[str]) -> None:
    config = load_config([*required, *WHOLE, *ENABLED, "global_profiler.save_path=/p"])
    rollout = config.actor_rollout_ref.rollout.profiler
    assert (rollout.tool, rollout.enable, rollout.ranks) == ("torch", True, [0])
    assert rollout.save_path == config.critic.profiler.save_path == "/p"
    assert config.critic.profiler.enable is False


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (WHOLE, r"global_profiler.steps=\[1\]: no role is recorded; set one of actor_rollout"),
        ([*ENABLED, "global_profiler.tool=torch"], "global_profiler.steps names no step"),
        ([*ENABLED, "global_profiler.steps=[1]"], "global_profiler.tool is null; takes nsys"),
        ([*WHOLE, f"{ACTOR}.enable=True"], r"set actor_rollout_ref.actor.profiler.all_ranks=True"),
        ([*WHOLE, *ENABLED, f"{ACTOR}.tool_config.torch.contents=[gpu]"], "takes cpu, cuda"),
        (
            [*WHOLE, *ENABLED, "critic.profiler.enable=True", "critic.profiler.all_ranks=True",
             "critic.profiler.tool=nsys"],
            "one process has one tool",
        ),
        (["global_profiler.tool=npu"], "takes one of nsys, torch, torch_memory"),
        (["+global_profiler.relocate_results=True"], "this option of profilers is not part"),
    ],
)  # fmt: skip
def test_half_of_it_is_refused(required: list[str], given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*required, *given])
