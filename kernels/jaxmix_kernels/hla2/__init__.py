"""Symmetric second-order linear attention (HLA2)."""
