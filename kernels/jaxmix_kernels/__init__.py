"""Pallas kernels for jaxmix: one folder an operator, one file a backend.

The package imports JAX and nothing of `jaxmix`, so that a kernel can be used, tested and timed alone. Kernels exist for
Hopper GPUs (Mosaic GPU) and TPUs (Mosaic TPU); `jaxmix.mixers.dispatch` says which calls they serve.
"""
