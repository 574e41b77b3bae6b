"""Packs the default trees of every old release into ``configs/data/trees.json``: each key once, with the releases that changed its default.

    python packages/legacy-shim/tools/pack_trees.py $TEMPER_TEST_DATA/legacy/config/defaults

The trees are facts, composed from each release's own YAML files with Hydra.
"""

import json
import sys
from pathlib import Path

VERSIONS = (
    "v0.2",
    "v0.2.0.post2",
    "v0.3.0.post0",
    "v0.3.0.post1",
    "v0.4.0",
    "v0.4.1",
    "v0.5.0",
    "v0.6.0",
    "v0.6.1",
    "v0.7.0",
    "v0.7.1",
    "v0.8.0",
    "v0.9.0",
)
FAMILIES = {
    "ppo_fsdp": "main_ppo_fsdp",
    "ppo_megatron": "main_ppo_megatron",
    "sft_columns": "sft_fsdp",
    "sft_fsdp": "sft_engine_fsdp",
    "sft_megatron": "sft_engine_megatron",
    "generation": "generation",
    "evaluation": "evaluation",
}
GONE = {"$gone": True}


def pack(source: Path) -> dict[str, object]:
    """One history per family and key: pairs of the release's number and the default from there on."""
    families: dict[str, dict[str, list[list[object]]]] = {}
    present: dict[str, list[int]] = {}
    for family, entry in FAMILIES.items():
        keys = families.setdefault(family, {})
        for number, version in enumerate(VERSIONS):
            path = source / version / f"{entry}.json"
            tree = json.loads(path.read_text())["flat"] if path.exists() else {}
            if tree:
                present.setdefault(family, []).append(number)
            for key in tree.keys() | keys.keys():
                value = tree.get(key, GONE)
                history = keys.setdefault(key, [])
                if value == GONE and not history:
                    continue
                if not history or json.dumps(history[-1][1]) != json.dumps(value):
                    history.append([number, value])
    return {
        "versions": VERSIONS,
        "families": {family: {"present": present[family], "keys": dict(sorted(keys.items()))} for family, keys in families.items()},
    }


def main() -> None:
    """Write the file beside the package's code."""
    out = Path(__file__).parent.parent / "src/temper_legacy_shim/configs/data/trees.json"
    packed = pack(Path(sys.argv[1]))
    lines = ['{"versions": ' + json.dumps(packed["versions"]) + ', "families": {']
    families = packed["families"]
    assert isinstance(families, dict)
    blocks = []
    for family, block in families.items():
        keys = ",\n".join(f"{json.dumps(key)}:{json.dumps(history, separators=(',', ':'))}" for key, history in block["keys"].items())
        blocks.append(f'{json.dumps(family)}: {{"present": {json.dumps(block["present"])}, "keys": {{\n{keys}\n}}}}')
    out.write_text("\n".join(lines) + "\n" + ",\n".join(blocks) + "\n}}\n")


if __name__ == "__main__":
    main()
