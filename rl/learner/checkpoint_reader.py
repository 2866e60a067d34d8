"""Reading torch's part of a checkpoint without running code that somebody wrote into it.

torch.distributed.checkpoint keeps its index (`.metadata`), and every value that is no tensor, as pickles. Whoever made
the folder could name any function in them. Here a pickle may name what such an index is made of, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_DTYPES = [str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)]
_ALLOWED = {
    "builtins": {"set", "frozenset"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {"Size", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


class StrangePickle(ValueError):
    """A pickle names what no index of a checkpoint has."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise StrangePickle(f"it names {module}.{name}, which would run code: whoever made it is not to be trusted")
        return super().find_class(module, name)


class IndexReader(FileSystemReader):
    """torch's reader, for checkpoints of strangers as well."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises StrangePickle."""
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise StrangePickle(f"it holds a {type(metadata).__name__}, no index")

        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainValuesPlanner(DefaultLoadPlanner):
    """What is no tensor is a number, a text, or a list or mapping of these."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises UnpicklingError for anything else."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
