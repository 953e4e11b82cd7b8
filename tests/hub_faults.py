"""What a hub's repository may hold, and all that may go wrong with it, each with what is to be said of it."""

import json

from hub_server import Fault, listing

COMMIT, OTHER = "a" * 40, "b" * 40
# What a repository may hold, and of it, what a pin without a path may bring.
WANTED = {
    "config.json": b'{"model_type": "none"}',
    "model.safetensors": bytes(range(256)) * 8,
    "onnx/tokenizer.json": b"{}",
}
UNWANTED = {
    "pytorch_model.bin": b"pickled",
    "modeling_evil.py": b"raise SystemExit",
    "model.gguf": b"GGUF",
    "README.md": b"# model",
    "data.csv": b"text,label\n",
    ".hidden.json": b"{}",
    ".files.json": b"{}",
}
LONG = {
    "model.safetensors": bytes(12_000_000)
}  # longer than the library's chunk of 10 MB, so that it resumes


def changed(files: dict, name: str) -> bytes:
    """The file with its fifth byte turned round, as long as it was."""
    return files[name][:4] + bytes([files[name][4] ^ 255]) + files[name][5:]


def described(**changes: object) -> bytes:
    """A listing with other values at its top."""
    return json.dumps(listing(COMMIT, WANTED) | changes).encode()


def listed(**changes: object) -> bytes:
    """A listing of one file, with other values in its entry."""
    entry = listing(COMMIT, {"model.safetensors": b"x"})["siblings"][0] | changes
    return described(siblings=[entry])


UNCLEAR = "the hub's answer cannot be understood"
ACCESS = ": the token is missing, wrong or without access"
GATED = "is gated: accept its terms on the hub and log in with `hf auth login`"
ABSENT = "no model or data set of this name is there, or it needs `hf auth login` and a token with access"
WRONG = "what came is not the file that the hub lists: short, or changed on the way"
INVALID = {"X-Error-Message": "Invalid credentials in Authorization header"}
WEIGHTS, CONFIG = "'model.safetensors': ", "'config.json': "

# A repository's name -> what goes wrong there, and what is said of it after the source's own name.
FAULTS = {
    "anonymous": (Fault("info", 401), ABSENT),
    "invalid-token": (Fault("info", 401, INVALID), ABSENT),
    "forbidden": (Fault("info", 403), f"the hub answered with status 403{ACCESS}"),
    "gated-listing": (Fault("info", 403, {"X-Error-Code": "GatedRepo"}), GATED),
    "no-endpoint": (Fault("info", 404), ABSENT),
    "busy": (Fault("info", 429), "the hub answered with status 429"),
    "broken": (Fault("info", 500), "the hub answered with status 500"),
    "down": (Fault("info", 503), "the hub answered with status 503"),
    "page": (Fault("info", body=b"<html>a login page</html>"), UNCLEAR),
    "list": (Fault("info", body=b"[1]"), UNCLEAR),
    "null": (Fault("info", body=b"null"), UNCLEAR),
    "not-utf8": (Fault("info", body=b'{"id": "\xff"}'), UNCLEAR),
    "no-id": (Fault("info", body=b"{}"), UNCLEAR),
    "no-files-key": (Fault("info", body=described(siblings=None)), UNCLEAR),
    "files-text": (Fault("info", body=described(siblings="all")), UNCLEAR),
    "no-name": (Fault("info", body=described(siblings=[{"size": 1}])), UNCLEAR),
    "no-size": (Fault("info", body=listed(size=None)), UNCLEAR),
    "size-text": (Fault("info", body=listed(size="many")), UNCLEAR),
    "no-sha256": (Fault("info", body=listed(lfs={"size": 1})), UNCLEAR),
    "nul-name": (Fault("info", body=listed(rfilename="a\0.json")), f"'a\\x00.json': {UNCLEAR}"),
    "other-commit": (
        Fault("info", body=described(sha=OTHER)),
        f"the hub answered for another commit, '{OTHER}'",
    ),
    "no-commit": (Fault("info", body=described(sha=None)), "the hub answered for another commit, None"),
    "head-401": (Fault("head", 401), f"{CONFIG}the hub answered with status 401{ACCESS}"),
    "head-403": (Fault("head", 403), f"{CONFIG}the hub answered with status 403{ACCESS}"),
    "head-gated": (Fault("head", 403, {"X-Error-Code": "GatedRepo"}), f"{CONFIG}{GATED}"),
    "head-404": (
        Fault("head", 404, {"X-Error-Code": "EntryNotFound"}),
        f"{CONFIG}the hub answered with status 404",
    ),
    "head-429": (Fault("head", 429), f"{CONFIG}the hub answered with status 429"),
    "head-500": (Fault("head", 500), f"{CONFIG}the hub answered with status 500"),
    "head-no-etag": (Fault("head", headers={"ETag": None}), f"{CONFIG}{UNCLEAR}"),
    "head-no-commit": (Fault("head", headers={"X-Repo-Commit": None}), f"{CONFIG}{UNCLEAR}"),
    "get-403": (Fault("get", 403), f"{CONFIG}the hub answered with status 403{ACCESS}"),
    "get-404": (Fault("get", 404), f"{CONFIG}the hub answered with status 404"),
    "get-429": (Fault("get", 429), f"{CONFIG}the hub answered with status 429"),
    "get-500": (Fault("get", 500), f"{CONFIG}the hub answered with status 500"),
    "cut-weights": (
        Fault("get", file="model.safetensors", sent=1000),
        f"{WEIGHTS}the hub cannot be reached (RemoteProtocolError)",
    ),
    "short-weights": (
        Fault("get", file="model.safetensors", sent=1000, honest=True),
        f"{WEIGHTS}what came is not as long as the hub said",
    ),
    "empty-config": (
        Fault("get", file="config.json", sent=0, honest=True),
        f"{CONFIG}what came is not as long as the hub said",
    ),
    "changed-weights": (
        Fault("get", file="model.safetensors", body=changed(WANTED, "model.safetensors")),
        WEIGHTS + WRONG,
    ),
    "changed-config": (Fault("get", file="config.json", body=changed(WANTED, "config.json")), CONFIG + WRONG),
    "longer-config": (
        Fault("get", file="config.json", body=WANTED["config.json"] + b" "),
        f"{CONFIG}what came is not as long as the hub said",
    ),
}
# The hub errs once or twice, and the same run goes on by itself.
HICCUPS = {
    "hiccup-cut": Fault("get", sent=11_000_000, times=1),
    "hiccup-429": Fault("get", 429, times=2),
    "hiccup-head": Fault("head", 500, times=2),
}
