"""Shapes and types in the signatures of the contract, the feed and the model are checked while testing."""

from jaxtyping import install_import_hook

install_import_hook(["latemask.batch", "latemask.feed", "latemask.model"], "beartype.beartype")

import signal  # noqa: E402
from pathlib import Path  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from training_support import write_store  # noqa: E402

torch.set_num_threads(1)
# A job started with `&` in a script ignores Ctrl-C, and hands that on to every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is not a fault, and a test says the same each time.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny folder of prepared text."""
    return write_store(tmp_path_factory.mktemp("prepared") / "data")
