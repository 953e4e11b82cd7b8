"""Cut answered and bare questions into frozen, disjoint parts: `python -m stages.questions`."""

from operator import itemgetter

from rlhf.config import load
from rlhf.data import check_frozen, cut, in_hash_order, near_duplicates
from rlhf.errors import run
from rlhf.prompts import answer_ids, question_ids
from rlhf.questions import distinct_questions, read_questions
from rlhf.record import read_json, replacing, sha256_rows, write_json, write_jsonl
from rlhf.sources import locate
from rlhf.special_tokens import say_unused
from rlhf.tokenizer import encoder, load_tokenizer

ANSWERED, BARE = ("sft", "val", "test"), ("rm", "rm_test", "ppo")


def main() -> None:
    params = load()
    split, sizes = params.split, vars(params.split.sizes)
    folder = locate(read_json("data/manifests/policy.json"))
    tokenizer = load_tokenizer(folder)
    say_unused(folder, tokenizer)
    encode = encoder(folder, tokenizer)

    def tokenised(row: dict) -> dict:
        """The row with its token ids, and how many of them are the prompt."""
        prompt = question_ids(encode, split.template, row["question"])
        answer = answer_ids(encode, row["answer"]) if "answer" in row else []
        return row | {"token_ids": prompt + answer, "prompt_tokens": len(prompt)}

    # Answered questions come first: a question in both files is used once, with its answer.
    answers, questions = read_questions(split.answers), read_questions(split.questions)
    unique = distinct_questions(answers + questions)
    rows = [tokenised(row) for row in in_hash_order(unique, params.seed, itemgetter("question"))]
    parts, fitting = {}, []
    for table, names, answered in ((split.answers, ANSWERED, True), (split.questions, BARE, False)):
        own = [row for row in rows if ("answer" in row) == answered]
        short = [row for row in own if len(row["token_ids"]) <= split.max_tokens]
        source = f"{table.file} ({len(own) - len(short)} over split.max_tokens {split.max_tokens})"
        parts |= cut(short, {part: sizes[part] for part in names}, source)
        fitting += short

    hashes = {part: sha256_rows(chosen) for part, chosen in parts.items()}
    check_frozen(hashes, split.sha256)
    asked = {part: [{"text": row["question"]} for row in chosen] for part, chosen in parts.items()}
    summary = {
        "sizes": {part: len(chosen) for part, chosen in parts.items()},
        "rows_read": len(answers) + len(questions),
        "rows_dropped": {
            "duplicate": len(answers) + len(questions) - len(unique),
            "too_long": len(rows) - len(fitting),
        },
        "rows_left_over": len(fitting) - sum(sizes.values()),
        "near_duplicates": near_duplicates(asked),
        "sha256": hashes,
    }
    with replacing("data/split") as output:
        output.mkdir()
        for part, chosen in parts.items():
            write_jsonl(output / f"{part}.jsonl", chosen)
    write_json("data/split.json", summary)
    print(f"split: {summary['sizes']}")


if __name__ == "__main__":
    run(main)
