"""Streams that are named by what they are for, and the order in which steps visit rows."""

import hashlib
from itertools import combinations

import numpy as np
import pytest

from rlhf.randomness import epoch_order, named_seed, stream

KEY = (42, "ppo", "sample", 3, 7)


def first_draws(*key) -> list[float]:
    return stream(*key).random(4).tolist()


def test_golden_first_draws():
    # Recorded once, and got a second time from sha256sum of "42 NUL ppo NUL sample NUL 3 NUL 7" and PCG64: a
    # change of key, hash, bit generator or of numpy's own streams would change every published number.
    assert stream(*KEY).random(3).tolist() == [0.3627398089148538, 0.20624031432428203, 0.38360681135579267]
    assert stream(*KEY).integers(0, 2**32, 3).tolist() == [1059082080, 1557955616, 599371342]
    assert stream(42, "ppo", "order", 0).permutation(8).tolist() == [1, 6, 3, 7, 0, 4, 2, 5]


def test_a_named_seed_has_63_bits_of_the_same_names():
    """Of sha256("42 NUL sft NUL dropout NUL 3 NUL 0") the first 16 bytes, little end first, modulo 2^63."""
    digest = hashlib.sha256(b"42\x00sft\x00dropout\x003\x000").digest()
    expected = int.from_bytes(digest[:8], "little") & (2**63 - 1)
    assert named_seed(42, "sft", "dropout", 3, 0) == expected
    seeds = {named_seed(42, "sft", "dropout", step, 0) for step in range(100)}
    assert len(seeds) == 100 and all(0 <= seed < 2**63 for seed in seeds) and max(seeds) > 2**62


def test_every_part_of_the_key_matters():
    keys = [
        KEY,
        (43, "ppo", "sample", 3, 7),
        (42, "sft", "sample", 3, 7),
        (42, "ppo", "order", 3, 7),
        (42, "ppo", "sample", 4, 7),
        (42, "ppo", "sample", 3, 8),
        (42, "ppo", "sample", 7, 3),  # the order of the indices
        (42, "ppo", "sample", 37),  # and where one ends and the next begins
        (42, "ppo", "sample", 3),
        (42, "ppos", "ample", 3, 7),
        (42, "ppo", "sample", "sft", 3, 7),
    ]
    for one, other in combinations(keys, 2):
        assert not set(first_draws(*one)) & set(first_draws(*other)), (one, other)


def test_draws_do_not_depend_on_what_was_drawn_before():
    expected = first_draws(*KEY)
    np.random.seed(1)  # the global generator must not matter
    stream(42, "ppo", "sample", 3, 6).random(1000)
    stream(*KEY).random(1000)
    assert first_draws(*KEY) == expected


def test_golden_epoch_order():
    # 5 rows in steps of 3: picks 0-4 are epoch 0, 5-9 epoch 1, 10-14 epoch 2; steps 1 and 3 span two epochs.
    steps = [epoch_order(42, "sft", 5, step, 3) for step in range(5)]
    assert steps == [[3, 0, 4], [2, 1, 3], [2, 0, 4], [1, 1, 4], [2, 0, 3]]


@pytest.mark.parametrize(("n_rows", "batch_size"), [(7, 3), (3, 8), (6, 6), (1, 4), (5, 1), (4, 2)])
def test_every_epoch_visits_every_row_once(n_rows, batch_size):
    steps = n_rows * 3
    visited = [row for step in range(steps) for row in epoch_order(1, "reward", n_rows, step, batch_size)]
    assert len(visited) == steps * batch_size
    for start in range(0, len(visited), n_rows):
        assert sorted(visited[start : start + n_rows]) == list(range(n_rows))


def test_epochs_differ_from_each_other_and_by_seed_and_stage():
    def epoch(number: int, seed: int = 1, stage: str = "sft") -> tuple[int, ...]:
        return tuple(epoch_order(seed, stage, 50, number, 50))

    # Five permutations of 50 that happen to agree would be a chance of about 1 in 50!.
    assert len({epoch(0), epoch(1), epoch(2), epoch(0, seed=2), epoch(0, stage="ppo")}) == 5


def test_batch_size_does_not_change_the_order_of_the_run():
    by_four = [row for step in range(6) for row in epoch_order(9, "ppo", 5, step, 4)]
    by_eight = [row for step in range(3) for row in epoch_order(9, "ppo", 5, step, 8)]
    assert by_four == by_eight


def test_orders_are_plain_integers():
    assert {type(row) for row in epoch_order(1, "sft", 4, 0, 4)} == {int}
