"""One commit of a model hub's repository: the files that may be used, each held to what the hub lists for it.

The hub is the one that `HF_ENDPOINT` names, huggingface_hub's default otherwise; a token is taken as that
library takes it. Errors are told in our own words, so that no address or token of the user's can show.
"""

import contextlib
import hashlib
import io
import logging
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from rlhf.errors import UserError
from rlhf.record import sha256_file

FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.parquet")
NAMED_FILES = (*FILES, "*.gguf", "*.csv", "*.tsv", "*.jsonl")  # where the pin's path is the file itself
OFFLINE = (
    "is not in the cache, and offline mode is on: run the fetch stage once with a network and without "
    "HF_HUB_OFFLINE, or copy the cache (RLHF_CACHE) from a machine that has it"
)


def download(name: str, commit: str, path: str | None, folder: Path) -> None:
    """Fill `folder` with the allowed files of model or data set `name` at `commit`, those at `path` alone if
    it is given. Whole files that are there already, of a download that was interrupted, are kept.

    Every file must have the size and the hash (sha256, or git's own for a small file) that the hub lists.
    Raises `UserError`, one line, for whatever goes wrong; what is in `folder` then is never taken as it is.
    """
    label = f"hub {name} {commit}"
    with _told(label):
        kind, listed = _listed(name, commit)
        files = [file for file in listed if _is_wanted(file.rfilename, path)]
        missing = [file for file in files if not _is_whole(folder / file.rfilename, file)]
        size = sum(file.size for file in missing)
        if size > (free := shutil.disk_usage(folder).free):
            raise UserError(f"{size:,} bytes are to be fetched, and the disk has {free:,} left")
    if missing:
        print(f"{label}: {len(missing)} files, {size:,} bytes", flush=True)
    for file in missing:
        with _told(f"{label}: {file.rfilename!r}"):
            _download_file({"repo_id": name, "revision": commit, "repo_type": kind}, file, folder)
    _keep_only(folder, {file.rfilename for file in files})


def _listed(name: str, commit: str) -> tuple[str, list[Any]]:
    """Ask for a model, then for a data set, at this commit; return which it is, and its files."""
    reason = "no model or data set of this name is there, or it needs `hf auth login` and a token with access"
    for kind in ("model", "dataset"):
        try:
            info = huggingface_hub.HfApi().repo_info(
                name,
                revision=commit,
                repo_type=kind,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
        except RevisionNotFoundError:
            reason = f"the {kind} is there, but has no such commit"
        except HfHubHTTPError as error:
            # Without a token, 401 is also the answer for a name that is a data set's and no model's.
            if isinstance(error, GatedRepoError) or error.response.status_code not in (401, 404):
                raise
        else:
            if info.sha != commit:
                raise UserError(f"the hub answered for another commit, {info.sha!r}")
            return kind, info.siblings
    raise UserError(reason)


def _is_wanted(file: str, path: str | None) -> bool:
    """A hidden name is not, and neither is one that leads out of the folder: /name, ../name."""
    patterns = NAMED_FILES if file == path else FILES
    inside = path is None or file == path or file.startswith(f"{path}/")
    safe = not re.search(r"(^|/)[./]|\\", file)
    return inside and safe and any(fnmatchcase(file, pattern) for pattern in patterns)


def _is_whole(path: Path, file: Any) -> bool:
    """Whether `path` has the size and hash of `file`: sha256 for one that git keeps elsewhere (LFS)."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.lfs is not None:
        return sha256_file(path) == file.lfs.sha256
    start = f"blob {file.size}\0".encode()
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.sha1(start, usedforsecurity=False))
    return digest.hexdigest() == file.blob_id


def _download_file(commit: dict[str, str], file: Any, folder: Path) -> None:
    path = folder / file.rfilename
    path.unlink(missing_ok=True)  # the library would take one that is there for right
    huggingface_hub.hf_hub_download(filename=file.rfilename, local_dir=folder, **commit)
    if not _is_whole(path, file):
        path.unlink()
        raise UserError("what came is not the file that the hub lists: short, or changed on the way")


def _keep_only(folder: Path, names: set[str]) -> None:
    """Remove what the hub does not list: the library's notes, and whatever else got into the folder."""
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn any error into one `UserError` about `what`, and keep the library's own words off the console."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        raise UserError(f"{what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _reason(error.__cause__)  # the library's word for any failure before the file itself
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OfflineModeIsEnabled):
        return OFFLINE
    if isinstance(error, GatedRepoError):
        return "is gated: accept its terms on the hub and log in with `hf auth login`"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        hint = ": the token is missing, wrong or without access" if status in (401, 403) else ""
        return f"the hub answered with status {status}{hint}"
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror
    if isinstance(error, FileMetadataError | KeyError | TypeError | ValueError | AttributeError):
        return "the hub's answer cannot be understood"
    if type(error) is OSError:  # the library's consistency check
        return "what came is not as long as the hub said"
    return f"the hub cannot be reached ({type(error).__name__})"
