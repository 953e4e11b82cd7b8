"""The hand-written questions and answers: their form, and that no two of them ask the same thing."""

import itertools
import json
import re
from collections import Counter

import pytest
from architecture import ROOT

DATA = ROOT / "qa" / "data"
KEYS = {"answers": ["question", "answer", "topic"], "questions": ["question", "topic"]}
ROWS = {"answers": 260, "questions": 180}  # at least
ROWS_PER_TOPIC = {"answers": 45, "questions": 30}  # at least
TOPICS = {"science", "computing", "machine learning", "everyday reasoning", "history"}
SIMILAR = 0.6  # two questions that share this much of their content words are near-duplicates

STOP_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        """a an the this that these those it its i you your we our they their them there s and or but if so
        than as of in on at to for from by with into between is are was were be been do does did has have had
        can could should would will must what why how when where who whose which""",
    )
)
FILLER = re.compile(
    r"\b(?:i think|i believe|maybe|perhaps|it depends|as an ai|important to note|worth noting|in conclusion|"
    r"additionally|of course|basically|actually|well,|sure,|certainly|great question)",
    re.IGNORECASE,
)


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def all_questions() -> list[str]:
    return [row["question"] for name in KEYS for row in read(name)]


def normalised(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def repeated(texts: list[str]) -> list[str]:
    """The normalised forms that occur more than once."""
    return [form for form, count in Counter(map(normalised, texts)).items() if count > 1]


def content_words(question: str) -> frozenset[str]:
    return frozenset(re.findall("[a-z0-9]+", question.casefold())) - STOP_WORDS


def near_duplicates(questions: list[str]) -> list[tuple[str, str]]:
    """Pairs whose content words overlap: intersection over union (Jaccard) of `SIMILAR` or more."""
    words = [(question, content_words(question)) for question in questions]
    return [
        (first, second)
        for (first, a), (second, b) in itertools.combinations(words, 2)
        if len(a & b) / len(a | b) >= SIMILAR
    ]


def text_faults(text: str, shortest: int, longest: int, end: str) -> list[str]:
    """What is wrong with the form of a question or an answer."""
    faults = []
    if not shortest <= len(text) <= longest:
        faults.append("length")
    if not text.isascii() or not text.isprintable() or re.search(r"[*_`#|<>\[\]]|  |^ | $", text):
        faults.append("characters")
    if not "A" <= text[:1] <= "Z":
        faults.append("start")
    if not text.endswith(end):
        faults.append("end")
    return faults


def question_faults(question: str) -> list[str]:
    return text_faults(question, 15, 120, "?") + (["sentences"] if question.count("?") > 1 else [])


def answer_faults(answer: str) -> list[str]:
    faults = text_faults(answer, 40, 200, ".")
    if len(re.split(r"[.!?]\s", answer)) > 3:
        faults.append("sentences")
    if FILLER.search(answer):
        faults.append("filler")
    return faults


# The files


@pytest.mark.parametrize("name", KEYS)
def test_every_line_is_one_canonical_object(name):
    content = (DATA / f"{name}.jsonl").read_bytes().decode("utf-8")
    rows = [json.loads(line) for line in content.split("\n")[:-1]]
    assert content == "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert all(list(row) == KEYS[name] for row in rows)
    assert all(isinstance(value, str) for row in rows for value in row.values())


@pytest.mark.parametrize("name", KEYS)
def test_there_are_enough_rows_of_every_topic(name):
    topics = Counter(row["topic"] for row in read(name))
    assert set(topics) == TOPICS
    assert topics.total() >= ROWS[name]
    assert min(topics.values()) >= ROWS_PER_TOPIC[name]


@pytest.mark.parametrize("name", KEYS)
def test_questions_take_many_forms(name):
    first_words = Counter(row["question"].split()[0] for row in read(name))
    assert {"What", "Why", "How", "When", "Who", "Which", "Is", "Does"} <= set(first_words)
    assert max(first_words.values()) < first_words.total() / 2


def test_the_form_of_questions_and_answers():
    faults = {question: question_faults(question) for question in all_questions()}
    faults |= {row["answer"]: answer_faults(row["answer"]) for row in read("answers")}
    assert {text: found for text, found in faults.items() if found} == {}


# Nothing twice


def test_no_question_and_no_answer_is_repeated():
    assert repeated(all_questions()) == []
    assert repeated([row["answer"] for row in read("answers")]) == []


def test_no_two_questions_are_near_duplicates():
    assert all(map(content_words, all_questions()))
    assert near_duplicates(all_questions()) == []


# The checks themselves


def test_a_planted_near_duplicate_is_caught():
    questions = [*all_questions(), "Why does an ice cube float on water?"]
    assert near_duplicates(questions) == [("Why does ice float on water?", questions[-1])]  # 3 of 4 words


def test_near_duplicates_share_three_content_words_of_five():
    assert content_words("What is the Moon's phase?") == {"moon", "phase"}
    five = ["Why do red cats chase mice?", "Do red cats chase birds?"]  # red, cats, chase; mice, birds
    six = ["Why do red cats chase mice?", "Do red cats chase small birds?"]
    assert near_duplicates(five) == [tuple(five)]
    assert near_duplicates(six) == []


def test_a_planted_repetition_is_caught():
    assert repeated(["What is RAM?", "what is R.A.M", "What is ROM?"]) == ["whatisram"]
    assert repeated([*all_questions(), read("questions")[-1]["question"].upper()]) != []


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("Ice floats.", "length"),
        ("Ice floats " + "very " * 40 + "well.", "length"),
        ("Ice floats on water because it is *less dense*.", "characters"),
        ("Ice floats at 0 \N{DEGREE SIGN}C because it is less dense.", "characters"),
        ("Ice floats on water.\nIt is less dense than water.", "characters"),
        ("ice floats on water because it is less dense.", "start"),
        ("Ice floats on water because it is less dense", "end"),
        ("Ice is cold. Ice is light. Ice is solid. Ice floats.", "sentences"),
        ("Ice floats on water, I think, because it is less dense.", "filler"),
        ("Ice floats on water, but it DEPENDS on the liquid.", "filler"),
    ],
)
def test_a_planted_fault_of_an_answer_is_caught(answer, fault):
    assert answer_faults(answer) == [fault]


@pytest.mark.parametrize(
    ("question", "fault"),
    [
        ("What is ice?", "length"),
        ("Tell me why ice floats on water.", "end"),
        ("why does ice float on water?", "start"),
        ("Is ice light? Does ice float on water?", "sentences"),
    ],
)
def test_a_planted_fault_of_a_question_is_caught(question, fault):
    assert question_faults(question) == [fault]
