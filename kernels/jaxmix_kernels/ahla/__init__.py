"""Asymmetric second-order linear attention (AHLA)."""
