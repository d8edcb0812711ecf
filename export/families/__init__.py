"""Families of models: which ones are supported, what differs between them, and why the others are refused.

A family is here when its attention has been proved to go through the seam. A model that does it elsewhere would be
exported with wrong numbers, after a warning at most.
"""

from export.families.encoder import TransformersEncoder
from export.families.table import FAMILIES, build_classifier, build_encoder, find_family, split_classifier

__all__ = ["FAMILIES", "TransformersEncoder", "build_classifier", "build_encoder", "find_family", "split_classifier"]
