"""Moves named tensors from a training engine to inference engines, and calls neither.

`transports.py` lists the transports: each offers a version, which an engine then loads.
`publication.py` is the folder used by disk and shared memory (buckets, and a manifest that covers
every byte), `bucket.py` one file of it; `delta.py` publishes only changes; `collective.py`
broadcasts through a process group; `cuda_ipc.py` shares memory of one GPU; `hf_folder.py` and
`tied_head.py` are for stock servers.
"""
