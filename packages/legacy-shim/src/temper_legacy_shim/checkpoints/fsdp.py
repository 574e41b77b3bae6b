"""Weights of FSDP checkpoints: every rank's file, read lazily, each key put together from its shards."""

from pathlib import Path

from temper_legacy_shim.checkpoints.archive import Archive
from temper_legacy_shim.checkpoints.lazy import LazyTensor
from temper_legacy_shim.checkpoints.pickles import in_short
from temper_legacy_shim.checkpoints.sharded import assemble
from temper_legacy_shim.checkpoints.tensors import Entry, TensorReader
from temper_legacy_shim.errors import DamagedFileError

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def read_weights(files: dict[int, Path], *, where: Path) -> dict[str, LazyTensor]:
    """Every tensor of a model under the name it has in the files, without the names of wrappers.

    Args:
        files: model files by rank.
        where: the directory, for errors.

    Raises:
        DamagedFileError: a file is damaged, or the files are not of one save.
    """
    by_key: dict[str, dict[int, Entry]] = {}
    forms: dict[int, tuple[str, ...]] = {}
    for rank, path in files.items():
        of_rank, forms[rank] = _entries(path, rank=rank)
        for key, entry in of_rank.items():
            by_key.setdefault(key, {})[rank] = entry
        if forms[rank] != forms[min(forms)]:
            raise DamagedFileError(
                f"{path} was written by another version of torch than {files[min(forms)].name}: the files are not of one save; copy every "
                "rank's file of one step here."
            )
    for key, entries in by_key.items():
        absent = sorted(set(files) - set(entries))
        if absent:
            raise DamagedFileError(f"{files[absent[0]]} has no {key}, which rank {min(entries)} has: the files are not of one save.")
    return {key: assemble(key, entries, where=str(where)) for key, entries in by_key.items()}


def _entries(path: Path, *, rank: int) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return a file's entries by name, and the form in which its torch pickled them."""
    archive = Archive(path)
    value = archive.value()
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path} holds a {type(value).__name__} instead of a mapping of names to tensors: is it a model file?")
    reader = TensorReader(archive, rank=rank)
    found: dict[str, Entry] = {}
    form: tuple[str, ...] = ()
    for key, node in value.items():
        if not isinstance(key, str):
            raise DamagedFileError(f"{path}: {in_short(key)} is no name of a tensor: is it a model file?")
        if not reader.is_tensor(node):
            continue  # such as the extra state of a module
        name = key
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if name in found:
            raise DamagedFileError(f"{path} has {name} twice, once inside a wrapper's name: which one counts can't be known.")
        found[name] = reader.entry(node, key=key)
        form = form or reader.distributed_form(node)
    if not found:
        raise DamagedFileError(f"{path} holds no tensor: is it a model file?")
    return found, form
