"""Section 8 of the report, as markdown: pins, parameters, environment, and what is promised."""

import json
from typing import Any

from rlhf.report import markdown as md

PROMISE = """- **Same machine, versions and thread count**: every output has the same bytes from run to run,
  and a run that was interrupted ends with the bytes of one that was not.
- **Another machine**: the same split, and the same statistics from the same judged rows. Trained weights, and
  with them texts and scores, may differ: floating-point sums depend on instruction set and thread count.
- **Every random draw** comes from a stream named by seed, stage, purpose, step and row; policies share the
  evaluation's noise, so that their differences are paired draw by draw."""


def section(
    manifests: dict[str, dict], split: str, params: dict[str, Any], environment: dict[str, str], limits: str
) -> str:
    """Section 8: pins, split, parameters, environment, promises, licences and limits.

    `manifests[what]` is the fetch stage's JSON, `params` is params.yaml as nested plain values, `environment`
    is `rlhf.environment`'s; `split` and `limits` are markdown.
    """
    if len(params["ppo"]["seeds"]) == 1:
        limits += "\n- One PPO seed: nothing is known about other training runs."
    return "\n\n".join(
        [
            "## 8. Provenance",
            _pins(manifests),
            "### Split",
            split,
            "### Parameters",
            md.folded("All parameters that can change a result", f"```text\n{_flat(params)}\n```"),
            "### Environment",
            "What this report was made with, also in `reports/environment.json`: the only part of "
            "it that describes the machine.",
            md.table(["What", "Value"], [[md.escape(k), md.escape(v)] for k, v in environment.items()], 2),
            "### What is promised about reproduction",
            PROMISE,
            "### Limits of this study",
            limits,
        ]
    )


def _pins(manifests: dict[str, dict]) -> str:
    sources = {what: manifest["source"] for what, manifest in manifests.items()}
    rows = [
        [what, *(md.escape(str(source[key] or "–")) for key in ("kind", "name", "revision", "license"))]
        for what, source in sources.items()
    ]
    files = [
        [what, md.escape(name), str(file["bytes"]), f"`{file['sha256']}`"]
        for what, manifest in manifests.items()
        for name, file in manifest["files"].items()
    ]
    pinned = [
        [what, md.escape(name), f"`{digest}`"]
        for what, source in sources.items()
        for name, digest in source["sha256"].items()
    ]
    return "\n\n".join(
        [
            md.table(["What", "Kind", "Name", "Revision", "Licence"], rows, 5),
            md.folded(
                "Hashes of every file",
                f"{md.table(['What', 'Pinned file', 'sha256'], pinned, 3)}\n\n"
                f"{md.table(['What', 'Unpacked file', 'Bytes', 'sha256'], files, 2)}",
            ),
        ]
    )


def _flat(values: dict[str, Any], prefix: str = "") -> str:
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines.append(_flat(value, f"{prefix}{key}."))
        else:
            lines.append(f"{prefix}{key}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
