"""Requests with what was sampled of them, as JSON values of a checkpoint."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from verl.workers.rollout.base import Completion, GenerationRequest


def requests_as_json(requests: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
    """Each request with its samples so far; `stop_reason` is None where a sample is unfinished."""
    return [
        {"request_id": request.request_id, "prompt": request.prompt_ids}
        | {"samples": [_sample_as_json(sample) for sample in request.sampled]}
        for request in requests
    ]


def _sample_as_json(sample: Completion) -> dict[str, Any]:
    values = {"tokens": sample.token_ids, "logprobs": sample.logprobs, "segments": sample.all_segments}
    values |= {"stop_reason": None if sample.is_unfinished else sample.stop_reason}
    return values | ({"alternatives": sample.alternatives} if sample.alternatives else {})


def requests_from_json(saved: Sequence[dict[str, Any]]) -> list[GenerationRequest]:
    """The requests of `requests_as_json`, without their sampling settings."""
    return [
        GenerationRequest(
            one["request_id"], one["prompt"], sampled=tuple(map(_sample_from_json, one.get("samples") or _early(one)))
        )
        for one in saved
    ]


def _sample_from_json(sample: dict[str, Any]) -> Completion:
    segments = [(version, count) for version, count in sample["segments"]] or [(0, 0)]
    alternatives = [[(token, logprob) for token, logprob in best] for best in sample.get("alternatives", ())] or None
    reason = sample["stop_reason"] or "aborted"
    return Completion.of(sample["tokens"], sample["logprobs"], reason, segments, alternatives)


def _early(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples in the form in which earlier versions saved those of the native engine."""
    samples: dict[int, dict[str, Any]] = {}
    for number, done in saved.get("finished", {}).items():
        segments = done["segments"] or [(done["policy_version"][1], len(done["token_ids"]))]
        best = done.get("alternatives") or ()
        samples[int(number)] = {**done, "tokens": done["token_ids"], "segments": segments, "alternatives": best}
    for part in saved.get("unfinished", ()):
        starts = [(part["first_version"], 0), *part["later_versions"], (-1, len(part["tokens"]))]
        segments = [(version, end - start) for (version, start), (_, end) in pairwise(starts) if end > start]
        samples[part["sample"]] = {**part, "segments": segments, "stop_reason": None}
    return [samples[number] for number in range(len(samples))]
