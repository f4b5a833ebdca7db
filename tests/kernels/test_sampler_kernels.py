"""The kernels of decoding: attention over pages, and the choice of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from caldera.rollout.native.cuda.attention_kernels import Pages, attend_pages
from caldera.rollout.native.cuda.graphs import MESSAGES, NOT_WRITTEN, HostMailbox
from caldera.rollout.native.cuda.step_kernels import begin_step, choose
from caldera.rollout.native.sampler import _draw, draws


@pytest.mark.parametrize(("size", "window"), [(3, None), (3, 20), (300, None)])
def test_attention_over_pages(size: int, window: int | None, device: torch.device) -> None:
    torch.manual_seed(0)
    heads, key_heads, width, pages = 14, 2, 80, 9
    positions = torch.randint(0, 16 * pages, (size,), device=device)
    positions[0] = -1
    tables = torch.randperm(size * pages, device=device).view(size, pages).int()
    keys = torch.randn(size * pages, 16, key_heads, width, device=device)
    values = torch.randn_like(keys)
    query, key, value = (
        torch.randn(size, count, width, device=device) for count in (heads, key_heads, key_heads)
    )
    inputs = torch.zeros(5, size, dtype=torch.int32, device=device)
    inputs[0], inputs[1] = torch.arange(size), positions
    pointers = torch.tensor([keys.data_ptr(), values.data_ptr()], device=device)
    cached = [pages_of.clone() for pages_of in (keys, values)]
    found = Pages(pointers, inputs, tables)
    out = attend_pages(query, key, value, found, width**-0.5, window)
    for row in range(1, size):
        count = int(positions[row])
        own = [
            torch.cat([every[tables[row].long()].flatten(0, 1)[:count], new[row : row + 1]])
            for every, new in zip(cached, (key, value), strict=True)
        ]
        seen = [each[-window:] if window else each for each in own]
        k, v = (each.repeat_interleave(heads // key_heads, 1).transpose(0, 1) for each in seen)
        want = F.scaled_dot_product_attention(query[row][:, None], k, v).squeeze(1)
        torch.testing.assert_close(out[row], want, rtol=1e-4, atol=1e-5)
        slot = int(tables[row, count // 16]), count % 16
        assert torch.equal(keys[slot], key[row])
        assert torch.equal(values[slot], value[row])


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("vocabulary", [300, 151936])
def test_the_choice_of_tokens(vocabulary: int, raw: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    size = 24
    logits = (3 * torch.randn(size, vocabulary, device=device)).bfloat16()
    words = draws(np.arange(size, dtype=np.uint64), np.full(size, 5))
    temperature = 0.5 + torch.rand(size, device=device)
    inputs = torch.zeros(5, size, dtype=torch.int32, device=device)
    inputs[0] = torch.arange(size)
    inputs[3] = torch.from_numpy(words.view(np.int32))
    inputs[4] = (1 / temperature).view(torch.int32)
    inputs[4, 0] = 0
    newest = torch.zeros(size, dtype=torch.int64, device=device)
    told = choose(logits, inputs, newest, raw)
    temperature[0] = 1
    scaled = logits.double() / temperature[:, None].double()
    want = _draw(scaled.softmax(-1).float(), words)[0]
    want[0] = logits[0].argmax()
    tokens = told[0].long()
    assert torch.equal(tokens, want)
    assert torch.equal(newest, tokens)
    plain = logits.double() if raw else scaled
    log_probs = plain.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(told[1].view(torch.float32).double(), log_probs, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by the interpreter
def test_a_row_without_numbers_gets_some_token(device: torch.device) -> None:
    """As from a model that diverged: whoever looks at the log-prob sees what happened."""
    vocabulary = 3 * 4096  # so many tiles, of the power of two that is looked at
    logits = torch.full((2, vocabulary), float("nan"), device=device).bfloat16()
    inputs = torch.zeros(5, 2, dtype=torch.int32, device=device)
    inputs[0] = torch.arange(2)
    inputs[4, 1] = torch.ones(1, device=device).view(torch.int32)  # the first is greedy
    newest = torch.zeros(5, dtype=torch.int64, device=device)
    told = choose(logits, inputs, newest, False)
    assert ((told[0] >= 0) & (told[0] < vocabulary)).all()
    assert told[1].view(torch.float32).isnan().all()


def test_messages_are_read_and_answered_in_turn(device: torch.device) -> None:
    """Each step finds its own inputs and replies beside them, however many were before it."""
    torch.manual_seed(0)
    most = spare = 140  # rows, so that the last is of places that none needs
    mailbox = HostMailbox(most, device)
    newest = torch.arange(100, 100 + spare + 1, device=device)
    tables = torch.full((spare + 1, 4), -1, dtype=torch.int32, device=device)
    replies = []
    for step in range(MESSAGES + 3):
        size, count = (most, 3) if step % 2 else (4, 3)
        inputs = torch.full((5, size), -7, dtype=torch.int32, device=device)
        told = np.zeros((5, count), dtype=np.int32)
        told[0], told[1], told[2] = [4, 0, 2], 16 + step, [9, 8, 7]
        told[3] = step
        told[4] = np.ones(count, dtype=np.float32).view(np.int32)
        mailbox.send(told, size)
        reply = mailbox.reply(size)
        before = newest.clone()
        tokens, positions = begin_step(mailbox, inputs, newest, tables)
        assert torch.equal(inputs[:, :count].cpu(), torch.from_numpy(told))
        assert (inputs[0, count:] == spare).all() and (inputs[1, count:] == -1).all()
        assert tokens[0, :count].tolist() == before[[4, 0, 2]].tolist()
        assert positions[0, :count].tolist() == [16 + step] * 3
        assert tables[[4, 0, 2], (16 + step) // 16].tolist() == [9, 8, 7]
        chosen = choose(
            torch.randn(size, 300, device=device), inputs, newest, False, mailbox=mailbox
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(reply, chosen.cpu())
        assert newest[[4, 0, 2]].tolist() == chosen[0, :count].tolist()
        assert newest[[1, 3, 5, 6]].tolist() == [101, 103, 105, 106]
        replies.append(reply)
    assert all(replies[-1].data_ptr() != each.data_ptr() for each in replies[-MESSAGES:-1])


def test_messages_that_were_not_read_are_passed_over(device: torch.device) -> None:
    mailbox = HostMailbox(4, device)
    newest = torch.zeros(5, dtype=torch.int64, device=device)
    tables = torch.zeros(5, 1, dtype=torch.int32, device=device)
    inputs = torch.zeros(5, 4, dtype=torch.int32, device=device)
    lost, told = np.full((5, 1), 9, dtype=np.int32), np.zeros((5, 1), dtype=np.int32)
    mailbox.send(lost, 4)
    mailbox.align()
    mailbox.send(told, 4)
    begin_step(mailbox, inputs, newest, tables)
    assert inputs[:, 0].tolist() == [0] * 5


def test_a_step_that_reads_another_message_is_noticed(device: torch.device) -> None:
    mailbox = HostMailbox(4, device)
    newest = torch.zeros(5, dtype=torch.int64, device=device)
    tables = torch.zeros(5, 1, dtype=torch.int32, device=device)
    inputs = torch.zeros(5, 4, dtype=torch.int32, device=device)
    mailbox.send(np.zeros((5, 2), dtype=np.int32), 4)
    mailbox.next_message += 1
    begin_step(mailbox, inputs, newest, tables)
    choose(torch.randn(4, 300, device=device), inputs, newest, False, mailbox=mailbox)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert (mailbox.reply(4)[0, :2] == NOT_WRITTEN).all()
