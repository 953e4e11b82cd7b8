"""The figures that the reference notebook published for Qwen3-4B, beside a run of the same model here."""

from typing import Any

import pandas as pd

from rlhf.report import markdown as md
from rlhf.report.comparisons import Comparison
from rlhf.stats import clopper_pearson

MODEL = "Qwen/Qwen3-4B-Base"
PREFIXES = 40
POSITIVE = {"base": 22, "sft": 23, "ppo": 27}  # of 40: 55.0%, 57.5%, 67.5%
NLL = {"base": 4.527, "sft": 3.517, "ppo": 3.525}
DIFFERENCE = "+0.092 [-0.048, 0.226]"
REWARD_RIGHT, REWARD_LABELS = 121, 128  # 94.5%
TITLES = {"base": "base", "sft": "SFT", "ppo": "PPO"}


def section(
    params: dict[str, Any], table: pd.DataFrame, found: list[Comparison], reward: dict[str, Any]
) -> str:
    """Section 9, or nothing where the policy is another model than the reference's.

    `params` is params.yaml as nested plain values; `table` is `levels.summarise`'s, `found` comes from
    `comparisons.compare`, `reward` is the reward stage's metrics.
    """
    if params["fetch"]["policy"]["name"] != MODEL:
        return ""
    main = next(c for c in found if c.group == "pooled" and c.measure.key == "judge_full")
    right = reward["true_negatives"] + reward["true_positives"]
    rows = [
        *(_positive(policy, table) for policy in POSITIVE),
        [
            "PPO - SFT, judged probability",
            DIFFERENCE,
            f"{md.signed(main.result.mean)} {md.interval(*main.interval)}",
        ],
        *(
            [f"Review NLL of {TITLES[policy]} (nats per token)", md.number(nll), _nll(table.loc[policy])]
            for policy, nll in NLL.items()
        ),
        [
            "Reward model's accuracy",
            _rate(REWARD_RIGHT, REWARD_LABELS),
            _rate(right, reward["n"]),
        ],
    ]
    return f"""## 9. Beside the reference's published figures

{md.table(["", "Published", "Here"], rows)}

Published: one run of a notebook on one T4, read from its outputs; intervals of its rates are computed here
(Clopper-Pearson), that of the difference is its own (percentile bootstrap over {PREFIXES} prefixes). Its
authors call it exploratory: the test prefixes were looked at during development. By the rule of section 1 its
difference of PPO and SFT is not shown. The two protocols differ as follows, so that agreement or disagreement
of single figures proves little.

{md.table(["", "Reference", "Here"], _protocol(params), text_columns=3)}"""


def _positive(policy: str, table: pd.DataFrame) -> list[str]:
    row = table.loc[policy]
    here = [md.number(100 * row[f"positive_rate_{end}"], 1) for end in ("low", "high")]
    return [
        f"Positive, full text, {TITLES[policy]}",
        _rate(POSITIVE[policy], PREFIXES),
        f"{md.percent(row['positive_rate'])} [{here[0]}, {here[1]}]",
    ]


def _nll(row: pd.Series) -> str:
    bounds = md.interval(row["nll_per_token_low"], row["nll_per_token_high"])
    return f"{md.number(row['nll_per_token'])} {bounds}"


def _rate(successes: int, n: int) -> str:
    low, high = (md.number(100 * end, 1) for end in clopper_pearson(successes, n))
    return f"{md.percent(successes / n)} [{low}, {high}] of {n}"


def _protocol(params: dict[str, Any]) -> list[list[str]]:
    """What differs or may differ: the reference's as its notebook shows it, ours from the parameters."""
    sizes, sft, reward, ppo = (
        params["split"]["sizes"],
        params["sft"],
        params["reward"],
        params["ppo"],
    )
    generation, model, sample = params["generation"], params["model"], params["sample"]
    rows = {
        "Labels": ("stanfordnlp/sst2", _source(params["fetch"]["reviews"])),
        "Split": (
            "training and validation part of SST-2, each shuffled by a seed",
            "disjoint parts of all rows, in the order of a content hash",
        ),
        "Rows: SFT, reward, PPO": (
            "2048, 4096, 1024",
            f"{sizes['sft']}, {sizes['rm']}, {sizes['ppo']}",
        ),
        "Rows: validation, reward test, test": (
            "128, 128, 40",
            f"{sizes['val']}, {sizes['rm_test']}, {sizes['test']}",
        ),
        "Continuations per test prefix": ("1", str(sample["n"])),
        "Tokens of prefix, continuation": (
            "6, 48",
            f"{generation['prefix_tokens']}, {generation['response_tokens']}",
        ),
        "Sampling noise": (
            "PyTorch's generator, seeded for each prefix, the same for every policy",
            "a named stream for each prefix, the same for every policy",
        ),
        "Weights": ("NF4, float16", f"{model['quantization']}, {model['dtype']}"),
        "LoRA rank": ("8", str(model["lora"]["rank"])),
        "SFT": ("128 steps of 8, lr 1e-4", f"{sft['steps']} steps of {sft['batch_size']}, lr {sft['lr']:g}"),
        "Reward model": (
            "192 steps of 8, lr 1e-4",
            f"{reward['steps']} steps of {reward['batch_size']}, lr {reward['lr']:g}",
        ),
        "PPO runs": ("1", str(len(ppo["seeds"]))),
        "PPO": (
            "96 batches of 8, 2 updates each, lr 1e-5",
            f"{ppo['steps']} batches of {ppo['batch_size']}, {ppo['epochs'] * ppo['minibatches']} updates "
            f"each, lr {ppo['lr']:g}",
        ),
        "KL coefficient": ("0.05, fixed", f"{ppo['kl_beta']:g}, {ppo['kl_controller']}"),
        "PPO's checkpoint": (
            "highest reward on 16 prefixes, every 16 batches",
            f"highest reward on {ppo['validation_prefixes']} prefixes, every {ppo['validate_every']} batches",
        ),
        "Judge": ("DistilBERT trained on SST-2", _source(params["fetch"]["judge"])),
        "Statistics": (
            "percentile bootstrap, 2000 resamples, no correction",
            "BCa and percentile bootstrap, sign flips, Holm",
        ),
    }
    return [[what, md.escape(theirs), md.escape(ours)] for what, (theirs, ours) in rows.items()]


def _source(source: dict[str, Any]) -> str:
    return f"{source['name']} at {source['revision'] or 'a sha256'}"
