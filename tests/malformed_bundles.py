"""A sound bundle made by hand, and bundles that nobody should trust, each with the words that refuse it."""

import hashlib
import io
import json
import stat
import struct
import zipfile
from collections.abc import Callable

from architecture import ROOT

PARAMS = (ROOT / "params.yaml").read_bytes()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RUN_FILE = b"stages: {all: {cmd: 'true'}}\n"
OUTPUTS = {"artifacts/sft/weights": b"w" * 300, "artifacts/sft/sub/config": b"{}", "reports/n.json": b"1"}


def lock_of(outs: dict[str, str]) -> bytes:
    """A dvc.lock of one stage; DVC's own is YAML, of which JSON is a part."""
    listed = [{"path": path, "hash": "md5", "md5": md5} for path, md5 in outs.items()]
    return json.dumps({"schema": "2.0", "stages": {"all": {"cmd": "true", "outs": listed}}}).encode()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


# A folder's hash by DVC's rule: the md5 of the JSON list of its files' hashes.
LISTED = [
    {"md5": md5(OUTPUTS[f"artifacts/sft/{name}"]), "relpath": name} for name in ("sub/config", "weights")
]
LOCKED = {
    "artifacts/sft": md5(json.dumps(LISTED, sort_keys=True).encode()) + ".dir",
    "reports/n.json": md5(b"1"),
}
FILES = {"dvc.lock": lock_of(LOCKED), "dvc.yaml": RUN_FILE, "params.yaml": PARAMS} | OUTPUTS
Members = list[tuple[str | zipfile.ZipInfo, bytes]]


def manifest_of(files: dict[str, bytes]) -> dict:
    """The manifest that fits these files."""
    entries = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()}
    return {"commit": COMMIT, "files": entries}


def zipped(members: Members, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of these members, whatever they are."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def bundled(
    files: dict[str, bytes] = FILES, more: Members = (), manifest: object = None, **options: int
) -> bytes:
    """A bundle of `files` and of what else is named, with the manifest that fits it unless one is given."""
    named = files | {getattr(name, "filename", name): content for name, content in more}
    text = json.dumps(manifest_of(named) if manifest is None else manifest).encode()
    return zipped([("MANIFEST.json", text), *files.items(), *more], **options)


def without(name: str) -> dict[str, bytes]:
    return {other: content for other, content in FILES.items() if other != name}


def info(name: str, mode: int = stat.S_IFREG) -> zipfile.ZipInfo:
    """A member of a kind and name that zipfile itself would not write."""
    found = zipfile.ZipInfo("x")
    found.filename, found.external_attr = name, (mode | 0o777) << 16
    return found


def patched(name: str, offset: int, value: bytes) -> bytes:
    """A bundle with bytes replaced in the central directory's record of one member."""
    data = bytearray(bundled())
    start = data.rfind(name.encode()) - 46 + offset  # a record is 46 bytes and then the name
    data[start : start + len(value)] = value
    return bytes(data)


def manifest(**changes: object) -> bytes:
    return bundled(manifest=manifest_of(FILES) | changes)


def entry(**changes: object) -> bytes:
    """A bundle whose manifest has another entry for one file."""
    found = manifest_of(FILES)
    found["files"]["reports/n.json"] |= changes
    return bundled(manifest=found)


def flipped(word: bytes) -> bytes:
    """A bundle with one bit turned where `word` begins."""
    data = bytearray(bundled())
    data[data.index(word)] ^= 1
    return bytes(data)


DEEP = b"[" * 3000
FIFO = info("artifacts/pipe", stat.S_IFIFO)
LINK = info("artifacts/link", stat.S_IFLNK)
SEEDS = b"seeds:\n  - 42\n"
FORTY_TWO = b'seeds:\n  - "42; touch hacked"\n'
TWICE = {"reports/n.json": md5(b"1"), "reports/m.json": md5(b"1")}

# What -> the archive, and words of the one line.
MALFORMED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty file": (lambda: b"", "not a sound zip"),
    "text": (lambda: b"no zip at all\n" * 9, "not a sound zip"),
    "first half": (lambda: bundled()[: len(bundled()) // 2], "not a sound zip"),
    "last byte cut": (lambda: bundled()[:-1], "not a sound zip"),
    "first byte cut": (lambda: bundled()[1:], "not a sound zip"),
    "flipped bit": (lambda: flipped(b"wwww"), "not a sound zip: Bad CRC-32"),
    "directory's magic": (lambda: flipped(b"PK\1\2"), "not a sound zip"),
    "header's magic": (lambda: flipped(b"PK\3\4"), "not a sound zip"),
    "other name in the header": (lambda: flipped(b"reports/n.json1"), "not a sound zip"),
    "no member": (lambda: zipped([]), "no single MANIFEST.json"),
    "version of the future": (lambda: patched("reports/n.json", 6, b"\xff"), "zip file version"),
    "encrypted": (lambda: patched("reports/n.json", 8, b"\1"), "compressed or encrypted"),
    "compressed": (lambda: bundled(compression=zipfile.ZIP_DEFLATED), "compressed or encrypted"),
    "unknown compression": (lambda: patched("reports/n.json", 10, b"\x63"), "compressed or encrypted"),
    "sizes that lie": (lambda: patched("reports/n.json", 20, struct.pack("<II", 2**31, 2**31)), "manifest"),
    "uncompressed size alone": (lambda: patched("reports/n.json", 24, b"\2"), "compressed or encrypted"),
    "offset of another member": (lambda: patched("reports/n.json", 42, b"\0\0\0\0"), "not a sound zip"),
    "absolute": (lambda: bundled(more=[("/tmp/hacked", b"")]), "'/tmp/hacked' is no file of a bundle"),
    "above": (lambda: bundled(more=[("../hacked", b"")]), "'../hacked' is no file of a bundle"),
    "above, later": (lambda: bundled(more=[("data/../../hacked", b"")]), "is no file of a bundle"),
    "backslash": (lambda: bundled(more=[("data\\..\\hacked", b"")]), "is no file of a bundle"),
    "drive": (lambda: bundled(more=[("C:/hacked", b"")]), "'C:/hacked' is no file of a bundle"),
    "two slashes": (lambda: bundled(more=[("data//hacked", b"")]), "is no file of a bundle"),
    "dot": (lambda: bundled(more=[("./params.yaml", b"")]), "is no file of a bundle"),
    "newline": (lambda: bundled(more=[("data/a\nb", b"")]), r"'data/a\\nb' is no file of a bundle"),
    "empty name": (lambda: bundled(more=[(info(""), b"")]), "'' is no file of a bundle"),
    "NUL": (lambda: bundled(more=[(info("data/a\0b"), b"")]), "not a regular file"),
    "code": (lambda: bundled(more=[("stages/ppo.py", b"")]), "'stages/ppo.py' is no file of a bundle"),
    "hook": (lambda: bundled(more=[(".git/hooks/post-commit", b"")]), "is no file of a bundle"),
    "settings": (lambda: bundled(more=[(".dvc/config", b"")]), "'.dvc/config' is no file of a bundle"),
    "folder": (lambda: bundled(more=[("data/sub/", b"")]), "is no file of a bundle"),
    "symbolic link": (lambda: bundled(more=[(LINK, b"/etc")]), "'artifacts/link' in the bundle is not a"),
    "pipe": (lambda: bundled(more=[(FIFO, b"")]), "'artifacts/pipe' in the bundle is not a regular file"),
    "twice": (lambda: bundled(more=[("reports/n.json", b"1")]), "the bundle has reports/n.json twice"),
    "twice but for case": (lambda: bundled(more=[("reports/N.json", b"1")]), "has reports/N.json twice"),
    "file and folder": (lambda: bundled(more=[("reports/n.json/x", b"")]), "is a file and a folder"),
    "folder and file": (lambda: bundled(more=[("artifacts/sft", b"")]), "is a file and a folder"),
    "not in the manifest": (
        lambda: bundled(more=[("data/x", b"")], manifest=manifest_of(FILES)),
        "data/x in the bundle is not as its manifest says",
    ),
    "only in the manifest": (
        lambda: bundled(manifest=manifest_of(FILES | {"data/x": b""})),
        "the bundle has no data/x",
    ),
    "no manifest": (lambda: zipped(list(FILES.items())), "no single MANIFEST.json"),
    "two manifests": (lambda: bundled(more=[("MANIFEST.json", b"{}")]), "no single MANIFEST.json"),
    "large manifest": (
        lambda: zipped([("MANIFEST.json", b" " * (2**24 + 1))]),
        "no single MANIFEST.json of at most 16,777,216 bytes",
    ),
    "manifest is a link": (
        lambda: zipped([(info("MANIFEST.json", stat.S_IFLNK), b"/etc/passwd")]),
        "not a regular file",
    ),
    "manifest is text": (lambda: zipped([("MANIFEST.json", b"hello")]), "not one that this program wrote"),
    "manifest is bytes": (lambda: zipped([("MANIFEST.json", b"\xff\xfe")]), "not one that this program"),
    "manifest is deep": (lambda: zipped([("MANIFEST.json", DEEP * 99)]), "not one that this program"),
    "manifest is a list": (lambda: bundled(manifest=[1]), "not one that this program wrote"),
    "manifest is null": (lambda: bundled(manifest=[None]), "not one that this program wrote"),
    "files are a list": (lambda: manifest(files=["params.yaml"]), "not one that this program wrote"),
    "entry is a number": (lambda: manifest(files={"params.yaml": 1}), "not one that this program wrote"),
    "other keys": (lambda: manifest(more=1), "not one that this program wrote"),
    "no commit": (lambda: manifest(commit=None), "not one that this program wrote"),
    "short commit": (lambda: manifest(commit="0123456"), "not one that this program wrote"),
    "size below 0": (lambda: entry(bytes=-1), "not one that this program wrote"),
    "size is true": (lambda: entry(bytes=True), "not one that this program wrote"),
    "hash is no hash": (lambda: entry(sha256="F" * 64), "not one that this program wrote"),
    "other size": (lambda: entry(bytes=2), "reports/n.json in the bundle is not as its manifest says"),
    "other hash": (lambda: entry(sha256="f" * 64), "reports/n.json in the bundle has another sha256"),
    "no params": (lambda: bundled(without("params.yaml")), "the bundle has no params.yaml"),
    "no lock": (lambda: bundled(without("dvc.lock")), "the bundle has no dvc.lock"),
    "no run file": (lambda: bundled(without("dvc.yaml")), "the bundle has no dvc.yaml"),
    "lock is text": (lambda: bundled(FILES | {"dvc.lock": b"hello"}), "dvc.lock is not a lock file"),
    "lock is no YAML": (lambda: bundled(FILES | {"dvc.lock": b"a: ["}), "dvc.lock is not a lock file"),
    "lock is no text": (lambda: bundled(FILES | {"dvc.lock": b"\xff"}), "dvc.lock is not a lock file"),
    "lock is deep": (lambda: bundled(FILES | {"dvc.lock": DEEP}), "dvc.lock is not a lock file"),
    "lock has numbers": (lambda: bundled(FILES | {"dvc.lock": lock_of({"a": 1})}), "is not a lock file"),
    "output not in the bundle": (
        lambda: bundled(FILES | {"dvc.lock": lock_of(LOCKED | TWICE)}),
        "output reports/m.json is missing",
    ),
    "output with another md5": (
        lambda: bundled(FILES | {"dvc.lock": lock_of(LOCKED | {"reports/n.json": md5(b"2")})}),
        "output reports/n.json is not what dvc.lock says",
    ),
    "output above": (
        lambda: bundled(FILES | {"dvc.lock": lock_of({"../x": md5(b"1")})}),
        "'../x' is no file of a bundle",
    ),
    "output that is code": (
        lambda: bundled(FILES | {"dvc.lock": lock_of({"rlhf/ops.py": md5(b"1")})}),
        "'rlhf/ops.py' is no file of a bundle",
    ),
    "no output": (
        lambda: bundled(more=[("data/x", b"")]),
        "data/x in the bundle is no output that its dvc.lock names",
    ),
    "another pipeline": (
        lambda: bundled(FILES | {"dvc.lock": lock_of(LOCKED).replace(b'"all"', b'"preferences@1"')}),
        "of another pipeline: dvc.yaml here has no stage 'preferences'",
    ),
    "stage is a number": (
        lambda: bundled(FILES | {"dvc.lock": lock_of(LOCKED).replace(b'"all"', b"1")}),
        "dvc.lock is not a file of DVC's with stages",
    ),
    "command in params": (
        lambda: bundled(FILES | {"params.yaml": PARAMS.replace(SEEDS, FORTY_TWO)}),
        r"the bundle's params.yaml: ppo.seeds\[0\] is '42; touch hacked': expected an integer",
    ),
    "params are no YAML": (lambda: bundled(FILES | {"params.yaml": b"a: ["}), "not valid YAML"),
    "params are deep": (lambda: bundled(FILES | {"params.yaml": DEEP}), "not valid YAML"),
}
