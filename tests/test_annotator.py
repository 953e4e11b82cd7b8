"""The simulated annotator: every rule by hand, all rules by a second route, and the preferences it gives."""

from itertools import combinations, product

import numpy as np
import pytest

from rlhf.annotator import FILLERS, Preference, fillers, heuristic, is_finished, preferences
from rlhf.randomness import stream


def sized(length: int, first: str = "a", last: str = "a") -> str:
    """A text of `length` characters that only its length, first and last character can score."""
    return (first + "b" * length)[: length - 1] + last


@pytest.mark.parametrize(
    ("length", "points"),
    [(2, -2), (19, -2), (20, 2), (200, 2), (201, 0), (300, 0), (301, -1), (5000, -1)],
)
@pytest.mark.parametrize(("first", "capital"), [("A", 1), ("a", 0), ("É", 1), ("7", 0), ('"', 0)])
@pytest.mark.parametrize(
    ("last", "finished"), [(".", 2), ("!", 2), ("?", 2), (",", 0), ("a", 0), ('"', 0), ("…", 0)]
)
def test_length_capital_and_ending_add_up(length, points, first, capital, last, finished):
    answer = sized(length, first, last)
    assert len(answer) == length
    assert heuristic(answer) == points + capital + finished
    assert is_finished(answer) is (finished == 2)


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ("It is the capital of France.", 0),
        ("I think it is.", 1),
        ("i THINK it is, I think.", 1),  # a phrase is counted once
        ("Maybe, perhaps.", 2),
        ("It depends; I think maybe, or perhaps not.", 4),
        ("Unthinkable: I thin k, may be, per haps.", 0),
        ("Hawaii thinks", 1),  # found inside other words too, as in the guide
    ],
)
def test_filler_phrases_count_once_each_in_any_case(answer, count):
    assert fillers(answer) == count
    longer = f"X{answer:_<40}."
    assert heuristic(longer) == 5 - count


def test_the_best_and_the_worst_answer():
    assert heuristic("The capital of France is Paris.") == 5
    worst = "it depends, i think maybe perhaps " * 10
    assert len(worst) > 300 and heuristic(worst) == -5
    short = "a maybe, perhaps"
    assert heuristic(short) == -4
    assert heuristic("") == -2
    # The bound of -6 needs four phrases in fewer than 20 characters, and they have 28 letters between them.
    assert sum(map(len, FILLERS)) > 20


def guide(response: str) -> int:
    """The guide's rules, line by line."""
    points = 0
    if response.endswith(".") or response.endswith("!") or response.endswith("?"):
        points += 2
    n = len(response)
    if n < 20:
        points -= 2
    if n >= 20 and n <= 200:
        points += 2
    if n > 300:
        points -= 1
    for phrase in ["I think", "maybe", "perhaps", "it depends"]:
        if response.lower().find(phrase.lower()) >= 0:
            points -= 1
    if len(response) > 0 and response[0].upper() == response[0] and response[0].lower() != response[0]:
        points += 1
    return points


def test_the_rules_are_the_guide_s_on_a_grid():
    starts = ("", "a", "A", "I think ", "Maybe ", "perhaps, it depends ", "it DEPENDS ", "3 ")
    middles = [body * times for body in ("b", "so it is. ", "I Think maybe ") for times in (0, 1, 9, 14, 30)]
    ends = ("", ".", "!", "?", "?!", ".)", " .", "…")
    answers = ["".join(parts) for parts in product(starts, middles, ends)]
    answers += [sized(n, first, last) for n in range(2, 305) for first in "aA" for last in "a."]
    assert [heuristic(answer) for answer in answers] == [guide(answer) for answer in answers]
    assert set(map(heuristic, answers)) == set(range(-5, 6)), "the grid meets every score there is"


def unused(seed: int = 0) -> np.random.Generator:
    return stream(seed, "tests", "annotator")


def test_all_pairs_are_judged_and_ties_counted_by_hand():
    found, ties = preferences([3, 5, 3, -1], 0.0, unused())
    assert found == [
        Preference(1, 0, 2),
        Preference(0, 3, 4),
        Preference(1, 2, 2),
        Preference(1, 3, 6),
        Preference(2, 3, 4),
    ]
    assert ties == 1  # answers 0 and 2


def test_noise_of_one_turns_every_judgement_round():
    quiet, ties = preferences([3, 5, 3, -1], 0.0, unused())
    turned, same_ties = preferences([3, 5, 3, -1], 1.0, unused())
    assert turned == [Preference(p.rejected, p.chosen, -p.margin) for p in quiet]
    assert ties == same_ties == 1


@pytest.mark.parametrize(("scores", "ties"), [([], 0), ([4], 0), ([2, 2], 1), ([0, 0, 0, 0], 6)])
def test_where_nothing_differs_there_is_no_preference(scores, ties):
    assert preferences(scores, 1.0, unused()) == ([], ties)


def test_every_pair_is_a_preference_or_a_tie_and_the_margin_says_which_way():
    draws = unused(3)
    for _ in range(50):
        scores = draws.integers(-6, 6, 5).tolist()
        found, ties = preferences(scores, 0.3, draws)
        assert len(found) + ties == 10
        assert len({frozenset(p[:2]) for p in found}) == len(found)
        for chosen, rejected, margin in found:
            assert margin == scores[chosen] - scores[rejected] != 0
        tied = [pair for pair in combinations(range(5), 2) if scores[pair[0]] == scores[pair[1]]]
        assert ties == len(tied)


def test_the_noise_is_the_share_of_judgements_turned_round():
    """20,000 judgements at 0.05: 1,000 expected, standard deviation 31; five of them either way."""
    draws, turned = unused(4), 0
    for _ in range(2_000):
        found, _ = preferences([0, 1, 2, 3, 4], 0.05, draws)
        turned += sum(preference.margin < 0 for preference in found)
    assert abs(turned - 1_000) < 154


def test_judgements_come_from_the_stream_alone():
    first, again = (preferences(list(range(9)), 0.5, unused(5)) for _ in range(2))
    assert first == again != preferences(list(range(9)), 0.5, unused(6))
