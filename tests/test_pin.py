"""`python -m rlhf.pin` against a small hub on this machine, in a process of its own, as HF_ENDPOINT is read
when huggingface_hub is imported."""

import json
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest
from architecture import ROOT
from ruamel.yaml import YAML
from toy import environment

from rlhf import config
from rlhf.errors import UserError
from rlhf.pin import check_key, pinned

COMMIT = "906bfd4b4dc7f14ee4320094d8b41684abff8539"
OTHER = "da87bfb608c14b7cf20ba1ce41287e8de496c0cd"
TOKEN = "hf_secret"
PARAMS = (ROOT / "params.yaml").read_text(encoding="utf-8")

# What the hub says: the path under /api -> status, X-Error-Code, body.
ANSWERS = {
    "/models/owner/model/revision/main": (200, None, {"id": "owner/model", "sha": COMMIT}),
    "/models/owner/model/revision/v1.0": (200, None, {"id": "owner/model", "sha": OTHER}),
    "/datasets/owner/data/revision/main": (200, None, {"id": "owner/data", "sha": OTHER}),
    "/models/owner/model/revision/gone": (404, "RevisionNotFound", {"error": "Invalid rev id: gone"}),
    "/models/owner/private/revision/main": (401, None, {"error": "Invalid username or password."}),
    "/models/owner/gated/revision/main": (403, "GatedRepo", {"error": "Access is restricted"}),
    "/models/owner/closed/revision/main": (403, None, {"error": "Forbidden"}),
    "/models/owner/broken/revision/main": (500, None, {"error": "Internal"}),
    "/models/owner/busy/revision/main": (429, None, {"error": "Too many requests"}),
    "/models/owner/page/revision/main": (200, None, "<html>a login page</html>"),
    "/models/owner/list/revision/main": (200, None, [COMMIT]),
    "/models/owner/empty/revision/main": (200, None, {"id": "owner/empty"}),
    "/models/owner/short/revision/main": (200, None, {"id": "owner/short", "sha": COMMIT[:7]}),
}
NOT_THERE = (404, "RepoNotFound", {"error": "Repository not found"})


class Hub(NamedTuple):
    """A running hub: its address, and the request line and token of everything that it was asked."""

    address: str
    asked: list[tuple[str, str | None]]


@pytest.fixture(scope="module")
def hub():
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            status, code, body = ANSWERS.get(self.path.removeprefix("/api"), NOT_THERE)
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Keep the console quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield Hub(f"http://127.0.0.1:{server.server_port}", asked)
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path) -> Path:
    """A project's root, as far as this program looks at it."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def clean_environment(folder: Path, address: str) -> dict[str, str]:
    """A shell with that hub, a token, no cache and no proxy."""
    clean = {k: v for k, v in environment().items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    return clean | {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "home"),
    }


def pin(folder: Path, address: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run the program in `folder`."""
    command = [sys.executable, "-m", "rlhf.pin", *arguments]
    env = clean_environment(folder, address) | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_a_branch_is_resolved_and_params_are_left_alone(hub, folder):
    done = pin(folder, hub.address, "owner/model")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{COMMIT}\n", "")
    assert hub.asked[-1] == ("/api/models/owner/model/revision/main", f"Bearer {TOKEN}")
    assert (folder / "params.yaml").read_text(encoding="utf-8") == PARAMS


def test_a_tag_is_written_into_params_and_nothing_else_changes(hub, folder):
    done = pin(folder, hub.address, "owner/model", "v1.0", "--key", "fetch.policy")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{OTHER}\nparams.yaml: fetch.policy is pinned; ")
    written = config.load(folder / "params.yaml").fetch
    before = config.load(ROOT / "params.yaml").fetch
    assert (written.reviews, written.judge) == (before.reviews, before.judge)
    policy = written.policy
    assert (policy.kind, policy.name, policy.revision, policy.sha256) == ("hub", "owner/model", OTHER, {})
    assert (policy.path, policy.license) == (before.policy.path, before.policy.license)


def test_a_data_set_has_its_own_endpoint(hub, folder):
    done = pin(folder, hub.address, "owner/data", "--dataset", "--key", "fetch.reviews")
    assert done.stdout.startswith(f"{OTHER}\n")
    assert config.load(folder / "params.yaml").fetch.reviews.revision == OTHER


def test_the_other_pipeline_s_sources_are_its_own(tmp_path, monkeypatch):
    shutil.copy(ROOT / "qa/params.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    check_key("fetch.policy")
    with pytest.raises(UserError, match=r"--key is 'fetch\.reviews': expected one of fetch\.policy$"):
        check_key("fetch.reviews")


# Arguments, and how the one line begins.
ERRORS = {
    "owner/none": "model owner/none: is not there, or needs `hf auth login`; name --dataset for a data set",
    "owner/private": "model owner/private: the hub answered with status 401: a token is missing, wrong or ",
    "owner/gated": "model owner/gated: is gated: accept its terms on the hub and log in with ",
    "owner/closed": "model owner/closed: the hub answered with status 403: a token is missing, wrong or ",
    "owner/broken": "model owner/broken: the hub answered with status 500\n",
    "owner/busy": "model owner/busy: the hub answered with status 429\n",
    "owner/page": "model owner/page: the hub's answer cannot be understood",
    "owner/list": "model owner/list: the hub's answer cannot be understood",
    "owner/empty": "model owner/empty: the hub's answer names no full commit",
    "owner/short": "model owner/short: the hub's answer names no full commit",
    "owner/model gone": "model owner/model: has no branch, tag or commit 'gone'",
    "owner/model main --dataset": "data set owner/model: is not there, or needs `hf auth login`; leave out",
    "owner": "repository is 'owner': expected owner/name, as Qwen/Qwen3-0.6B-Base",
    "https://owner/name": "repository is 'https://owner/name': expected owner/name",
    "../name": "repository is '../name': expected owner/name",
    "owner/model main --key ppo.lr": "--key is 'ppo.lr': expected one of fetch.policy, fetch.reviews, ",
}
# The program once for each line, in one process, since its libraries take long to load.
PROGRAM = """
import contextlib, io, json, sys
from rlhf import errors
from rlhf import pin
answers = {}
for line in sys.stdin.read().splitlines():
    sys.argv, out, err, status = ["pin", *line.split()], io.StringIO(), io.StringIO(), 0
    if "--key" not in line:
        sys.argv += ["--key", "fetch.policy"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            errors.run(pin.main)
        except SystemExit as end:
            status = end.code
    answers[line] = status, out.getvalue(), err.getvalue()
print(json.dumps(answers))
"""


def test_each_error_is_one_line_and_the_file_is_untouched(hub, folder):
    variables = clean_environment(folder, hub.address)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=variables,
        input="\n".join(ERRORS),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers = json.loads(done.stdout)
    assert answers.keys() == ERRORS.keys()
    for arguments, (status, out, err) in answers.items():
        assert (status, out) == (1, ""), arguments
        assert err.startswith(f"error: {ERRORS[arguments]}") and err.count("\n") == 1, err
        assert TOKEN not in err and hub.address not in err
    assert (folder / "params.yaml").read_text(encoding="utf-8") == PARAMS


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached (ConnectError)"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and a branch can only be looked up online"),
    ],
)
def test_without_a_network_the_error_is_one_line(folder, variables, message):
    done = pin(folder, "http://127.0.0.1:9", "owner/model", **variables)
    assert (done.returncode, done.stderr) == (1, f"error: model owner/model: {message}\n")


def test_a_broken_params_file_is_found_before_the_hub_is_asked(hub, folder):
    (folder / "params.yaml").write_text("seed: [")
    asked = len(hub.asked)
    done = pin(folder, hub.address, "owner/model", "--key", "fetch.policy")
    assert (done.returncode, len(hub.asked)) == (1, asked)
    assert done.stderr.startswith("error: params.yaml: not valid YAML") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("source", ["policy", "reviews", "judge"])
@pytest.mark.parametrize("commit", [COMMIT, "1" * 40, "5e" + "1" * 38, "0" * 40])
def test_only_the_source_s_own_lines_change_and_the_form_is_the_one_that_dvc_writes(source, commit, tmp_path):
    """A commit of digits alone, or of digits and an e, would be a number without quotes."""
    text = pinned(PARAMS, f"fetch.{source}", "owner/name", commit)
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    assert getattr(config.load(tmp_path / "params.yaml").fetch, source).revision == commit
    yaml = YAML()
    with (tmp_path / "again.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(yaml.load(text), file)
    assert (tmp_path / "again.yaml").read_text(encoding="utf-8") == text
    assert outside(text, source) == outside(PARAMS, source) and len(outside(text, source)) > 100


def outside(text: str, source: str) -> list[str]:
    """The lines before and after a source's kind, name, revision, path, sha256 and license."""
    lines = text.splitlines()
    start = lines.index(f"  {source}:")
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("    license:"))
    return lines[: start + 1] + lines[end:]
