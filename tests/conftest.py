import pytest
import torch


@pytest.fixture
def no_gpu(monkeypatch):
    """Lets a GPU machine make its inputs on the CPU, for tests of what happens there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
