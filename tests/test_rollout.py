"""Scoring responses: every number against one plain forward per prefix, and blind to padding and batching."""

import math

import pytest
import torch
from tiny import CPU, EOS, POISON, plain_forward, random_texts, streams
from torch import nn

from rlhf.batching import Batch, micro_batches, pad_pairs
from rlhf.heads import reward_head
from rlhf.models import adapter_state, select, set_adapter_state
from rlhf.objectives import Centre, score_from_logit
from rlhf.rollout import Rollout, collect, records, summarise
from rlhf.sampling import sample
from rlhf.scoring import RewardModel, evaluate, response_outputs, reward_logits, reward_scores

# Float32 numbers of size up to 16 are 1e-6 apart, and sums in another order move a few of those steps.
CLOSE = {"rtol": 0, "atol": 1e-5}
PROMPTS = random_texts([3, 1, 6, 2, 4], seed=1)
RESPONSES = [
    body + end
    for body, end in zip(random_texts([4, 1, 2, 0, 5], seed=2), ([], [], [EOS], [EOS], [EOS]), strict=True)
]
SETTINGS = {"policy": "ppo", "response_tokens": 8, "eos_id": EOS, "temperature": 1.2, "max_tokens": 24}


def value_head_of(model) -> nn.Linear:
    return reward_head("linear", 32, 5, CPU).requires_grad_(False)


def brute_force(model, value_head, temperature):
    """Rows of (log-probability, entropy, value), each from a forward over the tokens before its own."""
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        row = []
        for t, token in enumerate(response):
            logits, hidden = plain_forward(model, prompt + response[:t])
            p = torch.softmax(logits[-1].double() / temperature, 0)
            row.append((p[token].log(), -(p * p.log()).sum(), value_head(hidden[-1])[0]))
        rows.append(torch.tensor(row))
    return rows


def assert_rows(evaluation, expected):
    for i, row in enumerate(expected):
        for field, column in zip(evaluation, row.T, strict=True):
            torch.testing.assert_close(field[i, : len(column)], column.float(), **CLOSE)
            assert not field[i, len(column) :].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_entropies_and_values_equal_brute_force(model, temperature):
    select(model, "ppo")
    head = value_head_of(model)
    batch = pad_pairs(PROMPTS, RESPONSES, EOS, CPU)
    with torch.no_grad():
        outputs = response_outputs(model, batch, head, temperature)
    assert all(field.dtype == torch.float32 and field.shape == (5, 6) for field in outputs)
    assert_rows(outputs, brute_force(model, head, temperature))


def test_without_a_value_head_values_are_zero(llama):
    assert not evaluate(llama, PROMPTS, RESPONSES, None, 1.0, 100).values.any()


@torch.no_grad()
def test_padding_changes_nothing_whatever_lies_under_it(model):
    select(model, "ppo")
    head = value_head_of(model)
    plain = pad_pairs(PROMPTS, RESPONSES, EOS, CPU)
    expected = response_outputs(model, plain, head, 0.7)
    rows, width = plain.input_ids.shape
    embedding = model.get_base_model().get_input_embeddings()
    head_layer = model.get_base_model().get_output_embeddings()
    head_layer.weight = nn.Parameter(head_layer.weight.clone(), requires_grad=False)  # untied in GPT-2
    embedding.weight[POISON] = 1e6  # a trace of it would swamp everything else
    ids = torch.full((rows, 3 + width + 4), POISON)
    real = torch.zeros_like(ids, dtype=torch.bool)
    ids[:, 3 : 3 + width] = torch.where(plain.attention_mask, plain.input_ids, POISON)
    real[:, 3 : 3 + width] = plain.attention_mask
    poisoned = response_outputs(model, Batch(ids, real, real[:, 3 + 6 :]), head, 0.7)
    for before, after in zip(expected, poisoned, strict=True):
        torch.testing.assert_close(after[:, :6], before, **CLOSE)
        assert not after[:, 6:].any()


@pytest.mark.parametrize("max_tokens", [1, 17, 30])
def test_neither_micro_batches_nor_the_order_of_rows_change_an_evaluation(model, max_tokens):
    select(model, "ppo")
    head = value_head_of(model)
    whole = evaluate(model, PROMPTS, RESPONSES, head, 0.7, 10_000)
    order = [3, 0, 4, 2, 1]
    split = evaluate(model, [PROMPTS[i] for i in order], [RESPONSES[i] for i in order], head, 0.7, max_tokens)
    for before, after in zip(whole, split, strict=True):
        torch.testing.assert_close(after, before[order], **CLOSE)


def closed_logit(model, head, body):
    """The reward logit of one text without its EOS, by a plain forward over the text and one EOS."""
    return head(plain_forward(model, [*body, EOS])[1][-1])[0]


@torch.no_grad()
def test_the_reward_is_read_at_one_final_eos_alone(model):
    select(model, "reward")
    head = reward_head("linear", 32, 3, CPU)
    bodies = [*random_texts([5, 1, 9, 3, 7], seed=3), []]
    ended = [body + [EOS] * i for i, body in enumerate(bodies)]  # with 0 to 5 EOS of their own
    expected = torch.stack([closed_logit(model, head, body) for body in bodies])
    assert expected.unique().numel() == len(bodies)
    for max_tokens in (1, 14, 10_000):
        for order in ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1]):
            logits = reward_logits(model, head, [ended[i] for i in order], EOS, max_tokens)
            torch.testing.assert_close(logits, expected[order], **CLOSE)


def test_reward_scores_use_the_reward_adapter_and_no_gradient(llama):
    head = reward_head("linear", 32, 3, CPU)
    texts = random_texts([4, 2], seed=4)
    select(llama, "ppo", train=True)
    scores = reward_scores(llama, RewardModel(head, "reward", None), texts, EOS, 100)
    select(llama, "reward")
    logits = torch.stack([closed_logit(llama, head, text) for text in texts])
    torch.testing.assert_close(scores, torch.tanh(logits / 2), **CLOSE)  # 2 sigmoid(x) - 1
    assert not scores.requires_grad
    assert not any(parameter.requires_grad for parameter in llama.parameters())


@torch.no_grad()
@pytest.mark.parametrize("adapter", [None, "reward"])
def test_a_centred_score_is_read_under_the_reward_s_own_adapter(llama, adapter):
    """None is the base, whatever was active before."""
    head, texts = reward_head("mlp", 32, 3, CPU), random_texts([4, 2], seed=4)
    select(llama, adapter)
    logits = torch.stack([closed_logit(llama, head, text) for text in texts])
    select(llama, "ppo", train=True)
    scores = reward_scores(llama, RewardModel(head, adapter, Centre(0.5, 2.0)), texts, EOS, 100)
    torch.testing.assert_close(scores, (logits - 0.5) / 2, **CLOSE)


def reward_model() -> RewardModel:
    return RewardModel(reward_head("linear", 32, 3, CPU), "reward", None)


def collected(model, value_head, **changed) -> Rollout:
    return collect(
        model,
        reward_model(),
        value_head,
        PROMPTS,
        streams(5, seed=5),
        **{**SETTINGS, **changed},
    )


def test_a_rollout_holds_the_right_adapter_in_every_field(model):
    head = value_head_of(model)
    rollout = collected(model, head)
    select(model, "ppo")
    assert rollout.responses == sample(model, PROMPTS, streams(5, seed=5), 8, EOS, 1.2)
    assert len({len(response) for response in rollout.responses}) > 1, "choose another seed"
    for i, (prompt, response) in enumerate(zip(PROMPTS, rollout.responses, strict=True)):
        n = len(response)
        assert rollout.response_mask[i].tolist() == [t < n for t in range(rollout.response_mask.shape[1])]
        for name, field in (("ppo", rollout.logprobs), ("sft", rollout.ref_logprobs)):
            select(model, name)
            logits, hidden = plain_forward(model, prompt + response)
            before = torch.log_softmax(logits[len(prompt) - 1 : -1] / 1.2, -1)
            expected = before.gather(1, torch.tensor(response)[:, None])[:, 0]
            torch.testing.assert_close(field[i, :n], expected, **CLOSE)
            if name == "ppo":
                values = head(hidden[len(prompt) - 1 : -1])[:, 0]
                torch.testing.assert_close(rollout.values[i, :n], values, **CLOSE)
                torch.testing.assert_close(
                    rollout.entropy[i, :n], torch.distributions.Categorical(logits=before).entropy(), **CLOSE
                )
        select(model, "reward")
        body = [token for token in prompt + response if token != EOS]
        score = score_from_logit(closed_logit(model, reward_head("linear", 32, 3, CPU), body))
        torch.testing.assert_close(rollout.scores[i], score.detach(), **CLOSE)
    assert all(not field.requires_grad for field in rollout[2:])


@pytest.mark.parametrize("max_tokens", [1, 20, 10_000])
def test_before_the_first_update_the_ratio_is_one_and_the_kl_zero_exactly(model, max_tokens):
    set_adapter_state(model, "ppo", adapter_state(model, "sft"))
    rollout = collected(model, value_head_of(model), max_tokens=max_tokens)
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)
    assert summarise(rollout, str, EOS)["kl"] == 0
    select(model, "ppo", train=True)
    lengths = [len(p) + len(r) for p, r in zip(PROMPTS, rollout.responses, strict=True)]
    for indices in micro_batches(lengths, max_tokens):
        batch = pad_pairs([PROMPTS[i] for i in indices], [rollout.responses[i] for i in indices], POISON, CPU)
        again = response_outputs(model, batch, None, SETTINGS["temperature"]).logprobs
        assert again.requires_grad
        assert torch.equal(again, rollout.logprobs[indices, : again.shape[1]])
    other_split = evaluate(model, rollout.prompts, rollout.responses, None, SETTINGS["temperature"], 13)
    torch.testing.assert_close(other_split.logprobs, rollout.logprobs, **CLOSE)


def test_one_seed_gives_one_rollout_and_every_row_its_own_stream(llama):
    head = value_head_of(llama)
    first, second = collected(llama, head), collected(llama, head)
    assert first.responses == second.responses
    assert all(torch.equal(a, b) for a, b in zip(first[2:], second[2:], strict=True))
    replaced = streams(5, seed=5)
    replaced[0] = streams(6)[5]
    changed = collect(llama, reward_model(), head, PROMPTS, replaced, **SETTINGS)
    differs = [a != b for a, b in zip(first.responses, changed.responses, strict=True)]
    assert differs == [True, False, False, False, False]


def test_collect_does_not_change_the_model(llama):
    before = {key: value.clone() for key, value in llama.state_dict().items()}
    collected(llama, value_head_of(llama))
    assert all(torch.equal(value, before[key]) for key, value in llama.state_dict().items())


@pytest.mark.parametrize("policy", [None, "sft", "ppo", "reward"])
def test_any_policy_can_be_collected_and_is_compared_with_sft(llama, policy):
    rollout = collected(llama, None, policy=policy)
    select(llama, policy)
    assert rollout.responses == sample(llama, PROMPTS, streams(5, seed=5), 8, EOS, 1.2)
    own = evaluate(llama, PROMPTS, rollout.responses, None, 1.2, 24)
    select(llama, "sft")
    reference = evaluate(llama, PROMPTS, rollout.responses, None, 1.2, 24)
    assert torch.equal(rollout.logprobs, own.logprobs)
    assert torch.equal(rollout.ref_logprobs, reference.logprobs)
    assert torch.equal(own.logprobs, reference.logprobs) is (policy == "sft")


def hand_made() -> Rollout:
    return Rollout(
        prompts=[[1], [2, 3]],
        responses=[[5, EOS], [6, 7, 8]],
        response_mask=torch.tensor([[True, True, False], [True, True, True]]),
        logprobs=torch.tensor([[-1.0, -2.0, 99.0], [-1.0, -1.0, -1.0]]),
        ref_logprobs=torch.tensor([[-2.0, -2.5, -99.0], [-1.0, -0.5, -4.0]]),
        entropy=torch.tensor([[1.0, 2.0, 50.0], [3.0, 4.0, 5.0]]),
        values=torch.zeros(2, 3),
        scores=torch.tensor([0.5, -0.25]),
    )


def test_records_by_hand():
    texts = {(1,): "p", (5, EOS): " ", (1, 5, EOS): "p ", (2, 3): "q r", (6, 7, 8): "a b c a b c"}
    texts |= {(2, 3, 6, 7, 8): "q r a b c a b c"}
    assert records(hand_made(), lambda tokens: texts[tuple(tokens)], EOS) == [
        {
            "prefix": "p",
            "continuation": " ",
            "full_text": "p ",
            "token_ids": [5, EOS],
            "n_tokens": 2,
            "ended": True,
            "empty": True,
            "repetition": 0.0,
            "kl": 1.5,  # (-1 - 2) - (-2 - 2.5)
            "reward": 0.5,
        },
        {
            "prefix": "q r",
            "continuation": "a b c a b c",
            "full_text": "q r a b c a b c",
            "token_ids": [6, 7, 8],
            "n_tokens": 3,
            "ended": False,
            "empty": False,
            "repetition": 0.25,
            "kl": 2.5,  # -3 - (-1 - 0.5 - 4)
            "reward": -0.25,
        },
    ]


def test_summarise_by_hand():
    texts = {(5, EOS): "a b c d", (6, 7, 8): "a b c a b c"}  # 3-grams abc bca cab abc: one of four repeats
    assert summarise(hand_made(), lambda tokens: texts[tuple(tokens)], EOS) == {
        "reward": 0.125,
        "kl": 2.0,  # (1 + .5 + 0 - .5 + 3) / 2 sequences
        # exp(-d) - 1 + d of these: (.367879 + .106531 + 0 + .148721 + 2.049787) / 2
        "kl_k3": pytest.approx(1.336459, rel=1e-6),
        "kl_per_token": pytest.approx(0.8, rel=1e-6),  # the same sum over 5 tokens
        "ended_rate": 0.5,
        "length": 2.5,
        "repetition": 0.125,
        "entropy": 3.0,
    }


def test_summarise_counts_a_response_of_eos_alone():
    one = torch.zeros(1, 1)
    rollout = Rollout([[1]], [[EOS]], torch.ones(1, 1, dtype=torch.bool), one, one, one, one, torch.zeros(1))
    summary = summarise(rollout, lambda tokens: "", EOS)
    assert summary["ended_rate"] == 1 and summary["length"] == 1 and summary["repetition"] == 0
    assert all(math.isfinite(value) for value in summary.values())


def test_perturbed_adapters_differ_in_log_probability(llama):
    """The tests above rest on it: two adapters, and the base, are far apart in log-probability."""
    views = []
    for name in ("sft", "ppo", None):
        select(llama, name)
        views.append(evaluate(llama, PROMPTS, RESPONSES, None, 1.0, 100).logprobs)
    assert min((views[i] - views[j]).abs().mean() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.1


@pytest.mark.parametrize("prompts", [[[], [5]], [[], []]])
def test_an_empty_prompt_is_refused(llama, prompts):
    with pytest.raises(ValueError, match="at least one token in every prompt"):
        evaluate(llama, prompts, [[3], [4]], None, 1.0, 100)
