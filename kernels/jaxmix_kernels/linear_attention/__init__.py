"""Decayed linear attention: one primitive per platform, and its gradients, on Hopper by a kernel of their own."""
