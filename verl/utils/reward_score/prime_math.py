"""Import path for outside code to the scorer of Numina answers."""

from verl.rewards.scorers.prime_math import *
