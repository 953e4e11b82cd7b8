"""Pinned sources, with real pip on tiny wheels in a folder, and a tiny GGUF model: no network."""

import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML

from rlhf.errors import UserError
from rlhf.record import read_json, sha256_file
from rlhf.sections import Source
from rlhf.sources import fetch, locate

ROOT = Path(__file__).resolve().parents[1]
WHEEL = "tiny_reviews-1.0-py3-none-any.whl"
FETCHING = "wheel tiny-reviews 1.0: fetching"
ROWS = "tiny_reviews/data/rows.csv"
DATA = {ROWS: b"text,label\ngood,1\n", "tiny_reviews/data/more/notes.txt": b"notes\n"}
ABOUT = {
    "tiny_reviews-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-reviews\nVersion: 1.0\n",
    "tiny_reviews-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


@pytest.fixture(autouse=True)
def wheels(tmp_path, monkeypatch):
    """The only folder that pip can see; the cache is beside it."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def build_wheel(wheels, members=DATA, link=None):
    with zipfile.ZipFile(wheels / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**members, **ABOUT}.items():
            archive.writestr(name, content)
        if link is not None:
            member = zipfile.ZipInfo(link)
            member.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(member, "/etc/passwd")
    return wheels / WHEEL


def wheel_source(wheel, path=ROWS, **changes):
    pin = {"kind": "wheel", "name": "tiny-reviews", "revision": "1.0", "sha256": {WHEEL: sha256_file(wheel)}}
    return Source(**{**pin, "path": path, "license": "MIT", **changes})


def file_source(name, hashes, path=None):
    return Source("file", str(name), None, path, hashes, "MIT")


def data_file(manifest):
    (name,) = manifest["files"]
    return locate(manifest) / name


def assert_fails(source, words):
    """The error is one line that matches `words`, and nothing half-made stays in the cache."""
    with pytest.raises(UserError, match=words) as caught:
        fetch(source)
    assert "\n" not in str(caught.value)
    files = [path for path in Path(os.environ["RLHF_CACHE"]).rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix != ".lock"] == []


def test_a_file_of_a_wheel_is_fetched_once_and_described(tmp_path, wheels, capsys):
    source = wheel_source(build_wheel(wheels))
    manifest = fetch(source)
    assert capsys.readouterr() == (f"{FETCHING}\n", "")
    expected = {"bytes": len(DATA[ROWS]), "sha256": hashlib.sha256(DATA[ROWS]).hexdigest()}
    assert manifest == {"source": vars(source), "files": {"rows.csv": expected}}
    (wheels / WHEEL).unlink()
    assert fetch(source) == manifest
    assert data_file(manifest) == tmp_path / "cache" / "wheel" / source.sha256[WHEEL] / ROWS
    assert data_file(manifest).read_bytes() == DATA[ROWS]
    assert capsys.readouterr().out == ""


def test_a_folder_of_a_wheel_in_the_default_cache(tmp_path, wheels, monkeypatch):
    monkeypatch.delenv("RLHF_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    manifest = fetch(wheel_source(build_wheel(wheels), "tiny_reviews/data"))
    assert list(manifest["files"]) == ["more/notes.txt", "rows.csv"]
    assert locate(manifest).is_relative_to(tmp_path / "home" / ".cache" / "rlhf")
    assert (locate(manifest) / "more" / "notes.txt").read_bytes() == b"notes\n"
    with pytest.raises(UserError, match="holds no file at path 'tiny_reviews/dat'"):
        fetch(wheel_source(wheels / WHEEL, "tiny_reviews/dat"))


@pytest.mark.parametrize("linked", ["model.safetensors", "more", "more/config.json"])
def test_a_link_inside_a_local_folder_is_refused(tmp_path, linked):
    """As in a hub's own cache. Hidden files are not listed, and links among them do no harm."""
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (folder / "a.txt", elsewhere / "a.txt", folder / ".git/HEAD"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a")
    (folder / ".git/link").symlink_to(elsewhere)
    assert list(fetch(file_source(folder, {}))["files"]) == ["a.txt"]
    (folder / linked).parent.mkdir(exist_ok=True)
    (folder / linked).symlink_to(elsewhere if linked == "more" else elsewhere / "a.txt")
    with pytest.raises(UserError) as caught:
        fetch(file_source(folder, {}))
    assert str(caught.value) == (
        f"file {folder}: {linked} is a link: expected the file itself, as `cp -rL` copies it"
    )


def test_a_cache_in_the_home_of_no_user_is_refused(wheels, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", "~nobody-by-this-name/x")
    assert_fails(wheel_source(build_wheel(wheels)), "~nobody-by-this-name/x: no such user")


def test_a_wheel_that_is_not_the_pinned_one_is_refused(wheels):
    wheel = build_wheel(wheels)
    found = sha256_file(wheel)
    assert_fails(wheel_source(wheel, sha256={WHEEL: "0" * 64}), f"has sha256 {found}: expected {'0' * 64}")
    assert_fails(wheel_source(wheel, sha256={"other.whl": found}), "'other.whl', which is not there")
    assert_fails(wheel_source(wheel, revision="9.9"), "tiny-reviews 9.9: pip failed: .*tiny-reviews==9.9")
    wheel.write_bytes(b"not a zip file")
    assert_fails(wheel_source(wheel), "tiny-reviews 1.0: pip failed: .")


def test_a_wheel_with_a_damaged_member_is_refused(wheels):
    wheel = build_wheel(wheels, {ROWS: os.urandom(4000)})
    content = wheel.read_bytes()
    wheel.write_bytes(content[:2000] + bytes([content[2000] ^ 255]) + content[2001:])
    assert_fails(wheel_source(wheel), "the wheel is damaged")


def test_an_unsafe_wheel_is_refused(tmp_path, wheels):
    for name in ("../escaped", "/escaped", "a/../../escaped", "..\\escaped"):
        assert_fails(wheel_source(build_wheel(wheels, {**DATA, name: b"x"})), "unsafe member")
    assert list(tmp_path.rglob("*escaped*")) == []
    assert_fails(wheel_source(build_wheel(wheels, link="a/link")), "unsafe member 'a/link'")
    assert_fails(wheel_source(build_wheel(wheels, {ROWS: bytes(2**26 + 1)})), "more than 100 times its size")


DAMAGES = {
    "a changed file": lambda folder: (folder / "rows.csv").write_bytes(b"text,label\nevil,1\n"),
    "a missing file": lambda folder: (folder / "rows.csv").unlink(),
    "an added file": lambda folder: (folder / "config.json").write_text("{}"),
    "an unreadable table": lambda folder: (folder.parents[1] / ".files.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_heals_itself(wheels, capsys, damage):
    manifest = fetch(wheel_source(build_wheel(wheels), "tiny_reviews/data"))
    folder = locate(manifest)
    DAMAGES[damage](folder)
    capsys.readouterr()
    assert locate(manifest) == folder
    assert capsys.readouterr().out == f"{FETCHING} again, since the cached copy is damaged\n"
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {"rows.csv", "notes.txt"}
    assert (folder / "rows.csv").read_bytes() == DATA[ROWS]


def test_a_damaged_cache_is_left_alone_when_the_wheel_is_gone(wheels):
    manifest = fetch(wheel_source(build_wheel(wheels)))
    kept = data_file(manifest)
    kept.write_bytes(b"damaged")
    (wheels / WHEEL).unlink()
    with pytest.raises(UserError, match="pip failed"):
        locate(manifest)
    assert kept.read_bytes() == b"damaged"


def test_a_manifest_that_differs_from_its_source_is_refused(wheels):
    manifest = fetch(wheel_source(build_wheel(wheels)))
    manifest["files"]["rows.csv"]["sha256"] = "0" * 64
    with pytest.raises(UserError, match=r"rows.csv has sha256 .* unlike the manifest"):
        locate(manifest)
    with pytest.raises(UserError, match="not a manifest"):
        locate({"files": {}})


INEXACT = [
    ({"sha256": {"a.whl": "0" * 64, "b.whl": "1" * 64}}, "sha256 is .* exactly one entry"),
    ({"revision": None}, "revision is None: expected an exact version"),
    ({"revision": "1.0 --index-url=x"}, "an exact version"),
    ({"name": "-r other.txt"}, "a distribution's name"),
    ({"path": "../rows.csv"}, "a relative path"),
    ({"kind": "svn"}, "kind is 'svn': expected wheel, hub, file"),
    ({"kind": "hub", "name": "owner/name", "revision": "main"}, "revision is 'main': expected a full commit"),
    ({"kind": "hub", "name": "glue"}, "name is 'glue': expected owner/name"),
    ({"kind": "file"}, "revision is '1.0': expected null"),
]


@pytest.mark.parametrize(("changes", "words"), INEXACT)
def test_a_pin_that_is_not_exact_is_refused(tmp_path, wheels, changes, words):
    assert_fails(wheel_source(build_wheel(wheels), **changes), words)
    assert not (tmp_path / "cache").exists()


def test_a_local_file_is_used_where_it_is_and_only_with_its_hash(tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n")
    manifest = fetch(file_source(rows, {"rows.csv": sha256_file(rows)}))
    assert data_file(manifest) == rows
    rows.write_text("text,label\nmore,1\n")
    with pytest.raises(UserError, match=rf"rows.csv has sha256 {sha256_file(rows)}: expected"):
        locate(manifest)
    assert_fails(file_source(rows, {}), f"no entry 'rows.csv': expected {sha256_file(rows)}")
    assert_fails(file_source(tmp_path, {}, "rows.csv"), "no entry 'rows.csv'")
    assert_fails(file_source(rows, {"rows.csv": sha256_file(rows)}, "inside"), "no file at path 'inside'")
    assert_fails(file_source(tmp_path / "none.csv", {}), "no such file or folder")


def test_a_local_folder(tmp_path):
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for name in ("config.json", "sub/vocab.txt", ".hidden"):
        (model / name).write_text("{}")
    manifest = fetch(file_source(model, {"config.json": sha256_file(model / "config.json")}))
    assert list(manifest["files"]) == ["config.json", "sub/vocab.txt"]
    assert locate(manifest) == model
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"adapter_config.json has sha256 .* unlike the manifest"):
        locate(manifest)
    assert_fails(file_source(model, {"weights": "0" * 64}), "'weights', which is not there")


def python(code, **environment):
    start = "from rlhf.sections import Source; from rlhf.errors import run; from rlhf.sources import fetch; "
    command, pipe = [sys.executable, "-c", start + code], subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def test_a_hub_that_cannot_be_reached_is_one_line():
    source = Source("hub", "owner/name", "a" * 40, None, {}, "MIT")
    process = python(f"run(lambda: fetch({source!r}))", HF_HUB_OFFLINE="1", HF_TOKEN="hf_secret")
    out, err = process.communicate(timeout=120)
    assert err.startswith(f"error: hub owner/name {'a' * 40}: is not in the cache, and offline mode is on: ")
    assert err.count("\n") == 1
    assert (process.returncode, out) == (1, f"hub owner/name {'a' * 40}: fetching\n")


def test_two_processes_at_once_do_no_harm(wheels):
    source = wheel_source(build_wheel(wheels))
    both = [python(f"fetch({source!r})") for _ in range(2)]
    assert sorted(process.communicate(timeout=120) for process in both) == [("", ""), (f"{FETCHING}\n", "")]
    assert [process.returncode for process in both] == [0, 0]


def run_stage(folder, pin, judge):
    params = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text())
    params["fetch"] = {"policy": pin, "reviews": pin, "judge": judge}
    YAML().dump(params, folder / "params.yaml")
    return subprocess.run([sys.executable, "-m", "stages.fetch"], cwd=folder, capture_output=True, text=True)


def test_the_stage_writes_all_manifests_or_none(tmp_path, wheels):
    pin = vars(wheel_source(build_wheel(wheels)))
    done = run_stage(tmp_path, pin, pin)
    assert (done.returncode, done.stderr) == (0, "")
    manifests = tmp_path / "data" / "manifests"
    written = {path.name: path.read_bytes() for path in manifests.iterdir()}
    assert set(written) == {"policy.json", "reviews.json", "judge.json"}
    assert data_file(read_json(manifests / "judge.json")).name == "rows.csv"

    failed = run_stage(tmp_path, {**pin, "path": None}, {**pin, "sha256": {WHEEL: "0" * 64}})
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: wheel tiny-reviews 1.0: the wheel has sha256")
    assert failed.stderr.count("\n") == 1
    assert {path.name: path.read_bytes() for path in manifests.iterdir()} == written


def write_gguf(path):
    """Write a llama of one layer with random weights, and a byte-level tokenizer of 98 tokens."""
    from gguf import GGUFWriter

    tokens = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "ab"]
    settings = {"context_length": 32, "block_count": 1, "embedding_length": 8, "feed_forward_length": 16}
    settings |= {"head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_dimension_count": 4}
    settings |= {"rope_freq_base": 10000.0, "tokenizer_model": "gpt2", "token_list": tokens}
    settings |= {"token_merges": ["a b"], "unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shapes = {"token_embd": (98, 8), "output": (98, 8), "output_norm": (8,)}
    shapes |= {f"blk.0.{name}": (8,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    writer, generator = GGUFWriter(path, "llama"), np.random.default_rng(0)
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_model_is_converted_once_to_the_same_bytes(tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_file = tmp_path / "tiny.gguf"
    model_file.write_bytes(b"GGUF, or so it says")
    assert_fails(file_source(model_file, {"tiny.gguf": sha256_file(model_file)}), "cannot be converted: .")
    capsys.readouterr()
    write_gguf(model_file)
    source = file_source(model_file, {"tiny.gguf": sha256_file(model_file)})
    manifest = fetch(source)
    assert capsys.readouterr() == ("tiny.gguf as float32 safetensors: fetching\n", "")
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert list(manifest["files"]) == [*names, "tokenizer.json", "tokenizer_config.json"]

    folder = locate(manifest)
    assert capsys.readouterr().out == ""
    embedding = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(embedding, np.random.default_rng(0).standard_normal((98, 8), dtype=np.float32))
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids[-1] == 97

    # Neither another process nor another folder nor offline mode changes a byte.
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "another"))
    assert python(f"fetch({source!r})", HF_HUB_OFFLINE="1").communicate(timeout=120)[1] == ""
    assert fetch(source) == manifest
