"""Hub sources against a real HTTP server on this machine, in processes of their own: see hub_client."""

from pathlib import Path

import pytest
from hub_client import TOKEN, ask, pin
from hub_faults import ABSENT, COMMIT, FAULTS, HICCUPS, LONG, OTHER, UNWANTED, WANTED, changed, listed
from hub_server import Fault, running, sha256

LINE = f"error: hub owner/{{}} {COMMIT}: {{}}\n"


def assert_no_secret(folder: Path) -> None:
    """No file under `folder` holds the token."""
    for path in folder.rglob("*"):
        assert TOKEN not in str(path) and not (path.is_file() and TOKEN.encode() in path.read_bytes())


def cached(folder: Path) -> list[Path]:
    """The folders of the cache that count as whole."""
    return [path for path in (folder / "cache" / "hub").glob("*") if path.is_dir() and not path.suffix]


@pytest.fixture
def hub():
    """A hub with the model owner/model at COMMIT and the data set owner/data at OTHER."""
    with running() as hub:
        hub.repositories["models", "owner/model"] = {COMMIT: WANTED | UNWANTED}
        hub.repositories["datasets", "owner/data"] = {
            OTHER: {"data/train.parquet": b"PAR1", "README.md": b"#"}
        }
        yield hub


def test_a_model_is_brought_whole_and_nothing_else_of_its_repository_is(hub, tmp_path):
    answer = ask(tmp_path, hub.address, {"model": pin("model")})["model"]
    size = sum(map(len, WANTED.values()))
    fetching = f"hub owner/model {COMMIT}: "
    assert (answer["status"], answer["err"]) == (0, "")
    assert answer["out"] == f"{fetching}fetching\n{fetching}3 files, {size:,} bytes\n"
    files = {name: {"bytes": len(content), "sha256": sha256(content)} for name, content in WANTED.items()}
    assert answer["found"] == {"source": pin("model"), "files": dict(sorted(files.items()))}
    (folder,) = cached(tmp_path)
    assert {name: (folder / name).read_bytes() for name in WANTED} == WANTED
    asked = {path.split("/")[-1] for method, path, _, _ in hub.asked if method in ("GET", "HEAD")}
    assert not asked & set(UNWANTED)
    assert_no_secret(tmp_path)


def test_the_token_goes_to_the_hub_and_not_to_where_it_keeps_large_files(hub, tmp_path):
    ask(tmp_path, hub.address, {"model": pin("model")})
    tokens = {path: token for _, path, token, _ in hub.asked if "agent" not in path}
    elsewhere = {path for path in tokens if path.startswith("/elsewhere/")}
    assert {path.split("/")[-1] for path in elsewhere} == {"model.safetensors"}
    for path, token in tokens.items():
        assert token == (None if path in elsewhere else f"Bearer {TOKEN}"), path


def test_a_warm_cache_needs_no_hub(hub, tmp_path):
    tasks = {"model": pin("model"), "data": pin("data", revision=OTHER, path="data")}
    first = ask(tmp_path, hub.address, tasks)
    assert list(first["data"]["found"]["files"]) == ["train.parquet"]
    asked = len(hub.asked)
    manifests = {f"{name} again": answer["found"] for name, answer in first.items()}
    for variables in ({"HF_HUB_OFFLINE": "1"}, {}):
        again = ask(tmp_path, "http://127.0.0.1:9", tasks | manifests, **variables)
        assert {name: again[name]["found"] for name in tasks} == {
            name: first[name]["found"] for name in tasks
        }
        assert {(answer["out"], answer["err"]) for answer in again.values()} == {("", "")}
        assert Path(again["model again"]["found"], "config.json").read_bytes() == WANTED["config.json"]
    assert len(hub.asked) == asked


def test_a_cold_cache_offline_says_what_to_fetch_and_how(tmp_path):
    offline = ask(tmp_path, "http://127.0.0.1:9", {"model": pin("model")}, HF_HUB_OFFLINE="1")["model"]
    assert offline["err"] == LINE.format(
        "model",
        "is not in the cache, and offline mode is on: run the fetch stage once with a network and without "
        "HF_HUB_OFFLINE, or copy the cache (RLHF_CACHE) from a machine that has it",
    )
    gone = ask(tmp_path, "http://127.0.0.1:9", {"model": pin("model")})["model"]
    assert gone["err"] == LINE.format("model", "the hub cannot be reached (ConnectError)")
    assert (offline["status"], gone["status"], cached(tmp_path)) == (1, 1, [])


def test_each_fault_is_one_line_and_leaves_nothing_that_hinders_the_next_run(hub, tmp_path):
    for name, (fault, _) in FAULTS.items():
        hub.repositories["models", f"owner/{name}"] = {COMMIT: WANTED}
        hub.faults[f"owner/{name}"] = fault
    tasks = {name: pin(name) for name in FAULTS}
    answers = ask(tmp_path, hub.address, tasks)
    for name, (_, expected) in FAULTS.items():
        assert (answers[name]["status"], answers[name]["err"]) == (1, LINE.format(name, expected))
    assert cached(tmp_path) == []

    hub.faults.clear()
    sound = ask(tmp_path, hub.address, tasks)
    assert [sound[name]["err"] for name in FAULTS] == [""] * len(FAULTS)
    for name in FAULTS:
        found = {file: entry["sha256"] for file, entry in sound[name]["found"]["files"].items()}
        assert found == {file: sha256(content) for file, content in WANTED.items()}, name
    assert_no_secret(tmp_path)


def test_a_hub_that_errs_for_a_moment_is_asked_again_and_a_broken_download_goes_on(hub, tmp_path):
    for name, fault in HICCUPS.items():
        hub.repositories["models", f"owner/{name}"] = {COMMIT: LONG}
        hub.faults[f"owner/{name}"] = fault
    answers = ask(tmp_path, hub.address, {name: pin(name) for name in HICCUPS})
    for name in HICCUPS:
        assert (answers[name]["status"], answers[name]["err"]) == (0, "")
        assert answers[name]["found"]["files"]["model.safetensors"]["sha256"] == sha256(
            LONG["model.safetensors"]
        )
    ranges = [part for _, path, _, part in hub.asked if "hiccup-cut" in path and part]
    assert ranges == [f"bytes={10 * 2**20}-"]


def test_a_hub_that_never_answers_is_one_line_and_one_that_stalls_is_asked_again(hub, tmp_path):
    hub.faults["owner/model"] = Fault("info", stall=True)
    silent = ask(tmp_path, hub.address, {"model": pin("model")}, HF_HUB_ETAG_TIMEOUT="1")["model"]
    assert silent["err"] == LINE.format("model", "the hub cannot be reached (ReadTimeout)")
    hub.faults["owner/model"] = Fault("get", stall=True, times=1)
    stalled = ask(tmp_path, hub.address, {"model": pin("model")}, HF_HUB_DOWNLOAD_TIMEOUT="1")["model"]
    assert (stalled["status"], stalled["err"]) == (0, "")


def test_what_an_interrupted_download_brought_whole_is_not_brought_again(hub, tmp_path):
    hub.faults["owner/model"] = Fault("get", 500, file="model.safetensors")
    assert ask(tmp_path, hub.address, {"model": pin("model")})["model"]["status"] == 1
    hub.faults.clear()
    hub.asked.clear()
    answer = ask(tmp_path, hub.address, {"model": pin("model")})["model"]
    assert answer["out"].endswith(": 2 files, 2,050 bytes\n")
    assert not any(path.endswith("config.json") for _, path, _, _ in hub.asked)


def test_what_an_interrupted_download_left_is_not_trusted(hub, tmp_path):
    hub.faults["owner/model"] = Fault("get", 500, file="model.safetensors")
    assert ask(tmp_path, hub.address, {"model": pin("model")})["model"]["status"] == 1
    (left,) = (tmp_path / "cache" / "hub").glob("*.download")
    (left / "config.json").write_bytes(changed(WANTED, "config.json"))
    (left / "model.safetensors").write_bytes(WANTED["model.safetensors"][:-1])
    (left / "adapter_config.json").write_bytes(b"{}")
    hub.faults.clear()
    answer = ask(tmp_path, hub.address, {"model": pin("model")})["model"]
    assert answer["found"]["files"].keys() == WANTED.keys()
    assert answer["found"]["files"]["config.json"]["sha256"] == sha256(WANTED["config.json"])


PINS = {
    "no such repository": (pin("none"), LINE.format("none", ABSENT)),
    "no such commit of the model": (
        pin("model", revision=OTHER),
        f"error: hub owner/model {OTHER}: the model is there, but has no such commit\n",
    ),
    "no such commit of the data set": (
        pin("data"),
        LINE.format("data", "the dataset is there, but has no such commit"),
    ),
    "a branch": (
        pin("model", revision="main"),
        "error: source owner/model: revision is 'main': expected a full commit of 40 hexadecimal digits\n",
    ),
    "a short commit": (
        pin("model", revision="a" * 7),
        "error: source owner/model: revision is 'aaaaaaa': expected a full commit of 40 hexadecimal digits\n",
    ),
    "another hash": (
        pin("model", sha256={"config.json": "0" * 64}),
        LINE.format("model", f"config.json has sha256 {sha256(WANTED['config.json'])}: expected {'0' * 64}"),
    ),
    "a hash of no file": (
        pin("model", sha256={"weights.safetensors": "0" * 64}),
        LINE.format("model", "sha256 names 'weights.safetensors', which is not there"),
    ),
    "no such path": (pin("model", path="data"), LINE.format("model", "holds no file at path 'data'")),
    "a pickle by name": (
        pin("model", path="pytorch_model.bin"),
        LINE.format("model", "holds no file at path 'pytorch_model.bin'"),
    ),
    "a program by name": (
        pin("model", path="modeling_evil.py"),
        LINE.format("model", "holds no file at path 'modeling_evil.py'"),
    ),
    "a path outside": (
        pin("model", path="../model"),
        "error: source owner/model: path is '../model': expected a relative path such as folder/file\n",
    ),
}


def test_a_pin_that_the_hub_cannot_meet_is_one_line(hub, tmp_path):
    answers = ask(tmp_path, hub.address, {name: task for name, (task, _) in PINS.items()})
    for name, (_, expected) in PINS.items():
        assert (answers[name]["status"], answers[name]["err"]) == (1, expected), name


def test_a_hash_that_is_known_beforehand_is_held_to_and_a_corrected_pin_downloads_nothing_twice(
    hub, tmp_path
):
    known = {"model.safetensors": sha256(WANTED["model.safetensors"])}
    tasks = {
        "wrong": pin("model", sha256={"model.safetensors": "0" * 64}),
        "right": pin("model", sha256=known),
    }
    answers = ask(tmp_path, hub.address, tasks)
    assert answers["wrong"]["status"] == 1
    assert answers["right"]["found"]["source"]["sha256"] == known
    assert answers["right"]["out"] == f"hub owner/model {COMMIT}: fetching\n"


def test_files_that_lead_out_of_the_folder_are_left_where_they_are(hub, tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text("mine")
    names = [str(outside), "../outside.json", "a/../../outside.json", "..\\outside.json", "a//b.json"]
    files = WANTED | dict.fromkeys(names, b"theirs")
    hub.repositories["models", "owner/model"] = {COMMIT: files}
    answer = ask(tmp_path, hub.address, {"model": pin("model")})["model"]
    assert answer["found"]["files"].keys() == WANTED.keys()
    assert outside.read_text() == "mine" and list(tmp_path.rglob("outside.json")) == [outside]


def test_a_manifest_of_another_commit_is_refused(hub, tmp_path):
    hub.repositories["models", "owner/model"][OTHER] = {"config.json": b"{}"}
    pins = {"old": pin("model"), "new": pin("model", revision=OTHER)}
    found = {name: answer["found"] for name, answer in ask(tmp_path, hub.address, pins).items()}
    assert list(found["new"]["files"]) == ["config.json"] and len(cached(tmp_path)) == 2
    mixed = found["old"] | {"source": found["new"]["source"]}
    answers = ask(tmp_path, hub.address, found | {"mixed": mixed}, HF_HUB_OFFLINE="1")
    assert answers["old"]["found"] != answers["new"]["found"]
    assert answers["mixed"]["err"] == (
        f"error: hub owner/model {OTHER}: config.json has sha256 {sha256(b'{}')}, "
        "unlike the manifest; run the fetch stage again\n"
    )


def test_a_damaged_copy_is_kept_until_the_hub_gives_another(hub, tmp_path):
    manifest = ask(tmp_path, hub.address, {"model": pin("model")})["model"]["found"]
    (folder,) = cached(tmp_path)
    (folder / "config.json").write_bytes(b"damaged")
    offline = ask(tmp_path, hub.address, {"model": manifest}, HF_HUB_OFFLINE="1")["model"]
    assert offline["status"] == 1 and "offline mode is on" in offline["err"]
    assert (folder / "config.json").read_bytes() == b"damaged"
    assert ask(tmp_path, hub.address, {"model": manifest})["model"]["status"] == 0
    assert (folder / "config.json").read_bytes() == WANTED["config.json"]


# The kernel itself refuses to write more than this into one file, as a full disk would.
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))"


def test_a_full_disk_is_one_line_and_the_next_run_succeeds(hub, tmp_path):
    hub.repositories["models", "owner/model"] = {COMMIT: LONG | {"config.json": b"{}"}}
    answer = ask(tmp_path, hub.address, {"model": pin("model")}, start=LIMIT)["model"]
    assert answer["err"] == LINE.format("model", "'model.safetensors': File too large")
    assert cached(tmp_path) == []
    assert ask(tmp_path, hub.address, {"model": pin("model")})["model"]["status"] == 0


def test_a_disk_that_is_too_small_is_found_before_anything_is_fetched(hub, tmp_path):
    hub.faults["owner/model"] = Fault("info", body=listed(size=10**18))
    answer = ask(tmp_path, hub.address, {"model": pin("model")})["model"]
    beginning = LINE.format("model", "1,000,000,000,000,000,000 bytes are to be fetched, and the disk has ")
    assert answer["err"].startswith(beginning.rstrip("\n")) and answer["err"].count("\n") == 1
    assert not any("resolve" in path for _, path, _, _ in hub.asked)
