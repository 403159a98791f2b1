"""The asynchronous core: prompts go in, fresh batches of trajectories come out.

`executor` runs the show; `staleness` says when a prompt may start, `selection` which results form a
batch, `ledger` keeps every prompt's state on disk, `source` is the endless prompt stream,
`submitted` runs single rows beside it.
"""
