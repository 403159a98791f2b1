"""Triton kernels of the native engine on CUDA; imported only when CUDA is chosen, or by tests."""
