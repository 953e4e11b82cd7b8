"""Questions and preferences as files: read strictly, ordered by content, and cut into disjoint parts."""

import json
from dataclasses import replace
from functools import partial
from itertools import combinations
from operator import itemgetter
from pathlib import Path

import pytest
from malformed_tables import FORMATS, encoded
from question_stages import run_stage, write_folder
from toy import set_params

from rlhf.data import in_hash_order
from rlhf.errors import UserError
from rlhf.questions import distinct_questions, divided, read_preferences, read_questions
from rlhf.record import read_json, read_jsonl, write_jsonl
from rlhf.sections import AnswerTable, PairTable, QuestionTable
from rlhf.tokenizer import load_tokenizer

PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
ANSWER = {"question": "A?", "answer": "B."}


def reading(tmp_path, read, *rows: object):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    return read(path)


def bare(path, topic: str | None = None):
    return read_questions(QuestionTable(str(path), "utf-8", "question", topic))


def answered(path, topic: str | None = None):
    return read_questions(AnswerTable(str(path), "utf-8", "question", topic, "answer"))


def paired(path, margin: str | None = "margin"):
    return read_preferences(PairTable(str(path), "utf-8", "prompt", "chosen", "rejected", margin))


def test_questions_lose_the_white_space_around_them_and_other_columns(tmp_path):
    row = {"question": " Why? \n", "answer": "\tBecause it is.  ", "topic": " science ", "label": 1}
    stripped = {"question": "Why?", "answer": "Because it is.", "topic": "science"}
    assert reading(tmp_path, partial(answered, topic="topic"), row) == [stripped]
    del stripped["topic"]
    assert reading(tmp_path, answered, row) == [stripped]
    assert reading(tmp_path, bare, row) == [{"question": "Why?"}]


@pytest.mark.parametrize("topic", [None, ""])
def test_a_row_may_have_no_topic(tmp_path, topic):
    rows = [ANSWER | {"topic": topic}, ANSWER | {"topic": "science"}]
    assert reading(tmp_path, partial(answered, topic="topic"), *rows) == [ANSWER, rows[1]]


@pytest.mark.parametrize("suffix", FORMATS)
def test_columns_have_the_names_that_the_parameters_give_in_every_format(tmp_path, suffix):
    asks = [
        {"Subject": "film", "A": "It is\na film.", "Q": "Why, oh why?"},
        {"Subject": "", "A": "é", "Q": "Ü?"},
    ]
    (tmp_path / f"asks.{suffix}").write_bytes(encoded(suffix, asks))
    assert read_questions(AnswerTable(str(tmp_path / f"asks.{suffix}"), "utf-8", "Q", "Subject", "A")) == [
        {"question": "Why, oh why?", "answer": "It is\na film.", "topic": "film"},
        {"question": "Ü?", "answer": "é"},
    ]
    rates = [
        {"by": "2", "worse": "No.", "better": " So. ", "Q": "Why?"},
        {"by": "", "worse": "", "better": "Yes.", "Q": "How?"},
        {"by": "-0.5", "worse": "a", "better": "b", "Q": "Who?"},
    ]
    (tmp_path / f"rates.{suffix}").write_bytes(encoded(suffix, rates))
    table = PairTable(str(tmp_path / f"rates.{suffix}"), "utf-8", "Q", "better", "worse", "by")
    assert read_preferences(table) == [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "margin": 2},
        {"prompt": "How?", "chosen": "Yes.", "rejected": "", "margin": None},
        {"prompt": "Who?", "chosen": "b", "rejected": "a", "margin": -0.5},
    ]
    assert {pair["margin"] for pair in read_preferences(replace(table, margin_column=None))} == {None}


def test_latin_1_when_it_is_asked_for(tmp_path):
    (tmp_path / "asks.csv").write_bytes("q\nWo ist das Café?\n".encode("latin-1"))
    table = QuestionTable(str(tmp_path / "asks.csv"), "latin-1", "q", None)
    assert read_questions(table) == [{"question": "Wo ist das Café?"}]
    with pytest.raises(UserError, match=r"^asks\.csv, line 2: byte 0xe9 is not utf-8"):
        read_questions(replace(table, encoding="utf-8"))


@pytest.mark.parametrize(
    ("margin", "expected"), [(1, 1), (0.25, 0.25), (-2, -2), ("3", 3), (None, None), ("", None)]
)
def test_a_preference_may_say_by_how_much(tmp_path, margin, expected):
    assert reading(tmp_path, paired, PAIR | {"margin": margin}) == [PAIR | {"margin": expected}]


@pytest.mark.parametrize("content", ["", "\n", " \n\n"])
def test_an_empty_file_says_that_nobody_has_written_any(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content)
    assert paired(tmp_path / "rows.jsonl") == []
    for read in (bare, answered):
        with pytest.raises(UserError, match=r"^rows\.jsonl: no row$"):
            read(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("read", "row", "complaint"),
    [
        (answered, {"question": "Why?"}, "no column 'answer': it has ['question']"),
        (answered, ANSWER | {"answer": " "}, "answer is empty"),
        (answered, ANSWER | {"question": 3}, "question is 3: expected a text"),
        (bare, {}, "no column 'question': it has []"),
        (partial(bare, topic="topic"), {"question": "Why?"}, "no column 'topic'"),
        (partial(bare, topic="topic"), {"question": "Why?", "topic": 3}, "topic is 3: expected a text"),
        (paired, PAIR | {"margin": 1, "prompt": ""}, "prompt is empty"),
        (paired, PAIR | {"margin": 1, "chosen": None}, "chosen is None: expected a text"),
        (paired, PAIR, "no column 'margin': it has ['prompt', 'chosen', 'rejected']"),
        (partial(paired, margin=None), {"prompt": "Why?", "chosen": "a"}, "no column 'rejected'"),
        (paired, PAIR | {"rejected": "Because. ", "margin": 1}, "chosen and rejected are the same text: 'B"),
        *(
            (paired, PAIR | {"margin": value}, f"margin is {found}: expected a number other than 0, or none")
            for value, found in (
                (0, "0"), (True, "True"), ("0", "'0'"), ("two", "'two'"), ("nan", "'nan'"),
                ("1e999", "'1e999'"), ([2], "[2]"), (10**400, f"1{'0' * 76}..."),
            )
        ),
    ],
)  # fmt: skip
def test_a_malformed_row_is_one_line_that_names_file_and_row(tmp_path, read, row, complaint):
    with pytest.raises(UserError) as caught:
        reading(tmp_path, read, ANSWER | PAIR | {"topic": "a", "margin": 1}, row)
    message = str(caught.value)
    assert message.startswith(f"rows.jsonl, line 2: {complaint}") and "\n" not in message


@pytest.mark.parametrize("text", ["Why\ud800?", "Why\0?"])
def test_a_text_that_no_file_can_hold_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"line 1: question .* NUL or half a surrogate pair"):
        reading(tmp_path, bare, {"question": text})


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
    parts = divided(rows, {"rm": 96, "val": 24, "rm_test": 40}, 5, "x.csv")
    assert {part: len({row["prompt"] for row in found}) for part, found in parts.items()} == {
        "rm": 24,
        "val": 6,
        "rm_test": 10,
    }
    for first, second in combinations(parts.values(), 2):
        assert not {row["prompt"] for row in first} & {row["prompt"] for row in second}
    assert sorted((row for found in parts.values() for row in found), key=rows.index) == rows
    assert divided(rows, {"rm": 96, "val": 24, "rm_test": 40}, 6, "x.csv") != parts


def test_spellings_of_one_prompt_stay_together():
    rows = [{"prompt": text} for i in range(12) for text in (f"prompt {i}", f" Prompt  {i} ")]
    for found in divided(rows, {"rm": 2, "val": 1, "rm_test": 1}, 5, "x.csv").values():
        assert len(found) == 2 * len({" ".join(row["prompt"].lower().split()) for row in found})


@pytest.mark.parametrize("prompts", range(3, 13))
def test_as_many_prompts_as_parts_leave_no_part_empty(prompts):
    parts = divided(pairs(prompts), {"rm": 96, "val": 24, "rm_test": 40}, 5, "x.csv")
    assert all(parts.values()) and sum(map(len, parts.values())) == 2 * prompts


def test_fewer_prompts_than_parts_are_refused():
    with pytest.raises(UserError, match=r"^x\.csv: 2 distinct prompts: expected at least 3"):
        divided(pairs(2), {"rm": 96, "val": 24, "rm_test": 40}, 5, "x.csv")


ANSWERS = {
    **{"file": "data/answers.jsonl", "encoding": "utf-8"},
    **{"question_column": "question", "answer_column": "answer", "topic_column": "topic"},
}
SIZES = {"sft": 6, "val": 2, "test": 3, "rm": 3, "rm_test": 2, "ppo": 3}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Twelve answered and ten bare questions: of each kind one is too long, and one of each asks the same."""
    with write_folder(tmp_path, monkeypatch):
        set_params(Path(), {"split.sizes": SIZES, "split.answers": ANSWERS, "split.max_tokens": 40})
        set_params(Path(), {"ppo.validation_prefixes": 2})
        texts = [f"is the plot {word} {other} ?" for word in ("thin", "dull", "long") for other in "abcdefg"]
        rows = [{"question": text, "answer": "it is a film .", "topic": "film"} for text in texts[:12]]
        rows += [{"question": "the " * 40, "answer": "it is .", "topic": ""}]
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


@pytest.mark.parametrize(
    ("part", "parts_named", "file"),
    [("test", "sft, val, test", "answers"), ("rm", "rm, rm_test, ppo", "questions")],
)
def test_too_few_questions_of_a_kind_are_said(folder, part, parts_named, file):
    set_params(Path(), {"split.sizes": SIZES | {part: 20}})
    with pytest.raises(
        UserError,
        match=f"rows for {parts_named} and only [0-9]+ of data/{file}.jsonl .1 over split.max_tokens 40. are",
    ):
        run_stage("questions")
