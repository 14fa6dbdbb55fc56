import pytest
import torch


@pytest.fixture
def no_gpu():
    """Lets a GPU machine make its inputs on the CPU, for tests of what happens there."""
    # Not the test's own monkeypatch: used here it would be undone after fixtures that it is to be undone before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
