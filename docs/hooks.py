"""What mkdocs reads from elsewhere: the version of the package, and where its files are."""

import os
import re
from pathlib import Path
from typing import Any

__all__ = ["on_config"]

INIT = Path(__file__).parents[1] / "ddp_patch" / "__init__.py"


def on_config(config: Any) -> Any:
    """Set the version; and links to edit a page, where ``DDP_PATCH_SOURCE`` says where the repository's files are."""
    [config.extra["release"]] = re.findall(r'^__version__ = "(.*)"$', INIT.read_text(), re.MULTILINE)
    repository, _, ref = os.environ.get("DDP_PATCH_SOURCE", "").partition("/blob/")
    if ref:
        config.repo_url, config.edit_uri = repository, f"edit/{ref}/docs/"
        config.repo_name = "/".join(repository.split("/")[-2:])
    return config
