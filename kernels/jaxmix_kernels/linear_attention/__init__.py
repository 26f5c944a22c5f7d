"""Decayed linear attention: one primitive per platform, and its gradients by three calls of the same primitive."""
