"""Moves named tensors from a training engine to inference engines, independent of both.

`transports.py` lists the transports. `publication.py` is the folder used by disk and shared memory
(buckets, and a manifest that covers every byte), `bucket.py` one file of it, `seal.py` its hashes
and MAC; `delta.py` publishes only changes; `collective.py` broadcasts through a process group;
`cuda_ipc.py` shares memory of one GPU; `hf_folder.py` is for stock servers.
"""
