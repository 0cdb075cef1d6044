"""Identity of weights by their content: checkpoints with the same tensors have the same digest, wherever they are stored.

Reading a whole checkpoint takes minutes. So a digest covers the name, type and shape of each tensor, and a piece of the bytes of
many: of up to 128 tensors of a kind (names that differ in their numbers only, such as those of all layers and experts). Other
weights of the same shapes, trained further or with an adapter merged into them, differ in nearly all of these pieces. How the
tensors are divided into files does not matter.

Files are read rather than the loaded parameters, because each rank holds other parts of these, in the layout of its kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from huggingface_hub import snapshot_download
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.lora.request import LoRARequest

__all__ = ["LoraAdapters", "local_checkpoint", "weights_digest"]

_logger = init_logger("vllm.vllm_adapter")

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Weight files of a folder: those of the first pattern that any file matches, as vLLM chooses them."""
_INDEX = "model.safetensors.index.json"
_PIECE_BYTES = 4096
"""A page: the least that a file system reads. It holds 2000 elements: a small change leaves many of them as they were."""
_MOST_OF_A_KIND = 128
"""More than a model has layers, so that every layer is covered; 10 000 experts are not."""
_MOST_PIECES = 8192
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
_READERS = 16
"""Threads that read at once: a network file system takes about a millisecond for each piece."""
_ADAPTER_CONFIG = "adapter_config.json"
_MOST_ADAPTERS = 4096


class _Tensor(NamedTuple):
    """A tensor, or a piece of a file whose format is not read."""

    name: str
    description: str
    file: Path
    first_byte: int
    size_bytes: int


def local_checkpoint(name: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Return the file or folder of a checkpoint on this machine, None if there is none; nothing is downloaded.

    Args:
        name: A path, or the name of a repository on the Hugging Face Hub.
        revision: Revision of the repository.
        cache: Folder of downloaded repositories; None for the default.
    """
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    # Not downloaded, no name of a repository, or `~` of a user without a home.
    except (OSError, ValueError, RuntimeError):
        return None


def weights_digest(place: Path) -> str:
    """Return the digest of the weights in a file or folder as 32 hexadecimal digits; empty if there are none.

    Raises:
        OSError, ValueError: A file cannot be read, or is not what its name says.
    """
    try:
        return _digest(sorted(tensor for file in _files(place) for tensor in _tensors(file)))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{place} holds no valid safetensors: {error!r}") from error


def _digest(tensors: Sequence[_Tensor]) -> str:
    if not tensors:
        return ""
    kinds: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(re.sub(r"\d+", "#", tensor.name), []).append(tensor)
    chosen = [tensor for kind in kinds.values() for tensor in _spread(kind, _MOST_OF_A_KIND)]
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tensor.name}\0{tensor.description}\0{tensor.size_bytes}\n".encode())
    chosen = _spread(chosen, _MOST_PIECES)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as readers:
        pieces = list(readers.map(_read, chosen))
    for tensor, piece in sorted(zip(chosen, pieces, strict=True)):
        state.update(f"{tensor.name}\0".encode() + piece)
    return state.hexdigest()[:32]


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    index = place / _INDEX
    if index.is_file():  # a folder may hold the same weights twice; the index names the files of one set
        named = {place / str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        if all(file.is_file() for file in named):
            return sorted(named)
    return next((files for pattern in _PATTERNS if (files := sorted(place.glob(pattern)))), list[Path]())


def _tensors(file: Path) -> Iterator[_Tensor]:
    """Yield the tensors of a file; of a file in another format than safetensors, pieces at equal distances."""
    size_bytes = file.stat().st_size
    if file.suffix != ".safetensors":
        step = max(_PIECE_BYTES, size_bytes // _MOST_OF_A_KIND)
        for first in range(0, size_bytes, step):
            yield _Tensor(
                f"{file.name} at {first}", f"of {size_bytes}", file, first, min(_PIECE_BYTES, size_bytes - first)
            )
        return
    with file.open("rb") as source:
        header_bytes = int.from_bytes(source.read(8), "little")
        if header_bytes > min(size_bytes, _MOST_HEADER_BYTES):
            raise ValueError(f"{file} is not a safetensors file: its header would have {header_bytes} bytes")
        header: dict[str, Any] = json.loads(source.read(header_bytes))
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            yield _Tensor(name, f"{entry['dtype']}{entry['shape']}", file, 8 + header_bytes + first, end - first)


def _spread(tensors: Sequence[_Tensor], most: int) -> list[_Tensor]:
    """Return at most so many tensors, at equal distances."""
    if len(tensors) <= most:
        return list(tensors)
    return [tensors[number * len(tensors) // most] for number in range(most)]


def _read(tensor: _Tensor) -> bytes:
    """Return bytes from the middle of a tensor; an embedding often begins with unused tokens."""
    piece_bytes = min(_PIECE_BYTES, tensor.size_bytes)
    with tensor.file.open("rb", buffering=0) as source:
        return os.pread(source.fileno(), piece_bytes, tensor.first_byte + (tensor.size_bytes - piece_bytes) // 2)


# ------------------------------------------------------------------------------------------------------------ adapters


class _Adapter(NamedTuple):
    """An adapter: its files with their marks, its identity when it was loaded, and its identity now."""

    files: tuple[Path, ...]
    marks: tuple[tuple[int, int, int], ...]
    loaded: str
    identity: str


@final
class LoraAdapters:
    """The identities of LoRA adapters: their names and the content of their files.

    vLLM loads an adapter once for each number that it gives out, and tells no connector. So the content at an adapter's first
    request is taken for what was loaded, and files that change later give an identity that no engine with only one of the two
    contents has. Requests for an adapter that vLLM has loaded in place say so; then the new content alone counts.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Adapter] = {}

    def identity(self, request: LoRARequest) -> str:
        """Return the identity of an adapter: its name alone if its files cannot be read.

        The files are read at the adapter's first request (some hundred pieces), and at each one only asked for their times.
        """
        key = (request.lora_int_id, request.lora_path)
        known = self._known.get(key)
        files = self._files(request) if known is None else known.files
        marks = _marks(files)
        if known is not None and marks == known.marks:
            return known.identity
        loaded = now = f"{request.lora_name}{_content(files)}"
        if known is not None and not getattr(request, "load_inplace", False):  # hosts without it reload nothing
            loaded = known.loaded
        if now != loaded:
            _logger.warning(
                "the files of LoRA adapter '%s' in %s have changed since its first request: its prompts are handed over only "
                "between engines where they changed in the same way; load new weights under a new name and path",
                request.lora_name,
                request.lora_path,
            )
        if len(self._known) >= _MOST_ADAPTERS:
            del self._known[next(iter(self._known))]
        self._known[key] = _Adapter(files, marks, loaded, now if now == loaded else f"{loaded} {now}")
        return self._known[key].identity

    @staticmethod
    def _files(request: LoRARequest) -> tuple[Path, ...]:
        """Return an adapter's configuration and its weights; nothing, which is logged, where they are not on this machine."""
        place = local_checkpoint(request.lora_path)
        if place is not None:
            weights = [place / f"adapter_model{pattern[1:]}" for pattern in _PATTERNS]
            found = next((file for file in weights if file.is_file()), None)
            if found is not None and (place / _ADAPTER_CONFIG).is_file():
                return place / _ADAPTER_CONFIG, found
        _logger.warning(
            "LoRA adapter '%s' is identified by its name alone: there are no files of it in %s",
            request.lora_name,
            request.lora_path,
        )
        return ()


def _marks(files: Sequence[Path]) -> tuple[tuple[int, int, int], ...]:
    """Return marks that differ when the content of a file may differ."""
    try:
        return tuple((found.st_ino, found.st_size, found.st_mtime_ns) for found in map(os.stat, files))
    except OSError:
        return ()


def _content(files: Sequence[Path]) -> str:
    """Return the digest of an adapter's configuration and weights; empty if they cannot be read."""
    if not files:
        return ""
    try:
        settings, weights = files
        return f"/{hashlib.sha256(settings.read_bytes()).hexdigest()[:32]}/{weights_digest(weights)}"
    except (OSError, ValueError):
        return ""
