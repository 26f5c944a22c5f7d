"""Pallas kernels for jaxmix: one folder an operator, one file a backend.

The package imports JAX and nothing of `jaxmix`, so that a kernel can be used, tested and timed alone. It holds no
kernel yet: every mixer is served by the XLA forms in `jaxmix.mixers`, and asking for `implementation="pallas"` raises
`NotImplementedError`.
"""
