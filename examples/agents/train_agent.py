"""An agent trained with GRPO: it may guess again, told whether its answer was too low or too high.

python examples/agents/train_agent.py examples/agents/arithmetic_grpo.yaml

The agent knows OpenAI's client and nothing of areal: it would talk to any other server as well.
"""

import sys

from openai import AsyncOpenAI

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.reward.answer_text import last_number
from areal.utils.tokenizer import load_hf_tokenizer


class GuessAgain:
    def __init__(self, max_turns: int = 2, retry_worth: float = 0.5) -> None:
        self.max_turns = max_turns
        self.retry_worth = retry_worth

    async def run(self, data: dict, **extra_kwargs) -> float:
        client = AsyncOpenAI(**extra_kwargs)  # base_url, api_key, and where it can be, http_client
        messages = list(data["messages"])
        for turn in range(self.max_turns):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            message = reply.choices[0].message
            hint = judge(message.content, data["answer"])
            if hint == "right":
                return self.retry_worth**turn
            messages += [message.model_dump(), {"role": "user", "content": hint}]
        return 0.0


def judge(text: str, answer: str) -> str:
    given = last_number(text)
    if given is None or len(given) > 6:
        return "?"
    off = float(given.replace(",", "")) - float(answer)
    return "right" if off == 0 else "<" if off < 0 else ">"


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train = get_custom_dataset("train", config.train_dataset, tokenizer)
    valid = get_custom_dataset("test", config.valid_dataset, tokenizer)
    with PPOTrainer(config, train, valid) as trainer:
        trainer.train(workflow=GuessAgain, eval_workflow=GuessAgain)


if __name__ == "__main__":
    main(sys.argv[1:])
