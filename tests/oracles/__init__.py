"""Test vectors from independent PyTorch implementations."""
