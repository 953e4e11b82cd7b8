"""The code runs nothing that it reads: no pickle, no eval, no remote code, no shell, no unsafe YAML.

Members of archives are checked before anything is written: test_malformed.py (wheels), test_bundle.py.
"""

import ast

import pytest
from architecture import ROOT

SOURCES = sorted(path for name in ("rlhf", "stages", "tools") for path in (ROOT / name).rglob("*.py"))
NEVER_IMPORTED = {"pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle", "yaml"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.save"}
NEVER_SAID = {"shell": True, "trust_remote_code": True, "allow_pickle": True, "weights_only": False}


def dangers(source: str) -> list[str]:
    """What would run code or a shell: pickle, eval, remote code, unsafe YAML, extractall."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in NEVER_IMPORTED]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in NEVER_IMPORTED:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += (
                [name] if name in NEVER_CALLED or name.endswith((".extractall", ".unpack_archive")) else []
            )
            if (
                name.endswith("YAML")
                and not any(k.arg is None or k.arg == "typ" for k in node.keywords)
                and node.args
            ):
                found.append(name)
            for key in node.keywords:
                value = key.value.value if isinstance(key.value, ast.Constant) else None
                if key.arg in NEVER_SAID and value == NEVER_SAID[key.arg]:
                    found.append(f"{key.arg}={value}")
                if name.endswith("YAML") and key.arg == "typ" and value not in ("safe", "rt"):
                    found.append(f"typ={value}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_code_runs_what_it_reads(path):
    assert dangers(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        *(
            "import pickle",
            "from joblib import load",
            "import yaml",
            "import os\nos.system('x')",
            "eval('1')",
        ),
        *(
            "exec('1')",
            "torch.load('x')",
            "run('x', shell=True)",
            "m.from_pretrained(x, trust_remote_code=True)",
        ),
        *(
            "np.load(x, allow_pickle=True)",
            "f(weights_only=False)",
            "YAML(typ='unsafe')",
            "archive.extractall()",
        ),
    ],
)
def test_what_must_not_be_there_would_be_found(source):
    assert len(dangers(source)) == 1


def test_every_call_of_from_pretrained_refuses_remote_code():
    """GGUF apart: what it reads is one file, which can hold no code."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained"):
                words = {key.arg for key in node.keywords}
                assert path.stem == "gguf" or "trust_remote_code" in words or None in words, path
