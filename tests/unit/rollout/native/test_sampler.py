from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from caldera.rollout.base import Request, SamplingParams
from caldera.rollout.native.running import Running, Sequence
from caldera.rollout.native.sampler import (
    Penalties,
    SamplingRows,
    _draw,
    draws,
    exponentials,
    penalise,
    sample,
)

PROBABILITIES = [0.4, 0.3, 0.15, 0.1, 0.05]


def rows(
    count: Any,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Any = None,
    generated: int = 0,
) -> SamplingRows:
    return SamplingRows(
        temperature=np.full(count, temperature, dtype=np.float32),
        top_k=np.full(count, top_k),
        top_p=np.full(count, top_p),
        min_p=np.full(count, min_p),
        seed=np.arange(count, dtype=np.uint64) if seeds is None else np.array(seeds, np.uint64),
        generated=np.full(count, generated),
    )


def frequencies(count: int = 40_000, **params: Any) -> list[float]:
    logits = torch.tensor(PROBABILITIES).log().expand(count, -1)
    tokens = sample(logits, rows(count, **params), raw_log_probs=False).tokens
    return (torch.bincount(tokens, minlength=5) / count).tolist()


def splitmix64(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


def test_draws_are_splitmix64_in_integers() -> None:
    seeds, counters = [0, 1, 2**63 - 1, 2**64 - 1], [0, 5, 1000, 3]
    expected = [
        splitmix64((splitmix64(s) + (c + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 32
        for s, c in zip(seeds, counters, strict=True)
    ]
    assert draws(np.array(seeds, np.uint64), np.array(counters)).tolist() == expected


@pytest.mark.parametrize("by", ["seed", "counter", "race", "place"])
def test_exponentials_are_exponential_and_independent(by: str) -> None:
    count = 50_000
    seeds, counters = np.zeros(count, np.uint64), np.zeros(count, np.int64)
    if by == "seed":
        seeds = np.arange(count, dtype=np.uint64)
    elif by == "counter":
        counters = np.arange(count)
    words = draws(seeds, counters)
    numbers = exponentials(words, 1, 3)[:, 2]
    if by == "race":
        numbers = np.concatenate([exponentials(words[:1], race, 1)[0] for race in range(5000)])
    elif by == "place":
        numbers = exponentials(words[:1], 0, count)[0]
    uniform = np.exp(-numbers.astype(np.float64))
    assert numbers.min() > 0 and uniform.min() > 0
    histogram, _ = np.histogram(uniform, bins=20, range=(0, 1))
    expected = len(numbers) / 20
    assert ((histogram - expected) ** 2 / expected).sum() < 43.8  # one chance in a thousand
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.03


def test_sampling_follows_the_distribution() -> None:
    assert frequencies() == pytest.approx(PROBABILITIES, abs=0.01)
    assert frequencies(generated=17) == pytest.approx(PROBABILITIES, abs=0.01)


def test_temperature_sharpens() -> None:
    squared = [p**2 for p in PROBABILITIES]
    expected = [p / sum(squared) for p in squared]
    assert frequencies(temperature=0.5) == pytest.approx(expected, abs=0.01)


def test_top_k_keeps_the_most_likely() -> None:
    assert frequencies(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0], abs=0.01)
    assert frequencies(top_k=1) == [1, 0, 0, 0, 0]
    assert frequencies(top_k=99) == pytest.approx(PROBABILITIES, abs=0.01)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert frequencies(top_p=0.71) == pytest.approx([8 / 17, 6 / 17, 3 / 17, 0, 0], abs=0.01)
    assert frequencies(top_p=0.69) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0], abs=0.01)
    assert frequencies(top_p=0.0) == [1, 0, 0, 0, 0]


def test_top_p_applies_to_what_top_k_left() -> None:
    # of the first three, renormalised, the first two have 0.7 / 0.85 = 0.82
    assert frequencies(top_k=3, top_p=0.8) == pytest.approx([4 / 7, 3 / 7, 0, 0, 0], abs=0.01)


def test_min_p_is_a_share_of_the_most_likely() -> None:
    assert frequencies(min_p=0.3) == pytest.approx([8 / 17, 6 / 17, 3 / 17, 0, 0], abs=0.01)
    assert frequencies(min_p=1.0) == [1, 0, 0, 0, 0]
    # after temperature: of the squares, 0.16, 0.09, 0.0225 ...
    expected = [0.16 / 0.25, 0.09 / 0.25, 0, 0, 0]
    assert frequencies(min_p=0.3, temperature=0.5) == pytest.approx(expected, abs=0.01)


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5], [9.0, 9.0, 9.0, 9.0]])
    penalties = Penalties(
        rows=np.array([1, 0]),
        repetition=np.array([2.0, 1.0], dtype=np.float32),
        presence=np.array([0.0, 0.5], dtype=np.float32),
        frequency=np.array([0.25, 0.125], dtype=np.float32),
        tokens=np.array([[0, 1, 2, 2, 3], [3, 1, 0, 3, 3]]),
        prompts=np.array([2, 1]),
        lengths=np.array([4, 3]),  # what follows counts for nothing
    )
    assert penalise(logits, penalties).tolist() == [
        [2 - 0.5 - 0.125, -2 - 0.5 - 0.125, 1, 0.5],
        [1, -4, 0.5 - 2 * 0.25, 0.5],
        [9, 9, 9, 9],
    ]
    greedy = rows(3, temperature=0.0)
    tokens, log_probs, everything = sample(logits, greedy, False, penalties)
    assert tokens.tolist() == [0, 0, 0]
    expected = torch.tensor([1.375, -2.625, 1, 0.5]).log_softmax(-1)
    torch.testing.assert_close(everything[0].log_softmax(-1), expected)
    raw = sample(logits, greedy, True, penalties)
    torch.testing.assert_close(raw.log_probs, logits.log_softmax(-1)[:, 0])
    torch.testing.assert_close(log_probs[1], torch.tensor([1, -4, 0, 0.5]).log_softmax(-1)[0])


def test_equal_logits_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]]).expand(200, -1)
    tokens = sample(logits, rows(200, top_k=2), raw_log_probs=False).tokens
    assert set(tokens.tolist()) == {1, 2, 3, 4}


def test_temperature_zero_takes_the_most_likely_without_filters() -> None:
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    tokens, log_probs, _ = sample(logits, rows(50, temperature=0.0, top_k=2), False)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).max(-1).values)


def test_log_probs_after_or_before_temperature_and_filters() -> None:
    logits = torch.tensor(PROBABILITIES).log().expand(100, -1)
    params = rows(100, temperature=0.5, top_k=2)
    tokens, processed, _ = sample(logits, params, raw_log_probs=False)
    raw = sample(logits, params, raw_log_probs=True)[1]
    kept = 0.16 + 0.09
    expected = {0: math.log(0.16 / kept), 1: math.log(0.09 / kept)}
    assert processed.tolist() == pytest.approx([expected[t] for t in tokens.tolist()], abs=1e-5)
    logs = [math.log(PROBABILITIES[t]) for t in tokens.tolist()]
    assert raw.tolist() == pytest.approx(logs, abs=1e-5)


def test_a_row_depends_on_itself_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator)
    mixed = SamplingRows(
        temperature=np.array([1.0, 0.0, 0.7, 1.3, 1.0, 0.5], dtype=np.float32),
        top_k=np.array([-1, 5, 5, -1, 3, 0]),
        top_p=np.array([1.0, 0.5, 1.0, 0.9, 0.5, 1.0]),
        min_p=np.array([0.0, 0.5, 0.0, 0.0, 0.1, 0.2]),
        seed=np.array([3, 1, 4, 1, 5, 9], dtype=np.uint64),
        generated=np.array([0, 7, 3, 7, 1, 2]),
    )
    tokens, log_probs, _ = sample(logits, mixed, raw_log_probs=False)
    for row in range(6):
        alone = SamplingRows(*(getattr(mixed, name)[[row]] for name in mixed.__dataclass_fields__))
        token, log_prob, _ = sample(logits[[row]], alone, raw_log_probs=False)
        assert (token.item(), log_prob.item()) == (tokens[row].item(), log_probs[row].item())


def test_a_token_without_weight_is_never_drawn() -> None:
    words = draws(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.int64))
    weights = torch.tensor([[0.0, 1e-30, 0.0, 1.0, 0.0]]).expand(20_000, -1)
    assert set(_draw(weights, words)[0].tolist()) == {3}


def test_tokens_of_a_large_vocabulary_are_drawn_by_their_probability() -> None:
    """Tiles and groups, in which they are looked for, do not show."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(1, 9000, generator=generator)
    weights[0, 500:900] = 0
    count = 40_000
    words = draws(np.arange(count, dtype=np.uint64), np.full(count, 3))
    found = [_draw(weights.expand(len(part), -1), part) for part in np.array_split(words, 40)]
    tokens = torch.cat([tokens for tokens, _ in found])
    assert tokens.max() < 9000
    np.testing.assert_allclose(found[0][1].numpy(), weights.double().sum().item(), rtol=1e-6)
    for size in (64, 100, 4096):  # tokens that are counted together
        bins = -(-9000 // size)
        place = torch.arange(9000) // size
        expected = torch.zeros(bins).index_add_(0, place, weights[0]) / weights.sum() * count
        got = torch.bincount(tokens // size, minlength=bins)
        kept = expected > 0
        chi_square = ((got - expected) ** 2 / expected)[kept].sum()
        assert chi_square < kept.sum() + 4 * (2 * kept.sum()) ** 0.5


def test_rounding_hardly_ever_decides() -> None:
    """The same draws from logits that differ as those of one row alone and in a batch do."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 49152, generator=generator)
    rounded = logits + 5e-5 * torch.randn(1, 49152, generator=generator)
    one, two = (
        torch.cat(
            [
                sample(
                    each.expand(250, -1), rows(250, seeds=range(start, start + 250)), False
                ).tokens
                for start in range(0, 3000, 250)
            ]
        )
        for each in (logits, rounded)
    )
    assert (one != two).sum() <= 3  # a search among cumulated weights: hundreds


def test_penalties_read_no_token_that_was_never_sampled() -> None:
    """A row has room behind its tokens, where an earlier sequence may have expected one."""
    running = Running(2)

    def admit(number: int, length: int) -> int:
        params = SamplingParams(8, repetition_penalty=1.3)
        prompt = np.ones(length, dtype=np.int64)
        return running.admit(Sequence(number, Request(prompt.tolist(), params, 0), prompt))

    row = admit(0, 3)
    running.expect(np.array([row]))
    running.release(np.array([row]), 0)
    found = running.penalties(np.array([admit(1, 1), admit(2, 6)]))
    assert found is not None
    penalise(torch.zeros(2, 4), found)
