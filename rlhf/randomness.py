"""Every random draw of the project comes from a stream that is named by what it is for."""

import hashlib

import numpy as np


def stream(seed: int, stage: str, purpose: str, *indices: int | str) -> np.random.Generator:
    """Return the generator that `(seed, stage, purpose, *indices)` names.

    The key is hashed, so neighbouring keys give unrelated streams, and no draw depends on how many
    others were made before it: a resumed run continues exactly, a row's sample ignores its batch.
    """
    return np.random.Generator(np.random.PCG64(_digest(seed, stage, purpose, *indices)))


def named_seed(seed: int, stage: str, purpose: str, *indices: int | str) -> int:
    """Return a seed of 63 bits for a generator that is not numpy's, under the same names as `stream`."""
    return _digest(seed, stage, purpose, *indices) % 2**63


def _digest(*names: int | str) -> int:
    digest = hashlib.sha256("\x00".join(str(name) for name in names).encode("utf-8")).digest()
    return int.from_bytes(digest[:16], "little")


def epoch_order(seed: int, stage: str, n_rows: int, step: int, batch_size: int) -> list[int]:
    """Return the row indices of one step: row k of the run is row k mod n of shuffle k div n.

    Every epoch is its own permutation, every row is seen once in each, and a batch may span two epochs.
    """
    picks = range(step * batch_size, (step + 1) * batch_size)
    orders = {
        epoch: stream(seed, stage, "order", epoch).permutation(n_rows)
        for epoch in {pick // n_rows for pick in picks}
    }
    return [int(orders[pick // n_rows][pick % n_rows]) for pick in picks]
