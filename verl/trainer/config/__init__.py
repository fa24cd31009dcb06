"""Configuration classes at their public import path; the preset YAML files are in this folder."""

from verl.config import *
from verl.config import AlgorithmConfig as AlgoConfig
