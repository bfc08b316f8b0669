"""Run by a Python that has SGLang: decodes what a JSON file asks for and prints drafts and accepted tokens as JSON.

Not a test and not imported by one; it knows nothing of spectrain. SGLang runs on a CPU here, its Triton kernels in
Triton's interpreter. The processes it starts read this file again, so what is set at the top holds in them too.
"""

import json
import os
import sys

os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1")

import sglang  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.kernels.ops.speculative import spec_tree  # noqa: E402  # pyright: ignore[reportMissingImports]
from sglang.srt.layers.rotary_embedding import base  # noqa: E402  # pyright: ignore[reportMissingImports]

# for a CPU there are kernels that pip does not bring; these choose what SGLang has in Triton and in PyTorch
spec_tree._is_xpu = base._is_mps = True


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    engine = sglang.Engine(
        model_path=work["target"],
        device="cpu",
        attention_backend="triton",
        dtype="float32",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        mem_fraction_static=0.2,
        max_total_tokens=4096,
        max_running_requests=8,
        log_level="error",
        **work["speculative"],
    )
    params = [
        {"temperature": 0, "max_new_tokens": work["max_tokens"], "stop_token_ids": [stop]} for stop in work["stops"]
    ]
    outputs = engine.generate(input_ids=work["prompts"], sampling_params=params)
    found = [output["meta_info"] for output in outputs]
    histograms = [counts["spec_correct_drafts_histogram"] for counts in found]  # steps by how many drafts were right
    most = work["speculative"]["speculative_num_draft_tokens"] - 1
    accepted = [sum(sum(histogram[k:]) for histogram in histograms) for k in range(1, most + 1)]
    print(
        "RESULT",
        json.dumps(
            {
                "texts": [list(output["output_ids"]) for output in outputs],
                "drafts": sum(counts["spec_verify_ct"] for counts in found),
                "draft_tokens": sum(counts["spec_num_proposed_drafts"] for counts in found),
                "accepted": accepted,
            }
        ),
    )


if __name__ == "__main__":
    main()
