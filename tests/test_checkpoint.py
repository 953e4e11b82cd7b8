"""Snapshots: what goes in comes out to the bit, damage is noticed, other inputs are never resumed."""

import copy
import dataclasses
import os

import pytest
import torch
from torch import nn

from rlhf import checkpoint
from rlhf.checkpoint import Best, Snapshot, Snapshots, inputs_key, restore_training, training_snapshot
from rlhf.optim import adamw, copy_parameters, set_parameters


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float
    steps: int


def snapshots(folder, key="k", seconds=0.0) -> Snapshots:
    return Snapshots(folder / "stage", key, seconds)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.safetensors"))


def test_a_snapshot_comes_back_exactly(tmp_path):
    tensors = {
        "a": torch.tensor([0.1, -0.0, 1e-45, float("inf")]),
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "step": torch.tensor(3.0),
    }
    record = {"log": [{"loss": 0.1 + 0.2, "skipped": None, "n": 3}], "text": "naïve\n\x00"}
    store = snapshots(tmp_path)
    store.save(Snapshot(7, tensors, record))
    found = store.latest()
    assert (found.step, found.record) == (7, record)
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert found.tensors[name].shape == tensor.shape
        assert found.tensors[name].untyped_storage().tolist() == tensor.untyped_storage().tolist()


def test_the_newest_is_used_and_two_are_kept(tmp_path, capsys):
    store = snapshots(tmp_path)
    for step in (8, 9, 10, 11):
        store.save(Snapshot(step, {}, {}))
    assert [name.split("-")[0] for name in names(tmp_path)] == ["00000010", "00000011"]
    assert store.latest().step == 11
    assert capsys.readouterr().out == "stage: resuming after step 11\n"


DAMAGES = ("truncated", "empty", "header only", "flipped bit", "other number", "longer", "text")


def damage(path, kind: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    changed = {
        "truncated": content[:-1],
        "empty": b"",
        "header only": content[:8],
        "flipped bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "other number": content.replace(b"\x00\x00\x80\x3f", b"\x00\x00\x80\x3e", 1),  # 1.0 becomes 0.25
        "longer": content + b"\0",
        "text": b"not a snapshot",
    }
    path.write_bytes(changed[kind])


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_snapshot_is_said_and_the_one_before_is_used(tmp_path, capsys, kind):
    store = snapshots(tmp_path)
    store.save(Snapshot(1, {"x": torch.ones(3)}, {"log": [1]}))
    store.save(Snapshot(2, {"x": torch.ones(3)}, {"log": [1, 2]}))
    newest = next(tmp_path.rglob("00000002*"))
    damage(newest, kind)
    assert store.latest() == Snapshot(1, {"x": pytest.approx(torch.ones(3))}, {"log": [1]})
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        f"stage: snapshot {newest.name} is damaged and not used",
        "stage: resuming after step 1",
    ]
    assert not newest.exists()
    damage(next(tmp_path.rglob("00000001*")), kind)
    assert store.latest() is None


@pytest.mark.parametrize("name", ["00000002-.safetensors", "00000002.safetensors", "x.safetensors"])
def test_a_file_with_a_foreign_name_is_not_used(tmp_path, name):
    store = snapshots(tmp_path)
    store.save(Snapshot(2, {}, {}))
    found = next(tmp_path.rglob("*.safetensors"))
    found.rename(found.with_name(name))
    assert store.latest() is None


def test_other_inputs_have_no_snapshots(tmp_path):
    snapshots(tmp_path, "one").save(Snapshot(2, {}, {}))
    assert snapshots(tmp_path, "two").latest() is None
    assert snapshots(tmp_path, "one").latest().step == 2


def test_completion_removes_the_stage_and_nothing_else(tmp_path):
    snapshots(tmp_path, "one").save(Snapshot(2, {}, {}))
    Snapshots(tmp_path / "other", "one", 0).save(Snapshot(3, {}, {}))
    snapshots(tmp_path, "two").remove()
    snapshots(tmp_path, "two").remove()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_snapshots_are_due_by_their_interval(tmp_path):
    assert snapshots(tmp_path, seconds=0).due()
    assert not snapshots(tmp_path, seconds=1e9).due()


def test_a_failed_write_leaves_the_snapshots_that_were_there(tmp_path, monkeypatch):
    store = snapshots(tmp_path)
    store.save(Snapshot(1, {}, {}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            store.save(Snapshot(2, {}, {}))
    (tmp_path / "stage/k/.00000009-x.safetensors.partial").write_text("left by a kill")
    assert store.latest().step == 1
    assert [path.name.split("-")[0] for path in (tmp_path / "stage" / "k").iterdir()] == ["00000001"]
    assert store.latest().step == 1


def test_the_key_depends_on_values_files_folders_and_code(tmp_path, monkeypatch):
    (tmp_path / "folder/deep").mkdir(parents=True)
    files = {name: tmp_path / name for name in ("a.jsonl", "folder/one", "folder/deep/two")}
    for path in files.values():
        path.write_text("content")
    inputs = [tmp_path / "a.jsonl", tmp_path / "folder"]
    values = [1, Settings(0.1, 2)]
    key = inputs_key(values, inputs)
    assert inputs_key(copy.deepcopy(values), inputs) == key
    assert len({key, inputs_key([1, Settings(0.2, 2)], inputs), inputs_key([True], inputs)}) == 3
    for path in files.values():
        path.write_text("changed")
        assert inputs_key(values, inputs) != key
        path.write_text("content")
    assert inputs_key(values, inputs) == key
    code = tmp_path / "edited.py"
    code.write_text("another line")
    monkeypatch.setattr(checkpoint, "_loaded_code", lambda: [code])
    assert inputs_key(values, inputs) != key


def test_the_code_is_all_of_this_project_that_is_loaded():
    loaded = {path.name for path in checkpoint._loaded_code()}
    assert {"checkpoint.py", "record.py", "optim.py"} <= loaded
    assert not loaded & {"test_checkpoint.py", "functional.py"}


def a_model() -> tuple[nn.Linear, torch.optim.AdamW]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -0.2, 0.3], [0.4, 0.5, -0.6]]))
        model.bias.zero_()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.tensor([[1.0, step, -step]])).square().sum().backward()
        optimizer.step()


def test_training_goes_on_to_the_same_bits(tmp_path):
    whole, optimizer = a_model()
    train(whole, optimizer, range(8))
    first, optimizer = a_model()
    train(first, optimizer, range(5))
    best = Best(3, 0.25, [p.detach() * 2 for p in first.parameters()])
    snapshots(tmp_path).save(training_snapshot(5, optimizer, best=best, log=[1, 2]))

    second, optimizer = a_model()
    snapshot = snapshots(tmp_path).latest()
    found = restore_training(snapshot, optimizer)
    assert (snapshot.record["log"], found.step, found.value) == ([1, 2], 3, 0.25)
    assert all(map(torch.equal, found.parameters, best.parameters))
    train(second, optimizer, range(5, 8))
    assert all(map(torch.equal, whole.parameters(), second.parameters()))


def test_without_the_optimisers_state_the_bits_would_differ(tmp_path):
    """The test above could not fail if AdamW's moments did not matter at this size."""
    whole, optimizer = a_model()
    train(whole, optimizer, range(8))
    first, optimizer = a_model()
    train(first, optimizer, range(5))
    fresh = torch.optim.AdamW(first.parameters(), lr=0.1)
    train(first, fresh, range(5, 8))
    assert not torch.equal(whole.weight, first.weight)


def int8_model() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Two parameters with moments in 8 bits, which share code tables, and one that is too small for it."""
    shapes = ((64, 64), (100, 50), (3, 5))
    draws = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=draws)) for shape in shapes]
    return parameters, adamw({"all": parameters}, 0.05, 0.9, 0.999, 1e-8, 0.01, state="int8")


def train_int8(parameters, optimizer, steps) -> None:
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        optimizer.step()


def test_8_bit_moments_are_resumed_exactly(tmp_path):
    whole, whole_optimizer = int8_model()
    train_int8(whole, whole_optimizer, range(6))
    first, optimizer = int8_model()
    train_int8(first, optimizer, range(4))
    snapshots(tmp_path).save(training_snapshot(4, optimizer))
    second, restored = int8_model()
    restore_training(snapshots(tmp_path).latest(), restored)
    for before, after in zip(first, second, strict=True):
        expected, found = optimizer.state[before], restored.state[after]
        assert expected.keys() == found.keys() and len(found) == (3 if before.numel() == 15 else 7)
        assert type(found["step"]) is int and found["step"] == expected["step"] == 4
        for name in expected.keys() - {"step"}:
            assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])
        assert found["state1"].dtype == (torch.float32 if before.numel() == 15 else torch.uint8)
    train_int8(second, restored, range(4, 6))
    assert all(map(torch.equal, whole, second))
    for one, other in zip(whole, second, strict=True):
        assert torch.equal(whole_optimizer.state[one]["state2"], restored.state[other]["state2"])


def test_the_loss_scale_is_resumed(tmp_path):
    _, optimizer = a_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(1))
    scaler.update(64.0)
    snapshots(tmp_path).save(training_snapshot(1, optimizer, scaler))
    other = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert restore_training(snapshots(tmp_path).latest(), optimizer, other) is None
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 64.0


def test_an_optimiser_that_never_stepped_is_resumed_as_such(tmp_path):
    model, optimizer = a_model()
    snapshots(tmp_path).save(training_snapshot(1, optimizer))
    other, fresh = a_model()
    restore_training(snapshots(tmp_path).latest(), fresh)
    train(model, optimizer, range(2))
    train(other, fresh, range(2))
    assert torch.equal(model.weight, other.weight)


def test_copies_are_copies_and_go_back():
    model, optimizer = a_model()
    groups = {"weight": [model.weight], "bias": [model.bias]}
    before = copy_parameters(groups)
    train(model, optimizer, range(3))
    assert not torch.equal(model.weight, before[0])
    set_parameters(groups, before)
    assert torch.equal(model.weight, before[0])
    assert torch.equal(model.bias, before[1])
    train(model, optimizer, range(1))
    assert not torch.equal(model.weight, before[0])
