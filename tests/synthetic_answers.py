"""Results on answers that no model produced, with effects of known size: what its report's tests read."""

import numpy as np
import pandas as pd
from synthetic_results import likelihoods, write_manifest, write_params, write_ppo

from rlhf import record

ANSWERS = ("Ice floats.", "water is dense, I think", "It floats because it is less dense than water.")


def answer_rows(
    seeds=(1, 2, 3),
    questions=40,
    samples=2,
    heuristic=(1.0, 1.0, 1.0),
    reward=1.0,
    chrf=0.0,
    token_f1=0.0,
    characters=0.0,
    kl=1.2,
    again=None,
    collapse=None,
    texts=ANSWERS,
):
    """Rows as the judge stage writes them; `heuristic` shifts seeds one by one, the rest all PPO seeds.

    `again` adds SFT under other noise, and shifts its score; `collapse` is what PPO answers to everything.
    """
    generator = np.random.default_rng(7)
    shared = generator.normal(0, 0.5, (questions, samples))
    policies = ["base", "sft", *(f"ppo-{s}" for s in seeds), *(["sft-again"] if again is not None else [])]
    shift = dict(zip(policies[2:], heuristic, strict=False)) | {"sft-again": again}
    rows = []
    for number, policy in enumerate(policies):
        on = policy.startswith("ppo-")
        own = generator.normal(0, 0.3, (questions, samples))
        if policy == "sft-again":
            shared = generator.normal(0, 0.5, (questions, samples))
        for i, k in np.ndindex(questions, samples):
            noise = float(shared[i, k] + own[i, k])
            text = f"{texts[(i + k + number) % len(texts)]} {i} {k}" if not (on and collapse) else collapse
            rows.append(
                {
                    "policy": policy,
                    "id": f"test-{i:03d}",
                    "sample": k,
                    "prefix": "Question: Why?\n\nAnswer:",
                    "continuation": " " + text,
                    "full_text": "Question: Why?\n\nAnswer: " + text,
                    "n_tokens": round(20 + 3 * noise),
                    "ended": (i + k) % 9 > 0 and (policy != "base" or i % 2 > 0),
                    "empty": not text.strip(),
                    "repetition": abs(float(own[i, k])) / 10,
                    "kl": kl * on + float(own[i, k]),
                    "reward": noise + reward * on,
                    "question": texts[i % len(texts)],
                    "reference": "Ice is less dense than water | so it floats.",
                    "heuristic": round(2 + 2 * noise + 2 * shift.get(policy, 0)),
                    "characters": max(0, round(90 + 20 * noise + characters * on)),
                    "finished": (i + k) % 5 > 0,
                    "fillers": (i + k) % 3 // 2,
                    "token_f1": float(np.clip(0.4 + noise / 10 + token_f1 * on, 0, 1)),
                    "chrf": float(np.clip(40 + 5 * noise + chrf * on, 0, 100)),
                }
            )
    return pd.DataFrame(rows)


def answer_checks(seeds=(1, 2, 3), steps=(0, 3, 6), questions=12, reward=1.0, heuristic=1.0):
    """Validation rows; reward and heuristic score rise with the step, to so much at the last."""
    rows = []
    for seed in seeds:
        generator = np.random.default_rng([9, seed])
        level = generator.normal(0, 1, questions)
        for step in steps:
            way = step / steps[-1]
            for i, noise in enumerate(generator.normal(0, 0.2, questions)):
                text = ANSWERS[i % 3]
                rows.append(
                    {
                        "seed": seed,
                        "step": step,
                        "id": f"val-{i:03d}",
                        "prefix": "Question: Why?\n\nAnswer:",
                        "continuation": text,
                        "full_text": "Question: Why?\n\nAnswer: " + text,
                        "n_tokens": 20 + i % 4,
                        "ended": i % 9 > 0,
                        "empty": False,
                        "repetition": 0.01 * (i % 2),
                        "kl": (1.4 + seed / 20) * way,
                        "reward": level[i] + way * reward + noise,
                        "heuristic": round(2 + 2 * (level[i] + way * heuristic + noise)),
                        "characters": 90 + i,
                        "finished": i % 5 > 0,
                        "fillers": 0,
                    }
                )
    return pd.DataFrame(rows)


def pair_rows(questions=20, each=5, human=False, texts=ANSWERS):
    """Held-out pairs as the reward stage writes them; every tenth is turned round by noise."""
    generator = np.random.default_rng(3)
    rows = []
    for number in range(questions * each):
        margin = int(generator.integers(1, 6)) * (-1 if number % 10 == 9 else 1)
        right = generator.uniform(0.3, 1.0)
        rows.append(
            {
                "id": f"rm_test-{number:05d}",
                "prompt": f"Why {number // each}?",
                "chosen": texts[number % len(texts)],
                "rejected": texts[(number + 1) % len(texts)],
                "margin": None if human else margin,
                "flipped": not human and margin < 0,
                "probability": float(right if margin > 0 else 1 - right),
            }
        )
    return rows


def write_answers(root, seeds=(1, 2), samples=1, human=False, texts=ANSWERS, critic=True, **shifts):
    """Everything that stages/report_answers.py reads, under `root`."""
    write_params(root, "qa/params.yaml", seeds, resamples=500, examples=4)
    rows = answer_rows(seeds=seeds, samples=samples, texts=texts, **{"again": 0.0, "questions": 24} | shifts)
    record.write_csv(root / "artifacts/judged.csv", rows.to_dict("records"))
    record.write_csv(root / "artifacts/judged_validation.csv", answer_checks(seeds).to_dict("records"))
    for policy, frame in likelihoods(["base", "sft", *(f"ppo-{s}" for s in seeds)]).items():
        record.write_jsonl(root / f"artifacts/val_nll/{policy}.jsonl", frame.to_dict("records"))
    _write_reward(root, human, texts)
    for seed in seeds:
        write_ppo(root, seed)
        if not critic:
            log = root / f"reports/plots/ppo/{seed}.csv"
            table = pd.read_csv(log).assign(value_loss=None, value_grad_norm=None)
            table.to_csv(log, index=False, lineterminator="\n")
    write_manifest(root, "policy", "Apache-2.0")
    parts = ("sft", "val", "test", "rm", "rm_test", "ppo")
    split = {"sizes": dict.fromkeys(parts, 40), "rows_read": 500, "rows_dropped": {"duplicate": 3}}
    split |= {"rows_left_over": 0, "near_duplicates": 0, "sha256": dict.fromkeys(parts, "c" * 64)}
    record.write_json(root / "data/split.json", split)


def _write_reward(root, human, texts):
    record.write_jsonl(root / "artifacts/reward_test.jsonl", pair_rows(human=human, texts=texts))
    reward = {"selected_step": 50, "accuracy": 0.8, "loss": 0.5, "n": 100, "prompts": 20, "weak": False}
    reward |= {"mean_sft": 0.3, "std_sft": 1.2}
    record.write_json(root / "reports/metrics/reward.json", reward)
    counts = {"prompts": 60, "pairs": 300, "ties": 0 if human else 60, "flipped": 0 if human else 15}
    for part in ("rm", "val", "rm_test"):
        counts |= {f"pairs_{part}": 100, f"ties_{part}": 0 if human else 20}
        counts |= {f"flipped_{part}": 0 if human else 5}
    counts |= {"human": int(human), "samples_per_prompt": 0 if human else 4}
    record.write_json(root / "reports/metrics/preferences.json", counts)
    steps = range(1, 33)
    record.write_csv(root / "reports/plots/sft.csv", [{"step": s, "loss": 4 + 1 / s} for s in steps])
    record.write_csv(root / "reports/plots/reward.csv", [{"step": s, "loss": 0.4 + 1 / s} for s in steps])
    checks = [{"step": s, "loss": 0.5, "accuracy": 0.8} for s in (16, 32)]
    record.write_csv(root / "reports/plots/reward_validation.csv", checks)
