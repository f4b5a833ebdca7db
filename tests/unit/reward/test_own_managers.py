"""Custom managers: what they raise and return is checked, for every caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from caldera.errors import RewardError
from caldera.protocol import DataProto
from caldera.reward import compute_reward

MakeData = Callable[..., DataProto]


class Returns:
    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        return self.returned


def test_a_manager_of_ones_own_that_raises_or_returns_nonsense(make_data: MakeData) -> None:
    class Own:
        def __init__(self, rewards: list[list[float]]) -> None:
            self.rewards = rewards

        def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
            if not self.rewards:
                raise OSError("the judge is away")
            return {"reward_tensor": torch.tensor(self.rewards), "reward_extra_info": {"a": [1, 2]}}

    data = make_data([("1=", "1", "1")] * 2)
    rewards, extra = compute_reward(data, Own([]))
    assert rewards.tolist() == [[0, 0, 0]] * 2
    assert extra["reward_state"] == ["failed", "failed"]
    assert "OSError: the judge is away" in extra["reward_error"][0]
    rewards, extra = compute_reward(data, Own([[0, 1, 0], [float("nan"), 0, 0]]))
    assert rewards.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert extra["reward_state"] == ["value", "failed"] and extra["a"] == [1, 2]


def test_states_that_do_not_exist_are_failures(make_data: MakeData) -> None:
    states = ["value", "fine", "timed_out"]
    extras = {"reward_state": states, "reward_error": [None, None, "late"]}
    manager = Returns({"reward_tensor": torch.ones(3, 3), "reward_extra_info": extras})
    rewards, extra = compute_reward(make_data([("1=", "1", "1")] * 3), manager)
    assert extra["reward_state"] == ["value", "failed", "timed_out"]
    assert "'reward_state' is a reserved name" in extra["reward_error"][1]
    assert extra["reward_error"][2] == "late"
    assert rewards[:, 0].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (torch.zeros(1, 1), "a Tensor"),
        (None, "a NoneType"),
        ({}, "a dict of {}"),
        ({"reward_tensor": torch.zeros(1, 1)}, "a dict of {reward_tensor: Tensor}"),
        ({"reward_tensor": [0.0], "reward_extra_info": {}}, "{reward_tensor: list, "),
    ],
)
def test_a_manager_must_return_a_dict_when_asked_for_one(
    make_data: MakeData, returned: Any, said: str
) -> None:
    with pytest.raises(RewardError) as raised:
        compute_reward(make_data([("1=", "1", "1")]), Returns(returned))
    message = str(raised.value)
    assert message.startswith("Returns returned ") and said in message
    assert "the tensor reward_tensor and the dict reward_extra_info" in message
