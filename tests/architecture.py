"""What the source files say about themselves: imports, closures, declared dependencies."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports anywhere, lazily too, as a dotted name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the closure"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def first_party(path: Path) -> set[Path]:
    """The files inside the repository that a file imports, packages' `__init__` included."""
    found = set()
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] not in ("rlhf", "stages"):
            continue
        for depth in range(1, len(parts) + 1):
            stem = ROOT.joinpath(*parts[:depth])
            found.update(file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file())
    return found


def closure(path: Path) -> set[str]:
    """All files inside the repository that running `path` imports, itself included, relative to the root."""
    seen, todo = set(), {path, path.parent / "__init__.py"}
    while todo:
        file = todo.pop()
        seen.add(file)
        todo |= first_party(file) - seen
    return {file.relative_to(ROOT).as_posix() for file in seen}
