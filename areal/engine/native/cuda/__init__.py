"""Triton kernels of the native engine; imported only on CUDA, or by tests."""
