"""Cut the labelled reviews into frozen, disjoint parts: `python -m stages.split`."""

from rlhf.config import Split, load
from rlhf.data import (
    Row,
    closing_text,
    cut,
    distinct,
    in_hash_order,
    near_duplicates,
    normalised,
    read_table,
    shared_prefixes,
    tokenised,
)
from rlhf.errors import UserError, run
from rlhf.record import read_json, replacing, sha256_rows, write_json, write_jsonl
from rlhf.sources import data_file, locate
from rlhf.tokenizer import load_tokenizer


def main() -> None:
    params = load()
    split, sizes = params.split, vars(params.split.sizes)
    tokenizer = load_tokenizer(locate(read_json("data/manifests/policy.json")))
    table = data_file(read_json("data/manifests/reviews.json"))

    rows = read_table(table, split.rows.text_column, split.rows.label_column, split.rows.where)
    unique, dropped = distinct(rows)
    ordered = in_hash_order(unique, params.seed)
    eligible, outside = tokenised(
        ordered,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        split.min_tokens,
        split.max_tokens,
    )
    parts = cut(eligible, sizes)
    judge_rows = read_table(table, split.rows.text_column, split.rows.label_column, split.judge.where)
    taken = [row for part in parts.values() for row in part]
    parts["judge"] = judge_part(judge_rows, ordered, taken, split, params.seed)

    hashes = {part: sha256_rows(chosen) for part, chosen in parts.items()}
    check_frozen(hashes, split.sha256)
    training = parts["sft"] + parts["rm"] + parts["ppo"]
    summary = {
        "sizes": {part: len(chosen) for part, chosen in parts.items()},
        "label_balance": {
            part: sum(row["label"] for row in chosen) / len(chosen) for part, chosen in parts.items()
        },
        "rows_read": len(rows),
        "rows_dropped": dropped | outside,
        "rows_left_over": len(eligible) - sum(sizes.values()),
        "near_duplicates": near_duplicates(parts),
        "test_prefixes_in_training": shared_prefixes(
            parts["test"], training, params.generation.prefix_tokens
        ),
        "sha256": hashes,
    }
    with replacing("data/split") as folder:
        folder.mkdir()
        for part, chosen in parts.items():
            write_jsonl(folder / f"{part}.jsonl", chosen)
    write_json("data/split.json", summary)
    print(f"split: {summary['sizes']}")


def judge_part(
    reviews: list[Row], ordered: list[Row], taken: list[dict], split: Split, seed: int
) -> list[dict]:
    """The judge's own rows: closing sentences of reviews, and the snippets that no other part has taken."""
    closings = [row._replace(text=closing_text(row.text, split.judge.characters)) for row in reviews]
    unique, _ = distinct([row for row in closings if row.text])
    snippets = {normalised(row.text) for row in ordered}
    free = [row for row in in_hash_order(unique, seed) if normalised(row.text) not in snippets]
    used = {row["text"] for row in taken}
    unused = [row for row in ordered if row.text not in used] if split.judge.leftover else []
    rows = [row._asdict() for row in free[: split.judge.size] + unused]
    return cut(rows, {"judge": split.judge.size + len(unused)})["judge"]


def check_frozen(hashes: dict[str, str], frozen: dict[str, str] | None) -> None:
    """Stop, naming the parts, when the computed split is not the one that params.yaml froze."""
    if frozen is None or hashes == frozen:
        return
    changed = sorted(part for part in hashes | frozen if hashes.get(part) != frozen.get(part))
    raise UserError(
        f"the split is not the frozen one: split.sha256 differs for {', '.join(changed)}; "
        "if that is meant, set split.sha256 to null and copy the new hashes from data/split.json"
    )


if __name__ == "__main__":
    run(main)
