"""Padding and grouping, by hand and by exhaustion."""

import random
from itertools import pairwise

import pytest
import torch

from rlhf.batching import chunks, micro_batches, pad_pairs

CPU = torch.device("cpu")


def test_prompts_pad_left_and_responses_right():
    batch = pad_pairs([[1, 2, 3], [4]], [[5], [6, 7]], pad_id=0, device=CPU)
    assert batch.input_ids.tolist() == [[1, 2, 3, 5, 0], [0, 0, 4, 6, 7]]
    assert batch.attention_mask.tolist() == [
        [True, True, True, True, False],
        [False, False, True, True, True],
    ]
    assert batch.response_mask.tolist() == [[True, False], [True, True]]
    assert batch.input_ids.dtype == torch.int64
    assert batch.attention_mask.dtype == batch.response_mask.dtype == torch.bool


def test_masks_come_from_lengths_and_never_from_ids():
    # The pad token equals EOS in SmolLM2: real tokens with that id stay real.
    batch = pad_pairs([[2, 2], [2]], [[9, 2], [2]], pad_id=2, device=CPU)
    assert batch.attention_mask.tolist() == [[True] * 4, [False, True, True, False]]
    assert batch.response_mask.tolist() == [[True, True], [True, False]]


def test_the_pad_id_is_only_seen_under_the_mask():
    prompts, responses = [[1, 2, 3], [4], [5, 6]], [[7, 8], [9], []]
    one, other = (pad_pairs(prompts, responses, pad_id=pad, device=CPU) for pad in (0, 77))
    assert torch.equal(one.attention_mask, other.attention_mask)
    assert torch.equal(one.input_ids == other.input_ids, one.attention_mask)


def test_empty_prompts_and_empty_responses():
    batch = pad_pairs([[], [1]], [[2], []], pad_id=0, device=CPU)
    assert batch.input_ids.tolist() == [[0, 2], [1, 0]]
    assert batch.attention_mask.tolist() == [[False, True], [True, False]]
    assert batch.response_mask.tolist() == [[True], [False]]


def test_pad_pairs_edits_no_list():
    prompts, responses = [[1, 2], [3]], [[4], [5, 6]]
    pad_pairs(prompts, responses, pad_id=0, device=CPU)
    assert (prompts, responses) == ([[1, 2], [3]], [[4], [5, 6]])


@pytest.mark.parametrize(("prompts", "responses"), [([], []), ([[1]], []), ([[1]], [[2], [3]])])
def test_unequal_or_no_rows_are_refused(prompts, responses):
    with pytest.raises(ValueError, match=f"got {len(prompts)} and {len(responses)}"):
        pad_pairs(prompts, responses, pad_id=0, device=CPU)


@pytest.mark.parametrize(
    ("lengths", "limit", "groups"),
    [
        # Longest first, ties by index: 9; 5 and 5 fill 10; 4 and 3 pad to 8, a third would pad to 12.
        ([3, 9, 5, 4, 5, 1], 10, [[1], [2, 4], [3, 0], [5]]),
        ([4, 4, 4, 4], 8, [[0, 1], [2, 3]]),  # exactly the limit is allowed
        ([4, 4, 4, 4], 7, [[0], [1], [2], [3]]),
        ([100, 2], 10, [[0], [1]]),  # an item over the limit is alone
        ([2, 100, 2], 4, [[1], [0, 2]]),
        ([], 10, []),
    ],
)
def test_micro_batches_by_hand(lengths, limit, groups):
    assert micro_batches(lengths, limit) == groups


@pytest.mark.parametrize("case", range(20))
def test_micro_batches_hold_every_index_once_within_the_limit(case):
    generator = random.Random(case)
    limit = generator.randint(1, 60)
    lengths = [generator.randint(1, 40) for _ in range(generator.randint(1, 30))]
    before = list(lengths)
    groups = micro_batches(lengths, limit)
    assert lengths == before
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= limit
    longest = [max(lengths[i] for i in group) for group in groups]
    assert longest == sorted(longest, reverse=True)
    # No two neighbours could have been one group.
    for one, other in pairwise(groups):
        assert max(lengths[i] for i in one) * (len(one) + 1) > limit, (one, other)


@pytest.mark.parametrize(
    ("size", "pieces"),
    [(2, [[1, 2], [3, 4], [5]]), (5, [[1, 2, 3, 4, 5]]), (9, [[1, 2, 3, 4, 5]])],
)
def test_chunks(size, pieces):
    assert chunks([1, 2, 3, 4, 5], size) == pieces
    assert chunks([], size) == []
