"""Importing this registers three platforms and their engines with verl; the entry point names this module."""

from verl_hardware_reference import engines, metax, mlu, xpu

__all__ = ["engines", "metax", "mlu", "xpu"]
