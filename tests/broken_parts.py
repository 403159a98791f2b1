"""What a user may name in a config and get wrong: workflows, filters, loaders, rewards."""

from __future__ import annotations

import asyncio
import re
import time

from areal.api.workflow_api import RolloutWorkflow

NUMBER = 7


def raising_reward(*args, **data):
    raise ZeroDivisionError("the judge is out of order")


def hanging_reward(*args, **data):
    time.sleep(60)


def text_reward(*args, **data):
    return "good"


def batch_reward(prompts, completions, **kwargs):
    return [0.0] * len(completions)


def reward_without_data(prompt, completions, prompt_ids, completion_ids, answer):
    return 0.0


async def coroutine_reward(prompt, completions, prompt_ids, completion_ids, **data):
    return 0.0


def raising_filter(trajectory):
    raise KeyError("difficulty")


def endless_filter(trajectory):
    """Holds the interpreter: no other thread of the process runs a line until it returns."""
    return re.match("(a+)+$", "a" * 64 + "b") is None


def hanging_loader(path, *, split, tokenizer, max_length):
    time.sleep(1e6)


def raising_loader(path, *, split, tokenizer, max_length):
    raise ValueError(f"the rows of {path} lie elsewhere")


def image_rows(path, *, split, tokenizer, max_length):
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1="}]}]
    return [{"messages": chat, "images": [b"png"], "answer": "2"}] * 64


def messageless_rows(path, *, split, tokenizer, max_length):
    return [{"question": "1+1=", "answer": "2"}] * 64


def endless_prompts(path, *, split, tokenizer, max_length):
    return [{"messages": [{"role": "user", "content": "1+" * 400}], "answer": "2"}] * 64


class PlainAgent:
    def run(self, data, **kwargs):
        return 1.0


class ForwardingAgent:
    """Not `async def`, and yet what it returns can be awaited."""

    def run(self, data, **kwargs):
        return self.solve(data, **kwargs)

    async def solve(self, data, **kwargs):
        return 1.0


def not_a_workflow(engine, data):
    return None


class NeedsMore(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, reward_fn, judge_url):
        self.judge_url = judge_url

    async def arun_episode(self, engine, data):
        return None


class NoArguments(RolloutWorkflow):
    def __init__(self):
        pass

    async def arun_episode(self, engine, data):
        return None


class ReturnsText(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, reward_fn):
        pass

    async def arun_episode(self, engine, data):
        return "an answer"


class WaitsForEver(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, reward_fn):
        pass

    async def arun_episode(self, engine, data):
        await asyncio.Event().wait()
