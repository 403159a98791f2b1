"""The demo's task by TRL's GRPOTrainer: what peers.py runs with the Python of TRL's environment.

    python benchmark/peers_trl.py FOLDER STEPS THREADS  # FOLDER/{train,test}.jsonl, FOLDER/model

Prints {"times": [time.time() after each step], "accuracy": of greedy answers to the test rows}.
"""

import json
import sys
import time

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from areal.reward.gsm8k import gsm8k_reward_fn

folder, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(int(sys.argv[3]))
train = load_dataset("json", data_files=f"{folder}/train.jsonl", split="train")
test = load_dataset("json", data_files=f"{folder}/test.jsonl", split="train")
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model", padding_side="left")
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
times = []


class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        times.append(time.time())


def reward(prompts, completions, answer, **columns):
    rows = zip(prompts, completions, answer, strict=True)
    return [gsm8k_reward_fn(prompt, text, None, None, answer=gold) for prompt, text, gold in rows]


def accuracy():
    texts = list(test["prompt"])
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    texts = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    scores = reward(test["prompt"], texts, test["answer"])
    return sum(scores) / len(scores)


config = GRPOConfig(
    output_dir=f"{folder}/out",
    max_steps=steps,
    per_device_train_batch_size=512,
    num_generations=8,
    max_completion_length=10,
    temperature=1.0,
    beta=0.0,
    epsilon=0.2,
    epsilon_high=0.28,
    loss_type="dapo",
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    warmup_steps=int(0.04 * steps),
    weight_decay=0.01,
    adam_beta2=0.95,
    seed=1,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=config,
    train_dataset=train,
    processing_class=tokenizer,
    callbacks=[Clock()],
)
trainer.train()
print(json.dumps({"times": times, "accuracy": accuracy()}))
