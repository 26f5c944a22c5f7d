"""One token at a time: kernels that read and write every state once."""
