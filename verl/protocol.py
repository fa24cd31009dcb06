"""Import path of DataProto, which does not exist here."""

raise ImportError(
    "verl.protocol (DataProto) does not exist here: batches are packed (verl.data.batch.Batch) and rewards get plain "
    "arguments; write a function compute_score(data_source, solution_str, ground_truth, extra_info)"
)
