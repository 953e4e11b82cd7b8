"""Compare PPO between experiments, text by text: `python -m tools.compare main exp-a exp-b`.

Each name is a git revision or a DVC experiment, `workspace` the working tree; the first is the control. What
was judged is read through DVC at each revision, so no checkout is needed. Writes reports/compare.md; with
`--pipeline qa` it reads the second pipeline, and writes qa/reports/compare.md.
"""

import argparse
import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from dvc.api import DVCFileSystem
from dvc.exceptions import DvcException
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf.errors import UserError, run
from rlhf.record import write_text
from rlhf.report import answers, comparisons, tables
from rlhf.report import markdown as md
from rlhf.report.comparisons import Comparison, Measure, Unit
from rlhf.report.verdict import ALPHA, change, direction, only_here

OUTPUT = "reports/compare.md"
ABSENT = object()


class Pipeline(NamedTuple):
    """What differs between the two pipelines.

    `folder` is empty or ends with "/". `same` names, by column, what both sides must have been tested on.
    `rulers` are the models that score, each with the keys of its measures; `closing` says what no measure is.
    """

    folder: str
    measures: tuple[Measure, ...]
    prepare: Callable[[pd.DataFrame, list[str]], pd.DataFrame]
    unit: Unit
    same: dict[str, str]
    rulers: dict[str, tuple[str, ...]]
    closing: str


REVIEWS = Pipeline(
    folder="",
    measures=comparisons.MEASURES,
    prepare=comparisons.prepare,
    unit=comparisons.PREFIX,
    same={"prefix": "test prefixes"},
    rulers={
        "artifacts/judge_model": ("judge_full", "judge_continuation"),
        "artifacts/reward": ("reward",),
    },
    closing="Judge, VADER and reward model are automatic measures of sentiment only.",
)
ANSWERS = Pipeline(
    folder="qa/",
    measures=answers.MEASURES,
    prepare=answers.prepare,
    unit=answers.QUESTION,
    # Token F1 and chrF hold an answer against the reference.
    same={"question": "test questions", "reference": "reference answers to the test questions"},
    # The annotator's rules are code, no model.
    rulers={"artifacts/reward": ("reward",)},
    closing="""The heuristic score is a rule about style, token F1 and chrF are overlap with one hand-written
answer, and the reward model is automatic too: no person judged these answers.""",
)


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
    parser.add_argument("--pipeline", choices=("root", "qa"), default="root", help="where its dvc.yaml is")
    parser.add_argument(
        "names", nargs="+", metavar="revision", help="the control, then what to compare to it"
    )
    arguments = parser.parse_args()
    names, pipeline = arguments.names, ANSWERS if arguments.pipeline == "qa" else REVIEWS
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"revisions {' '.join(names)}: expected two or more, none twice")
    control, *treatments = [read(name, pipeline) for name in names]
    pairs = [compare(control, treatment, pipeline) for treatment in treatments]
    output = f"{pipeline.folder}{OUTPUT}"
    write_text(output, document(control, with_family(pairs), pipeline))
    print(f"wrote {output}")


def read(name: str, pipeline: Pipeline) -> Experiment:
    """Read an experiment through DVC; raises `UserError` for a name or a file that is not there."""
    try:
        files = DVCFileSystem(rev=None if name == "workspace" else name)
        return contents(name, files, pipeline)
    except FileNotFoundError as error:
        path = str(error).rpartition(": ")[2].strip("'")
        if recorded(files, path):
            missing = f"{path} is not in DVC's cache: `dvc pull --all-commits`, or run that experiment again"
        else:
            missing = f"expected a whole run of the pipeline, {path} is not there"
        raise UserError(f"{name}: {missing}") from None
    except DvcException as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from None
    except (YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name}: expected the files of a run, found {error!r}") from None


def contents(name: str, files: DVCFileSystem, pipeline: Pipeline) -> Experiment:
    """Read an experiment of a pipeline, whose files lie in its folder."""
    folder = pipeline.folder
    params = YAML(typ="safe", pure=True).load(files.read_text(f"{folder}params.yaml", encoding="utf-8"))
    return Experiment(
        name,
        flat(params),
        comparisons.read_rows(io.BytesIO(files.read_bytes(f"{folder}artifacts/judged.csv"))),
        {seed: likelihood(files, folder, seed) for seed in params["ppo"]["seeds"]},
        {path: recorded(files, f"{folder}{path}") for path in pipeline.rulers},
    )


def recorded(files: DVCFileSystem, path: str) -> str:
    """Return the hash that DVC has of a path; empty where no run has left one."""
    return files.info(path).get("dvc_info", {}).get("md5", "") if files.exists(path) else ""


def likelihood(files: DVCFileSystem, folder: str, seed: int) -> pd.DataFrame:
    text = files.read_text(f"{folder}artifacts/val_nll/ppo-{seed}.jsonl", encoding="utf-8")
    return pd.DataFrame(json.loads(line) for line in text.split("\n") if line)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested parameters under dotted keys."""
    found = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def compare(control: Experiment, treatment: Experiment, pipeline: Pipeline) -> Pair:
    """Compare PPO's scores per unit, seed by seed and sample by sample, where both have them."""
    seeds = [seed for seed in control.nll if seed in treatment.nll]
    if not seeds:
        raise UserError(f"{control.name} and {treatment.name}: expected at least one PPO seed that both ran")
    samples = set(control.judged["sample"]) & set(treatment.judged["sample"])
    before, after = (scores(e, seeds, samples, pipeline) for e in (control, treatment))
    check_same(control, treatment, seeds, pipeline)
    # What scores a text must be the same on both sides, or two rulers are compared.
    differ = [path for path in pipeline.rulers if control.rulers[path] != treatment.rulers[path]]
    left_out = {key for path in differ for key in pipeline.rulers[path]}
    seed, resamples = control.params["seed"], control.params["report.resamples"]
    found = []
    for measure in pipeline.measures:
        if measure.key not in left_out:
            differences = after[measure.key] - before[measure.key]
            name = f"{treatment.name} - {control.name}"
            nothing = np.zeros_like(differences[0])
            found.append(comparisons.pooled(name, measure, differences, nothing, seed, resamples))
    return Pair(control, treatment, seeds, [m for m in pipeline.measures if m.key in left_out], found)


def scores(
    experiment: Experiment, seeds: list[int], samples: set[int], pipeline: Pipeline
) -> dict[str, np.ndarray]:
    """Return `[measure]` arrays [seeds, units, samples] of the PPO policies."""
    judged = experiment.judged[experiment.judged["sample"].isin(samples)]
    policies = [f"ppo-{seed}" for seed in seeds]
    nll = {f"ppo-{seed}": experiment.nll[seed] for seed in seeds}
    found = comparisons.scores(pipeline.prepare(judged, policies), nll, pipeline.measures)
    return {key: np.stack([arrays[policy] for policy in policies]) for key, arrays in found.items()}


def check_same(control: Experiment, treatment: Experiment, seeds: list[int], pipeline: Pipeline) -> None:
    """Raise `UserError` unless both were tested on the same texts, and their NLL is of the same texts."""
    both = control, treatment
    texts = {what: [values(e.judged, column) for e in both] for column, what in pipeline.same.items()}
    texts[f"held-out {pipeline.unit.texts}"] = [values(e.nll[seeds[0]], "tokens") for e in both]
    for what, (one, other) in texts.items():
        if one != other:
            raise UserError(
                f"{control.name} and {treatment.name}: expected the same {what}, {len(one & other)} of "
                f"{len(one | other)} are common"
            )


def values(rows: pd.DataFrame, column: str) -> set[tuple]:
    """Return what a column holds, each with its row's id."""
    return set(zip(rows["id"], rows[column], strict=True))


def with_family(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs with Holm's p-values over all tests of all pairs."""
    family = iter(comparisons.adjusted([comparison for pair in pairs for comparison in pair.found]))
    return [pair._replace(found=[next(family) for _ in pair.found]) for pair in pairs]


def document(control: Experiment, pairs: list[Pair], pipeline: Pipeline) -> str:
    """The whole of compare.md."""
    tests, many = sum(len(pair.found) for pair in pairs), pipeline.unit.many
    opening = f"""# PPO between experiments

The control is {md.escape(control.name)}. Every difference is PPO of an experiment minus PPO of the control,
on the same test {many}, PPO seed by PPO seed and sample by sample, and under the same random numbers
where seed and sampling settings agree. Holm p adjusts over all {tests} tests of this file. A change counts
as shown only if both of its 95% intervals lie on one side of 0, its Holm p is below {ALPHA}, and no PPO
seed points the other way; it is then shown of the policies trained here, and the interval over new seeds
speaks for other seeds.

Not shown by this file: that the best of several experiments stays the best elsewhere. Experiments that were
run and are not listed are not adjusted for, and a choice made on these {many} looks better on them than it
is. {pipeline.closing} Columns are those of the report's
section 3."""
    return "\n\n".join([opening, *(section(pair, pipeline.unit) for pair in pairs)]) + "\n"


def section(pair: Pair, unit: Unit) -> str:
    """One experiment against the control: what is shown, what differs in the parameters, every number."""
    names = [md.escape(experiment.name) for experiment in (pair.treatment, pair.control)]
    parts = [
        f"## {names[0]} - {names[1]}",
        "\n".join(f"- {sentence}" for sentence in sentences(pair.found, unit)),
        parameters(pair.control, pair.treatment),
        tables.difference_table(pair.found),
        tables.between_seeds(pair.found, [f"PPO {seed}" for seed in pair.seeds], unit),
    ]
    if pair.left_out:
        listed = ", ".join(measure.name for measure in pair.left_out)
        parts.insert(3, f"Left out, since other models scored the two: {listed}.")
    return "\n\n".join(parts)


def sentences(found: list[Comparison], unit: Unit) -> list[str]:
    """Say by rule what is shown, what is not, and what is shown of these seeds alone."""
    ways = [direction(comparison) for comparison in found]
    shown = [f"{c.measure.name} {change(c, way)}" for c, way in zip(found, ways, strict=True) if way]
    silent = [c.measure.name for c, way in zip(found, ways, strict=True) if not way]
    here = [c.measure.name for c, way in zip(found, ways, strict=True) if way and only_here(c)]
    lines = [f"**Shown** on {found[0].result.n} {unit.many}: {'; '.join(shown) or 'no difference'}."]
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
