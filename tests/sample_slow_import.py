"""A reward whose module takes its time to load, as one that imports torch does."""

from __future__ import annotations

import time

from sample_rewards import digit_share_reward_fn

time.sleep(1.5)


def slow_digit_share(prompt, completions, prompt_ids, completion_ids, **data):
    time.sleep(0.08)
    return digit_share_reward_fn(prompt, completions, prompt_ids, completion_ids)
