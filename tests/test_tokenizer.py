"""The tokenizer's end of sequence against the model's own files, and padding that needs no token."""

import json

import pytest
import torch
from tiny import (
    CPU,
    EOS,
    SENTENCES,
    adapter_tensors,
    lora,
    perturb,
    random_texts,
    streams,
    tiny_tokenizer,
    write_policy_folder,
)

from rlhf.errors import UserError
from rlhf.heads import reward_head
from rlhf.models import add_adapters, load_base, select
from rlhf.sampling import sample
from rlhf.scoring import evaluate, reward_logits
from rlhf.special_tokens import say_unused
from rlhf.tokenizer import encoder, load_tokenizer


def test_a_policy_folder_holds_its_tokenizer(tmp_path):
    sentence, plain = SENTENCES[1], tiny_tokenizer()
    plain.save_pretrained(tmp_path / "whole")
    tokenizer = load_tokenizer(tmp_path / "whole")
    assert tokenizer.eos_token_id == EOS
    ids = tokenizer.encode(sentence, add_special_tokens=False)
    assert len(ids) < len(sentence) and tokenizer.decode(ids) == sentence
    plain.eos_token = None
    plain.save_pretrained(tmp_path / "endless")
    with pytest.raises(UserError, match="endless: the tokenizer names no end-of-sequence token"):
        load_tokenizer(tmp_path / "endless")


def change(path, **values) -> None:
    """Change keys of a JSON file; None removes one."""
    changed = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


@pytest.mark.parametrize(
    ("model_end", "generation_end", "said"),
    [
        (EOS, EOS, None),
        (EOS, [EOS], None),
        (None, None, None),
        (7, EOS, "config.json names 7"),
        (EOS, [EOS, 7], "generation_config.json names [0, 7]"),
        (7, [7, 9], "config.json names 7, generation_config.json names [7, 9]"),
    ],
)
def test_the_end_of_sequence_is_the_tokenizers_and_another_one_is_named(
    tmp_path, capsys, model_end, generation_end, said
):
    folder = write_policy_folder(tmp_path / "base")
    change(folder / "config.json", eos_token_id=model_end)
    change(folder / "generation_config.json", eos_token_id=generation_end)
    capsys.readouterr()
    assert load_tokenizer(folder).eos_token_id == EOS
    start = "base: the end of sequence is the tokenizer's '<eos>' (0); "
    assert capsys.readouterr().out == (f"{start}{said}\n" if said else "")


def test_an_end_of_sequence_that_the_model_cannot_say_is_one_line_of_error(tmp_path):
    """As with a tokenizer to which a token was added and a model whose embedding was not grown."""
    folder = write_policy_folder(tmp_path / "base")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.save_pretrained(folder)
    size = len(tokenizer) - 1
    change(folder / "config.json", vocab_size=size)
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder)
    assert str(caught.value) == (
        f"base: the tokenizer's end of sequence '<|im_end|>' is {size}: "
        f"expected an id below the model's vocab_size {size}"
    )
    change(folder / "config.json", vocab_size=size + 1)
    assert load_tokenizer(folder).eos_token_id == size


def test_a_text_with_a_token_that_the_model_does_not_know_is_one_line_of_error(tmp_path):
    """An added token does no harm where no text has it, as in models that were given a padding token."""
    folder = write_policy_folder(tmp_path / "base")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["[PAD]"])
    size = len(tokenizer) - 1
    change(folder / "config.json", vocab_size=size)
    encode = encoder(folder, tokenizer)
    assert encode(SENTENCES[1]) == tokenizer.encode(SENTENCES[1], add_special_tokens=False)
    assert encode("") == []
    with pytest.raises(UserError) as caught:
        encode("a [PAD] film")
    assert str(caught.value) == (
        f"base: the tokenizer's id for 'a [PAD] film' is {size}: "
        f"expected an id below the model's vocab_size {size}"
    )
    change(folder / "config.json", vocab_size=size + 1)
    assert size in encoder(folder, tokenizer)("a [PAD] film")


@pytest.mark.parametrize(
    ("pad", "bos", "said"),
    [
        ((None, None, None), (None, None, None), ""),
        ((3, 3, 3), (None, None, None), ""),
        (
            (None, 7, 7),
            (None, None, None),
            "pad_token_id: tokenizer none, config.json 7, generation_config.json 7",
        ),
        (
            (3, None, 3),
            (None, None, None),
            "pad_token_id: tokenizer 3, config.json none, generation_config.json 3",
        ),
        # As Qwen3's base: the tokenizer has no beginning of sequence, and config.json names one.
        (
            (None, None, None),
            (None, 5, 5),
            "bos_token_id: tokenizer none, config.json 5, generation_config.json 5",
        ),
    ],
)
def test_unused_tokens_on_which_the_files_disagree_are_named(tmp_path, capsys, pad, bos, said):
    folder = write_policy_folder(tmp_path / "base")
    tokenizer = load_tokenizer(folder)
    tokenizer.pad_token_id, tokenizer.bos_token_id = pad[0], bos[0]
    for name, pad_id, bos_id in zip(("config.json", "generation_config.json"), pad[1:], bos[1:], strict=True):
        change(folder / name, pad_token_id=pad_id, bos_token_id=bos_id)
    capsys.readouterr()
    say_unused(folder, tokenizer)
    choices = {"pad": "padding is masked by length, whatever token it has"}
    choices |= {"bos": "no beginning of sequence is ever added", "": ""}
    assert capsys.readouterr().out == (f"base: {said}: {choices[said[:3]]}\n" if said else "")


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_a_generation_config_that_is_none_is_one_line_of_error(tmp_path, text):
    folder = write_policy_folder(tmp_path / "base")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"base/generation_config\.json") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


PADS = {"none": (None, None), "pad = eos": ("<eos>", EOS), "pad = unk": ("!", 1)}
TEXTS = random_texts([9, 2, 6, 3], seed=2)


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "qwen3", "gpt2"])
def test_a_pad_token_or_none_changes_no_sample_score_or_gradient(tmp_path, architecture):
    folder, views = write_policy_folder(tmp_path / "base", architecture), []
    head = reward_head("linear", 32, 3, CPU)
    for token, token_id in PADS.values():
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = token
        tokenizer.save_pretrained(folder)
        change(folder / "config.json", pad_token_id=token_id)
        change(folder / "generation_config.json", pad_token_id=token_id)
        assert load_tokenizer(folder).pad_token_id == token_id
        base = load_base(folder, "float32", "none", CPU)
        tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
        assert tied == (architecture in ("llama-tied", "gpt2"))
        model = add_adapters(base, lora(architecture), ["ppo"], seed=1)
        perturb(model, "ppo")
        parameters = select(model, "ppo", train=True)
        responses = sample(model, TEXTS, streams(4), 8, EOS, 1.0)
        logits = reward_logits(model, head, [p + r for p, r in zip(TEXTS, responses, strict=True)], EOS, 100)
        logits.sum().backward()
        views.append(
            [
                torch.tensor([token for response in responses for token in response]),
                *evaluate(model, TEXTS, responses, head, 1.0, 100),
                logits.detach(),
                *(parameter.grad for parameter in parameters),
            ]
        )
    assert len(views[0]) == 5 + len(adapter_tensors(model, "ppo"))
    for view in views[1:]:
        assert all(map(torch.equal, view, views[0]))
