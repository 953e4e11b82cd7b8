"""params.yaml is read strictly: each mistake names its key, its value and what was expected, in one line."""

import functools
from copy import deepcopy
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf.config import Params, QuestionParams, load
from rlhf.errors import UserError
from rlhf.objectives import next_kl_beta

ROOT = Path(__file__).parent.parent
SHA, UPPER = "ab" * 32, "AB" * 32
SECTIONS = "seed, runtime, model, adam, generation, sft, reward, ppo, sample, report, fetch, split, judge"


@pytest.fixture(scope="module")
def document() -> dict:
    return YAML(typ="safe", pure=True).load(ROOT / "params.yaml")


@pytest.fixture
def edited(tmp_path, document):
    """Write the published parameters with keys set to raw YAML text, or removed by None; return the path."""

    def write(changes: dict[str, str | None]) -> Path:
        changed, path = deepcopy(document), tmp_path / "params.yaml"
        for number, (key, raw) in enumerate(changes.items()):
            *sections, name = key.split(".")
            section = changed
            for part in sections:
                section = section[part]
            if raw is None:
                del section[name]
            else:
                section[name] = f"placeholder-{number}"
        with path.open("w", encoding="utf-8") as file:
            YAML(typ="safe", pure=True).dump(changed, file)
        text = path.read_text(encoding="utf-8")
        for number, raw in enumerate(changes.values()):
            text = text.replace(f"placeholder-{number}", raw or "")
        path.write_text(text, encoding="utf-8")
        return path

    return write


def message(path: Path) -> str:
    """The one line that `load` complains with, without the path it starts with."""
    with pytest.raises(UserError) as raised:
        load(path)
    text = str(raised.value)
    assert text.startswith(str(path))
    assert len(text.splitlines()) == 1
    return text.removeprefix(str(path)).removeprefix(": ")


def test_every_value_arrives_under_its_own_key(edited, document):
    def as_tuples(value):
        if isinstance(value, dict):
            return {key: as_tuples(item) for key, item in value.items()}
        return tuple(value) if isinstance(value, list) else value

    params = load(edited({}))
    assert asdict(params) == as_tuples(document)
    with pytest.raises(FrozenInstanceError):
        params.ppo.lam = 0.5


def test_the_published_parameters_and_presets_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert isinstance(load(), Params)
    for preset in sorted(Path("presets").glob("*.yaml")):
        assert isinstance(load(preset), Params), preset


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("1e-05", 1e-5), ("1e-5", 1e-5), ("1E-5", 1e-5), ("1.0e-5", 1e-5), ("0.00001", 1e-5), ("2", 2.0)],
)
def test_spellings_of_a_number(edited, raw, expected):
    value = load(edited({"ppo.lr": raw})).ppo.lr
    assert value == expected
    assert type(value) is float


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        *[("seed", "0"), ("ppo.steps", "1"), ("ppo.seeds", "[0]"), ("ppo.gamma", "0"), ("ppo.gamma", "1")],
        *[
            ("ppo.lam", "0"),
            ("ppo.lam", "1.0"),
            ("ppo.kl_beta", "0"),
            ("adam.beta1", "0"),
            ("reward.weak_accuracy", "1"),
        ],
        *[("split.rows.where", "{}"), ("split.sha256", f"{{sft: {SHA}}}"), ("fetch.policy.revision", "'1'")],
        *[("adam.weight_decay", "0"), ("model.dtype", "bfloat16")],
    ],
)
def test_the_borders_of_each_range_are_inside(edited, key, raw):
    value = functools.reduce(getattr, key.split("."), load(edited({key: raw})))
    assert (list(value) if isinstance(value, tuple) else value) == YAML(typ="safe", pure=True).load(raw)


@pytest.mark.parametrize(
    ("key", "raw", "complaint"),
    [
        # Types: a bool is no integer, a quoted number no number, a float no integer.
        ("seed", "true", "seed is True: expected an integer"),
        ("seed", "1.0", "seed is 1.0: expected an integer"),
        ("seed", "'1'", "seed is '1': expected an integer"),
        ("seed", "", "seed is None: expected an integer"),
        ("ppo.lr", "true", "ppo.lr is True: expected a number"),
        ("ppo.lr", "'1e-5'", "ppo.lr is '1e-5': expected a number"),
        ("ppo.lr", "1e-5x", "ppo.lr is '1e-5x': expected a number"),
        ("ppo.lr", "[1.0]", "ppo.lr is [1.0]: expected a number"),
        ("report.title", "3", "report.title is 3: expected a text"),
        ("fetch.policy.revision", "5e12345", "fetch.policy.revision is inf: expected a text"),
        ("report.title", "2024-01-02", "report.title is datetime.date(2024, 1, 2): expected a text"),
        # Ranges
        ("seed", "-1", "seed is -1: expected an integer of at least 0"),
        ("ppo.steps", "0", "ppo.steps is 0: expected an integer of at least 1"),
        *[(f"{s}.lr", raw, f"{s}.lr is {float(raw)}: expected a finite number above 0")
          for s, raw in (("sft", "0.0"), ("reward", "-0.1"))],
        ("judge.lr", ".nan", "judge.lr is nan: expected a finite number above 0"),
        ("ppo.lr", ".inf", "ppo.lr is inf: expected a finite number above 0"),
        ("ppo.lr", "1e999", "ppo.lr is inf: expected a finite number above 0"),
        ("ppo.kl_beta", "-0.1", "ppo.kl_beta is -0.1: expected a finite number of at least 0"),
        ("ppo.kl_beta", ".nan", "ppo.kl_beta is nan: expected a finite number of at least 0"),
        ("ppo.kl_beta", ".inf", "ppo.kl_beta is inf: expected a finite number of at least 0"),
        ("ppo.gamma", "1.5", "ppo.gamma is 1.5: expected a number from 0 to 1"),
        ("ppo.lam", "-0.5", "ppo.lam is -0.5: expected a number from 0 to 1"),
        ("ppo.lam", ".nan", "ppo.lam is nan: expected a number from 0 to 1"),
        ("adam.beta1", "1", "adam.beta1 is 1: expected a number from 0 to below 1"),
        ("report.title", "' '", "report.title is ' ': expected a text that is not empty"),
        ("fetch.judge.sha256", "{f: AB}", "fetch.judge.sha256.f is 'AB': expected 64 hexadecimal digits"),
        ("split.sha256", f"{{a: {UPPER}}}", f"split.sha256.a is '{UPPER}': expected 64 hexadecimal digits"),
        # Choices
        ("runtime.device", "CPU", "runtime.device is 'CPU': expected one of cpu, cuda"),
        ("runtime.device", "", "runtime.device is None: expected one of cpu, cuda"),
        ("model.quantization", "[nf4]", "model.quantization is ['nf4']: expected one of none, nf4"),
        # Lists and mappings
        ("sample", "[n, 2]", "sample is ['n', 2]: expected a mapping"),
        ("sample", "", "sample is None: expected a mapping"),
        ("ppo.seeds", "42", "ppo.seeds is 42: expected a list"),
        ("ppo.seeds", "[]", "ppo.seeds is []: expected at least one seed, none twice"),
        ("ppo.seeds", "[1, 2, 1]", "ppo.seeds is [1, 2, 1]: expected at least one seed, none twice"),
        ("ppo.seeds", "[1, true]", "ppo.seeds[1] is True: expected an integer"),
        ("ppo.seeds", "[1, -2]", "ppo.seeds[1] is -2: expected an integer of at least 0"),
        ("model.lora.targets", "[q, '']", "model.lora.targets[1] is '': expected a text that is not empty"),
        ("split.rows.where", "[a]", "split.rows.where is ['a']: expected a mapping with text keys"),
        ("split.rows.where", "{1: a}", "split.rows.where is {1: 'a'}: expected a mapping with text keys"),
        ("split.rows.where", "{year: 2020}", "split.rows.where.year is 2020: expected a text"),
        # Unknown and missing keys
        ("pppo", "{}", f"unknown key 'pppo': expected {SECTIONS}"),
        ("sample.m", "1", "sample: unknown key 'm': expected n, batch_size"),
        ("model.lora.r", "8", "model.lora: unknown key 'r': expected rank, alpha, targets"),
        ("ppo", None, "missing key 'ppo'"),
        ("ppo.lam", None, "ppo: missing key 'lam'"),
        ("fetch.judge.revision", None, "fetch.judge: missing key 'revision'"),
        ("model.lora.targets", None, "model.lora: missing key 'targets'"),
    ],
)  # fmt: skip
def test_each_mistake_names_key_value_and_expectation(edited, key, raw, complaint):
    assert message(edited({key: raw})) == complaint


@pytest.mark.parametrize(
    ("key", "raw", "limit", "complaint"),
    [
        ("split.min_tokens", "10", {"split.max_tokens": "9"}, "expected at most split.max_tokens"),
        (
            *("generation.prefix_tokens", "10", {"split.min_tokens": "10"}),
            "expected less than split.min_tokens, so that every row has a continuation",
        ),
        (
            *("sft.prompt_tokens", "10", {"split.min_tokens": "10"}),
            "expected less than split.min_tokens, so that every row has a continuation",
        ),
        ("reward.loss", "pairwise", {}, "expected label"),
        ("ppo.minibatches", "3", {"ppo.batch_size": "8"}, "expected a divisor of ppo.batch_size"),
        ("ppo.validation_prefixes", "9", {"split.sizes.val": "8"}, "expected at most split.sizes.val"),
    ],
)
def test_keys_that_contradict_each_other(edited, key, raw, limit, complaint):
    assert message(edited({key: raw, **limit})) == f"{key} {raw}: {complaint}"


def asked(tmp_path, section: str, name: str, value: object) -> Path:
    """Write the published parameters of question answering with one key changed; return the path."""
    yaml, path = YAML(typ="safe", pure=True), tmp_path / "params.yaml"
    params = yaml.load(ROOT / "qa/params.yaml")
    params[section] |= {name: value}
    yaml.dump(params, path)
    return path


@pytest.mark.parametrize(("bound", "beyond", "kl"), [(0.01, 0.00999, 0.0), (1.0, 1.001, 1.0)])
def test_the_stepwise_controller_keeps_what_the_parameters_may_say(tmp_path, bound, beyond, kl):
    """Its bounds are accepted and fixed under any KL; beyond them is refused, and would have jumped."""
    text = (ROOT / "qa/params.yaml").read_text(encoding="utf-8")
    for value in (bound, beyond):
        (tmp_path / f"{value}.yaml").write_text(text.replace("kl_beta: 0.1", f"kl_beta: {value}"))
    assert load(tmp_path / f"{bound}.yaml").ppo.kl_beta == bound
    assert next_kl_beta("stepwise", bound, kl, 0.02, 32, 10_000) == bound
    assert next_kl_beta("stepwise", beyond, 0.02, 0.02, 32, 10_000) == bound
    with pytest.raises(UserError, match=r"expected 0\.01 to 1, within which"):
        load(tmp_path / f"{beyond}.yaml")


def test_a_section_of_preferences_makes_it_question_answering():
    params = load(ROOT / "qa/params.yaml")
    assert isinstance(params, QuestionParams) and not isinstance(params, Params)
    assert params.generation.prefix_tokens is params.sft.prompt_tokens is None
    assert params.split.template == "Question: {question}\n\nAnswer:"


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("generation.prefix_tokens", 6, "6: expected null, since each row says where its prompt ends"),
        ("sft.prompt_tokens", 1, "1: expected null, since each row says where its prompt ends"),
        ("reward.loss", "label", "label: expected pairwise"),
        ("preferences.noise", 1.5, "is 1.5: expected"),
        ("preferences.samples", 1, "is 1: expected"),
        ("split.template", "Answer:", "is 'Answer:': expected a text with {question} in it once"),
        ("split.template", "{question}{question}", "is '{question}{question}': expected a text with"),
        ("reward.head", "deep", "is 'deep': expected"),
        ("ppo.advantage", "none", "is 'none': expected"),
        ("ppo.validation_prefixes", 1000, "1000: expected at most split.sizes.val"),
        ("ppo.kl_beta", 0, "0.0 with ppo.kl_controller stepwise: expected 0.01 to 1, within which"),
        ("ppo.kl_beta", 1.5, "1.5 with ppo.kl_controller stepwise: expected 0.01 to 1, within which"),
    ],
)
def test_a_mistake_in_the_parameters_of_question_answering(tmp_path, key, value, complaint):
    found = message(asked(tmp_path, *key.split("."), value))
    assert found.startswith(f"{key} {complaint}")


def test_keys_that_just_agree(edited):
    limits = {"split.min_tokens": "10", "split.max_tokens": "10", "generation.prefix_tokens": "9"}
    equal = {
        "ppo.batch_size": "8",
        "ppo.minibatches": "8",
        "split.sizes.val": "8",
        "ppo.validation_prefixes": "8",
    }
    params = load(edited(limits | equal))
    assert (params.split.min_tokens, params.generation.prefix_tokens, params.ppo.minibatches) == (10, 9, 8)


@pytest.mark.parametrize(
    ("before", "after", "fragment"),
    [
        (b"", b"seed: [1\n", "not valid YAML"),
        (b"", b"seed: 2\n", 'duplicate key "seed"'),
        (b"", b"---\nseed: 2\n", "expected a single document"),
        (b"", b"extra: !!python/object/apply:os.system [x]\n", "could not determine a constructor"),
        (b"", b"extra: 1\x00\n", "not valid YAML"),
        (b"", b"extra: caf\xe9\n", "not valid YAML: 'utf-8' codec"),  # Latin-1
        (b"\xff\xfe", b"", "not valid YAML: 'utf-8' codec"),  # UTF-16
        (b"", b"extra: " + b"9" * 5000, "not valid YAML"),  # beyond Python's limit for digits
        (b"", b"extra: " + b"[" * 5000, "not valid YAML"),  # beyond what the parser can nest
    ],
)
def test_a_damaged_file_is_one_line(edited, before, after, fragment):
    path = edited({})
    path.write_bytes(before + path.read_bytes() + after)
    assert fragment in message(path)


def test_a_byte_order_mark_is_accepted(edited):
    path = edited({"seed": "7"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(path).seed == 7


def test_no_file_and_an_empty_file(tmp_path):
    assert message(tmp_path / "absent.yaml") == "no such file; run from the folder that holds it"
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert message(tmp_path / "empty.yaml") == " is None: expected a mapping"


def test_an_integer_too_large_for_a_float_is_a_mistake_of_the_file(edited):
    assert "ppo.lr" in message(edited({"ppo.lr": "1" + "0" * 400}))


def test_a_key_with_a_line_end_still_gives_one_line(edited):
    assert "expected a text" in message(edited({"split.rows.where": '{"a\\nb": 3}'}))
