"""Cut the labelled reviews into frozen, disjoint parts: `python -m stages.split`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rlhf.config import Split, load
from rlhf.data import (
    Row,
    check_both_labels,
    check_frozen,
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
from rlhf.sections import Rows
from rlhf.sources import locate
from rlhf.special_tokens import say_unused
from rlhf.tokenizer import encoder, load_tokenizer

HELD_OUT = ("val", "rm_test", "test")


class Pool(NamedTuple):
    """What one file has: its distinct rows in hash order, and of these the eligible ones, with token ids."""

    ordered: list[Row]
    eligible: list[dict]
    dropped: dict[str, int]


def main() -> None:
    params = load()
    split, sizes = params.split, vars(params.split.sizes)
    folder = locate(read_json("data/manifests/policy.json"))
    tokenizer = load_tokenizer(folder)
    say_unused(folder, tokenizer)
    encode = encoder(folder, tokenizer)
    table, held_out_table = data_files(read_json("data/manifests/reviews.json"), split.rows)

    rows = read(table, split.rows, split.rows.where)
    held_out = read(held_out_table, split.rows, split.rows.where) if held_out_table else []
    held_texts = {normalised(row.text) for row in held_out}
    pool = pool_of(table.name, rows, held_texts, encode, split, params.seed)
    pools = [pool]
    if held_out_table is None:
        parts = cut(pool.eligible, sizes)
    else:
        pools.append(pool_of(held_out_table.name, held_out, set(), encode, split, params.seed))
        parts = cut(pool.eligible, {part: size for part, size in sizes.items() if part not in HELD_OUT})
        parts |= cut(pools[1].eligible, {part: sizes[part] for part in HELD_OUT})
    if split.judge:
        reviews = read(table, split.rows, split.judge.where)
        unseen = [row for row in reviews if normalised(row.text) not in held_texts]
        taken = [row for part in parts.values() for row in part]
        parts["judge"] = judge_part(unseen, pool.ordered, taken, split, params.seed)
        check_both_labels("split.judge", parts["judge"])

    hashes = {part: sha256_rows(chosen) for part, chosen in parts.items()}
    check_frozen(hashes, split.sha256)
    training = parts["sft"] + parts["rm"] + parts["ppo"]
    summary = {
        "sizes": {part: len(chosen) for part, chosen in parts.items()},
        "label_balance": {
            part: sum(row["label"] for row in chosen) / len(chosen) for part, chosen in parts.items()
        },
        "rows_read": len(rows) + len(held_out),
        "rows_dropped": {
            reason: sum(each.dropped.get(reason, 0) for each in pools) for reason in pool.dropped
        },
        "rows_left_over": sum(len(each.eligible) for each in pools) - sum(sizes.values()),
        "near_duplicates": near_duplicates(parts),
        "test_prefixes_in_training": shared_prefixes(
            parts["test"], training, params.generation.prefix_tokens
        ),
        "sha256": hashes,
    }
    with replacing("data/split") as output:
        output.mkdir()
        for part in (*sizes, "judge"):  # a ready judge's own part is an empty file, since DVC expects one
            write_jsonl(output / f"{part}.jsonl", parts.get(part, []))
    write_json("data/split.json", summary)
    print(f"split: {summary['sizes']}")


def data_files(manifest: dict, rows: Rows) -> tuple[Path, Path | None]:
    """The checked files that `rows` names: of the reviews, and of the held-out ones where there are such."""
    folder, names = locate(manifest), sorted(manifest["files"])
    file = names[0] if rows.file is None and len(names) == 1 else rows.file
    for key, name in (("file", file), ("held_out_file", rows.held_out_file or file)):
        if name not in names:
            found = "null" if name is None else repr(name)
            raise UserError(f"split.rows.{key} is {found}: expected one of {', '.join(names)}")
    if file == rows.held_out_file:
        raise UserError(f"split.rows.held_out_file is {file!r}: expected another file than split.rows.file")
    return folder / file, folder / rows.held_out_file if rows.held_out_file else None


def read(table: Path, rows: Rows, where: dict[str, str]) -> list[Row]:
    return read_table(table, rows.text_column, rows.label_column, rows.labels, where, rows.encoding)


def pool_of(
    name: str,
    rows: list[Row],
    held_texts: set[str],
    encode: Callable[[str], list[int]],
    split: Split,
    seed: int,
) -> Pool:
    """The pool of file `name`, without `held_texts`; `UserError` where it is empty or has only one label."""
    own = [row for row in rows if normalised(row.text) not in held_texts]
    unique, dropped = distinct(own)
    ordered = in_hash_order(unique, seed)
    eligible, outside = tokenised(ordered, encode, split.min_tokens, split.max_tokens)
    dropped |= outside | ({"also_held_out": len(rows) - len(own)} if held_texts else {})
    if not eligible:
        limits = f"split.min_tokens {split.min_tokens}, split.max_tokens {split.max_tokens}"
        why = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count)
        raise UserError(f"{name}: none of {len(rows)} rows is eligible ({limits}): {why}")
    check_both_labels(name, eligible)
    return Pool(ordered, eligible, dropped)


def judge_part(
    reviews: list[Row], ordered: list[Row], taken: list[dict], split: Split, seed: int
) -> list[dict]:
    """The judge's own rows: closing sentences of reviews, and the snippets that no other part has taken."""
    closings = [row._replace(text=closing_text(row.text, split.judge.characters)) for row in reviews]
    unique, _ = distinct([row for row in closings if row.text])
    snippets = {
        normalised(text) for text in (*(row.text for row in ordered), *(row["text"] for row in taken))
    }
    free = [row for row in in_hash_order(unique, seed) if normalised(row.text) not in snippets]
    used = {row["text"] for row in taken}
    unused = [row for row in ordered if row.text not in used] if split.judge.leftover else []
    rows = [row._asdict() for row in free[: split.judge.size] + unused]
    return cut(rows, {"judge": split.judge.size + len(unused)})["judge"]


if __name__ == "__main__":
    run(main)
