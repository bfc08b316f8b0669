"""spectrain: draft heads for speculative decoding, from hidden states to a measured speed-up."""

__version__ = "0.1.0"
