"""`areal doctor`: which stage is wrong when training does not learn.

report.py     the stages in order, what was found of each, one verdict
live.py       a config: model, engine, episodes and one training step, looked at stage by stage
stored.py     the folder of a run: its trajectories and recover points, computed again
text.py       tokenizer, template, parser
engines.py    weights, logits, routing: the inference engine against the trainer
episodes.py   tokens, sampling, loss mask: a few episodes, every request of which is recorded
rewards.py    reward
learning.py   advantages, loss mask, optimizer: one training step
"""
