"""Obtain the pinned models and data, and record every file's size and hash.

    python -m stages.fetch

Reads section `fetch` of params.yaml; writes data/manifests/<name>.json for each source. The files themselves
stay in the cache of `rlhf.sources`, where later stages find them, checked, through their manifest.
"""

from rlhf import sources
from rlhf.config import load
from rlhf.errors import run
from rlhf.record import write_json


def main() -> None:
    """Fetch everything before writing, so that a failure leaves the earlier manifests as they were."""
    manifests = {name: sources.fetch(pin) for name, pin in vars(load().fetch).items()}
    for name, manifest in manifests.items():
        write_json(f"data/manifests/{name}.json", manifest)
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        print(f"fetch: {name}: {len(manifest['files'])} files, {size:,} bytes")


if __name__ == "__main__":
    run(main)
