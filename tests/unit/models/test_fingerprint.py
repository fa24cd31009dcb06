"""The digest by which a publish proves what arrived."""

import torch

from verl.models.fingerprint import fingerprint


def test_a_fingerprint_tells_four_words_that_change_places():
    words = torch.arange(1 << 18, dtype=torch.float64)
    for step in (1, 2, 64, 1 << 16, 1 << 17):
        cycled = words.clone()
        cycled[[8, 8 + step, 300, 300 + step]] = words[[8 + step, 8, 300 + step, 300]]
        flipped = words.clone()
        flipped[[8, 8 + step]], flipped[[300, 300 + step]] = words[8], words[8 + step]
        flipped_back = flipped.clone()
        flipped_back[[8, 300 + step]], flipped_back[[8 + step, 300]] = words[8 + step], words[8]
        assert len({fingerprint(t) for t in (words, cycled, flipped, flipped_back)}) == 4
    assert fingerprint(torch.empty(0)) != fingerprint(torch.empty(0, 2))
