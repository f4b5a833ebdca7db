"""The kernels of exact mode: right, and the same bits whatever stands beside a row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from caldera.models.exact_cuda import KEYS, attend, product, rms_norm, row_means

DTYPES = [torch.float32, torch.float16]  # the interpreter has no products of bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products(dtype: torch.dtype, biased: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    values = torch.randn(70, 100, device=device).to(dtype)
    weight = torch.randn(90, 100, device=device).to(dtype)
    bias = torch.randn(90, device=device).to(dtype) if biased else None
    want = F.linear(values.double(), weight.double(), None if bias is None else bias.double())
    found = product(values, weight, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-9
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)
    assert torch.equal(product(values[33:34], weight, bias), found[33:34])
    assert torch.equal(product(values.t().contiguous().t(), weight, bias), found)


def test_tiles_of_any_shape_give_the_same_bits(device: torch.device) -> None:
    torch.manual_seed(0)
    values = torch.randn(520, 64, device=device).half()
    weight = torch.randn(70000, 64, device=device).half()
    whole = product(values, weight[:300])  # tiles of 64 x 128
    assert torch.equal(product(values[:100], weight[:300]), whole[:100])  # of 128 x 64
    assert torch.equal(product(values[:10], weight)[:, :300], whole[:10])  # of 128 x 256


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", [False, True])
def test_norms(dtype: torch.dtype, shifted: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    values = (3 * torch.randn(2, 5, 100, device=device)).to(dtype)
    weight = torch.randn(100, device=device).to(dtype)
    found = rms_norm(values, weight, 1e-6, shifted)
    scale = weight.double() + (1 if shifted else 0)
    want = F.rms_norm(values.double(), (100,), eps=1e-6) * scale
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)
    assert torch.equal(rms_norm(values[1, 2:3], weight, 1e-6, shifted), found[1, 2:3])
    means = row_means(values)
    torch.testing.assert_close(means.double(), values.double().mean(-1), rtol=0.01, atol=0.01)
    assert torch.equal(row_means(values[1, 2:3]), means[1, 2:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_in_pages_is_that_over_packed_tokens(
    dtype: torch.dtype, window: int | None, device: torch.device
) -> None:
    torch.manual_seed(0)
    heads, key_heads, width, page = 6, 2, 24, 16
    lengths = [1, 5, KEYS, KEYS + 9]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    query = torch.randn(sum(lengths), heads, width, device=device).to(dtype)
    keys, values = (
        torch.randn(sum(lengths), key_heads, width, device=device).to(dtype) for _ in range(2)
    )
    found = attend(query, keys, values, positions, width**-0.5, window)

    most = -(-max(lengths) // page)
    tables = torch.randperm(len(lengths) * most).view(len(lengths), most).int().to(device)
    rows = torch.cat([torch.full((n,), row) for row, n in enumerate(lengths)]).to(device)
    slots = tables[rows, positions // page].long() * page + positions % page
    pages = torch.zeros(2, tables.numel(), page, key_heads, width, device=device, dtype=dtype)
    pages[0].flatten(0, 1)[slots], pages[1].flatten(0, 1)[slots] = keys, values
    pointers = torch.tensor([pages[0].data_ptr(), pages[1].data_ptr()], device=device)
    alone = [0, 5, len(positions) - 1]  # other neighbours, and only some of the tokens
    paged = (pointers, tables, rows[alone].int(), page)
    again = attend(query[alone], pages[0], None, positions[alone], width**-0.5, window, paged)
    assert torch.equal(again, found[alone])

    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    for sequence in torch.arange(len(positions), device=device).split(lengths):
        ahead = positions[sequence][:, None] - positions[sequence][None]
        seen = (ahead >= 0) & (ahead < (window or len(positions)))
        q, k, v = (each[sequence].double().transpose(0, 1) for each in (query, keys, values))
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        torch.testing.assert_close(
            found[sequence].double(), want.transpose(0, 1), rtol=tolerance, atol=tolerance
        )
