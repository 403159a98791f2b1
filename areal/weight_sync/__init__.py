"""Moves named tensors from a training engine to inference engines, and knows neither.

`transports.py` lists the ways they go. `publication.py` is the folder that travels by disk and
shared memory (buckets and a manifest that covers every byte), `bucket.py` one file of it;
`delta.py` publishes only what changed, by `patch.py`; `collective.py` broadcasts through a process
group; `cuda_ipc.py` says where the weights lie on a GPU; `hf_folder.py` and `tied_head.py` are for
servers that are not ours.
"""
