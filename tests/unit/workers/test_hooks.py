from __future__ import annotations

from typing import Self

import torch

from caldera.protocol import DataProto, tensors_of
from caldera.rollout import Completion
from caldera.workers.hooks import ResponseHooks


class Counting:
    """A hook that notes what it is called with."""

    def __init__(self, rank: int, calls: list[str], name: str = "hook") -> None:
        self.rank, self.calls, self.name = rank, calls, name

    def begin(self, prompts: DataProto) -> Self:
        self.calls.append(f"{self.name} begin {len(prompts)} on {self.rank}")
        return self

    def __enter__(self) -> Self:
        self.calls.append(f"{self.name} enter")
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append(f"{self.name} exit")

    def on_finished(self, place: int, completion: Completion) -> None:
        self.calls.append(f"{self.name} {place} {completion.token_ids}")

    def join(self, responses: DataProto) -> DataProto:
        tensors_of(responses)[self.name] = torch.ones(len(responses))
        return responses

    def finish(self) -> None:
        self.calls.append(f"{self.name} finish")


def batch() -> DataProto:
    return DataProto.from_dict({"input_ids": torch.zeros(2, 3, dtype=torch.long)})


def test_hooks_are_made_once_and_called_in_their_order() -> None:
    calls: list[str] = []
    hooks = ResponseHooks(
        [lambda rank: Counting(rank, calls, "one"), lambda rank: Counting(rank, calls, "two")]
    )
    assert calls == [], "not before the first batch"
    completion = Completion([5, 6], [-0.5, -0.1], "stop", 0)
    for _ in range(2):
        begun = hooks.begin(batch(), 3)
        with begun:
            assert begun.on_finished is not None
            begun.on_finished(1, completion)
        joined = begun.join(batch())
        assert {"one", "two"} <= set(tensors_of(joined).keys())
    hooks.finish()
    once = ["one begin 2 on 3", "two begin 2 on 3", "one enter", "two enter"]
    once += ["one 1 [5, 6]", "two 1 [5, 6]", "two exit", "one exit"]
    assert calls == [*once, *once, "one finish", "two finish"]


def test_without_hooks_the_sampler_calls_nothing() -> None:
    begun = ResponseHooks([]).begin(batch(), 0)
    responses = batch()
    with begun:
        assert begun.on_finished is None
    assert begun.join(responses) is responses


def test_hooks_that_were_never_made_have_nothing_to_finish() -> None:
    calls: list[str] = []
    ResponseHooks([lambda rank: Counting(rank, calls)]).finish()
    assert calls == []
