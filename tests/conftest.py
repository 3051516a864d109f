"""What every test shares: one thread, one seed, repeatable property tests."""

import random

import hypothesis
import numpy
import pytest
import torch

# The suite runs one worker a core; more threads than that slow each other down and make sums differ between machines.
torch.set_num_threads(1)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
