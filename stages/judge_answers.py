"""Score every answer by the annotator's rules and against the hand-written answer:
`python -m stages.judge_answers`.
"""

from rlhf.annotator import fillers, heuristic, is_finished
from rlhf.config import load
from rlhf.content import chrf, token_f1
from rlhf.errors import run
from rlhf.record import read_jsonl, write_csv


def main() -> None:
    seeds = load().ppo.seeds
    asked = {row["id"]: row for row in read_jsonl("data/split/test.jsonl")}
    judged = []
    for policy in ["base", "sft", "sft-again", *(f"ppo-{seed}" for seed in seeds)]:
        for row in read_jsonl(f"artifacts/samples/{policy}.jsonl"):
            question, reference = asked[row["id"]]["question"], asked[row["id"]]["answer"]
            answer = row["continuation"].strip()
            content = {"token_f1": token_f1(answer, reference), "chrf": chrf(answer, reference)}
            judged.append(style(row) | {"question": question, "reference": reference} | content)
    write_csv("artifacts/judged.csv", judged)

    # What PPO wrote at each of its checks shows whether reward and annotator part along the way.
    checked = [
        {"seed": seed} | style(row)
        for seed in seeds
        for row in read_jsonl(f"artifacts/ppo_validation/{seed}.jsonl")
    ]
    write_csv("artifacts/judged_validation.csv", checked)
    print(f"judge: {len(judged)} answers, and {len(checked)} along training")


def style(row: dict) -> dict:
    """The row without token ids and with what the annotator sees in its answer."""
    answer = row["continuation"].strip()
    return {name: value for name, value in row.items() if name != "token_ids"} | {
        "heuristic": heuristic(answer),
        "characters": len(answer),
        "finished": is_finished(answer),
        "fillers": fillers(answer),
    }


if __name__ == "__main__":
    run(main)
