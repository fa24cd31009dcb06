"""Many good publishes to the real vLLM: any alarm is a failure. Goes on where the last run of this commit stopped.

    make soak PART=receipt                       # 1,000 publishes in each case
    python -m scripts.soak.receipt --publishes 20 --folder /tmp/soak

The model takes optimiser steps between publishes; every publish is read back and probed, and every hundredth starts a
new probe, as a restart of the run does.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.soak.progress import RESULTS, Progress
from verl.config.rollout import RolloutConfig
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.workers.rollout.vllm.engine import VLLMEngine

VOCAB, CHUNK = 64, 100
CASES = [(dtype, tied) for dtype in ("float32", "bfloat16") for tied in (True, False)]


def make_model(tied: bool, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=tied, eos_token_id=0, bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def logprobs(model: Qwen3ForCausalLM, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    ids = torch.tensor(sequences)
    values = model(ids, use_cache=False).logits.double().log_softmax(-1)
    return [[0.0, *row] for row in values[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].tolist()]


def new_sync(model: Qwen3ForCausalLM, engine: VLLMEngine, cast: Qwen3ForCausalLM) -> CopySync:
    """A sync as a run builds it at its start; `cast` has the dtype that the model is cast to."""

    async def trainer(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return logprobs(model, sequences)

    async def other_dtype(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        cast.load_state_dict(model.state_dict())
        return logprobs(cast, sequences)

    assert engine.dtype is not None
    probe = LogprobProbe(probe_sequences(VOCAB), trainer, other_dtype, engine.dtype)
    return CopySync(lambda: model.named_parameters(), engine, probe, probe_every=1)


def run_case(dtype: str, tied: bool, publishes: int, progress: Progress, folder: Path) -> None:
    """Publish until `publishes` are recorded; an alarm ends it with the error."""
    case = f"{dtype}, {'tied' if tied else 'untied'}"
    if progress.done(case) >= publishes:
        return
    model = make_model(tied, seed=progress.done(case))
    model.save_pretrained(folder)
    config = RolloutConfig(
        name="vllm", dtype=dtype, prompt_length=40, response_length=40, max_num_seqs=8, enforce_eager=True,
        kv_cache_bytes=1 << 24,
    )  # fmt: skip
    engine = VLLMEngine(config, folder)
    cast = make_model(tied, 0).to(torch.float64 if dtype == "float32" else torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    worst = float(progress.cases.get(case, {}).get("largest_share_of_the_bound", 0.0))
    with asyncio.Runner() as runner:
        while (done := progress.done(case)) < publishes:
            sync, count = new_sync(model, engine, cast), min(CHUNK, publishes - done)
            for version in range(done, done + count):
                ids = torch.randint(VOCAB, (2, 16))
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                receipt = runner.run(sync.publish(version))
                assert receipt.num_read_back == receipt.num_tensors and not receipt.unread
                worst = max(worst, receipt.probes[0].difference / receipt.probes[0].bound)
            progress.record(case, count, alarms=0, largest_share_of_the_bound=round(worst, 4))
            print(f"{case}: {progress.done(case)} publishes, no alarm, at most {worst:.0%} of the bound", flush=True)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=1000, help="in each case")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    options = parser.parse_args()
    progress = Progress("receipt", options.folder)
    for dtype, tied in CASES:
        with tempfile.TemporaryDirectory() as folder:
            run_case(dtype, tied, options.publishes, progress, Path(folder))


if __name__ == "__main__":
    main()
