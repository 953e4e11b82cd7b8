"""Answer content against a reference by hand and by bounds, and the stage that judges answers."""

import csv
import sys
from pathlib import Path

import pytest
from architecture import ROOT
from ruamel.yaml import YAML
from toy import toy_question_params

from rlhf.content import chrf, token_f1
from rlhf.record import write_jsonl
from stages import judge_answers


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("Paris is the capital.", "The capital is Paris!", 1.0),  # a bag: order, case and marks do not count
        ("the cat sat", "the cat ran away", 2 * 2 / 7),  # p 2/3, r 2/4
        ("the the the", "the cat", 2 * 1 / 5),  # a word is shared as often as both have it
        ("the the cat", "the the dog", 2 * 2 / 6),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("...", "!?", 0.0),
        ("", "", 0.0),
        ("3.14", "3,14", 1.0),
        ("Éclair", "éclair", 1.0),
    ],
)
def test_token_f1_by_hand(answer, reference, expected):
    assert token_f1(answer, reference) == pytest.approx(expected, rel=1e-15)
    assert token_f1(reference, answer) == pytest.approx(expected, rel=1e-15)


def test_chrf_by_hand():
    """'abcd' and 'abce': 3 of 4 letters, 2 of 3 pairs, 1 of 2 triples, 0 of 1 fours are shared, with equal
    precision and recall, so the mean over the orders that occur is F: (3/4 + 2/3 + 1/2 + 0) / 4."""
    assert chrf("abcd", "abce") == pytest.approx(100 * (3 / 4 + 2 / 3 + 1 / 2) / 4, rel=1e-12)


def test_chrf_bounds_and_recall_weighs_more():
    assert chrf("The sky is blue.", "The sky is blue.") == pytest.approx(100, rel=1e-12)
    assert chrf("", "blue") == chrf("xyz", "blue") == 0
    whole, half = "the sky is blue because air scatters light", "the sky is blue"
    assert chrf(whole, half) > chrf(half, whole)


SEEDS = [1, 2]


def sampled(name: str, continuation: str) -> dict:
    return {"id": name, "sample": 0, "continuation": continuation, "token_ids": [1, 2], "reward": 0.5}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    yaml = YAML(typ="safe", pure=True)
    params = toy_question_params(yaml.load((ROOT / "qa/params.yaml").read_text(encoding="utf-8")))
    params["ppo"]["seeds"] = SEEDS
    yaml.dump(params, Path("params.yaml"))
    asked = [
        {"id": "test-00000", "question": "What is the capital of France?", "answer": "It is Paris."},
        {"id": "test-00001", "question": "Why?", "answer": "Because."},
    ]
    write_jsonl("data/split/test.jsonl", asked)
    for policy in ("base", "sft", "sft-again", "ppo-1", "ppo-2"):
        rows = [sampled("test-00001", f" Because. \n{policy} maybe"), sampled("test-00000", " It is Paris. ")]
        write_jsonl(f"artifacts/samples/{policy}.jsonl", [{"policy": policy} | row for row in rows])
    for seed in SEEDS:
        rows = [{"step": step} | sampled("val-00000", "I think so") for step in (0, 4)]
        write_jsonl(f"artifacts/ppo_validation/{seed}.jsonl", rows)
    monkeypatch.setattr(sys, "argv", ["judge_answers"])
    return tmp_path


def table(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_answer_is_judged_beside_its_own_question_and_reference(folder):
    judge_answers.main()
    rows = table("artifacts/judged.csv")
    assert [row["policy"] for row in rows] == [
        name for name in ("base", "sft", "sft-again", "ppo-1", "ppo-2") for _ in range(2)
    ]
    assert "token_ids" not in rows[0]
    first, second = rows[:2]
    assert (first["question"], first["reference"]) == ("Why?", "Because.")
    # "Because. \nbase maybe": 20 characters without the white space around them, a capital, one filler.
    assert [first[key] for key in ("heuristic", "characters", "finished", "fillers")] == [
        "2",
        "20",
        "False",
        "1",
    ]
    assert float(first["token_f1"]) == pytest.approx(2 * 1 / 4)
    assert (second["question"], second["reference"]) == ("What is the capital of France?", "It is Paris.")
    assert [second[key] for key in ("heuristic", "characters", "finished")] == ["1", "12", "True"]
    assert float(second["token_f1"]) == 1 and float(second["chrf"]) == pytest.approx(100)
    assert second["continuation"] == " It is Paris. "


def test_what_was_written_along_training_is_judged_by_the_rules_alone(folder):
    judge_answers.main()
    rows = table("artifacts/judged_validation.csv")
    assert [(row["seed"], row["step"]) for row in rows] == [("1", "0"), ("1", "4"), ("2", "0"), ("2", "4")]
    assert {(row["heuristic"], row["fillers"]) for row in rows} == {("-2", "1")}
    assert not {"token_f1", "reference", "token_ids"} & set(rows[0])
