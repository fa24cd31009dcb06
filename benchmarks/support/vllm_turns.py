"""vLLM in its own environment: an in-process or a server engine that generates one batch per request.

    python vllm_turns.py SETTINGS    with {"model", "dtype", "vocab", "in_process", "max_num_seqs", "eager"} as JSON

Reads one JSON line per turn, {"batch", "prompt", "new", "seed"}, and replies {"seconds", "tokens"}.
"""

import json
import os
import random
import sys
import time


def main() -> None:
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")  # vLLM prints to stdout
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not settings["in_process"]))
    from vllm import LLM, SamplingParams

    llm = LLM(
        settings["model"], dtype=settings["dtype"], skip_tokenizer_init=True, max_model_len=512,
        max_num_batched_tokens=16384, max_num_seqs=settings["max_num_seqs"], enforce_eager=settings["eager"],
        enable_prefix_caching=False,
    )  # fmt: skip
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        generator = random.Random(turn["seed"])
        prompts = [
            {"prompt_token_ids": [generator.randrange(settings["vocab"]) for _ in range(turn["prompt"])]}
            for _ in range(turn["batch"])
        ]
        params = SamplingParams(temperature=1.0, max_tokens=turn["new"], ignore_eos=True, logprobs=0, detokenize=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=replies, flush=True)


if __name__ == "__main__":
    main()
