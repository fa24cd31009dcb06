"""`hf_tokenizer` and `hf_processor`, where published code imports them."""

from verl.doors.tokenizer import *
