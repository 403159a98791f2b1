"""A reward for tests of workflows, whose process imports this file and nothing heavy with it."""


def contains_42(prompt, completions, prompt_ids, completion_ids, **data):
    return float("42" in completions)
