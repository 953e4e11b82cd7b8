"""Compare PPO between experiments, prefix by prefix: `python -m tools.compare main exp-a exp-b`.

Each name is a git revision or a DVC experiment, `workspace` the working tree; the first is the control. What
was judged is read through DVC at each revision, so no checkout is needed. Writes reports/compare.md.
"""

import argparse
import io
import json
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from dvc.api import DVCFileSystem
from dvc.exceptions import DvcException
from ruamel.yaml import YAML

from rlhf.errors import UserError, run
from rlhf.record import write_text
from rlhf.report import comparisons, tables
from rlhf.report import markdown as md
from rlhf.report.comparisons import MEASURES, Comparison, Measure
from rlhf.report.verdict import ALPHA, change, direction, only_here

OUTPUT = "reports/compare.md"
ABSENT = object()
# What scores a text must be the same on both sides, or two rulers are compared.
RULERS = {
    "artifacts/judge_model": ("judge_full", "judge_continuation"),
    "artifacts/reward": ("reward",),
}


class Experiment(NamedTuple):
    """What one revision measured; `rulers` are the hashes of the models that scored it."""

    name: str
    params: dict[str, Any]
    judged: pd.DataFrame
    nll: dict[int, pd.DataFrame]
    rulers: dict[str, str]


class Pair(NamedTuple):
    """One experiment against the control, on the PPO seeds that both have."""

    control: Experiment
    treatment: Experiment
    seeds: list[int]
    left_out: list[Measure]
    found: list[Comparison]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="+", metavar="revision", help="the control, then what to compare to it"
    )
    names = parser.parse_args().names
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"revisions {' '.join(names)}: expected two or more, none twice")
    control, *treatments = [read(name) for name in names]
    pairs = [compare(control, treatment) for treatment in treatments]
    write_text(OUTPUT, document(control, with_family(pairs)))
    print(f"wrote {OUTPUT}")


def read(name: str) -> Experiment:
    """Read an experiment through DVC; raises `UserError` for a name or a file that is not there."""
    try:
        files = DVCFileSystem(rev=None if name == "workspace" else name)
        params = YAML(typ="safe", pure=True).load(files.read_text("params.yaml", encoding="utf-8"))
        return Experiment(
            name,
            flat(params),
            comparisons.read_rows(io.BytesIO(files.read_bytes("artifacts/judged.csv"))),
            {seed: likelihood(files, seed) for seed in params["ppo"]["seeds"]},
            {path: files.info(path).get("dvc_info", {}).get("md5", "") for path in RULERS},
        )
    except FileNotFoundError as error:
        path = str(error).rpartition(": ")[2].strip("'")
        raise UserError(
            f"{name}: {path} is not in DVC's cache: `dvc pull --all-commits`, or run that experiment again"
        ) from None
    except DvcException as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from None


def likelihood(files: DVCFileSystem, seed: int) -> pd.DataFrame:
    text = files.read_text(f"artifacts/val_nll/ppo-{seed}.jsonl", encoding="utf-8")
    return pd.DataFrame(json.loads(line) for line in text.split("\n") if line)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested parameters under dotted keys."""
    found = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def compare(control: Experiment, treatment: Experiment) -> Pair:
    """Compare PPO's scores per prefix, seed by seed and sample by sample, where both have them."""
    seeds = [seed for seed in control.nll if seed in treatment.nll]
    if not seeds:
        raise UserError(f"{control.name} and {treatment.name}: expected at least one PPO seed that both ran")
    samples = set(control.judged["sample"]) & set(treatment.judged["sample"])
    before, after = (scores(experiment, seeds, samples) for experiment in (control, treatment))
    check_same(control, treatment, seeds)
    left_out = {
        key for path, keys in RULERS.items() for key in keys if control.rulers[path] != treatment.rulers[path]
    }
    seed, resamples = control.params["seed"], control.params["report.resamples"]
    found = []
    for measure in MEASURES:
        if measure.key not in left_out:
            differences = after[measure.key] - before[measure.key]
            name = f"{treatment.name} - {control.name}"
            nothing = np.zeros_like(differences[0])
            found.append(comparisons.pooled(name, measure, differences, nothing, seed, resamples))
    return Pair(control, treatment, seeds, [m for m in MEASURES if m.key in left_out], found)


def scores(experiment: Experiment, seeds: list[int], samples: set[int]) -> dict[str, np.ndarray]:
    """Return `[measure]` arrays [seeds, prefixes, samples] of the PPO policies."""
    judged = experiment.judged[experiment.judged["sample"].isin(samples)]
    policies = [f"ppo-{seed}" for seed in seeds]
    nll = {f"ppo-{seed}": experiment.nll[seed] for seed in seeds}
    found = comparisons.scores(comparisons.prepare(judged, policies), nll)
    return {key: np.stack([arrays[policy] for policy in policies]) for key, arrays in found.items()}


def check_same(control: Experiment, treatment: Experiment, seeds: list[int]) -> None:
    """Raise `UserError` unless both were tested on the same prefixes and the same reviews."""
    both = control, treatment
    prefixes = [set(zip(e.judged["id"], e.judged["prefix"], strict=True)) for e in both]
    reviews = [set(zip(e.nll[seeds[0]]["id"], e.nll[seeds[0]]["tokens"], strict=True)) for e in both]
    for what, (one, other) in (("test prefixes", prefixes), ("held-out reviews", reviews)):
        if one != other:
            raise UserError(
                f"{control.name} and {treatment.name}: expected the same {what}, {len(one & other)} of "
                f"{len(one | other)} are common"
            )


def with_family(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs with Holm's p-values over all tests of all pairs."""
    family = iter(comparisons.adjusted([comparison for pair in pairs for comparison in pair.found]))
    return [pair._replace(found=[next(family) for _ in pair.found]) for pair in pairs]


def document(control: Experiment, pairs: list[Pair]) -> str:
    """The whole of compare.md."""
    tests = sum(len(pair.found) for pair in pairs)
    opening = f"""# PPO between experiments

The control is {md.escape(control.name)}. Every difference is PPO of an experiment minus PPO of the control,
on the same test prefixes, PPO seed by PPO seed and sample by sample, and under the same random numbers
where seed and sampling settings agree. Holm p adjusts over all {tests} tests of this file. A change counts
as shown only if both of its 95% intervals lie on one side of 0, its Holm p is below {ALPHA}, and no PPO
seed points the other way; it is then shown of the policies trained here, and the interval over new seeds
speaks for other seeds.

Not shown by this file: that the best of several experiments stays the best elsewhere. Experiments that were
run and are not listed are not adjusted for, and a choice made on these prefixes looks better on them than it
is. Judge, VADER and reward model are automatic measures of sentiment only. Columns are those of the report's
section 3."""
    return "\n\n".join([opening, *(section(pair) for pair in pairs)]) + "\n"


def section(pair: Pair) -> str:
    """One experiment against the control: what is shown, what differs in the parameters, every number."""
    names = [md.escape(experiment.name) for experiment in (pair.treatment, pair.control)]
    parts = [
        f"## {names[0]} - {names[1]}",
        "\n".join(f"- {sentence}" for sentence in sentences(pair.found)),
        parameters(pair.control, pair.treatment),
        tables.difference_table(pair.found),
        tables.between_seeds(pair.found, [f"PPO {seed}" for seed in pair.seeds]),
    ]
    if pair.left_out:
        listed = ", ".join(measure.name for measure in pair.left_out)
        parts.insert(3, f"Left out, since other models scored the two: {listed}.")
    return "\n\n".join(parts)


def sentences(found: list[Comparison]) -> list[str]:
    """Say by rule what is shown, what is not, and what is shown of these seeds alone."""
    ways = [direction(comparison) for comparison in found]
    shown = [f"{c.measure.name} {change(c, way)}" for c, way in zip(found, ways, strict=True) if way]
    silent = [c.measure.name for c, way in zip(found, ways, strict=True) if not way]
    here = [c.measure.name for c, way in zip(found, ways, strict=True) if way and only_here(c)]
    lines = [f"**Shown** on {found[0].result.n} prefixes: {'; '.join(shown) or 'no difference'}."]
    if silent:
        lines.append(f"**Not shown**: a difference in {', '.join(silent)}.")
    if here:
        lines.append(
            f"**Not shown of other PPO seeds** (interval over new seeds covers 0): {', '.join(here)}."
        )
    return lines


def parameters(control: Experiment, treatment: Experiment) -> str:
    """The parameters that differ, as a table."""
    both = control.params, treatment.params
    keys = [key for key in both[0] | both[1] if both[0].get(key, ABSENT) != both[1].get(key, ABSENT)]
    if not keys:
        return "No parameter differs; code, data or environment may."
    rows = [[f"`{key}`", *(md.escape(shown(params.get(key, ABSENT))) for params in both)] for key in keys]
    return md.table(["Parameter", md.escape(control.name), md.escape(treatment.name)], rows, text_columns=3)


def shown(value: Any) -> str:
    return "absent" if value is ABSENT else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    run(main)
