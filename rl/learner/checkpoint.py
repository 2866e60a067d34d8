"""What torch adds to a checkpoint: models, their AdamW states and RNG, and the export to a folder that others load.

Saved by all ranks (torch.distributed.checkpoint, one file per rank); any number of ranks can load what any
other number saved. The learning rate is a function of the step, so the schedule needs no state; AdamW's
hyperparameters come from the configuration of the resumed run.

Reading runs no code that somebody wrote into a checkpoint. torch keeps its index (`.metadata`), and every value that is
no tensor, as pickles. Whoever made the folder could name any function in them. Here a pickle may name what such an
index is made of, and nothing else.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from rl.learner.apart import bring_home
from rl.models.protocol import PolicyModel, is_frozen
from rl.store.checkpoint_folder import CheckpointError, Meta, begin, commit, partial_path, read_meta
from rl.store.digests import DIGESTS, write_digests
from rl.wire.process import WaitExpired

_MODEL_FILE_BYTES = 4 << 30
_CUDA_RNG = "cuda_rng"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json", DIGESTS)  # weights of the source model
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

Trained = Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]  # policy, critic


def save(folder: Path, trained: Trained, meta: Meta, journal: bytes, keep: int, apart: Sequence[int] = ()) -> None:
    """Write `folder/step-N`; all ranks call it together, `journal` counts on rank 0. Keeps the newest `keep`. The ranks
    `apart` have another folder, and bring rank 0 their part."""
    if dist.get_rank() == 0:
        begin(folder, meta.step)
    dist.barrier()

    state = partial_path(folder, meta.step) / "state"
    save_state(_state(trained), checkpoint_id=state)
    bring_home(state, apart)
    if dist.get_rank() == 0:
        commit(folder, meta, journal, keep)
    dist.barrier()


class Background:
    """Checkpoints that are written while training goes on, one at a time; all ranks call the same methods together.

    What is saved is copied to the host before training goes on. A checkpoint is there, by one rename, once every rank
    has written its part; a death before that leaves the one before.
    """

    def __init__(self, folder: Path, deadline_s: float, apart: Sequence[int] = ()) -> None:
        """deadline_s: longest wait for one that is being written. apart: as for `save`."""
        self._folder = folder
        self._apart = apart
        self._deadline_s = deadline_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))  # training has its own
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def save(self, trained: Trained, meta: Meta, journal: bytes, keep: int) -> None:
        """As `save` of this module. Waits for the one before; raises what has become of that."""
        self.wait()
        if dist.get_rank() == 0:
            begin(self._folder, meta.step)
        dist.barrier()
        state = partial_path(self._folder, meta.step) / "state"
        written: Any = async_save(_state(trained), checkpoint_id=state, process_group=self._group)
        self._writing = self._thread.submit(self._complete, written, meta, journal, keep)

    def look(self) -> None:
        """Raise what has become of the one that is being written, without a wait."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises WaitExpired."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result(self._deadline_s)
        except TimeoutError:
            me = f"learner.{dist.get_rank()} waited {self._deadline_s:g} s for its checkpoint to be written"
            raise WaitExpired(f"{me} (its bytes at 50 MB/s, and timeouts.hang_s)") from None

    def _complete(self, written: Future[Any], meta: Meta, journal: bytes, keep: int) -> None:
        written.result()
        bring_home(partial_path(self._folder, meta.step) / "state", self._apart, self._group)
        if dist.get_rank() == 0:
            commit(self._folder, meta, journal, keep)


def load(checkpoint: Path, trained: Trained) -> Meta:
    """Load models, optimizer states and RNG in place; all ranks call it together.

    Raises CheckpointError if the checkpoint is missing, damaged, of another model or without one of these.
    """
    meta = read_meta(checkpoint)
    state = _state(trained)
    _read(checkpoint, state)
    for name, (model, adamw) in trained.items():
        configured = [{key: group[key] for key in group if key != "params"} for group in adamw.param_groups]
        weights, optimizer = state[name]["model"], state[name]["optimizer"]
        # What stands still is not there; whether anything else is missing, reading the state has found.
        options = StateDictOptions(strict=False)
        set_state_dict(model, adamw, model_state_dict=weights, optim_state_dict=optimizer, options=options)
        for group, values in zip(adamw.param_groups, configured, strict=True):
            group.update(values)

    torch.set_rng_state(state["rng"])
    if _CUDA_RNG in state:
        torch.cuda.set_rng_state(state[_CUDA_RNG])
    return meta


def load_policy(checkpoint: Path, policy: nn.Module) -> None:
    """Load the weights of the policy alone, in place. Raises CheckpointError."""
    weights = _moving(policy, get_model_state_dict(policy))
    _read(checkpoint, {"policy": {"model": weights}})
    set_model_state_dict(policy, weights, options=StateDictOptions(strict=False))


def _read(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fill `state` in place."""
    try:
        reader = IndexReader(checkpoint / "state")
        saved = reader.read_metadata().state_dict_metadata
        if _CUDA_RNG not in saved:  # it was saved without a GPU
            state.pop(_CUDA_RNG, None)
        load_state(state, storage_reader=reader, planner=PlainValuesPlanner())
    except (Exception, CheckpointException) as error:  # the latter is no Exception; damage has many types
        raise CheckpointError(f"{checkpoint} cannot be loaded: {_reason(error)}") from error


def export_hf(policy: PolicyModel, folder: Path, source: Path, beside: Mapping[str, str]) -> None:
    """The policy as a model folder that transformers and vLLM load; all ranks call it together.

    Weights in the dtype of the source model's files, everything else (configuration, tokenizer, chat template)
    copied from `source`, the texts that stand `beside` them by name, and digests of all. Everybody may read them. The
    folder appears by one rename and replaces an earlier export.
    """
    with _given_away(folder) as partial:
        if dist.get_rank() == 0:
            for path in source.iterdir():
                if path.is_file() and not path.name.endswith(_NOT_COPIED):
                    shutil.copyfile(path, partial / path.name)
            for name, text in beside.items():
                (partial / name).write_text(text)
        _write_weights(policy, partial, _source_dtype(source))


def export_adapter(adapter: Iterable[tuple[str, Tensor]], told: Mapping[str, Any], folder: Path) -> None:
    """Adapters in peft's format, by its names and with what it wants to be `told`; all ranks call it together. The
    folder appears by one rename and replaces an earlier one."""
    with _given_away(folder) as partial:
        _save_tensors(adapter, partial / "adapter_model.safetensors")
        if dist.get_rank() == 0:
            (partial / "adapter_config.json").write_text(json.dumps(told, indent=2) + "\n")


@contextmanager
def _given_away(folder: Path) -> Iterator[Path]:
    """An empty folder to write into. What rank 0 finds there gets digests, may be read by everybody, and appears as
    `folder`. All ranks go through it together."""
    partial = folder.with_name(folder.name + ".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    yield partial

    if dist.get_rank() == 0:
        write_digests(partial, partial / DIGESTS)
        partial.chmod(0o755)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors' own are their maker's alone
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def _save_tensors(named: Iterable[tuple[str, Tensor]], path: Path, dtype: torch.dtype | None = None) -> None:
    """Rank 0 writes them, in their own dtype or in this one; all ranks go through them together."""
    tensors = {}
    for name, whole in named:
        if dist.get_rank() == 0:
            tensors[name] = whole.to("cpu", dtype).contiguous()
    if dist.get_rank() == 0:
        save_file(tensors, path, metadata={"format": "pt"})


def _write_weights(policy: PolicyModel, folder: Path, dtype: torch.dtype) -> None:
    """safetensors files of at most 4 GiB (or one tensor), and their index; one file is gathered at a time."""
    layout = split_torch_state_dict_into_shards(
        {
            name: torch.empty(placement.shape, dtype=dtype, device="meta")
            for name, _, placement in policy.export(untie=False)
        },
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_MODEL_FILE_BYTES,
    )

    for file, names in layout.filename_to_tensors.items():
        _save_tensors(policy.gather(names), folder / file, dtype)
    if dist.get_rank() == 0 and layout.is_sharded:
        index = {"metadata": layout.metadata, "weight_map": layout.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _source_dtype(source: Path) -> torch.dtype:
    config = json.loads((source / "config.json").read_text())
    dtype: torch.dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    return dtype


def _reason(error: BaseException) -> str:
    """One line: the failure of the first rank that had one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _state(trained: Trained) -> dict[str, Any]:
    state: dict[str, Any] = {"rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[_CUDA_RNG] = torch.cuda.get_rng_state()
    for name, (model, adamw) in trained.items():
        weights, optimizer = get_state_dict(model, adamw)
        state[name] = {"model": _moving(model, weights), "optimizer": optimizer}
    return state


def _moving(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Without what stands still: a run reads that from the model that it began with."""
    still = {key for key, each in model.state_dict(keep_vars=True).items() if is_frozen(each)}
    return {key: each for key, each in weights.items() if key not in still}


class StrangePickle(ValueError):
    """A pickle names what no index of a checkpoint has."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 has the classes of `pathlib`, and no other has
            module = "pathlib"
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
