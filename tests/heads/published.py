"""The shapes of targets for which heads were published: `from spectrain.tests.heads.published import LLAMA_7B`."""

from spectrain.heads.base import TargetFacts

LLAMA_7B = TargetFacts(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab_size=32000,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
LLAMA_8B = TargetFacts(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
QWEN3_4B = TargetFacts(
    model_type="qwen3",
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    max_position_embeddings=40960,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)
