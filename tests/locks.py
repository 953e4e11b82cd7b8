"""Hand-made dvc.lock contents."""


def listed(hashes: dict[str, str]) -> list[dict]:
    """Entries as dvc.lock has them, from path -> hash."""
    return [{"path": path, "md5": md5} for path, md5 in hashes.items()]


def stage(deps: dict[str, str], outs: dict[str, str]) -> dict:
    """A stage as dvc.lock has it; each argument is path -> hash."""
    return {"deps": listed(deps), "outs": listed(outs)}


# fetch -> split -> sft -> sample@a, sample@b -> judge: as in this project, and none of split's parts in git.
LOCK = {
    "judge": stage({"artifacts/samples": "s.dir"}, {"judged.csv": "j"}),
    "fetch": {"outs": listed({"manifest.json": "m"})},
    "split": stage({"manifest.json": "m"}, {"data/split": "d.dir", "data/split.json": "p"}),
    "sft": stage({"rlhf/models.py": "c", "data/split/sft.jsonl": "x"}, {"artifacts/sft": "f.dir"}),
    "sample@a": stage({"artifacts/sft": "f.dir"}, {"artifacts/samples/a.jsonl": "1"}),
    "sample@b": stage({"artifacts/sft": "f.dir"}, {"artifacts/samples/b.jsonl": "2"}),
}
