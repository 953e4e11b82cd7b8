"""The judge: learns separable text, repeats to the bit, and reads a text alike in any company."""

import pytest
import torch
from tiny import CPU, tiny_tokenizer
from transformers import BertConfig, BertModel

from rlhf import judging
from rlhf.checkpoint import Snapshots
from rlhf.errors import UserError
from rlhf.judging import encode, load_classifier, positive_probabilities, train_classifier, vader_compound

TEXTS = ["a warm and moving film .", "the plot is dull and thin .", "", "one of the best films of the year !"]
SENTENCES = {1: "an honest , tender story", 0: "it is a dull and lifeless movie"}


@pytest.fixture
def folder(tmp_path):
    """A tiny encoder without a classification head, with its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        BertModel(BertConfig(vocab_size=96, initializer_range=0.2, **shape)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def trained(folder, seed: int = 0):
    model, tokenizer = load_classifier(folder, CPU)
    labels = [i % 2 for i in range(24)]
    never = Snapshots(folder / "snapshots", "key", float("inf"))
    texts = encode(tokenizer, [f"{SENTENCES[label]} {'!' * (i % 5)}" for i, label in enumerate(labels)], 64)
    train_classifier(model, texts, labels, epochs=4, batch_size=8, lr=0.01, seed=seed, snapshots=never)
    return model, texts, labels


def test_it_separates_what_can_be_separated_and_ends_frozen(folder):
    model, texts, labels = trained(folder)
    assert [p >= 0.5 for p in positive_probabilities(model, texts)] == [label == 1 for label in labels]
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert judging.positive_class(model) == 1


def test_training_depends_on_its_seed_and_on_no_global_state(folder):
    torch.manual_seed(1)
    first = trained(folder)[0].state_dict()
    torch.manual_seed(2)
    again, other = trained(folder)[0].state_dict(), trained(folder, seed=1)[0].state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])


def test_a_text_is_scored_alike_alone_and_among_longer_ones(folder):
    """Within rounding: float32 products are summed in another order for another batch."""
    model, tokenizer = load_classifier(folder, CPU)
    model.config.id2label = {0: "NEGATIVE", 1: "POSITIVE"}
    texts = encode(tokenizer, TEXTS, 64)
    together = positive_probabilities(model, texts)
    assert together == pytest.approx([positive_probabilities(model, [text])[0] for text in texts], abs=1e-6)
    assert positive_probabilities(model, texts[::-1])[::-1] == pytest.approx(together, abs=1e-6)


def test_the_positive_class_is_found_by_name_or_refused(folder):
    model, tokenizer = load_classifier(folder, CPU)
    texts = encode(tokenizer, TEXTS, 64)
    model.config.id2label = {0: "negative", 1: "positive"}
    second = positive_probabilities(model, texts)
    model.config.id2label = {0: "positive", 1: "negative"}
    first = positive_probabilities(model, texts)
    assert [a + b for a, b in zip(first, second, strict=True)] == pytest.approx([1.0] * 4, abs=1e-6)
    model.config.id2label = {0: "LABEL_0", 1: "LABEL_1"}
    with pytest.raises(UserError, match="expected one of them to be POSITIVE"):
        positive_probabilities(model, texts)


def test_long_texts_are_cut_and_an_empty_one_still_has_a_token(folder):
    tokenizer = load_classifier(folder, CPU)[1]
    assert [len(ids) for ids in encode(tokenizer, ["a warm film . " * 50, ""], 16)] == [16, 1]


def test_vader_agrees_with_its_authors_examples():
    """The first is in the README of vaderSentiment 3.3, with its score; the second negates it."""
    texts = ["VADER is smart, handsome, and funny.", "VADER is not smart, handsome, nor funny.", ""]
    assert vader_compound(texts) == [0.8316, -0.7424, 0.0]
