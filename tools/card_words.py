"""What a model card says of one pipeline and not of the other: movie reviews, and answers to questions."""

from typing import NamedTuple

from rlhf.config import Params, QuestionParams
from rlhf.record import read_json
from rlhf.report import answer_appendix
from rlhf.report import markdown as md
from rlhf.report.appendix import JUDGE_LIMITS, LIMITS
from rlhf.sections import Ppo, Reward
from rlhf.stats import clopper_pearson

ANSWER_LIMITS = """- It says what is wrong as readily as what is right: do not use it as a source of facts.
- No person compared the answers that are measured here.
- A reward can rise while answers get worse (reward hacking). The run's report says which signs of that it
  looked for and found.
{study}"""


class Words(NamedTuple):
    """Pieces of a card as markdown; `prompt` and `trials` end a sentence, the others are whole ones."""

    aim: str
    prompt: str
    data: str
    method: str
    accuracies: str
    scales: str
    trials: str
    limits: str


def review_words(params: Params) -> Words:
    """Return what is said of a run on labelled texts."""
    return Words(
        aim="",
        prompt=f"the first {params.generation.prefix_tokens} tokens of a text",
        data="",
        method=review_method(params),
        accuracies=review_accuracies(),
        scales="NLL and KL are in nats, lengths in tokens.",
        trials="",
        limits=LIMITS.format(judge=JUDGE_LIMITS[params.judge.epochs > 0]),
    )


def answer_words(params: QuestionParams) -> Words:
    """Return what is said of a run on questions; who preferred its answers is read from its metrics."""
    preferences = read_json(metrics_file("preferences"))
    human = bool(preferences["human"])
    study = answer_appendix.limits(params.split.sizes.test, human)
    return Words(
        aim=answer_aim(human),
        prompt="a question in that template, without special tokens and without a chat template",
        data=answer_data(params, human),
        method=answer_method(params, preferences),
        accuracies=answer_accuracies(human),
        scales=answer_scales(human),
        trials=(
            ",\nwith questions as trials, since pairs of one question depend on each other (the report\n"
            "resamples questions with their pairs instead)"
        ),
        limits=ANSWER_LIMITS.format(study=study),
    )


def review_method(params: Params) -> str:
    """Return the whole run in four sentences."""
    sizes, sft, ppo, rank = params.split.sizes, params.sft, params.ppo, params.model.lora.rank
    judge = "a ready classifier"
    if params.judge.epochs > 0:
        rows = read_json(metrics_file("judge_model"))["train_rows"]
        judge = f"a classifier trained on {rows} other labelled texts"
    return f"""SFT fits a LoRA adapter of rank {rank} to {sizes.sft} texts by next-token loss, in
{sft.steps} steps of {sft.batch_size}. A reward model, {reward_model(params.reward)},
learns the human labels of {sizes.rm} texts. PPO starts from SFT and raises the reward 2σ(logit) − 1 of its
continuations in {ppo.steps} steps of {ppo.batch_size}, {penalty(ppo)},
and the step of the highest reward on fixed validation prefixes is kept. A judge
that PPO never sees, {judge}, scores what each policy writes after
{sizes.test} held-out prefixes, under the same random numbers."""


def answer_method(params: QuestionParams, preferences: dict) -> str:
    """Return the whole run in five sentences; `preferences` is that stage's metrics."""
    sizes, sft, ppo, rank = params.split.sizes, params.sft, params.ppo, params.model.lora.rank
    human, drawn = preferences["human"], preferences["samples_per_prompt"]
    who = (
        "people's own, from a file"
        if human
        else f"those of a simulated annotator between {drawn} samples of SFT to each question, a judgement "
        f"being turned round with probability {params.preferences.noise}"
    )
    advantages = {
        "gae": "GAE's, with a value head",
        "returns": "the rewards to go, without a value head",
    }
    return f"""SFT fits a LoRA adapter of rank {rank} to {sizes.sft} hand-written answers by
next-token loss, in {sft.steps} steps of {sft.batch_size}. A Bradley-Terry reward model,
{reward_model(params.reward)}, learns {preferences["pairs_rm"]} preferences between two answers,
{who}; its step of the lowest validation loss is kept. PPO starts
from SFT and raises that model's output, in standard deviations of {scored(human)}, in
{ppo.steps} steps of {ppo.batch_size}, {penalty(ppo)}. Its
advantages are {advantages[ppo.advantage]}, and the step of the highest reward on
{ppo.validation_prefixes} fixed validation questions is kept. What each policy answers to
{sizes.test} held-out questions is scored by rules of style and held against hand-written answers, under the
same random numbers."""


def reward_model(reward: Reward) -> str:
    """Return in words what the reward model is made of."""
    base = "another adapter of the same base" if reward.adapter else "the frozen base itself"
    head = {"linear": "a linear head", "mlp": "a head of two layers"}[reward.head]
    return f"{base} with {head}"


def penalty(ppo: Ppo) -> str:
    """Return in words how PPO is held near SFT; no controller changes a coefficient of 0."""
    if ppo.kl_beta == 0:
        return "without a KL penalty"
    start = "" if ppo.kl_controller == "fixed" else " at first"
    return (
        "with a KL penalty to the frozen SFT policy on every\n"
        f"token ({ppo.kl_controller}, {ppo.kl_beta}{start})"
    )


def scored(human: bool) -> str:
    """Return on which answers the reward is centred."""
    return "the preferred and rejected answers" if human else "SFT's samples"


def answer_aim(human: bool) -> str:
    """Return what the run was for, and who preferred."""
    who = "people's preferences" if human else "the preferences of a simulated annotator, a rule about style"
    return f"The run teaches it how to answer questions: SFT by hand-written answers, PPO by\n{who}."


def answer_data(params: QuestionParams, human: bool) -> str:
    """Return where the run's questions, answers and preferences come from."""
    answers, questions, pairs = params.split.answers, params.split.questions, params.preferences.pairs
    preferences = (
        f"People's preferences are `{pairs.file}`."
        if human
        else f"No person's preferences were used: `{pairs.file}` held none."
    )
    return f"""Hand-written answers and bare questions are files of the run's own folder,
`{answers.file}` and `{questions.file}`. {preferences}"""


def answer_scales(human: bool) -> str:
    """Return what the metrics of answers mean."""
    whose = "a rule about style" if human else "the annotator's rule about style"
    return f"""The heuristic score, from −5 to 5, is {whose}. Token
F1 (0 to 1) and chrF (0 to 100) compare with one hand-written answer each. The NLL of other hand-written
answers and the KL are in nats, the reward is in standard deviations of {scored(human)}."""


def review_accuracies() -> str:
    """Return a table of what was right on held-out labels."""
    reward, judge = read_json(metrics_file("reward")), read_json(metrics_file("judge_model"))
    rows = [
        ["Reward model", *accuracy(reward["accuracy"], reward["n"])],
        ["Judge", *accuracy(judge["accuracy"], judge["n"])],
        ["VADER", *accuracy(judge["vader_accuracy"], judge["n"])],
    ]
    return md.table(["Accuracy on held-out labels", "n", "Accuracy", "95% interval"], rows)


def answer_accuracies(human: bool) -> str:
    """Return a table of held-out pairs that were ordered right; the noise in people's pairs is not known."""
    reward = read_json(metrics_file("reward"))
    shares = {"as judged": reward["accuracy"]}
    if not human:
        shares["before noise"] = reward["noise_free_accuracy"]
    pairs = str(reward["n"])
    rows = [
        [f"Reward model, {what}", pairs, *accuracy(share, reward["prompts"])]
        for what, share in shares.items()
    ]
    header = ["Accuracy on held-out pairs", "Pairs", "Questions", "Accuracy", "95% interval"]
    return md.table(header, rows)


def accuracy(share: float, n: int) -> list[str]:
    """Return the end of a table row: trials, the share that was right, and its interval."""
    return [str(n), md.percent(share), md.interval(*clopper_pearson(round(share * n), n))]


def metrics_file(name: str) -> str:
    """Return where a stage wrote its metrics."""
    return f"reports/metrics/{name}.json"
