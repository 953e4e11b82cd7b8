"""The stage of preferences: simulated on scripted and on sampled answers, and written by people."""

from collections import Counter
from itertools import combinations, cycle
from pathlib import Path

import pytest
from question_stages import SIZES, run_stage, write_folder, written
from toy import set_params

from rlhf import record
from rlhf.annotator import heuristic
from rlhf.errors import UserError
from rlhf.record import read_json, read_jsonl, write_jsonl
from rlhf.tokenizer import load_tokenizer

PARTS = ("rm", "val", "rm_test")
# By the annotator's rules: 2 + 2, -2, 0 + 2 for an end, and the first again.
ANSWERS = ("it is a dull and lifeless film .", "a film", "fine !", "it is a dull and lifeless film .")
SCORES = [4, -2, 0, 4]
MARGINS = {(0, 1): 6, (0, 2): 4, (2, 1): 2, (3, 1): 6, (3, 2): 4}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    with write_folder(tmp_path, monkeypatch):
        yield


@pytest.fixture
def scripted(monkeypatch) -> list[list[int]]:
    """`ANSWERS`, one after the other, stand in for samples; their token ids, EOS at the end of each."""
    set_params(Path(), {"preferences.samples": len(ANSWERS)})
    tokenizer = load_tokenizer(Path("policy"))
    responses = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for answer in ANSWERS]
    assert [heuristic(answer) for answer in ANSWERS] == SCORES
    turn = cycle(responses)
    monkeypatch.setattr(
        "stages.preferences.sample", lambda model, prompts, *rest: [next(turn) for _ in prompts]
    )
    return responses


def preferred(part: str) -> list[dict]:
    return read_jsonl(f"artifacts/preferences/{part}.jsonl")


def asked(part: str) -> list[dict]:
    return read_jsonl(f"data/split/{part}.jsonl")


def prompts_in(part: str) -> set[str]:
    return {row["prompt"] for row in preferred(part)}


def test_all_pairs_of_a_question_s_answers_are_written_by_hand(scripted):
    set_params(Path(), {"preferences.noise": 0.0})
    run_stage("preferences")
    for part in PARTS:
        rows = preferred(part)
        assert len(rows) == 5 * SIZES[part]
        for question, found in zip(
            asked(part), (rows[i : i + 5] for i in range(0, len(rows), 5)), strict=True
        ):
            by_pair = {}
            for row in found:
                name, chosen, rejected = row["id"].rsplit("-", 2)
                assert name == question["id"] and row["prompt"] == question["question"]
                by_pair[int(chosen), int(rejected)] = row
            assert {pair: row["margin"] for pair, row in by_pair.items()} == MARGINS
            for (chosen, rejected), row in by_pair.items():
                assert (row["chosen"], row["rejected"]) == (ANSWERS[chosen], ANSWERS[rejected])
                assert (
                    row["chosen_ids"] == question["token_ids"][: question["prompt_tokens"]] + scripted[chosen]
                )
                assert row["rejected_ids"][question["prompt_tokens"] :] == scripted[rejected]
    metrics = read_json("reports/metrics/preferences.json")
    assert metrics == {
        "prompts": 13,
        "pairs": 65,
        "ties": 13,
        "flipped": 0,
        **{"pairs_rm": 30, "pairs_val": 20, "pairs_rm_test": 15},
        **{"ties_rm": 6, "ties_val": 4, "ties_rm_test": 3},
        **{"flipped_rm": 0, "flipped_val": 0, "flipped_rm_test": 0},
        "human": 0,
        "left_out": 0,
        "samples_per_prompt": 4,
    }


def test_noise_of_one_turns_every_pair_round_and_keeps_the_ties(scripted):
    set_params(Path(), {"preferences.noise": 1.0})
    run_stage("preferences")
    for part in PARTS:
        pairs = Counter(tuple(map(int, row["id"].split("-")[-2:])) for row in preferred(part))
        assert pairs == {(worse, better): SIZES[part] for better, worse in MARGINS}
        assert all(
            row["margin"] == heuristic(row["chosen"]) - heuristic(row["rejected"]) for row in preferred(part)
        )
    metrics = read_json("reports/metrics/preferences.json")
    assert metrics["flipped"] == metrics["pairs"] == 65 and metrics["ties"] == 13


def test_noise_is_named_by_question_and_counted(scripted):
    """What a part holds beside it changes no judgement of a question."""
    set_params(Path(), {"preferences.noise": 0.5})
    run_stage("preferences")
    before, metrics = preferred("rm_test"), read_json("reports/metrics/preferences.json")
    assert metrics["flipped"] == sum(row["margin"] < 0 for part in PARTS for row in preferred(part))
    assert 0 < metrics["flipped"] < 65
    write_jsonl("data/split/rm.jsonl", asked("rm")[1:3])
    run_stage("preferences")
    assert preferred("rm_test") == before and len(preferred("rm")) == 10
    set_params(Path(), {"seed": 7})
    run_stage("preferences")
    assert preferred("rm_test") != before


def test_where_every_pair_is_a_tie_the_part_is_named(scripted, monkeypatch):
    run_stage("preferences")
    before = written()
    monkeypatch.setattr(
        "stages.preferences.sample", lambda model, prompts, *rest: [scripted[0]] * len(prompts)
    )
    with pytest.raises(UserError, match=r"no preference is left for part rm; 36 pairs were ties"):
        run_stage("preferences")
    assert written() == before


LONGER = {"generation.response_tokens": 9}  # answers of more and of fewer than 20 characters


def test_samples_are_the_sft_policy_s_own_and_the_same_in_any_batch():
    set_params(Path(), LONGER)
    run_stage("preferences")
    first = written()
    samples = read_jsonl("artifacts/preferences/samples.jsonl")
    assert len(samples) == 3 * 13
    assert len({tuple(row["token_ids"]) for row in samples}) > 13, "a question's samples are other draws"
    for row in samples:
        question = next(q for q in asked(row["part"]) if q["id"] == row["id"])
        assert row["prompt"] == question["question"]
        assert (
            row["token_ids"][: question["prompt_tokens"]]
            == question["token_ids"][: question["prompt_tokens"]]
        )
        assert row["answer"] == row["answer"].strip()
    set_params(Path(), {"preferences.batch_size": 5})
    run_stage("preferences")
    assert written() == first


def test_interrupted_the_stage_gives_the_same_bytes(monkeypatch, capsys):
    set_params(Path(), LONGER | {"preferences.batch_size": 8, "runtime.snapshot_seconds": 0})
    run_stage("preferences")
    expected, step_of = written(), record.Progress.step

    def interrupted(progress, step, *arguments, **values):
        if step == 24:
            raise KeyboardInterrupt
        step_of(progress, step, *arguments, **values)

    with monkeypatch.context() as patch:
        patch.setattr(record.Progress, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_stage("preferences")
    run_stage("preferences")
    assert "resuming after step 2" in capsys.readouterr().out
    assert written() == expected


def test_what_the_stage_wrote_may_come_back_as_people_s():
    """Turned pairs and empty answers too; but for ids and the division, which are made anew."""
    set_params(Path(), LONGER | {"preferences.noise": 0.5})
    run_stage("preferences")
    rows = [row for part in PARTS for row in preferred(part)]
    rows[0]["rejected"] = ""
    write_jsonl("data/preferences.jsonl", rows)
    set_params(Path(), {"preferences.pairs.margin_column": "margin"})
    run_stage("preferences")

    def contents(rows: list[dict]) -> list[tuple]:
        return sorted((row["prompt"], row["chosen"], row["rejected"], row["margin"]) for row in rows)

    again = [row for part in PARTS for row in preferred(part)]
    assert contents(again) == contents(rows) and min(row["margin"] for row in rows) < 0
    encode = load_tokenizer(Path("policy")).encode
    (empty,) = [row for row in again if row["rejected"] == ""]
    assert empty["rejected_ids"] == encode(f"{empty['prompt']} and so") + encode(" ")
    metrics = read_json("reports/metrics/preferences.json")
    assert (metrics["human"], metrics["pairs"], metrics["left_out"]) == (1, len(rows), 0)


def people(count: int, **changes) -> list[dict]:
    """Two pairs for each of `count` questions."""
    return [
        {"prompt": f"{i}?", "chosen": "so it is .", "rejected": f"so {other} .", "margin": 1} | changes
        for i in range(count)
        for other in ("a", "b")
    ]


@pytest.fixture
def no_model(monkeypatch):
    """Neither a model nor a sample is to be had."""

    def refuse(*arguments, **settings):
        raise AssertionError("people's preferences need no model")

    for name in ("load_model", "sample"):
        monkeypatch.setattr(f"stages.preferences.{name}", refuse)


def test_people_s_pairs_are_taken_as_they_are_and_nothing_is_sampled(no_model):
    rows = people(20)
    rows[3]["margin"] = None
    rows[5]["margin"] = 2.5
    write_jsonl("data/preferences.jsonl", rows)
    set_params(Path(), {"preferences.pairs.margin_column": "margin"})
    run_stage("preferences")
    found = [row for part in PARTS for row in preferred(part)]
    kept = {(row["prompt"], row["chosen"], row["rejected"]): row["margin"] for row in found}
    assert kept == {(row["prompt"], row["chosen"], row["rejected"]): row["margin"] for row in rows}
    for first, second in combinations(PARTS, 2):
        assert not prompts_in(first) & prompts_in(second)
    assert [len(prompts_in(part)) for part in PARTS] == [9, 6, 5]  # 20 in the proportions 6 : 4 : 3
    assert [row["id"] for row in preferred("val")] == [f"val-{i:05d}" for i in range(12)]
    encode = load_tokenizer(Path("policy")).encode
    for row in found:
        prompt = encode(f"{row['prompt']} and so")
        assert row["chosen_ids"] == prompt + encode(f" {row['chosen']}")
        assert row["rejected_ids"] == prompt + encode(f" {row['rejected']}")
    metrics = read_json("reports/metrics/preferences.json")
    assert (metrics["human"], metrics["samples_per_prompt"]) == (1, 0)
    assert (metrics["prompts"], metrics["pairs"], metrics["ties"], metrics["flipped"]) == (20, 40, 0, 0)


def test_people_s_training_answers_stand_in_for_samples_each_once(no_model):
    write_jsonl("data/preferences.jsonl", people(20))
    run_stage("preferences")
    answers = [(row["prompt"], row["answer"]) for row in read_jsonl("artifacts/preferences/samples.jsonl")]
    expected = {(row["prompt"], row[kind]) for row in preferred("rm") for kind in ("chosen", "rejected")}
    assert len(answers) == len(set(answers)) and set(answers) == expected


def test_people_s_parts_do_not_depend_on_the_order_of_the_file(no_model):
    found = []
    for rows in (people(20), people(20)[::-1]):
        write_jsonl("data/preferences.jsonl", rows)
        run_stage("preferences")
        found.append([prompts_in(part) for part in PARTS])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "spelled",
    [
        *("test question 0?", "Test Question 0?", "test  question 0?", " test question 0?\n"),
        *("test question 0", "test question 0 ?", "test question 0..."),
    ],
)
def test_pairs_about_a_test_question_are_left_out_however_it_is_spelled(no_model, spelled):
    write_jsonl("data/preferences.jsonl", [*people(20), *people(1, prompt=spelled)])
    run_stage("preferences")
    assert not {row["prompt"] for part in PARTS for row in preferred(part) if "question" in row["prompt"]}
    metrics = read_json("reports/metrics/preferences.json")
    assert metrics["pairs"] == 40 and metrics["left_out"] == 2


@pytest.mark.parametrize("kind", ["chosen", "rejected"])
def test_people_s_pairs_over_the_token_limit_are_left_out_and_said(no_model, capsys, kind):
    """A question "0?" is at its limit with the longer of two answers; one word more is too much."""
    encode = load_tokenizer(Path("policy")).encode
    answer = "so it is and so it is ."
    limit = len(encode("0? and so")) + len(encode(f" {answer}"))
    set_params(Path(), {"split.max_tokens": limit})
    over = people(1, **{kind: f"so {answer}"})
    write_jsonl("data/preferences.jsonl", [*people(10, chosen=answer), *over])
    run_stage("preferences")
    metrics = read_json("reports/metrics/preferences.json")
    assert (metrics["pairs"], metrics["left_out"]) == (20, 2)
    assert "2 pairs are too long or ask a test question: left out" in capsys.readouterr().out
    write_jsonl("data/preferences.jsonl", over)
    with pytest.raises(
        UserError,
        match="2 pairs are too long or ask a test question: left out: 0 distinct prompts: expected",
    ):
        run_stage("preferences")


def test_people_s_malformed_row_leaves_what_was_there(no_model):
    write_jsonl("data/preferences.jsonl", people(20))
    run_stage("preferences")
    before = written()
    write_jsonl("data/preferences.jsonl", [*people(3), {"prompt": "why?", "chosen": "so"}])
    with pytest.raises(UserError, match=r"preferences\.jsonl, line 7: no column 'rejected'"):
        run_stage("preferences")
    assert written() == before
