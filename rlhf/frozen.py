"""A split is frozen by the hashes of its parts."""

from rlhf.errors import UserError


def check_frozen(hashes: dict[str, str], frozen: dict[str, str] | None) -> None:
    """Stop, naming the parts, when the computed split is not the one that params.yaml froze."""
    if frozen is None or hashes == frozen:
        return
    changed = sorted(part for part in hashes | frozen if hashes.get(part) != frozen.get(part))
    raise UserError(
        f"the split is not the frozen one: split.sha256 differs for {', '.join(changed)}; "
        "if that is meant, set split.sha256 to null and copy the new hashes from data/split.json"
    )
