"""The private names of torch, transformers, peft and Python that `verl/` uses: each may change without notice.

python -m scripts.private_names        prints the list
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ONEDNN = "models/decoder/onednn_weights.py"

# (file below verl/, name): (what it is for, the public way that was looked at)
PRIVATE_NAMES: dict[tuple[str, str], tuple[str, str]] = {
    ("checkpoint_engine/broadcast.py", "_DistributedBackendOptions"): (
        "a gloo group between programs that share no default group",
        "init_process_group: one world per process",
    ),
    ("checkpoint_engine/broadcast.py", "_Options"): (
        "gloo's device and timeout",
        "new_group: only inside one default group",
    ),
    ("checkpoint_engine/broadcast.py", "_devices"): ("the network device inside these options", "none"),
    ("checkpoint_engine/broadcast.py", "_timeout"): ("the timeout inside these options", "none"),
    ("checkpoint_engine/shared_memory.py", "_new_shared_cuda"): (
        "open device memory of another process",
        "torch.multiprocessing: pickles, and needs a parent process",
    ),
    ("checkpoint_engine/shared_memory.py", "_share_cuda_"): (
        "name device memory for another process",
        "torch.multiprocessing: pickles, and needs a parent process",
    ),
    ("observe/profiling/tools.py", "_C"): ("the way to these settings", "none"),
    ("observe/profiling/tools.py", "_profiler"): ("the way to these settings", "none"),
    ("observe/profiling/tools.py", "_ExperimentalConfig"): (
        "record the operators of all threads, also those that a rollout or autograd starts",
        "torch.profiler.profile: the thread that starts it",
    ),
    ("observe/profiling/tools.py", "_record_memory_history"): ("record allocations with their stacks", "none"),
    ("observe/profiling/tools.py", "_dump_snapshot"): ("write what was recorded", "none"),
    ("models/compiled_layers.py", "_dynamo"): (
        "the tracer's backends, its limit of graphs, and the exception by which it starts again",
        "none; torch.compiler names neither",
    ),
    ("models/attention/flash_kernels.py", "_flash_attention_forward"): (
        "flash attention that also returns the log-sum-exp",
        "scaled_dot_product_attention returns none",
    ),
    ("models/attention/flash_kernels.py", "_flash_attention_backward"): ("its gradient", "none"),
    ("models/decoder/ragged_attention.py", "_flash_attention_forward"): (
        "flash attention of one query to a part of each sequence's keys, in a captured graph",
        "varlen_attn takes numbers of keys (seqused_k) in torch 2.13; of 2.11, the oldest, it is not known",
    ),
    ("models/attention/flash_kernels.py", "_scaled_dot_product_flash_attention_for_cpu"): (
        "the same on a CPU",
        "scaled_dot_product_attention returns no log-sum-exp",
    ),
    ("models/attention/flash_kernels.py", "_scaled_dot_product_flash_attention_for_cpu_backward"): (
        "its gradient",
        "none",
    ),
    ("models/decoder/prompt_cache.py", "_scaled_dot_product_flash_attention_for_cpu"): (
        "attention to a shared prompt, joined by log-sum-exp",
        "scaled_dot_product_attention returns no log-sum-exp",
    ),
    (ONEDNN, "_is_mkldnn_bf16_supported"): ("whether oneDNN computes in bfloat16 here", "none"),
    (ONEDNN, "_linear_pointwise"): (
        "a product with reordered weights and its pointwise tail",
        "torch.compile: compiles every shape at the start",
    ),
    (ONEDNN, "_reorder_linear_weight"): (
        "the weight in oneDNN's own order",
        "torch.compile: compiles every shape at the start",
    ),
    ("models/device_moves.py", "_has_compatible_shallow_copy_type"): (
        "whether `.data =` keeps the parameter, as nn.Module.to asks",
        "none",
    ),
    ("models/performance.py", "_cdata"): ("the identity of a storage", "data_ptr: freed memory is given out again"),
    ("rewards/sandbox/inside/program.py", "_shutdown"): (
        "wait for the threads of a program at its end, as the interpreter does",
        "sys.exit: ends the whole interpreter, which takes longer than the program",
    ),
    ("rewards/sandbox/inside/program.py", "_run_exitfuncs"): ("the same for atexit", "none"),
    ("models/export.py", "_weight_conversions"): ("conversions that only rank 0 has", "none in transformers"),
    ("models/load.py", "_model_mapping"): (
        "whether a family has a model class",
        "from_config raises for other reasons too",
    ),
    ("models/lora.py", "_disable_adapters"): (
        "adapters off for one pass",
        "enable_adapters(False): freezes them, and the optimiser loses them",
    ),
    ("commands/merge.py", "_from_config"): ("a model class without from_config", "none in transformers"),
    ("models/expert_parallel.py", "_apply_gate"): (
        "the activation of a family's experts, which its classes may override",
        "act_fn: without what GPT-OSS does to gate and up",
    ),
    ("plugin/library_versions.py", "_impl_tp_layer_overrides"): (
        "the plans of experts that transformers 5.16 looks into before it reads fp8 weights",
        "experts_implementation: one value has a plan, deepgemm_megamoe, which needs a GPU",
    ),
    ("plugin/platform/accelerator.py", "_set_allocator_settings"): (
        "allocator settings after the start",
        "the environment variable: read once, at the start",
    ),
    ("utils/process_end.py", "_run_exitfuncs"): ("exit functions before os._exit", "sys.exit: takes seconds"),
    ("utils/process_end.py", "_shutdown"): ("waits for threads before os._exit", "sys.exit: takes seconds"),
    ("config/base.py", "_getframe"): (
        "the caller of a configuration read",
        "inspect.stack: reads the source of every frame",
    ),
    ("config/extra.py", "_getframe"): (
        "the caller of a configuration read",
        "inspect.stack: reads the source of every frame",
    ),
    ("utils/import_paths.py", "_getframe"): (
        "whether `from … import` asks",
        "inspect.stack: reads every frame's source",
    ),
    ("utils/process_end.py", "_getframe"): ("where a process ended", "inspect.stack: reads the source of every frame"),
    ("agent/blocked_loop.py", "_current_frames"): ("where a thread stands", "faulthandler: writes text only"),
    ("workers/engine/checkpoint_tensors.py", "_non_persistent_buffers_set"): (
        "buffers that state_dict leaves out",
        "state_dict: collective under FSDP",
    ),
    ("workers/engine/optimizer.py", "_foreach_mul_"): (
        "clipping in one kernel",
        "clip_grad_norm_: its norm is not ours",
    ),
    ("workers/engine/precision.py", "_foreach_copy_"): ("masters to weights in one kernel", "a loop: a kernel each"),
    ("workers/engine/precision.py", "_post_accumulate_grad_hooks"): (
        "remove the hooks of an earlier model",
        "handles are lost with it",
    ),
    ("workers/engine/shard_folders.py", "_local_tensor"): (
        "a shard without its process group",
        "to_local: needs the group",
    ),
    ("workers/engine/shard_folders.py", "torch.distributed.tensor._dtensor_spec:DTensorSpec"): (
        "the only classes that a reference's shard may name",
        "none",
    ),
    ("workers/engine/shard_folders.py", "torch.distributed.tensor._dtensor_spec:TensorMeta"): (
        "the only classes that a reference's shard may name",
        "none",
    ),
}


def private_uses(root: Path = ROOT) -> dict[tuple[str, str], int]:
    """(file below verl/, name): how often a private name that the package does not define itself is used there."""
    trees = {
        str(path.relative_to(root / "verl")): ast.parse(path.read_text()) for path in (root / "verl").rglob("*.py")
    }
    own = {name for tree in trees.values() for name in _defined(tree)}
    uses: dict[tuple[str, str], int] = defaultdict(int)
    for path, tree in trees.items():
        for name in _used(tree):
            if name not in own:
                uses[path, name] += 1
    return dict(uses)


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "out"):
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in ("_origins",):  # set through object.__setattr__
            yield node.value


def _used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("verl"):
            for alias in node.names:
                if any(map(_is_private, [alias.name, *(node.module or "").split(".")])):
                    yield f"{node.module}:{alias.name}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def main() -> None:
    for (path, name), count in sorted(private_uses().items()):
        reason, public = PRIVATE_NAMES.get((path, name), ("NOT LISTED", ""))
        print(f"{path}: {name} ({count}): {reason}; public: {public}")


if __name__ == "__main__":
    main()
