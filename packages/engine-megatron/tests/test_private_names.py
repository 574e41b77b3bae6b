"""Test that no private name of Megatron or another library is used."""

import ast
import itertools
from pathlib import Path

import temper_engine_megatron

ALLOWED = {
    ("cpu_device.py", "_getframe"),
    # Megatron has no public way to use the CPU's RNG states instead of those of CUDA.
    ("cpu_device.py", "_get_cuda_rng_state"),
    ("cpu_device.py", "_set_cuda_rng_state"),
    # transformers has no public list of tensors that its models do not load.
    ("huggingface_model.py", "_keys_to_ignore_on_load_unexpected"),
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def private_names(tree):
    """Yield private attributes, imports, and names given to patch and getattr as text."""
    own = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            yield from [node.attr] if is_private(node.attr) and node.attr not in own else []
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            yield from (
                alias.name for alias in node.names if any(map(is_private, alias.name.split(".")))
            )
        elif isinstance(node, ast.Call):
            yield from (
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and is_private(str(arg.value))
            )


def test_no_private_name_of_others_is_used():
    sources = sorted(Path(temper_engine_megatron.__file__).parent.rglob("*.py"))
    used = {
        (path.name, name) for path in sources for name in private_names(ast.parse(path.read_text()))
    }
    assert used == ALLOWED
    assert len(sources) > 10


def test_check_finds_each_way_to_use_a_private_name():
    programs = [
        "x._hidden",
        "from m import _hidden",
        "import m._hidden",
        "patch.object(m, '_hidden')",
        "getattr(m, '_hidden')",
    ]
    assert all(list(private_names(ast.parse(program))) for program in programs)
    assert not list(
        itertools.chain(
            *(private_names(ast.parse(p)) for p in ("self._own", "x.__dict__", "x.public"))
        )
    )
