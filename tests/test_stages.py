"""What single stages promise beyond running: the split's freedom from order, and who may judge."""

import pytest

from rlhf.config import load
from rlhf.data import Row, in_hash_order
from rlhf.errors import UserError
from stages.sample import named
from stages.split import check_frozen, judge_part

REVIEWS = [
    Row("Long ago I saw it.<br />What a warm film.", 1),
    Row("It was dull. It was stale.", 0),
    Row("No more.", 0),
]
SNIPPETS = [Row("a tender story", 1), Row("it was dull. it was stale.", 0), Row("thin", 0)]


@pytest.mark.parametrize("leftover", [True, False])
def test_the_judge_gets_closing_sentences_and_only_rows_that_nobody_else_has(leftover):
    """The second review closes with a snippet's text, so it is left out; 'thin' is in another part."""
    split = load().split
    judge = type(split.judge)(where={}, characters=40, size=2, leftover=leftover)
    settings = type(split)(**{**vars(split), "judge": judge})
    ordered, taken = in_hash_order(SNIPPETS, 0), [{"text": "thin"}]
    found = judge_part(REVIEWS, ordered, taken, settings, seed=0)
    texts = {row["text"] for row in found}
    closings = {"long ago i saw it. what a warm film.", "no more."}
    assert texts == closings | ({"a tender story", "it was dull. it was stale."} if leftover else set())
    assert [row["id"] for row in found] == [f"judge-{i:05d}" for i in range(len(found))]
    assert judge_part(REVIEWS[::-1], ordered, taken, settings, seed=0) == found


def test_a_frozen_split_names_the_parts_that_differ():
    check_frozen({"sft": "a", "test": "b"}, None)
    check_frozen({"sft": "a", "test": "b"}, {"test": "b", "sft": "a"})
    with pytest.raises(UserError, match=r"split\.sha256 differs for sft, val;"):
        check_frozen({"sft": "a", "test": "b"}, {"sft": "c", "test": "b", "val": "d"})


@pytest.mark.parametrize(
    ("policy", "seed", "found"),
    [
        *(
            ("base", None, ("base", None)),
            ("sft", None, ("sft", "sft")),
            ("sft-again", None, ("sft-again", "sft")),
        ),
        *(("ppo", 42, ("ppo-42", "policy")), ("ppo", 0, ("ppo-0", "policy"))),
    ],
)
def test_a_policy_has_a_name_and_an_adapter(policy, seed, found):
    assert named(policy, seed) == found


@pytest.mark.parametrize("policy", ["", "ppo-1", "ppo-x", "ppo/..", "reward"])
def test_another_policy_is_refused(policy):
    with pytest.raises(UserError, match=r"expected base, sft, sft-again or ppo$"):
        named(policy, None)


@pytest.mark.parametrize(("policy", "seed"), [("ppo", None), ("sft", 1), ("base", 0)])
def test_a_seed_is_ppo_s_and_ppo_s_alone(policy, seed):
    with pytest.raises(UserError, match="expected a seed for ppo, and for ppo alone"):
        named(policy, seed)
