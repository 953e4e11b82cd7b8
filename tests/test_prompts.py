"""Where a prompt ends: on token ids, whatever the text looks like; and the SFT loss that rests on it."""

from pathlib import Path

import pytest
import torch
from question_stages import model_with, run_stage, write_folder
from tiny import CPU, EOS, plain_forward, random_texts, tiny_tokenizer
from toy import set_params

from rlhf.batching import pad_pairs
from rlhf.config import load
from rlhf.models import load_adapter, select
from rlhf.objectives import sequence_nll
from rlhf.ops import token_logprobs
from rlhf.prompts import answer_ids, prompt_of, question_ids, response_of
from rlhf.randomness import epoch_order
from rlhf.record import read_jsonl
from rlhf.sampling import sample
from rlhf.scoring import response_outputs

TEMPLATE = "Question: {question}\n\nAnswer:"


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """The current folder, as the stages of question answering find it."""
    with write_folder(tmp_path, monkeypatch):
        yield


@pytest.mark.parametrize(
    ("tokens", "prompt", "response"),
    [(None, [7, 8, 9], [4, 5, EOS]), (1, [7], [8, 9, 4, 5, EOS]), (4, [7, 8, 9, 4], [5, EOS])],
)
def test_a_row_is_cut_where_it_or_the_setting_says(tokens, prompt, response):
    row = {"token_ids": [7, 8, 9, 4, 5], "prompt_tokens": 3}
    assert prompt_of(row, tokens) == prompt
    assert response_of(row, tokens, EOS) == response
    assert row == {"token_ids": [7, 8, 9, 4, 5], "prompt_tokens": 3}


def test_a_bare_question_is_all_prompt():
    row = {"token_ids": [7, 8, 9], "prompt_tokens": 3}
    assert prompt_of(row, None) == [7, 8, 9] and response_of(row, None, EOS) == [EOS]


def test_a_labelled_row_needs_no_length_of_its_own():
    assert prompt_of({"token_ids": [7, 8]}, 1) == [7]


def characters(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize(
    "question",
    ["Why?", "What does 'Answer:' mean?", "What is {question}?", "a\\1 {0} %s", "Who?\n\nAnswer: me"],
)
def test_the_question_is_put_into_the_template_as_it_is(question):
    expected = "Question: " + question + "\n\nAnswer:"
    assert question_ids(characters, TEMPLATE, question) == characters(expected)


def test_an_answer_follows_its_prompt_after_one_space():
    assert answer_ids(characters, "Because.") == characters(" Because.")


def test_ids_are_joined_never_text():
    """The tokenizer would merge across the border; the prompt's ids stay those that a bare question has."""
    tokenizer = tiny_tokenizer(("so it is so it is so it is so", "is so it is so it is so it"), vocabulary=40)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    asked, answer = (
        question_ids(encode, "{question} s", "it is"),
        answer_ids(lambda text: encode(text[1:]), "o"),
    )
    assert tokenizer.decode(asked + answer) == "it is so"
    assert encode("it is so") != asked + answer, "choose texts that merge"
    row = {"token_ids": asked + answer, "prompt_tokens": len(asked)}
    assert prompt_of(row, None) == asked
    assert response_of(row, None, EOS) == [*answer, EOS]


def losses(model, rows):
    """The SFT loss of each row as the stage computes it, and the log-probabilities that it averages."""
    select(model, "sft")
    prompts = [prompt_of(row, None) for row in rows]
    responses = [response_of(row, None, EOS) for row in rows]
    batch = pad_pairs(prompts, responses, EOS, CPU)
    outputs = response_outputs(model, batch, None, temperature=1.0)
    return sequence_nll(outputs.logprobs, batch.response_mask), outputs.logprobs, batch


def test_the_loss_is_on_answer_and_eos_alone(llama):
    texts = random_texts([7, 5, 4], seed=8)
    rows = [{"token_ids": text, "prompt_tokens": n} for text, n in zip(texts, (3, 4, 1), strict=True)]
    found, _, batch = losses(llama, rows)
    assert batch.response_mask.sum(1).tolist() == [5, 2, 4]  # the answers' tokens, and EOS
    for row, loss in zip(rows, found, strict=True):
        text = torch.tensor([[*row["token_ids"], EOS]])
        predicted = llama(input_ids=text).logits[0, :-1].log_softmax(-1)
        own = -predicted.gather(1, text[0, 1:, None])[:, 0]
        torch.testing.assert_close(loss, own[row["prompt_tokens"] - 1 :].mean(), rtol=0, atol=1e-5)


def test_every_target_is_an_answer_s_token_or_eos(llama, monkeypatch):
    targets = []
    monkeypatch.setattr(
        "rlhf.scoring.token_logprobs", lambda *x: targets.append(x[2].tolist()) or token_logprobs(*x)
    )
    rows = [
        {"token_ids": [5, 3, 9, 1, 2], "prompt_tokens": 3},
        {"token_ids": [5, 3, 4], "prompt_tokens": 1},
        {"token_ids": [6, 2], "prompt_tokens": 2},
    ]
    losses(llama, rows)
    assert targets == [[1, 2, EOS, 3, 4, EOS, EOS]]


def test_sft_descends_the_mean_answer_loss(questions):
    set_params(Path(), {"sft.steps": 1, "sft.lora_dropout": 0.0})
    run_stage("sft")
    rows, found = read_jsonl("data/split/sft.jsonl"), []
    model = model_with("sft")
    for index in epoch_order(load().seed, "sft", len(rows), 0, load().sft.batch_size):
        text, n = [*rows[index]["token_ids"], EOS], rows[index]["prompt_tokens"]
        predicted = plain_forward(model, text)[0][:-1].log_softmax(-1)
        found.append(-predicted[range(n - 1, len(text) - 1), text[n:]].mean().item())
    loss = float(Path("reports/plots/sft.csv").read_text(encoding="utf-8").splitlines()[1].split(",")[1])
    assert loss == pytest.approx(sum(found) / len(found), abs=1e-5)


def test_sampling_continues_each_question_and_measures_its_answer(questions, monkeypatch):
    given = []
    monkeypatch.setattr("rlhf.rollout.sample", lambda *x: given.extend(x[1]) or sample(*x))
    run_stage("sample --policy sft")
    test, val = (read_jsonl(f"data/split/{part}.jsonl") for part in ("test", "val"))
    prompts = [row["token_ids"][: row["prompt_tokens"]] for row in test]
    assert given == prompts * load().sample.n
    assert len({len(prompt) for prompt in prompts}) > 1, "choose prompts of several lengths"
    measured = read_jsonl("artifacts/val_nll/sft.jsonl")
    assert [row["tokens"] for row in measured] == [
        len(row["token_ids"]) - row["prompt_tokens"] + 1 for row in val
    ]
    model = model_with("sft")
    load_adapter(model, "sft", "artifacts/sft")
    select(model, "sft")
    for row, found in zip(val, measured, strict=True):
        text, n = [*row["token_ids"], EOS], row["prompt_tokens"]
        predicted = plain_forward(model, text)[0][:-1].log_softmax(-1)
        own = -predicted[range(n - 1, len(text) - 1), text[n:]].sum().item()
        assert found["nll"] == pytest.approx(own, abs=1e-4)
