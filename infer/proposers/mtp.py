"""MTP drafting: the target's own draft layers run on its rows as they come, then on their own output."""

from .feature import AutoregressiveProposer


class MtpProposer(AutoregressiveProposer):
    """A draft row is conditioned on the head's prediction of the state that the target has not computed yet."""
