"""Post-training of language models with reinforcement learning; see README.md. Importing this costs almost nothing."""

__version__ = "0.11.0"


def __getattr__(name: str) -> object:
    if name == "DataProto":
        raise ImportError(
            "verl.DataProto does not exist here: batches are packed (verl.data.batch.Batch) and rewards get plain "
            "arguments; write a function compute_score(data_source, solution_str, ground_truth, extra_info)"
        )
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
