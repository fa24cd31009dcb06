"""SmolLM2-135M, a real pretrained model: a GRPO step against TRL's, rollout against vLLM and generate().

    python benchmarks/pretrained.py [step] [rollout] [--peer-python PATH] [--vllm-python PATH] [--json PATH] [--pairs 5]

`step`: questions of GSM8K by the model's chat template, 4 prompts x 8 answers, float32, every answer of one length: a
third of the mean prompt (`long prompts`), or as long as it (`equal`). Our step is as a user gets it, with its records.
TRL's trainer takes the same rows and lengths in a process of its own, stopped while ours runs; the two take turns.
`rollout`: 32 prompts of 32 tokens, 96 new ones, float32: native, vLLM (CPU) and transformers' generate() in turns.
The model: what `python scripts/get_smollm2.py` writes, or --model DIR. GSM8K: --gsm8k FILE, a question in each line.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rollout_vllm import CONFIGURATIONS, PAUSE_S, VLLM, Case, Native
from support.jobs import REWARD, GRPOCase, grpo_overrides, stepper
from support.memory import peak_bytes, reset_peak
from support.peer import PEER_ENVIRONMENT, peer
from support.record import save
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

BARS = {"long prompts": 3.0, "equal": 2.0, "rollout": 1.3}
ROLLOUT = Case("SmolLM2", "float32", 32, 32, 96, 1)
SYSTEM = "Solve the problem. Answer with the number only."


def spread(values: list[float]) -> float:
    """The distance of the 90th from the 10th percentile."""
    return float(torch.tensor(values).quantile(torch.tensor([0.1, 0.9])).diff()) if len(values) > 1 else 0.0


# --- a GRPO step ------------------------------------------------------------------------------------------------------


def prepare(folder: Path, model: Path, gsm8k: Path) -> int:
    """The rows and the reward of both sides, and a link to the model; the mean number of tokens of a prompt."""
    (folder / "model").symlink_to(model)
    tokenizer, lines, lengths = AutoTokenizer.from_pretrained(model), [], []
    for line in gsm8k.read_text().splitlines()[:256]:
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": json.loads(line)["question"]}]
        lengths.append(len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]))
        lines.append({"data_source": "benchmark", "prompt": prompt, "reward_model": {"ground_truth": ""}})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (folder / "reward.py").write_text(REWARD)
    return round(statistics.mean(lengths))


def measure_step(folder: Path, case: GRPOCase, args: argparse.Namespace) -> dict[str, Any]:
    """Pairs of a step of ours and one of TRL's, after one of each to warm up."""
    pairs, stages, ours_peak = [], list[dict[str, float]](), 0
    with stepper(grpo_overrides(folder, case)) as job, peer(args.peer_python, folder, case, args.threads) as trl:
        for pair in range(args.pairs + 1):
            reset_peak()
            step = job.step()
            ours_peak = max(ours_peak, peak_bytes())
            theirs = trl.steps(1)[0] if trl else None
            print(
                f"  {case.name} {pair}: ours {step.seconds:.1f} s, TRL {theirs[0] if theirs else 0:.1f} s", flush=True
            )
            if pair:
                pairs.append((step.seconds, step.tokens, *(theirs or (0.0, 0))))
                stages.append({name: step.timing_s.get(name, 0.0) for name in ("gen", "old_log_prob", "update_actor")})
        peer_peak = _peak_of(trl.process.pid) if trl else 0
    row: dict[str, Any] = {
        "answer_tokens": case.max_tokens,
        "ours_s": statistics.median(pair[0] for pair in pairs),
        "tokens_per_s": statistics.median(pair[1] / pair[0] for pair in pairs),
        "stages_s": {name: statistics.median(stage[name] for stage in stages) for name in stages[0]},
        "peak_gb": ours_peak / 2**30,
    }
    if args.peer_python:
        assert all(pair[1] == pair[3] for pair in pairs), f"different numbers of tokens: {pairs}"
        ratios = [pair[2] / pair[0] for pair in pairs]
        row |= {
            "trl_s": statistics.median(pair[2] for pair in pairs),
            "trl_peak_gb": peer_peak / 2**30,
            "ratio": statistics.median(ratios),
            "spread": spread([a / b for a, b in itertools.pairwise(pair[0] for pair in pairs)]),
            "bar": BARS[case.name],
        }
    return row


def _peak_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


# --- rollout ----------------------------------------------------------------------------------------------------------


def generate_turn(model: PreTrainedModel, seed: int) -> float:
    """Tokens per second of transformers' generate()."""
    torch.manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (ROLLOUT.batch, ROLLOUT.prompt))
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": ROLLOUT.new}
    started = time.perf_counter()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=ROLLOUT.new, **settings)
    return ROLLOUT.batch * (out.shape[1] - ROLLOUT.prompt) / (time.perf_counter() - started)


def measure_rollout(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds in which each engine takes a turn."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    turns: dict[str, Any] = {
        "generate()": lambda seed: generate_turn(model, seed),
        "native": Native(model, ROLLOUT).turn,
    }
    vllm = None
    if args.vllm_python:
        vllm = VLLM(args.vllm_python, folder, ROLLOUT, CONFIGURATIONS[0], model.config.vocab_size)
        turns["vLLM"] = vllm.turn
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for round_number in range(args.pairs + 1):
        for name, turn in turns.items():
            time.sleep(PAUSE_S)
            rate = turn(round_number)
            rates[name] += [rate] * (round_number > 0)
            print(f"  rollout {round_number}: {name} {rate:.0f} tokens/s", flush=True)
    if vllm is not None:
        vllm.close()
    row: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
    for name in rates.keys() - {"native"}:
        row[f"native / {name}"] = statistics.median(a / b for a, b in zip(rates["native"], rates[name], strict=True))
    return row | {"spread": spread([a / b for a, b in itertools.pairwise(rates["native"])]), "bar": BARS["rollout"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="step (or a half of it: 'long prompts', equal), rollout; all without")
    parser.add_argument("--prompts", type=int, default=4, help="of a step; TRL takes 16 GB with 4 (equal)")
    parser.add_argument("--peer-python", help="Python of an environment with TRL")
    parser.add_argument("--vllm-python", default=os.environ.get("VERL_VLLM_PYTHON"))
    parser.add_argument("--model", type=Path, default=Path(os.environ.get("VERL_SMOLLM2") or "~/.cache/verl/smollm2"))
    data = Path(os.environ.get("VERL_TEST_DATA") or "../shared/data")
    parser.add_argument("--gsm8k", type=Path, default=data / "gsm8k" / "test.jsonl")
    parser.add_argument("--json", type=Path, help="figures of this run replace those of the same part in the file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    model = args.model.expanduser().resolve()
    if not (model / "config.json").is_file():
        parser.error(f"no model in {model}; python scripts/get_smollm2.py fetches it")
    torch.set_num_threads(args.threads)
    rows = json.loads(args.json.read_text())["rows"] if args.json and args.json.is_file() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["VERL_FILE_LOGGER_ROOT"] = temporary
        prompt = prepare(folder, model, args.gsm8k)
        cases = {"long prompts": prompt // 3, "equal": prompt}
        wanted = args.parts or ["step", "rollout"]
        for name in [*(name for name in cases if {name, "step"} & {*wanted}), *({"rollout"} & {*wanted})]:
            if name == "rollout":
                rows[name] = measure_rollout(folder, args)
            else:
                case = GRPOCase(name, cases[name], False, args.prompts, lr=5e-6, max_prompt=512)
                rows[name] = measure_step(folder, case, args)
            print(json.dumps({name: rows[name]}, indent=1), flush=True)
            if args.json:
                save(args.json, {"prompt_tokens": prompt, "rows": rows})
    if not args.peer_python and "step" in wanted:
        print(PEER_ENVIRONMENT)


if __name__ == "__main__":
    main()
