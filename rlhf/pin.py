"""Find the full commit of a hub repository's branch or tag, and pin a source of params.yaml to it:
`python -m rlhf.pin OWNER/NAME [BRANCH] [--dataset] [--key fetch.policy]`.

The hub is the one that `HF_ENDPOINT` names; a token is taken as huggingface_hub takes it, and is never shown.
"""

import argparse
import io
import re
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from ruamel.yaml import YAML

from rlhf import config, errors, record
from rlhf.errors import UserError

PARAMS = "params.yaml"
SECONDS = 30  # for the hub to answer


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.pin", description="Find the full commit of a hub repository's branch or tag."
    )
    parser.add_argument("name", metavar="OWNER/NAME")
    parser.add_argument("branch", metavar="BRANCH", nargs="?", default="main", help="a branch, tag or commit")
    parser.add_argument("--dataset", action="store_true", help="a data set, not a model")
    parser.add_argument("--key", metavar="SECTION", help="pin this section of params.yaml, as fetch.policy")
    arguments = parser.parse_args()
    check_name(arguments.name)
    if arguments.key is not None:
        check_key(arguments.key)
    commit = resolve(arguments.name, arguments.branch, arguments.dataset)
    print(commit)
    if arguments.key is not None:
        text = Path(PARAMS).read_text(encoding="utf-8")
        record.write_text(PARAMS, pinned(text, arguments.key, arguments.name, commit))
        print(f"{PARAMS}: {arguments.key} is pinned; its path and license are as they were: check them")


def check_name(name: str) -> None:
    """Raise `UserError` unless `name` reads owner/name in the hub's own letters."""
    try:
        validate_repo_id(name)
        known = name.count("/") == 1
    except HFValidationError:
        known = False
    if not known:
        raise UserError(f"repository is {name!r}: expected owner/name, as Qwen/Qwen3-0.6B-Base")


def check_key(key: str) -> None:
    """Raise `UserError` unless params.yaml is sound and `key` is one of its sources."""
    known = [f"fetch.{name}" for name in vars(config.load(PARAMS).fetch)]
    if key not in known:
        raise UserError(f"--key is {key!r}: expected one of {', '.join(known)}")


def resolve(name: str, branch: str, dataset: bool) -> str:
    """Ask the hub for the commit of a branch, tag or commit; raises `UserError` in our own words, so that no
    address or token of the user's can show."""
    kind = "data set" if dataset else "model"
    ask = hub.HfApi().dataset_info if dataset else hub.HfApi().model_info
    try:
        commit = ask(name, revision=branch, timeout=SECONDS).sha
    except GatedRepoError:
        reason = "is gated: accept its terms on the hub and log in with `hf auth login`"
    except RevisionNotFoundError:
        reason = f"has no branch, tag or commit {branch!r}"
    except RepositoryNotFoundError:
        other = "leave out --dataset for a model" if dataset else "name --dataset for a data set"
        reason = f"is not there, or needs `hf auth login`; {other}"
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = ": a token is missing, wrong or without access" if status in (401, 403) else ""
        reason = f"the hub answered with status {status}{hint}"
    except OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set, and a branch can only be looked up online"
    except (KeyError, TypeError, ValueError, AttributeError):
        reason = "the hub's answer cannot be understood"
    except Exception as error:
        reason = f"the hub cannot be reached ({type(error).__name__})"
    else:
        if isinstance(commit, str) and re.fullmatch("[0-9a-f]{40}", commit):
            return commit
        reason = "the hub's answer names no full commit"
    raise UserError(f"{kind} {name}: {reason}")


def pinned(text: str, key: str, name: str, commit: str) -> str:
    """Return the text of params.yaml with source `key` at a hub commit, its other keys as they were."""
    yaml, written = YAML(), io.StringIO()
    params = yaml.load(text)
    section, source = key.split(".")
    params[section][source].update({"kind": "hub", "name": name, "revision": commit, "sha256": {}})
    yaml.dump(params, written)
    return written.getvalue()


if __name__ == "__main__":
    errors.run(main)
