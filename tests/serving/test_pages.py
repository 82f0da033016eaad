"""Temporary pages and slots of tokens, compared with loops over tokens."""

from __future__ import annotations

import pytest
import torch

from greenfast.serving.pages import (
    PAGE,
    allocate_pages,
    compute_slots,
    compute_token_slots,
    copy_codes,
    count_pages,
    find_sequences,
    view_rows_as_pages,
)


@pytest.mark.parametrize("seed", range(20))
def test_temporary_pages(seed: int) -> None:
    """No two tokens share a slot, all slots are in the pages, and the block table leads to them."""
    generator = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 9, (), generator=generator))
    lengths = torch.randint(0, 400, (batch,), generator=generator) * torch.randint(0, 2, (batch,), generator=generator)
    lengths[int(torch.randint(0, batch, (), generator=generator))] = PAGE
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    total = int(ends[-1]) + seed % 3
    slots, positions, used_k, table = compute_token_slots(
        ends, None, None, None, total, -(-int(lengths.max()) // PAGE), PAGE
    )
    assert used_k.tolist() == lengths.tolist()
    assert positions[: int(ends[-1])].tolist() == [t for n in lengths.tolist() for t in range(n)]
    assert table.dtype == torch.int32
    assert slots.dtype == torch.int64
    for b, n in enumerate(lengths.tolist()):
        wanted = [int(table[b, t // PAGE]) * PAGE + t % PAGE for t in range(n)]
        assert slots[ends[b] : ends[b + 1]].tolist() == wanted
    used = slots[: int(ends[-1])]
    assert len(set(used.tolist())) == used.numel()
    assert (slots[int(ends[-1]) :] == -1).all()
    assert int(used.min()) >= 0
    assert int(used.max()) < count_pages(total, batch) * PAGE


def test_appended_slots() -> None:
    table = torch.tensor([[5, 2], [1, 7]], dtype=torch.int32)
    of_sequence, positions = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([15, 16, 31, 32, -1])
    assert compute_slots(table, 16, of_sequence, positions).tolist() == [5 * 16 + 15, 2 * 16, 7 * 16 + 15, -1, -1]


def test_sequences_of_tokens() -> None:
    ends = torch.tensor([0, 0, 2, 2, 5], dtype=torch.int32)
    assert find_sequences(ends, torch.arange(7)).tolist() == [1, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(("length", "size"), [(16, 16), (96, 32), (256, 128), (192, 64)])
def test_rows_as_pages(length: int, size: int) -> None:
    cache = torch.arange(2 * length).view(2, length, 1, 1)
    pages, values, step, count = view_rows_as_pages(cache, cache)
    assert step == count == length // size
    assert torch.equal(pages, values)
    assert pages.shape[:2] == (2 * length // size, size)
    assert pages.data_ptr() == cache.data_ptr()
    assert torch.equal(pages.flatten(), cache.flatten())


def test_codes_of_no_sequence_and_beyond_all_pages_go_to_the_spare_page() -> None:
    pages = allocate_pages(3, PAGE, 2, 64, None, grouped=False)
    for x in pages[:2]:
        x.view(torch.uint8).zero_()
    k, v = (torch.full((4, 2, 64), n, dtype=torch.uint8).view(torch.float8_e4m3fn) for n in (1, 2))
    copy_codes(k, v, torch.tensor([3, -1, 2 * PAGE + 7, 2**40]), pages)
    for x, n in zip(pages[:2], (1, 2), strict=True):
        rows = x.view(torch.uint8).flatten(0, 1)
        assert bool((rows[[3, 2 * PAGE]] == n).all())
        assert int(rows.sum()) == 2 * n * 2 * 64


def test_rows_that_are_no_pages() -> None:
    with pytest.raises(ValueError, match="k_cache: 100 keys; without page_table a multiple of 16"):
        view_rows_as_pages(*[torch.zeros(2, 100, 1, 16)] * 2)
    for keys, values in (
        (torch.zeros(2, 72, 1, 16)[:, :32], torch.zeros(2, 72, 1, 16)[:, :32]),
        (torch.zeros(2, 64, 1, 16)[:, :32], torch.zeros(2, 32, 1, 16)),  # one table is for both
        (torch.zeros(1, 32, 1, 16).expand(2, -1, -1, -1), torch.zeros(2, 32, 1, 16)),
    ):
        with pytest.raises(ValueError, match=r"k_cache: its strides are .* one distance from sequence to sequence"):
            view_rows_as_pages(keys, values)
