"""Facts of a Hugging Face folder that the run needs beside the model's shape."""

from __future__ import annotations

import json
from pathlib import Path


def eos_ids(folder: Path) -> list[int]:
    """The ids that end a response, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [int(i) for i in found] if isinstance(found, list) else [int(found)]
    return []
