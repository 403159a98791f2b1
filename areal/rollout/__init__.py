"""The asynchronous core: prompts go in, fresh batches of trajectories come out.

`executor` drives it; `staleness` bounds admission, `buffer` selects batches, `ledger` records the
state of every prompt on disk, `source` is the endless prompt stream, `tasks` runs single rows.
"""
