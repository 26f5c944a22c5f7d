"""Higher-order linear attention: second order (hla2), asymmetric (ahla) and third order (hla3)."""

from jaxmix.mixers.hla.ahla import AHLAState, AHLASummary, ahla
from jaxmix.mixers.hla.hla2 import hla2
from jaxmix.mixers.hla.hla2_summary import HLA2PrintedSummary, HLA2State, HLA2Summary
from jaxmix.mixers.hla.hla3 import hla3
from jaxmix.mixers.hla.hla3_summary import HLA3PrintedSummary, HLA3State, HLA3Summary

__all__ = [
    "AHLAState",
    "AHLASummary",
    "HLA2PrintedSummary",
    "HLA2State",
    "HLA2Summary",
    "HLA3PrintedSummary",
    "HLA3State",
    "HLA3Summary",
    "ahla",
    "hla2",
    "hla3",
]
