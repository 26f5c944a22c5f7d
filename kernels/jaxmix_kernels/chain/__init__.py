"""Chains of decayed linear attentions, their forward pass in one kernel."""
