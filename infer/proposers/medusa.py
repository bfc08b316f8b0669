"""Medusa drafting: the heads' tokens side by side, as a chain."""

from .per_step import PerStepProposer


class MedusaProposer(PerStepProposer):
    """Draft k is head k's, whatever was drafted before it, so sampled drafts are drawn independently."""
