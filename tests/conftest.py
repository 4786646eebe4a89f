"""Shapes and types in the signatures of the contract, the feed and the model are checked while testing."""

from jaxtyping import install_import_hook

install_import_hook(["latemask.batch", "latemask.feed", "latemask.model"], "beartype.beartype")

import hypothesis  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
# A busy machine is not a fault, and a test says the same each time.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")
