"""Makes the README a page that stands alone, as an index of packages shows it."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or picture of Markdown whose target lies in the repository.
_RELATIVE = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!\w+:|#)[^)]+)\)")
# A picture of HTML, which may have another one for dark pages.
_PICTURE = re.compile(r'(?P<name>src|srcset)="(?P<target>(?!\w+:)[^"]+)"')


def standing_alone(readme: str, source: str) -> str:
    """Return a README whose links lead to the files at ``source``, the address of the repository's files."""

    def absolute(link: re.Match[str]) -> str:
        raw = "?raw=true" if link["picture"] else ""
        return f"{link['picture']}[{link['text']}]({source}/{link['target']}{raw})"

    pictured = _PICTURE.sub(rf'\g<name>="{source}/\g<target>?raw=true"', readme)
    return _RELATIVE.sub(absolute, pictured)


class CustomMetadataHook(MetadataHookInterface):
    """Reads ``DDP_PATCH_SOURCE``, which a release sets; other builds have the README as it is."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = Path(self.root, "README.md").read_text()
        source = os.environ.get("DDP_PATCH_SOURCE")
        metadata["readme"] = {"content-type": "text/markdown", "text": standing_alone(text, source) if source else text}
