"""The frozen external judge: a text classifier that PPO never sees, and VADER as a second opinion."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from rlhf.batching import micro_batches
from rlhf.checkpoint import Snapshots, restore_training, training_snapshot
from rlhf.errors import UserError
from rlhf.randomness import epoch_order, stream
from rlhf.record import Progress

MICRO_BATCH_TOKENS = 1024


def load_classifier(folder: str | Path, device: torch.device) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load a two-class text classifier in float32, in evaluation mode, and its tokenizer.

    An encoder without a classification head gets one, with weights that `train_classifier` sets; any other
    missing weight is a `UserError`. Dropout stays off in training too: it would draw from a global generator.
    """
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=2, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **local
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
    except Exception as error:  # transformers tells of a damaged folder by any of a dozen kinds
        raise UserError(f"the judge cannot be loaded: {str(error).strip()}") from None
    if missing := sorted(set(found["missing_keys"]) - {"classifier.weight", "classifier.bias"}):
        raise UserError(f"the judge lacks weights besides its head's, such as {missing[0]}")
    return model.to(device).eval().requires_grad_(False), tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_tokens: int) -> list[list[int]]:
    """Token ids with the tokenizer's own special tokens, cut at `max_tokens`; an empty text reads as ' '."""
    return tokenizer([text or " " for text in texts], truncation=True, max_length=max_tokens)["input_ids"]


def _logits(model: nn.Module, texts: list[list[int]]) -> torch.Tensor:
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=model.device)
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts], device=model.device)
    return model(input_ids=ids, attention_mask=mask).logits


def train_classifier(
    model: nn.Module,
    texts: list[list[int]],
    labels: list[int],
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
    snapshots: Snapshots,
) -> None:
    """Fine-tune all of `model` with cross-entropy; it returns frozen, with 1 as the class 'positive'.

    The head starts at N(0, 0.02); AdamW, gradients clipped at 1; the learning rate rises over a sixteenth of
    the steps and then falls linearly to zero.
    """
    head = stream(seed, "judge", "head").normal(0, 0.02, model.classifier.weight.shape)
    with torch.no_grad():
        model.classifier.weight.copy_(torch.from_numpy(head))
        model.classifier.bias.zero_()
    model.config.id2label, model.config.label2id = (
        {0: "NEGATIVE", 1: "POSITIVE"},
        {"NEGATIVE": 0, "POSITIVE": 1},
    )
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    steps = epochs * len(texts) // batch_size
    warm_up = max(1, steps // 16)
    done = 0
    if snapshot := snapshots.latest():
        restore_training(snapshot, optimizer)
        done = snapshot.step
    progress = Progress("judge-model", steps, done)
    for step in range(done, steps):
        optimizer.param_groups[0]["lr"] = lr * min(
            (step + 1) / warm_up, (steps - step) / (steps - warm_up + 1)
        )
        rows = epoch_order(seed, "judge", len(texts), step, batch_size)
        loss = 0.0
        for indices in micro_batches([len(texts[i]) for i in rows], MICRO_BATCH_TOKENS):
            chosen = [rows[i] for i in indices]
            target = torch.tensor([labels[i] for i in chosen], device=model.device)
            part = F.cross_entropy(_logits(model, [texts[i] for i in chosen]), target, reduction="sum")
            (part / len(rows)).backward()
            loss += part.item() / len(rows)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step(step + 1, sum(len(texts[i]) for i in rows), loss=loss)
        if snapshots.due():
            snapshots.save(training_snapshot(step + 1, optimizer))
    model.requires_grad_(False)


def save_classifier(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that `load_classifier` reads."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # For a full disk the two libraries raise types of their own, down to Exception itself.
        raise UserError(f"the judge could not be written: {error}") from None


def positive_class(model: nn.Module) -> int:
    """The index of the class that the model's own configuration calls positive."""
    names = {name.upper(): int(index) for index, name in model.config.id2label.items()}
    if "POSITIVE" not in names:
        raise UserError(f"the judge names its classes {sorted(names)}: expected one of them to be POSITIVE")
    return names["POSITIVE"]


@torch.no_grad()
def positive_probabilities(model: nn.Module, texts: list[list[int]]) -> list[float]:
    """Probability of the positive class for each text, whatever the order and the batches."""
    positive = positive_class(model)
    result = [0.0] * len(texts)
    for indices in micro_batches([len(text) for text in texts], MICRO_BATCH_TOKENS * 4):
        found = _logits(model, [texts[i] for i in indices]).softmax(-1)[:, positive]
        for index, probability in zip(indices, found.tolist(), strict=True):
            result[index] = probability
    return result


def vader_compound(texts: list[str]) -> list[float]:
    """VADER's compound score in [-1, 1]: a lexicon and rules, no training. Source: Hutto and Gilbert 2014."""
    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in texts]
