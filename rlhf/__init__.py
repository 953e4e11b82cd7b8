"""Reinforcement learning from human feedback, small enough to read and exact enough to repeat.

Notation used by every module, in shapes and in names:

    B   sequences in a batch        P   prompt tokens (left-padded)
    R   response tokens             T   = P + R
    V   vocabulary size             H   hidden size
    N   any number of items

    input_ids       [B, T]  token ids; what lies under the padding never changes a result
    attention_mask  [B, T]  bool, True = real token
    response_mask   [B, R]  bool, True = real response token (its EOS included)
    logprobs        [B, R]  log pi(token_t | tokens before t), float32, nats
    ref_logprobs    [B, R]  the same under the frozen SFT policy
    values          [B, R]  the value head's estimate before token t is chosen
    scores          [B]     the frozen reward model's judgement of the whole text
    rewards         [B, R]  per-token KL penalty, plus the score on the last real token
    advantages      [B, R]  generalised advantage estimates
    returns         [B, R]  raw advantages + values, the value head's target

`last` is an index, `lengths` is a count. KL divergences say their unit: per token, or summed over the
sequence. Log-probabilities, KL, advantages and losses are float32 whatever the model's dtype.
"""

import logging

# As it is imported on some CPUs, bitsandbytes misses a kernel from a hub that this package never uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
