"""Inputs that nobody should trust, each with words of its refusal: params.yaml, manifests, wheels.

`CASES` adds those of `malformed_data`, `malformed_tensors` and `malformed_bundles`; `python
tests/malformed_inputs.py` counts them all.
"""

import copy
import hashlib
import io
import json
import os
import stat
import struct
import zipfile

from malformed_bundles import MALFORMED
from malformed_bundles import PARAMS as PUBLISHED
from malformed_data import CSV, JSON_LINES, PARQUET, PREFERENCES, QUESTIONS, RECORDS, TSV
from malformed_tensors import ADAPTER_CONFIGS, ADAPTERS, HEADS, MODELS, SNAPSHOTS
from ruamel.yaml import YAML

Cases = dict[str, tuple[bytes, str]]  # what -> content, a pattern within the message

DOCUMENT = YAML(typ="safe", pure=True).load(PUBLISHED)


def params(changes: dict[str, object]) -> bytes:
    """The published parameters with dotted keys set, as JSON, which is YAML; text after ! goes in raw."""
    changed, raw = copy.deepcopy(DOCUMENT), {}
    for number, (key, value) in enumerate(changes.items()):
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section[part]
        section[name] = value
        if isinstance(value, str) and value.startswith("!"):
            section[name] = f"@{number}"
            raw[f'"@{number}"'] = value[1:]
    text = json.dumps(changed)
    for mark, value in raw.items():
        text = text.replace(mark, value)
    return text.encode()


def without(key: str) -> bytes:
    return json.dumps({name: value for name, value in DOCUMENT.items() if name != key}).encode()


def wrong(key: str, value: object, words: str) -> tuple[str, tuple[bytes, str]]:
    return f"{key} {value!r:.40}", (params({key: value}), words)


def bomb(levels: int = 9) -> str:
    """Ten to the power `levels` of x in a few hundred characters."""
    text = f"&a0 [{', '.join('x' * 10)}]"
    for level in range(1, levels):
        text = f"&a{level} [{text}{f', *a{level - 1}' * 9}]"
    return text


HEXADECIMAL = "!0x" + "f" * 5000
REPEATED = "expected at least one seed, none twice"
COUNT, NATURAL = "expected an integer of at least 1", "expected an integer of at least 0"
PAIRS = "expected a mapping with text keys"
YAMLS: Cases = {
    what: (content, "params.yaml: not valid YAML: ")
    for what, content in {
        **{"NUL": b"seed: 1\0", "control character": b"seed: \1", "Latin-1": b"a: caf\xe9"},
        **{"UTF-16": PUBLISHED.decode().encode("utf-16"), "half a surrogate pair": b"a: \xed\xa0\x80"},
        **{"overlong UTF-8": b"a: \xc0\xaf", "cut character": b"a: \xe2\x82"},
        **{"open list": b"a: [1", "open mapping": b"a: {b: 1", "open quote": b'a: "b', "tab": b"a:\n\t- b"},
        **{"closing bracket": b"a: ]", "no colon": b"a: 1\nb", "indentation": b"a: 1\n  b: 2"},
        **{"at": b"a: @b"},
        **{"duplicate key": PUBLISHED + b"seed: 2\n", "two documents": PUBLISHED + b"---\nseed: 2\n"},
        **{"object": b"a: !!python/object/apply:os.system [x]", "name": b"a: !!python/name:os.system x"},
        **{"own tag": b"!evil a", "no alias": b"a: *b", "anchor twice": b"a: & b"},
        **{"list as key": b"? [a, [b]]"},
        **{"mapping as key": b"? {a: 1}\n: 2", "version 9": b"%YAML 9.9\n---\na"},
        **{"version x": b"%YAML x\n---\na"},
        **{"escape": b'a: "\\xg"', "large escape": b'a: "\\UFFFFFFFF"', "deep": b"[" * 1000},
        **{"deep map": b"{a: " * 1000},
        **{"deep block": b"- " * 1000, "integer": b"a: !!int ''", "float": b"a: !!float ''"},
        **{"bool": b"a: !!bool x"},
        **{"int of text": b"a: !!int x", "timestamp": b"a: !!timestamp x", "base64": b"a: !!binary a"},
        **{"date": b"a: 2001-99-99", "zone": b"a: 2001-12-14t21:59:43.10-99:99"},
        **{"digits": b"a: " + b"9" * 5000},
        **{"merge of a number": b"<<: 1", "set of a list": b"!!set [a]", "ordered map": b"a: !!omap [b]"},
    }.items()
}  # fmt: skip
PARAMS: Cases = {
    **YAMLS,
    "empty": (b"", "params.yaml is None: expected a mapping"),
    "comment": (b"# nothing\n", "params.yaml is None: expected a mapping"),
    "text": (b"hello", "params.yaml is 'hello': expected a mapping"),
    "list": (b"[1, 2]", r"params.yaml is \[1, 2\]: expected a mapping"),
    "number": (b"0x" + b"f" * 5000, "params.yaml is a number of too many digits: expected a mapping"),
    "set": (b"!!set {a}", "params.yaml is {'a'}: expected a mapping"),
    "list in itself": (b"&a [*a]", "expected a mapping"),
    "mapping in itself": (b"&a {seed: *a}", "params.yaml: missing key 'runtime'"),
    "number as key": (params({}).replace(b"{", b"{1: 2, ", 1), "unknown key 1: expected seed, "),
    "digits as key": (params({}).replace(b"{", b"{? 0x%b : 2, " % (b"f" * 5000), 1), "unknown key a number"),
    "line end in a key": (params({}).replace(b"{", b'{"a\\nb": 2, ', 1), r"unknown key 'a\\nb': expected"),
    "YAML 1.1": (b"%YAML 1.1\n---\n" + PUBLISHED, "unknown key False: expected n, batch_size"),
    "no sections": (b"seed: 1", "missing key 'runtime'"),
    **{
        f"no {key}": (without(key), f"missing key '{key}'")
        for key in ("seed", "model", "fetch", "ppo", "judge", "report")
    },
    **dict(
        (
            *(wrong("seed", value, NATURAL) for value in (-1, -(2**63))),
            *(wrong("seed", v, "expected an integer") for v in (None, True, 1.0, "1", [], {})),
            *(wrong("seed", raw, "expected an integer") for raw in ("!1e3", "!.inf", "!-")),
            *(wrong("seed", v, "expected an integer of 64 bits") for v in (2**63, -(2**63) - 1, HEXADECIMAL)),
            wrong("seed", "!" + bomb(), r"seed is \[\[\[\[\.\.\.\]"),
            wrong("seed", "x" * 10**6, "seed is 'xxxx"),
            wrong("runtime", [], r"runtime is \[\]: expected a mapping"),
            wrong("runtime.device", "gpu", "expected one of cpu, cuda"),
            wrong("runtime.threads", 0, COUNT),
            wrong("runtime.snapshot_seconds", "!.nan", "expected a finite number of at least 0"),
            wrong("fetch.policy", None, "fetch.policy is None: expected a mapping"),
            wrong("fetch.policy.kind", "ftp", "expected one of wheel, hub, file"),
            wrong("fetch.policy.kind", ["wheel"], "expected one of wheel, hub, file"),
            wrong("fetch.policy.name", "", "expected a text that is not empty"),
            wrong("fetch.policy.name", "-r /etc/passwd", "expected a distribution's name"),
            wrong("fetch.policy.name", "a; touch b", "expected a distribution's name"),
            wrong("fetch.policy.name", "a\nb", "expected a distribution's name"),
            wrong("fetch.policy.revision", None, "expected an exact version"),
            wrong("fetch.policy.revision", 1.0, "expected a text"),
            wrong("fetch.policy.revision", ">=1", "expected an exact version"),
            wrong("fetch.policy.revision", "1.0 --index-url x", "expected an exact version"),
            wrong("fetch.policy.path", "/etc/passwd", "expected a relative path such as folder/file"),
            wrong("fetch.policy.path", "../x", "expected a relative path such as folder/file"),
            wrong("fetch.policy.path", "a\\b", "expected a relative path such as folder/file"),
            wrong("fetch.policy.sha256", {}, "expected exactly one entry, the wheel's file name"),
            wrong("fetch.policy.sha256", {"a": "0" * 63}, "expected 64 hexadecimal digits"),
            wrong("fetch.policy.sha256", {"a\nb": 1}, r"sha256.a\\nb is 1: expected a text"),
            wrong("fetch.policy.sha256", "!{1: a}", PAIRS),
            wrong("split.rows.labels", {"a": 2}, "labels.a is 2: expected 0 or 1"),
            wrong("split.rows.labels", {"a": 1}, "expected at least one value for 0 and one for 1"),
            wrong("split.rows.labels", {}, "expected at least one value for 0 and one for 1"),
            wrong("split.rows.encoding", "utf-16", "expected one of utf-8, latin-1"),
            wrong("split.rows.where", [], PAIRS),
            wrong("split.min_tokens", 10**6, "expected at most split.max_tokens"),
            wrong("split.sizes.val", 1, "expected an integer of at least 2"),
            wrong("split.sha256", "x", PAIRS),
            wrong("model.lora.targets", "q_proj", "expected a list"),
            wrong("model.lora.targets", [[]], r"targets\[0\] is \[\]: expected a text"),
            wrong("model.lora.alpha", 0, "expected a finite number above 0"),
            wrong("model.dtype", "int8", "expected one of float32, bfloat16, float16"),
            wrong("model.gradient_checkpointing", 1, "expected true or false"),
            wrong("adam.beta1", 1.0, "expected a number from 0 to below 1"),
            wrong("adam.eps", "!1e999", "adam.eps is inf: expected a finite number above 0"),
            wrong("generation.prefix_tokens", 10**6, "expected less than split.min_tokens"),
            wrong("generation.temperature", HEXADECIMAL, "is a number of too many digits: expected"),
            wrong("sft.lr", "1e-5x", "sft.lr is '1e-5x': expected a number"),
            wrong("sft.lr", -1, "expected a finite number above 0"),
            wrong("reward.loss", "pairwise", "reward.loss pairwise: expected label"),
            wrong("ppo.seeds", 42, "expected a list"),
            wrong("ppo.seeds", [], REPEATED),
            wrong("ppo.seeds", [1, 1], REPEATED),
            wrong("ppo.seeds", ["42; touch x"], r"ppo.seeds\[0\] is '42; touch x': expected an integer"),
            wrong("ppo.minibatches", 3, "expected a divisor of ppo.batch_size"),
            wrong("ppo.kl_horizon", 1, "expected at least ppo.batch_size"),
            wrong("ppo.lam", 1.5, "expected a number from 0 to 1"),
            wrong("ppo.validation_prefixes", 10**6, "expected at most split.sizes.val"),
            wrong("sample.n", "!2001-01-01", r"sample.n is datetime.date\(2001, 1, 1\): expected an integer"),
            wrong("judge.epochs", -1, NATURAL),
            wrong("report.title", "!\"\\t\"", r"report.title is '\\t': expected a text that is not empty"),
            wrong("report.title", "!!!binary aGk=", "report.title is b'hi': expected a text"),
        )
    ),
}  # fmt: skip

# A manifest of one local file, rows.csv, in the folder that a test runs in.
ROWS = b"text,label\ngood,1\n"
ENTRY = {"bytes": len(ROWS), "sha256": hashlib.sha256(ROWS).hexdigest()}
PIN = {
    **{"kind": "file", "name": "rows.csv", "revision": None, "path": None},
    **{"sha256": {"rows.csv": ENTRY["sha256"]}, "license": "MIT"},
}
NOT_ONE = "not a manifest of the fetch stage; run that stage again"


def manifest(files: object = None, **changes: object) -> bytes:
    return json.dumps(
        {"source": PIN | changes, "files": {"rows.csv": ENTRY} if files is None else files}
    ).encode()


MANIFESTS: Cases = {
    "empty": (b"", "manifest.json: not valid JSON"),
    "text": (b"hello", "manifest.json: not valid JSON"),
    "first half": (manifest()[:99], "manifest.json: not valid JSON"),
    "two": (manifest() * 2, "manifest.json: not valid JSON: Extra data"),
    "UTF-16": (manifest().decode().encode("utf-16"), "manifest.json: not valid UTF-8"),
    "byte order mark": (b"\xef\xbb\xbf" + manifest(), "manifest.json: not valid JSON"),
    "deep": (b'{"a":' * 10**5, "manifest.json: not valid JSON"),
    "NaN": (manifest({"rows.csv": float("nan")}), "NaN is not a JSON number"),
    "too large a number": (manifest() .replace(b"18", b"1e999"), "not valid JSON"),
    "digits": (manifest().replace(b"18", b"9" * 5000), "not valid JSON"),
    "single quotes": (manifest().replace(b'"', b"'"), "manifest.json: not valid JSON"),
    **{
        f"{content!r:.30}": (content, NOT_ONE)
        for content in (b"[]", b"null", b"3", b'"source"', b"{}", b'{"files": {}}')
    },
    "empty source": (b'{"source": {}, "files": {}}', NOT_ONE),
    "source is a list": (b'{"source": [], "files": {}}', NOT_ONE),
    "other key": (manifest(more=1), NOT_ONE),
    "no files": (json.dumps({"source": PIN}).encode(), NOT_ONE),
    **{f"files {value!r}": (manifest(value), NOT_ONE) for value in ([], 3, "rows.csv", True)},
    "files as pairs": (manifest([["rows.csv", ENTRY]]), NOT_ONE),
    "name is a number": (manifest(name=3), NOT_ONE),
    "path is a number": (manifest(path=3), NOT_ONE),
    "kind is a list": (manifest(kind=[]), NOT_ONE),
    "hashes are a list": (manifest(sha256=[]), NOT_ONE),
    "hash is null": (manifest(sha256={"rows.csv": None}), NOT_ONE),
    "no hash": (manifest(sha256={}), "sha256 has no entry 'rows.csv'"),
    "other kind": (manifest(kind="http"), "kind is 'http': expected wheel, hub, file"),
    "kind with a line end": (manifest(kind="a\nb"), r"kind is 'a\\nb': expected wheel, hub, file"),
    "empty name": (manifest(name=""), "name is '': expected a file or a folder"),
    "no such file": (manifest(name="other.csv"), "file other.csv: no such file or folder"),
    "line end": (manifest(name="a\nb"), r"file a\\nb: no such file or folder"),
    "NUL": (manifest(name="a\0b"), r"file a\\x00b: no such file or folder"),
    "half a surrogate pair": (manifest(name="\ud800"), r"file \\ud800: no such file or folder"),
    "home of nobody": (manifest(name="~nobody-by-this-name/x"), "no such user"),
    "long name": (manifest(name="x" * 300), "File name too long"),
    "revision": (manifest(revision="1.0"), "revision is '1.0': expected null"),
    "path above": (manifest(path="../rows.csv"), "expected a relative path such as folder/file"),
    "absolute path": (manifest(path="/rows.csv"), "expected a relative path such as folder/file"),
    "path inside a file": (manifest(path="x"), "holds no file at path 'x'"),
    "short hash": (manifest(sha256={"rows.csv": "0" * 63}), "expected 64 hexadecimal digits for each file"),
    "hash with a line end": (manifest(sha256={"rows.csv": "0" * 64 + "\n"}), "64 hexadecimal digits"),
    "other hash": (manifest(sha256={"rows.csv": "0" * 64}), "rows.csv has sha256 .*: expected 0000"),
    "hash of another": (manifest(sha256={"a\nb": "0" * 64}), "sha256 has no entry 'rows.csv'"),
    "other entry": (manifest({"rows.csv": {}}), "unlike the manifest; run the fetch stage again"),
    "entry is text": (manifest({"rows.csv": "x"}), "unlike the manifest; run the fetch stage again"),
    "other file": (manifest({"rows.csv": ENTRY, "../x": ENTRY}), r"\.\./x is missing, unlike the manifest"),
    "file with a line end": (manifest({"a\nb": ENTRY}), r"a\\nb is missing, unlike the manifest"),
    "wheel without version": (manifest(kind="wheel", name="a"), "expected an exact version"),
    "wheel as option": (manifest(kind="wheel", name="--help", revision="1"), "a distribution's name"),
    "branch": (manifest(kind="hub", name="a/b", revision="main"), "expected a full commit of 40"),
    "hub address": (manifest(kind="hub", name="https://a/b", revision="0" * 40), "expected owner/name"),
}  # fmt: skip


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def patched(offset: int, value: bytes, data: bytes = b"") -> bytes:
    """A wheel with bytes replaced in the central directory's record of its only member."""
    data = bytearray(data or WHEEL)
    start = data.rfind(b"PK\1\2") + offset
    data[start : start + len(value)] = value
    return bytes(data)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


def named(name: str) -> bytes:
    return zipped(("a/rows.csv", ROWS), (name, b"x"))


def linked(kind: int, name: str = "a/link") -> bytes:
    member = zipfile.ZipInfo(name)
    member.external_attr = (kind | 0o777) << 16
    return zipped((member, b"/etc/passwd"))


NOISE = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(99))
WHEEL = zipped(("a/rows.csv", NOISE))
BZIP, LZMA, DEFLATED = (
    zipped(("a/rows.csv", NOISE), compression=kind)
    for kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED)
)
DAMAGED, UNSAFE = "wheel tiny 1.0: the wheel is damaged: ", "unsafe member .* in the wheel"
WHEELS: Cases = {
    **{
        what: (content, DAMAGED)
        for what, content in {
            **{"empty file": b"", "text": b"no zip at all\n" * 9, "first half": WHEEL[: len(WHEEL) // 2]},
            **{"last byte cut": WHEEL[:-1], "first kilobyte cut": WHEEL[1000:], "turned": WHEEL[::-1]},
            **{"changed member": flipped(WHEEL, 500), "header's magic": flipped(WHEEL, 0)},
            **{"name in the header": flipped(WHEEL, 30), "directory's magic": patched(0, b"XX")},
            **{"deflated, changed": flipped(DEFLATED, 41), "lzma, changed": flipped(LZMA, 500)},
            **{"lzma, options changed": flipped(LZMA, 42), "bzip2, changed": flipped(BZIP, 500)},
            **{"version": patched(6, b"\xff"), "encrypted": patched(8, b"\1")},
            **{"method": patched(10, b"\x63")},
            **{"checksum": patched(16, b"\0\0\0\0"), "larger": patched(20, struct.pack("<II", 2**20, 2**20))},
            **{"name's length": patched(28, b"\0\0"), "offset": patched(42, b"\xff\xff\0\0")},
            "name not UTF-8": patched(46, b"\xff", patched(8, b"\0\x08")),
        }.items()
    },
    "bomb": (
        zipped(("a", bytes(2**26 + 1)), compression=zipfile.ZIP_DEFLATED),
        "more than 100 times its size",
    ),
    "bombs together": (
        zipped(*((str(i), bytes(2**24)) for i in range(5)), compression=zipfile.ZIP_DEFLATED),
        "more than 100 times its size",
    ),
    "size that lies": (patched(24, struct.pack("<I", 2**31)), "more than 100 times its size"),
    "absolute": (named("/escaped"), UNSAFE),
    "above": (named("../escaped"), UNSAFE),
    "above, later": (named("a/../../escaped"), UNSAFE),
    "above the download": (named(".download/../../escaped"), UNSAFE),
    "backslash": (named("..\\escaped"), UNSAFE),
    "two slashes": (named("a//escaped"), UNSAFE),
    "dot": (named("./escaped"), UNSAFE),
    "only dots": (named(".."), UNSAFE),
    "root": (named("/"), UNSAFE),
    "symbolic link": (linked(stat.S_IFLNK), UNSAFE),
    "symbolic link above": (linked(stat.S_IFLNK, "../link"), UNSAFE),
    "file and folder": (zipped(("a", b"x"), ("a/b", b"y")), "Not a directory"),
    "folder and file": (zipped(("a/b", b"y"), ("a", b"x")), "Is a directory"),
    "over the download": (named(".download"), "Is a directory"),
    "long name": (named("a" * 300), "File name too long"),
    "no member": (zipped(), "holds no file at path None"),
    "only hidden": (zipped((".x", b"")), "holds no file at path None"),
    "only folders": (zipped(("a/", b"")), "holds no file at path None"),
}  # fmt: skip

CASES: dict[str, Cases] = {
    **{"params.yaml": PARAMS, "manifest": MANIFESTS, "wheel": WHEELS, "csv": CSV, "tsv": TSV},
    **{"jsonl": JSON_LINES, "parquet": PARQUET, "questions": QUESTIONS, "preferences": PREFERENCES},
    "record": RECORDS,
    **{"head": HEADS, "adapter": ADAPTERS, "adapter_config.json": ADAPTER_CONFIGS, "snapshot": SNAPSHOTS},
    **MODELS,
}  # fmt: skip


def counts() -> dict[str, int]:
    """How many different inputs there are of each kind."""
    own = {kind: len({content for content, _ in cases.values()}) for kind, cases in CASES.items()}
    return own | {"bundle": len({make() for make, _ in MALFORMED.values()})}


if __name__ == "__main__":
    found = counts()
    print(os.linesep.join(f"{count:4} {kind}" for kind, count in found.items()))
    print(f"{sum(found.values()):4} malformed inputs")
