"""Run engines of other projects in our conformance kit, each through an adapter, on one CPU rank.

`nox -s other-engines` does it and updates docs/conformance-other-engines.md.
"""

VERL = "verl==0.9.1"
"""Installed without its requirements, which exclude this version of transformers."""

REQUIREMENTS = (
    "torch==2.13.0",
    "transformers==5.17.0",
    "accelerate==1.15.0",
    "codetiming==1.4.0",
    "datasets==5.2.0",
    "omegaconf==2.3.1",
    "orjson==3.13.0",
    "peft==0.21.2",
    "pillow==13.0.0",
    "ray==2.60.0",
    "tensordict==0.15.3",
)
"""Versions that the page names: torch, transformers, and what both engines import."""

ENGINES = {
    "verl": "tools.other_engines.verl_fsdp:VerlFSDPEngine",
    "transformers": "tools.other_engines.transformers_trainer:TransformersTrainerEngine",
}
"""Adapters by the name of the project."""
