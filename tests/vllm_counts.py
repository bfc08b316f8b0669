"""Run by a Python that has vLLM: decodes what a JSON file asks for and prints drafts and accepted tokens as JSON.

Not a test and not imported by one; it knows nothing of spectrain.
"""

import json
import os
import sys

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")

from vllm import LLM, SamplingParams  # noqa: E402  # pyright: ignore[reportMissingImports]


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    llm = LLM(
        model=work["target"],
        speculative_config=work["speculative"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=work["max_length"],
        skip_tokenizer_init=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
    params = [
        SamplingParams(temperature=0, max_tokens=work["max_tokens"], stop_token_ids=[stop], detokenize=False)
        for stop in work["stops"]
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = {metric.name: getattr(metric, "value", getattr(metric, "values", None)) for metric in llm.get_metrics()}
    print(
        "RESULT",
        json.dumps(
            {
                "texts": [list(output.outputs[0].token_ids) for output in outputs],
                "drafts": found["vllm:spec_decode_num_drafts"],
                "draft_tokens": found["vllm:spec_decode_num_draft_tokens"],
                "accepted": list(found["vllm:spec_decode_num_accepted_tokens_per_pos"]),
            }
        ),
    )


if __name__ == "__main__":
    main()
