"""For each pattern of results, the sentence that must appear and the one that must not."""

import re

from synthetic_results import judged_rows, likelihoods

from rlhf.report import comparisons, levels, verdict


def study(accuracy=0.87, selected=24, rise=0.0, seeds=(1, 2, 3), again=0.0, **shifts):
    """The verdict's sentences on synthetic rows."""
    policies = ["base", "sft", *(f"ppo-{s}" for s in seeds)]
    judged = judged_rows(seeds=seeds, again=again, **shifts)
    rows, nll = comparisons.prepare(judged, policies), likelihoods(policies, rise)
    again = [name for name in ("sft-again",) if name in set(judged["policy"])]
    values = comparisons.scores(comparisons.prepare(judged, policies + again), nll)
    found, checks = comparisons.compare(values, seeds, 42, 2000), comparisons.self_check(values, 42, 2000)
    table = levels.summarise(rows, nll, 42, 200)
    steps = dict.fromkeys(seeds, selected)
    kl, flags = table.loc["ppo", "kl"], verdict.flags(table)
    return verdict.sentences(found, checks, kl, accuracy, 0.7, steps, flags)


def test_a_clear_gain_is_called_an_improvement_with_its_size_and_interval():
    effect, second, cost, warnings, missing = study()
    assert effect.startswith("**PPO improved judged sentiment**")
    assert re.search(r"by \+0\.\d{3} \(95% interval \[0\.1\d\d, 0\.2\d\d\], over new seeds \[", effect)
    assert "3 of 3 seeds show a rise, 0 a fall, 0 neither" in effect
    assert "agrees (full text: rose by 0.4" in second
    assert "from base to SFT: fell by 1.09" in cost
    assert "from SFT to PPO: no change shown" in cost
    assert "no flag of section 4 is raised" in warnings
    assert "people would prefer" in missing and "Judge, full text" not in missing


def test_no_gain_is_never_an_improvement():
    effect, second, _, _, missing = study(judge=(0.0, 0.0, 0.0), vader=0.0, reward=0.0)
    assert effect.startswith("**An effect of PPO on judged sentiment is not shown**")
    assert "the interval includes 0" in effect and "80% power" in effect
    assert "improved" not in effect and "worsened" not in effect
    assert "VADER shows none either" in second and "agrees" not in second
    assert "a difference between PPO and SFT in Judge, full text" in missing


def test_a_loss_is_called_a_loss():
    effect, *_ = study(judge=(-0.2, -0.2, -0.2), vader=-0.4)
    assert effect.startswith("**PPO worsened judged sentiment**")
    assert "improved" not in effect and "3 a fall" in effect


def test_one_seed_against_the_others_forbids_the_claim():
    effect, *_, missing = study(judge=(0.3, 0.3, -0.1))
    assert "is not shown" in effect and "improved" not in effect
    assert "2 of 3 seeds show a rise, 1 a fall" in effect
    assert "Judge, full text" in missing


def test_one_seed_says_that_variation_between_runs_is_unknown():
    effect, *_ = study(seeds=(5,), judge=(0.2,))
    assert "improved" in effect
    assert "variation between training runs is not measured" in effect
    assert "seeds show" not in effect


def test_a_weak_reward_model_is_said_plainly():
    assert "the reward model is weak (accuracy 0.650, below 0.70)" in study(accuracy=0.65)[3]
    assert "weak" not in study(accuracy=0.70)[3]


def test_selection_of_step_zero_is_said_plainly():
    assert "step 0 for seed 1, 2, 3" in study(selected=0)[3]
    assert "step 0" not in study(selected=1)[3]


def test_identical_policies_give_no_effect_and_no_power():
    effect, *_ = study(selected=0, judge=(0.0, 0.0, 0.0), vader=0.0, reward=0.0, own_noise=0.0)
    assert "is not shown" in effect and "+0.000" not in effect
    assert "0.000 (95% interval [0.000, 0.000]" in effect
    assert "80% power" not in effect


def test_a_cost_in_likelihood_length_and_repetition_is_said():
    _, _, cost, warnings, missing = study(rise=0.3, length=-10.0, repetition=0.2)
    assert re.search(r"from SFT to PPO: rose by 0\.(29|30)", cost)
    assert "length in tokens: fell by" in cost and "repetition: rose by 0.2" in cost
    for name in ("Rise of review NLL", "Change of length", "Rise of repetition"):
        assert name in warnings
    assert "NLL" not in missing


def test_judge_and_vader_apart_are_said_apart():
    assert "VADER, a word list that needs no training, points the other way" in study(vader=-0.4)[1]
    assert "VADER does not confirm it" in study(vader=0.0)[1]
    assert "VADER alone shows a change" in study(judge=(0.0, 0.0, 0.0))[1]


def test_reward_without_judged_gain_raises_the_flag():
    warnings = study(judge=(0.0, 0.0, 0.0), reward=0.6)[3]
    assert "Reward gain, as probability, beyond judged gain" in warnings


def test_an_interval_that_leaves_out_zero_is_not_enough_without_the_adjusted_p():
    policies = ["base", "sft", "ppo-1"]
    rows = comparisons.prepare(judged_rows(seeds=(1,)), policies)
    values = comparisons.scores(rows, likelihoods(policies))
    found = comparisons.compare(values, (1,), 42, 2000)
    main = next(c for c in found if c.group == "pooled" and c.measure.key == "judge_full")
    assert verdict.direction(main) == 1
    assert verdict.direction(main._replace(adjusted_p=0.05)) == 0
    assert verdict.direction(main._replace(bca=comparisons.Interval(-0.01, 0.4))) == 0
    assert verdict.direction(main._replace(percentile=comparisons.Interval(-0.01, 0.4))) == 0


def test_what_the_seeds_at_hand_show_is_not_said_of_other_seeds():
    alike = study(judge=(0.2, 0.21, 0.19))
    assert re.search(r"interval \[0\.\d+, 0\.\d+\], over new seeds \[0\.1\d+, 0\.2\d+\]", alike[0])
    assert "other PPO seeds" not in alike[-1]
    apart = study(judge=(0.05, 0.1, 0.5))
    assert "**PPO improved judged sentiment in these 3 runs**" in apart[0]
    assert "over new seeds [-0." in apart[0] and "in these" not in alike[0]
    assert "that other PPO seeds change Judge, full text, Judge, continuation too" in apart[-1]
    assert "over new seeds" not in study(seeds=(5,), judge=(0.2,))[0]


def test_a_self_check_that_shows_a_difference_is_a_warning_before_all_others():
    warnings = study(again=0.2, accuracy=0.6)[3]
    assert warnings.startswith(
        "**Warnings**: the self-check fails: SFT differs from itself (Judge, full text"
    )
    assert "no difference of this report can be relied on; the reward model is weak" in warnings
    for passing in (study(), study(again=None)):
        assert "self-check" not in passing[3]
