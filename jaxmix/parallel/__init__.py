"""Meshes and the collectives that mixers need when the sequence is split over devices."""

from jaxmix.parallel.collectives import gather_axis
from jaxmix.parallel.mesh import make_mesh

__all__ = ["gather_axis", "make_mesh"]
