"""Third-order linear attention (HLA3)."""
