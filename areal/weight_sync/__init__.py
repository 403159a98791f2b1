"""Moves named tensors from a training engine to inference engines, and knows neither.

`publication.py` is the folder that travels (buckets and a manifest that covers every byte),
`bucket.py` one file of it, `transports.py` the ways it goes: direct, shared memory, disk.
"""
