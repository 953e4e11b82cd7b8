"""Questions and preferences as files: read strictly, ordered by content, and cut into disjoint parts."""

import json
from itertools import combinations
from operator import itemgetter
from pathlib import Path

import pytest
from question_stages import run_stage, write_folder
from toy import set_params

from rlhf.data import in_hash_order
from rlhf.errors import UserError
from rlhf.questions import distinct_questions, divided, read_preferences, read_questions
from rlhf.record import read_json, read_jsonl, write_jsonl
from rlhf.tokenizer import load_tokenizer

PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}


def reading(tmp_path, read, *rows: object):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return read(path)


def answered(path):
    return read_questions(path, answered=True)


def bare(path):
    return read_questions(path, answered=False)


def test_questions_lose_the_white_space_around_them(tmp_path):
    row = {"question": " Why? \n", "answer": "\tBecause it is.  ", "topic": " science "}
    assert reading(tmp_path, answered, row) == [
        {"question": "Why?", "answer": "Because it is.", "topic": "science"}
    ]
    assert reading(tmp_path, bare, {"question": "Why?"}) == [{"question": "Why?"}]
    assert reading(tmp_path, answered) == []


@pytest.mark.parametrize(
    ("margin", "expected"), [(1, 1), (0.25, 0.25), (-2, -2), (None, None), ("absent", None)]
)
def test_a_preference_may_say_by_how_much(tmp_path, margin, expected):
    row = PAIR if margin == "absent" else PAIR | {"margin": margin}
    assert reading(tmp_path, read_preferences, row) == [PAIR | {"margin": expected}]


@pytest.mark.parametrize(
    ("read", "row", "complaint"),
    [
        (answered, {"question": "Why?"}, "answer is None: expected a text that is not empty"),
        (answered, {"question": "Why?", "answer": " "}, "answer is ' ': expected a text that is not empty"),
        (answered, {"question": 3, "answer": "a"}, "question is 3: expected a text"),
        (
            answered,
            {"question": "Why?", "answer": "a", "label": 1},
            "unknown key 'label': expected question, answer",
        ),
        (
            bare,
            {"question": "Why?", "answer": "a"},
            "unknown key 'answer': expected question, topic (optional)",
        ),
        (bare, {}, "question is None"),
        (read_preferences, PAIR | {"prompt": ""}, "prompt is '': expected a text that is not empty"),
        (read_preferences, PAIR | {"chosen": None}, "chosen is None"),
        (read_preferences, {"prompt": "Why?", "chosen": "a"}, "rejected is None"),
        (
            read_preferences,
            PAIR | {"rejected": " Because. "},
            "chosen and rejected are the same text: 'Because.'",
        ),
        (read_preferences, PAIR | {"margin": 0}, "margin is 0: expected a number other than 0, or null"),
        (read_preferences, PAIR | {"margin": True}, "margin is True: expected a number other than 0"),
        (read_preferences, PAIR | {"margin": "2"}, "margin is '2': expected a number other than 0"),
        (read_preferences, PAIR | {"question": "Why?"}, "unknown key 'question'"),
    ],
)
def test_a_malformed_row_is_one_line_that_names_file_and_row(tmp_path, read, row, complaint):
    sound = {answered: {"question": "A?", "answer": "B."}, bare: {"question": "A?"}}.get(read, PAIR)
    with pytest.raises(UserError) as caught:
        reading(tmp_path, read, sound, row)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'rows.jsonl'}, row 2: {complaint}") and "\n" not in message


def test_a_margin_too_large_for_a_number_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(PAIR)[:-1] + ', "margin": 1e999}\n', encoding="utf-8", newline="\n")
    with pytest.raises(UserError, match=r"line 1: not valid JSON: a number too large for 64 bits$"):
        read_preferences(path)


@pytest.mark.parametrize("row", ["Why?", ["Why?"], [], 3, None])
@pytest.mark.parametrize("read", [answered, bare, read_preferences])
def test_a_row_that_is_no_object_is_refused(tmp_path, read, row):
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n", encoding="utf-8", newline="\n")
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1: expected a JSON object$"):
        read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("text", ["Why\ud800?", "Why\0?"])
def test_a_text_that_no_file_can_hold_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"row 1: question .* NUL or half a surrogate pair"):
        reading(tmp_path, bare, {"question": text})


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Why?"}\nWhy?\n', encoding="utf-8", newline="\n")
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: not valid JSON"):
        bare(path)


def test_a_question_is_kept_once_with_its_answer_whatever_the_order():
    rows = [
        {"question": "why?"},
        {"question": "Why?", "answer": "b"},
        {"question": "WHY?", "answer": "z"},
        {"question": "Why?", "answer": "a"},
        {"question": " how "},
        {"question": "How"},
    ]
    for order in (rows, rows[::-1], rows[3:] + rows[:3]):
        found = sorted(distinct_questions(order), key=lambda row: "answer" in row)
        assert found == [{"question": " how "}, {"question": "WHY?", "answer": "z"}]


def test_topics_that_differ_alone_do_not_bring_the_file_s_order_in():
    rows = [{"question": "Why?", "answer": "a", "topic": topic} for topic in ("science", "history")]
    assert distinct_questions(rows) == distinct_questions(rows[::-1])


def test_the_order_is_one_of_content_and_seed():
    def order(rows: list[dict], seed: int) -> list[int]:
        found = in_hash_order(rows, seed, itemgetter("question"))
        return [int(row["question"].split()[1]) for row in found]

    rows = [{"question": f"question {i}"} for i in range(40)]
    assert (
        order(rows, 1)
        == order(rows[::-1], 1)
        == order([{"question": f" Question  {i}"} for i in range(40)], 1)
    )
    assert sorted(order(rows, 1)) == list(range(40)) != order(rows, 1) != order(rows, 2)


def pairs(prompts: int, each: int = 2) -> list[dict]:
    return [{"prompt": f"prompt {i}", "number": number} for i in range(prompts) for number in range(each)]


def test_pairs_are_divided_by_prompt_in_proportion():
    rows = pairs(40)
    parts = divided(rows, {"rm": 96, "val": 24, "rm_test": 40}, 5)
    assert {part: len({row["prompt"] for row in found}) for part, found in parts.items()} == {
        "rm": 24,
        "val": 6,
        "rm_test": 10,
    }
    for first, second in combinations(parts.values(), 2):
        assert not {row["prompt"] for row in first} & {row["prompt"] for row in second}
    assert sorted((row for found in parts.values() for row in found), key=rows.index) == rows
    assert divided(rows, {"rm": 96, "val": 24, "rm_test": 40}, 6) != parts


def test_spellings_of_one_prompt_stay_together():
    rows = [{"prompt": text} for i in range(12) for text in (f"prompt {i}", f" Prompt  {i} ")]
    for found in divided(rows, {"rm": 2, "val": 1, "rm_test": 1}, 5).values():
        assert len(found) == 2 * len({" ".join(row["prompt"].lower().split()) for row in found})


@pytest.mark.parametrize("prompts", range(3, 13))
def test_as_many_prompts_as_parts_leave_no_part_empty(prompts):
    parts = divided(pairs(prompts), {"rm": 96, "val": 24, "rm_test": 40}, 5)
    assert all(parts.values()) and sum(map(len, parts.values())) == 2 * prompts


def test_fewer_prompts_than_parts_are_refused():
    with pytest.raises(UserError, match="preferences: 2 distinct prompts: expected at least 3"):
        divided(pairs(2), {"rm": 96, "val": 24, "rm_test": 40}, 5)


SIZES = {"sft": 6, "val": 2, "test": 3, "rm": 3, "rm_test": 2, "ppo": 3}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Twelve answered and ten bare questions: of each kind one is too long, and one of each asks the same."""
    with write_folder(tmp_path, monkeypatch):
        set_params(Path(), {"split.sizes": SIZES, "split.max_tokens": 40, "ppo.validation_prefixes": 2})
        texts = [f"is the plot {word} {other} ?" for word in ("thin", "dull", "long") for other in "abcdefg"]
        rows = [{"question": text, "answer": "it is a film .", "topic": "film"} for text in texts[:12]]
        rows += [{"question": "the " * 40, "answer": "it is ."}]
        write_jsonl("data/answers.jsonl", rows)
        write_jsonl(
            "data/questions.jsonl",
            [{"question": text} for text in texts[12:]]
            + [{"question": texts[0].upper()}, {"question": "a " * 60}],
        )
        yield tmp_path


def parts() -> dict[str, list[dict]]:
    return {part: read_jsonl(f"data/split/{part}.jsonl") for part in SIZES}


def test_the_stage_cuts_disjoint_parts_of_their_kinds_and_counts_what_it_drops(folder):
    run_stage("questions")
    found = parts()
    assert {part: len(rows) for part, rows in found.items()} == SIZES
    asked = [row["question"].lower() for rows in found.values() for row in rows]
    assert len(asked) == len(set(asked))
    for part, rows in found.items():
        assert [row["id"] for row in rows] == [f"{part}-{i:05d}" for i in range(SIZES[part])]
        assert all(("answer" in row) == (part in ("sft", "val", "test")) for row in rows)
    summary = read_json("data/split.json")
    assert summary["sizes"] == SIZES and summary["rows_read"] == 13 + 11
    assert summary["rows_dropped"] == {"duplicate": 1, "too_long": 2}
    assert summary["rows_left_over"] == 12 + 9 - sum(SIZES.values())
    assert summary["near_duplicates"] > 0  # 'is the plot thin a ?' and 'is the plot thin b ?'


def test_the_stage_cuts_on_token_ids(folder):
    run_stage("questions")
    tokenizer = load_tokenizer(Path("policy"))
    for rows in parts().values():
        for row in rows:
            prompt, rest = row["token_ids"][: row["prompt_tokens"]], row["token_ids"][row["prompt_tokens"] :]
            assert prompt == tokenizer.encode(f"{row['question']} and so", add_special_tokens=False)
            assert tokenizer.decode(rest) == (" it is a film ." if "answer" in row else "")


def test_the_order_of_the_files_decides_nothing(folder):
    run_stage("questions")
    before = parts()
    for name in ("answers", "questions"):
        write_jsonl(f"data/{name}.jsonl", read_jsonl(f"data/{name}.jsonl")[::-1])
    run_stage("questions")
    assert parts() == before


def test_another_split_than_the_frozen_one_stops_the_stage_and_loses_nothing(folder):
    run_stage("questions")
    before, hashes = parts(), read_json("data/split.json")["sha256"]
    set_params(Path(), {"split.sha256": hashes})
    run_stage("questions")
    rows = read_jsonl("data/answers.jsonl")
    write_jsonl("data/answers.jsonl", [row | {"answer": "it is a dull film ."} for row in rows])
    with pytest.raises(UserError, match=r"split\.sha256 differs for sft, test, val;"):
        run_stage("questions")
    assert parts() == before


@pytest.mark.parametrize(("part", "parts_named"), [("test", "sft, val, test"), ("rm", "rm, rm_test, ppo")])
def test_too_few_questions_of_a_kind_are_said(folder, part, parts_named):
    set_params(Path(), {"split.sizes": SIZES | {part: 20}})
    with pytest.raises(UserError, match=f"rows for {parts_named} and only"):
        run_stage("questions")
