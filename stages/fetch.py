"""Obtain the pinned policy, reviews and judge, and record every file's size and hash.

    python -m stages.fetch

Reads section `fetch` of params.yaml; writes data/manifests/{policy,reviews,judge}.json. The files themselves
stay in the cache of `rlhf.sources`, where later stages find them, checked, through their manifest.
"""

from rlhf import sources
from rlhf.config import load
from rlhf.errors import run
from rlhf.record import write_json


def main() -> None:
    """Fetch all three before writing, so that a failure leaves the earlier manifests as they were."""
    pins = load().fetch
    manifests = {
        "policy": sources.fetch(pins.policy),
        "reviews": sources.fetch(pins.reviews),
        "judge": sources.fetch(pins.judge),
    }
    for name, manifest in manifests.items():
        write_json(f"data/manifests/{name}.json", manifest)
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        print(f"fetch: {name}: {len(manifest['files'])} files, {size:,} bytes")


if __name__ == "__main__":
    run(main)
