"""Results that no model produced, with effects of known size: what the report's tests read."""

from pathlib import Path

import numpy as np
import pandas as pd
from ruamel.yaml import YAML

from rlhf import record

ROOT = Path(__file__).resolve().parent.parent


def judged_rows(
    seeds=(1, 2, 3),
    prefixes=40,
    samples=2,
    judge=(0.2, 0.2, 0.2),
    vader=0.4,
    reward=0.4,
    kl=1.2,
    length=0.0,
    repetition=0.0,
    again=None,
    own_noise=0.03,
    texts=("a fine film", "a dull film", "what a pleasant story this was"),
):
    """Rows as the judge stage writes them; `judge` shifts seeds one by one, the rest all seeds.

    `again` adds SFT under other noise, and shifts its judge.
    """
    generator = np.random.default_rng(7)
    noise = generator.normal(0, 0.05, (prefixes, samples))
    policies = ["base", "sft", *(f"ppo-{s}" for s in seeds), *(["sft-again"] if again is not None else [])]
    shift = dict(zip(policies[2:], judge, strict=False)) | {"sft-again": again}
    rows = []
    for number, policy in enumerate(policies):
        on = policy.startswith("ppo-")
        own = generator.normal(0, own_noise, (prefixes, samples))
        if policy == "sft-again":
            noise = generator.normal(0, 0.05, (prefixes, samples))
        for i in range(prefixes):
            for k in range(samples):
                shared = noise[i, k] + own[i, k]
                probability = 0.45 + shared + shift.get(policy, 0)
                text = texts[(i + k + number) % len(texts)]
                rows.append(
                    {
                        "policy": policy,
                        "id": f"test-{i:03d}",
                        "sample": k,
                        "prefix": "the movie is",
                        "continuation": text,
                        "full_text": "the movie is " + text,
                        "n_tokens": round(20 + 20 * shared + length * on),
                        "ended": (i + k) % 9 > 0,
                        "empty": not text.strip(),
                        "repetition": abs(own[i, k]) + repetition * on,
                        "kl": kl * on + own[i, k],
                        "reward": -0.1 + shared + reward * on,
                        "judge_full": float(np.clip(probability, 0, 1)),
                        "judge_continuation": float(np.clip(probability - 0.02, 0, 1)),
                        "vader_full": shared + vader * on,
                        "vader_continuation": own[i, k] + vader * on,
                    }
                )
    return pd.DataFrame(rows)


def validation_rows(seeds=(1, 2, 3), steps=(0, 12, 24), prefixes=16, reward=0.6, judge=0.3):
    """Judged validation rows; reward and judge rise with the step, to `reward` and `judge` at the last."""
    rows = []
    for seed in seeds:
        generator = np.random.default_rng([9, seed])
        level = generator.normal(0, 0.2, prefixes)
        for step in steps:
            way = step / steps[-1]
            for i, noise in enumerate(generator.normal(0, 0.03, (prefixes, 2))):
                text = "a fine film" if i % 3 else "a dull , dull film"
                rows.append(
                    {
                        "seed": seed,
                        "step": step,
                        "id": f"val-{i:03d}",
                        "prefix": "the movie is",
                        "continuation": text,
                        "full_text": "the movie is " + text,
                        "n_tokens": 20 + i % 4,
                        "ended": i % 9 > 0,
                        "empty": False,
                        "repetition": 0.01 * (i % 2),
                        "kl": 1.4 * way + seed / 20 * way,
                        "reward": level[i] + way * reward + noise[0],
                        "judge_full": float(np.clip(0.5 + level[i] + way * judge + noise[1], 0, 1)),
                        "vader_full": level[i] + way * judge + noise[0],
                    }
                )
    return pd.DataFrame(rows)


def likelihoods(policies, rise=0.0, rows=40):
    generator = np.random.default_rng(8)
    tokens = generator.integers(12, 40, rows)
    level = {"base": 5.3, "sft": 4.2}
    return {
        policy: pd.DataFrame(
            {
                "id": [f"val-{i}" for i in range(rows)],
                "nll": tokens * (level.get(policy, 4.2 + rise) + generator.normal(0, 0.02, rows)),
                "tokens": tokens,
            }
        )
        for policy in policies
    }


def write_inputs(root, seeds, samples, texts=("a fine film", "a dull film"), **shifts):
    """Everything that stages/report.py reads, under `root`."""
    write_params(root, "params.yaml", seeds, resamples=2000, examples=9)
    policies = ["base", "sft", *(f"ppo-{s}" for s in seeds)]
    rows = judged_rows(
        seeds=seeds, samples=samples, texts=texts, judge=(0.2,) * len(seeds), **{"again": 0.0} | shifts
    )
    record.write_csv(root / "artifacts/judged.csv", rows.to_dict("records"))
    checks = validation_rows(seeds, steps=(0, 6, 12, 18, 24))
    record.write_csv(root / "artifacts/judged_validation.csv", checks.to_dict("records"))
    for policy, frame in likelihoods(policies).items():
        record.write_jsonl(root / f"artifacts/val_nll/{policy}.jsonl", frame.to_dict("records"))
    write_models(root, texts)
    for seed in seeds:
        write_ppo(root, seed)
    write_provenance(root)


def write_params(root, like, seeds, **report):
    """The project's file `like` with other PPO seeds and report settings, as `root`'s params.yaml."""
    yaml = YAML()
    params = yaml.load((ROOT / like).read_text(encoding="utf-8"))
    params["ppo"]["seeds"] = list(seeds)
    params["report"].update(report)
    with (root / "params.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(params, file)


def write_models(root, texts):
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 2, 60)
    probabilities = np.clip(labels * 0.6 + generator.uniform(0, 0.5, 60), 0, 1).round(3)
    record.write_jsonl(
        root / "artifacts/reward_test.jsonl",
        (
            {"id": f"r{i}", "text": texts[i % len(texts)], "label": int(y), "probability": float(p)}
            for i, (y, p) in enumerate(zip(labels, probabilities, strict=True))
        ),
    )
    counts = {
        f"{'true' if y == guess else 'false'}_{'positives' if guess else 'negatives'}": int(
            ((labels == y) & ((probabilities >= 0.5) == guess)).sum()
        )
        for y in (0, 1)
        for guess in (0, 1)
    }
    right = (counts["true_positives"] + counts["true_negatives"]) / 60
    reward = {"accuracy": right, "loss": 0.4, "n": 60, "weak": False}
    record.write_json(root / "reports/metrics/reward.json", {**reward, "selected_step": 64, **counts})
    judge = {"accuracy": 0.8, "n": 60, "vader_accuracy": 0.6, "train_rows": 6000}
    record.write_json(root / "reports/metrics/judge_model.json", judge)
    steps = range(1, 65)
    record.write_csv(
        root / "reports/plots/sft.csv",
        [{"step": s, "loss": 4 + 1.5 / s + 0.1 * generator.normal(), "grad_norm": 1.0} for s in steps],
    )
    record.write_csv(
        root / "reports/plots/reward.csv",
        [{"step": s, "loss": 0.3 + 0.4 / s + 0.05 * generator.normal(), "grad_norm": 1.0} for s in steps],
    )
    record.write_csv(
        root / "reports/plots/reward_validation.csv",
        [{"step": s, "loss": 0.35 + 3 / (s + 9), "accuracy": 0.8} for s in (0, 32, 64)],
    )


def write_ppo(root, seed):
    generator = np.random.default_rng(seed)
    log = [
        {
            "step": s,
            "reward": -0.2 + 0.03 * s + 0.05 * generator.normal(),
            "kl": 0.06 * s + 0.05 * generator.normal(),
            "kl_per_token": 0.003 * s,
            "loss": 0.1,
            "policy_loss": -0.02 + 0.01 * generator.normal(),
            "value_loss": 0.3 / s,
            "mean_ratio": 1 + 0.01 * generator.normal(),
            "clip_fraction": 0.05 + 0.02 * generator.random(),
            "policy_grad_norm": None if s == 7 else 0.5 + generator.random(),
            "value_grad_norm": None if s == 7 else 4 * generator.random(),
            "skipped_updates": int(s == 7),
            "ended_rate": 0.9,
            "length": 24 - 0.2 * s,
            "repetition": 0.01,
            "entropy": 3.5 - 0.02 * s,
            "kl_beta": 0.05,
        }
        for s in range(1, 25)
    ]
    record.write_csv(root / f"reports/plots/ppo/{seed}.csv", log)
    checks = [
        {
            "step": s,
            "reward": -0.2 + 0.025 * s,
            "kl": 0.06 * s,
            "length": 22,
            "ended_rate": 0.9,
            "repetition": 0,
        }
        for s in (0, 6, 12, 18, 24)
    ]
    record.write_csv(root / f"reports/plots/ppo_validation/{seed}.csv", checks)
    found = {
        "selected_step": 24,
        "validation_reward_initial": -0.2,
        "validation_reward_selected": 0.4,
        "last_step_reward": 0.5,
        "last_step_kl": 1.4,
    }
    record.write_json(root / f"reports/metrics/ppo/{seed}.json", found)


def write_manifest(root, what, licence):
    source = {
        "kind": "wheel",
        "name": f"some-{what}",
        "revision": "0.1.0",
        "path": "x/y",
        "sha256": {"some-0.1.0.whl": "a" * 64},
        "license": licence,
    }
    files = {"model.safetensors": {"bytes": 1234567, "sha256": "b" * 64}}
    record.write_json(root / f"data/manifests/{what}.json", {"source": source, "files": files})


def write_provenance(root):
    for what in ("policy", "reviews", "judge"):
        write_manifest(root, what, "MIT (package); data | for research")
    parts = ("sft", "rm", "ppo", "val", "rm_test", "test")
    split = {
        "sizes": dict.fromkeys(parts, 100),
        "label_balance": dict.fromkeys(parts, 0.5),
        "sha256": dict.fromkeys(parts, "c" * 64),
        "near_duplicates": 3,
        "test_prefixes_in_training": 4,
        "rows_read": 8530,
        "rows_dropped": {"duplicate": 3, "too_short": 900},
    }
    record.write_json(root / "data/split.json", split)
