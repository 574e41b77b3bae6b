"""Test the site: valid links, a reference of every key, and a figure drawn from the contracts."""

import re
from pathlib import Path

import pytest

from temper_engine_api.specs import EngineConfig
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.schema import iterate_entries
from temper_trainer.settings.ranges import PositiveFloat, PositiveInt
from temper_trainer.settings.variants import settings
from tools.docs import find_broken_links
from tools.environment import PACKAGES
from tools.pages import split_page
from tools.project_urls import REPOSITORY_URL
from tools.site.__main__ import gather_pages
from tools.site.architecture_figure import FIGURE, contract_layers, draw_architecture
from tools.site.configuration import build_configuration_pages, find_unit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages of the site, gathered once."""
    folder = tmp_path_factory.mktemp("site") / "site"
    gather_pages(ROOT, folder)
    return folder


def test_every_link_has_a_target_in_the_site(site: Path) -> None:
    broken = [
        line
        for page in (site / "pages").rglob("*.md")
        for line in find_broken_links(page, split_page(page.read_text())[1])
    ]
    assert broken == []


def test_every_page_is_in_the_navigation(site: Path) -> None:
    navigation = (site / "mkdocs.yml").read_text()
    pages = sorted(
        path.relative_to(site / "pages").as_posix() for path in (site / "pages").rglob("*.md")
    )
    listed = re.findall(r"(?m)^ +- (?:[^:\n]+: )?([\w./-]+\.md)$", navigation)
    assert sorted(listed) == pages
    assert {f"reference/{package}/index.md" for package in PACKAGES} <= set(pages)
    assert {"index.md", "reference/compatibility.md"} <= set(pages)


def test_navigation_follows_a_users_work(site: Path) -> None:
    navigation = (site / "mkdocs.yml").read_text()
    work = [
        "install.md",
        "first-run.md",
        "data.md",
        "reward.md",
        "sft.md",
        "dpo.md",
        "lora.md",
        "algorithms.md",
        "distillation.md",
        "environment.md",
        "agent.md",
        "evaluate-and-export.md",
        "gpu.md",
        "schedulers.md",
        "troubleshooting.md",
        "migration/README.md",
        "writing-an-engine.md",
        "reference/configuration/index.md",
        "benchmarks/README.md",
        "decisions/0001",
    ]
    positions = [navigation.index(f"{page}") for page in work]
    assert positions == sorted(positions)


def test_every_module_has_a_page(site: Path) -> None:
    page = (site / "pages/reference/engine-api/temper_engine_api.batch.md").read_text()
    head = "---\nsearch: {boost: 0.0001}\n---\n"
    assert page == f"{head}# batch\n\n::: temper_engine_api.batch\n"
    index = (site / "pages/reference/engine-api/index.md").read_text()
    assert "| [temper_engine_api.batch](temper_engine_api.batch.md) | " in index


def test_guides_are_found_before_modules_decisions_and_records(site: Path) -> None:
    assert not (site / "pages/docs/how-to/data.md").read_text().startswith("---")
    for page in ("reference/trainer/index.md", "docs/records/first_hour.md"):
        assert (site / "pages" / page).read_text().startswith("---\nsearch: {boost: 0.")


def test_repository_link_needs_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    assert ("repo_url" in (site / "mkdocs.yml").read_text()) == bool(REPOSITORY_URL)
    monkeypatch.setattr("tools.site.__main__.REPOSITORY_URL", "https://example.org/temper")
    gather_pages(ROOT, tmp_path / "site")
    assert "repo_url: https://example.org/temper\n" in (tmp_path / "site/mkdocs.yml").read_text()


def test_compatibility_table_shows_which_packages_need_torch(site: Path) -> None:
    page = (site / "pages/reference/compatibility.md").read_text()
    torch = {
        cells[1].strip(): cells[4].strip()
        for line in page.splitlines()
        if len(cells := line.split("|")) == 7
    }
    assert torch["temper-legacy-shim"].startswith("none, >=")
    assert "with `[checkpoint]`" in torch["temper-legacy-shim"]
    assert torch["temper-engine-api"].startswith(">=")


def test_configuration_reference_explains_every_key() -> None:
    page = "\n".join(build_configuration_pages().values())
    rows = dict(re.findall(r"^\| `([^`]+)` \| .* \| ([^|]*) \|$", page, re.MULTILINE))
    assert {"task", "batching.max_tokens", "run.seed", "strategy", "tensor_parallel"} <= rows.keys()
    assert {"preference.beta", "algorithm.rollout_correction.reject.NAME.low"} <= rows.keys()
    assert [key for key, meaning in rows.items() if not meaning.strip()] == []
    for entry in iterate_entries(TrainerConfig, engine_class=EngineConfig):
        assert f"`{entry.name}" in page or f"# {entry.name}\n" in page
    assert "| `runtime.worker_timeout_s` | number above 0 | " in page
    assert " | seconds | " in page


def test_every_number_in_the_configuration_has_a_unit_or_none() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| ((?:\\\||[^|])*) \| (?:\\\||[^|])* \| ((?:\\\||[^|])*) \|",
        "\n".join(build_configuration_pages().values()),
        re.MULTILINE,
    )
    units = {key: unit.strip() for key, kind, unit in rows if "number" in kind}
    assert [key for key, unit in units.items() if not unit] == [], (
        "name them in UNITS or NO_UNIT of tools/site/configuration.py"
    )
    assert units["run.save_every"] == "steps"
    assert units["run.num_table_rows"] == "completions"
    assert units["algorithm.advantage.gamma"] == "none"
    assert {unit for key, kind, unit in rows if kind in ("text", r"true \| false")} == {""}


def test_number_of_a_new_algorithm_has_no_unit_without_being_listed() -> None:
    @settings
    class SoftClip(PolicyLoss):
        width: PositiveFloat = 0.2
        soft_tokens: PositiveInt = 1

    SoftClip.__module__ = f"{PolicyLoss.__module__}_of_somebody"
    entries = iterate_entries(SoftClip, engine_class=EngineConfig)
    assert {entry.name: find_unit(entry) for entry in entries} == {
        "width": "none",
        "soft_tokens": "tokens",
    }


def test_figure_shows_the_components_of_the_contracts(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        (ROOT / "pyproject.toml").read_text().replace('"(metrics)"', '"(a_new_component)"')
    )
    assert "a_new_component" in draw_architecture(tmp_path)
    assert (ROOT / FIGURE).read_text() == draw_architecture(ROOT), (
        "draw it again: python -m tools.site.architecture_figure"
    )
    sizes = [float(size) for size in re.findall(r'font-size="([^"]+)"', draw_architecture(ROOT))]
    assert min(sizes) >= 11, "labels are too small to read"
    drawn = re.findall(r">([^<>]+)</text>", draw_architecture(ROOT))
    for row in contract_layers(ROOT, name="Folders of the trainer"):
        assert {component.strip("_") for component in row} <= set(drawn)
    assert {"engine-api", "trainer", "legacy-shim"} <= set(drawn)
