import pytest
import torch


@pytest.fixture
def no_gpu():
    """Lets a GPU machine make its inputs on the CPU, for tests of what happens there."""
    # The fixture monkeypatch, asked for here, would be set up before a test's other fixtures and so undone after them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="session")
def interpreter():
    """Calls a function of `tests.interpreted` in a process in which Triton interprets."""
    from tests import interpreted

    with interpreted.interpreter() as pool:
        yield lambda function, *args, **named: pool.submit(function, *args, **named).result()
