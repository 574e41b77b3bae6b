"""The table of rules.

Every row is reached, every rule that builders name stands in it, and the documentation shows it.
"""

import ast
import re
from pathlib import Path
from runpy import run_path
from string import Formatter
from typing import get_args

import pytest

from temper_legacy_shim.configs.mapping.builder import messages
from temper_legacy_shim.configs.mapping.rows import FACTS, Row, alternatives, steps
from temper_legacy_shim.configs.mapping.rules import (
    Rule,
    find_rule,
    rules,
    sources_of,
)
from temper_legacy_shim.configs.reading.trees import (
    Family,
    all_keys,
    config_keys,
    own_configs,
    versions,
)

from .conftest import CONFIG
from .examples import example_of

SOURCES = Path(__file__).parents[2] / "src/temper_legacy_shim/configs"
BRACES = re.compile(r"\{(\w+)\}")
WORDS = {"since", "before", "set", "has", "given", "on", "is", "differs"}
"""Words of conditions; any other word is a fact."""
BLOCKS = {"role", "block", "engine", "parent", "model", "megatron", "optim", "fsdp", "sharding"}
"""Names that a role gives to its rows; see ``OldRole.blocks``."""
FROM_HISTORY = {"2231", "4665"}
"""Pull requests that only verl's own history names: one_step_off_policy, and TensorRT as a rollout
engine.
"""
DOCS = Path(__file__).parents[4] / "docs/migration/config-rules.md"
TOOLS = Path(__file__).parents[2] / "tools"


def example(key: str) -> str:
    """Return a key that a pattern matches."""
    if "***" not in key and "**" in key:
        matching = re.compile(re.escape(key).replace(r"\*\*", ".+").replace(r"\*", "[^.]+") + r"\Z")
        return next(
            (
                name
                for family in get_args(Family)
                for name in all_keys(family)
                if matching.match(name)
            ),
            key.removesuffix(".**"),
        )
    return key.replace("***", "any.leaf").replace("*", "any")


def rule_of(name: str) -> Rule:
    return next(rule for rule in rules() if rule.id == name)


def with_keys() -> list[Rule]:
    return [rule for rule in rules() if rule.old]


@pytest.mark.parametrize("rule", with_keys(), ids=lambda rule: rule.id)
def test_every_row_is_reached_by_a_key_of_its_own(rule: Rule) -> None:
    reached = [
        find_rule(program, example(key))
        for program in rule.programs
        for key in alternatives(rule.old)
    ]
    assert rule in reached


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.id)
def test_every_rule_does_what_its_row_shows(rule: Rule) -> None:
    example = example_of(rule)
    result = example.translated()
    own = [
        token
        for token in result.tokens[len(result.tokens) - len(example.tokens) :]
        if token.rule == rule.id
    ]
    assert {token.disposition for token in own[-1:]} == (
        {example.disposition} if example.disposition else set()
    )
    assert {
        finding.level for finding in result.findings if finding.rule == rule.id
    } == example.levels
    assert set(example.settings) <= {setting.override for setting in result.settings}
    by_rule = {setting.override for setting in result.settings if setting.rule == rule.id}
    assert own or example.levels or by_rule & set(example.settings), (
        "the example does not exercise the rule"
    )


def test_every_row_has_a_source_and_a_test() -> None:
    assert [rule.id for rule in rules() if not sources_of(rule)] == []
    assert [rule.id for rule in rules() if not rule.test] == []


def test_sources_are_positions_of_the_old_system_and_pull_requests_that_the_facts_know() -> None:
    cited = [part for rule in rules() for part in rule.source.split("; ") if part]
    wrong = [
        part
        for part in cited
        if not re.match(rf"({'|'.join(versions())})(:[\w./-]+(:[\d-]+)?)?\Z|Hydra's ", part)
    ]
    assert wrong == []
    assert all(re.fullmatch(r"#\d+", pr) for rule in rules() for pr in rule.prs.split())


@pytest.mark.skipif(not CONFIG.is_dir(), reason=f"needs {CONFIG}: set TEMPER_TEST_DATA")
def test_no_pull_request_is_invented() -> None:
    facts = "\n".join(
        path.read_text() for path in (*CONFIG.glob("*.csv"), CONFIG.parent / "CONFIG.md")
    )
    known = set(re.findall(r"(?<![\d.])\d{2,4}(?![\d.])", facts)) | FROM_HISTORY
    assert {pr for rule in rules() for pr in rule.prs.split()} - {
        f"#{number}" for number in known
    } == set()


def source_text() -> str:
    return "\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))


def table_rows() -> list[Row]:
    return [row for rows in steps().values() for row in rows]


def test_every_rule_that_builders_name_stands_in_the_table_and_the_other_way_round() -> None:
    text = source_text()
    literals = set(re.findall(r'"([a-z0-9-]+)"', text))
    in_rows = {row.rule for row in table_rows()}
    named = set(re.findall(r'rule="([a-z0-9-]+)"', text)) | in_rows
    named |= {name.partition(".")[0] for name in messages()}
    table = {rule.id for rule in rules()}
    # The table is about old keys; cpu-trial is an option of the command.
    assert named - table - {"value-unknown", "cpu-trial"} == set()
    assert {rule.id for rule in rules() if not rule.old} - named - literals == set()


def test_every_step_is_applied_by_a_builder() -> None:
    literals = set(re.findall(r'"([a-z0-9-]+)"', source_text()))
    assert set(steps()) - literals == set()


def message_of(row: Row) -> str:
    """Return the name of the message that a row finds, or gives as a reason."""
    reported = re.search("[?!](.+)", row.words.get("else", ""))
    return row.argument if not row.sets else reported[1] if reported else ""


def test_every_message_has_a_position_that_finds_it() -> None:
    literals = set(re.findall(r'"([a-z0-9.-]+)"', source_text()))
    in_rows = {message_of(row) for row in table_rows()} - {""}
    assert set(messages()) - literals - in_rows == set()
    in_calls = set(re.findall(r'draft\.find\("([a-z0-9.-]+)"', source_text()))
    assert (in_calls | in_rows) - set(messages()) == set()


def test_a_message_of_a_row_belongs_to_its_rule_and_a_reason_to_a_dropped_key() -> None:
    for row in table_rows():
        if name := message_of(row):
            is_reason = row.converter == "drop"
            assert (messages()[name][0] == "dropped") == is_reason, name
            assert is_reason or name.partition(".")[0] == row.rule, name


def test_rows_read_old_keys_that_the_table_explains() -> None:
    programs = {program for rule in rules() for program in rule.programs}
    keys = {
        key
        for row in table_rows()
        for part in re.split(" and | or ", row.old)
        for key in alternatives(part)
        if key and not BRACES.search(part)
    }
    assert len(keys) > 100
    # A block such as reward.overlong_buffer is explained by its keys.
    unknown = [
        key
        for key in keys
        if not any(find_rule(each, f"{key}{end}") for each in programs for end in ("", ".enable"))
    ]
    assert unknown == []


def test_rows_set_new_keys_of_their_own_rule() -> None:
    for row in table_rows():
        rule = rule_of(row.rule)
        blocks = {"engine": "actor.engine", "source": "data.train", "teacher": "", "argument": ""}
        blocks |= {"reject_rule": "", "first_rule": "", "new_column": "prompt"}
        key = row.new.format(**blocks)
        assert not row.sets or any(f"{key}.".startswith(f"{own}.") for own in new_keys(rule)), row


def new_keys(rule: Rule) -> list[str]:
    return [key for part in rule.new.split(", ") for key in alternatives(part)]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.id)
def test_every_setting_of_a_translation_stands_in_the_row_that_it_names(rule: Rule) -> None:
    for setting in example_of(rule).translated().settings:
        named = rule_of(setting.rule)
        assert any(f"{setting.key}.".startswith(f"{key}.") for key in new_keys(named)), (
            f"{setting.key} of {named.id}"
        )


def test_ids_are_unique_and_every_row_has_a_reason() -> None:
    assert len({rule.id for rule in rules()}) == len(rules())
    assert all(rule.reason.endswith(".") for rule in rules())


def test_every_key_of_every_default_tree_falls_under_a_rule() -> None:
    programs = {
        "ppo_fsdp": "ppo",
        "ppo_megatron": "ppo",
        "sft_columns": "sft1",
        "sft_fsdp": "sft",
        "sft_megatron": "sft",
    }
    missing = [
        (family, key)
        for family, program in programs.items()
        for key in all_keys(family)  # type: ignore[arg-type]
        if find_rule(program, key) is None
    ]
    missing += [
        (config, key)
        for config in own_configs()
        for key in config_keys(config)
        if find_rule("ppo", key) is None
    ]
    assert missing == []


def test_the_documentation_has_the_table_as_it_is() -> None:
    page = run_path(str(TOOLS / "rules_page.py"))["page"]
    assert DOCS.read_text() == page(), (
        "run `python packages/legacy-shim/tools/rules_page.py > docs/migration/config-rules.md`"
    )


@pytest.mark.skipif(not CONFIG.is_dir(), reason=f"needs {CONFIG}: set TEMPER_TEST_DATA")
def test_every_row_of_the_migration_table_has_an_answer_here() -> None:
    import csv

    with (CONFIG / "migration_table.csv").open() as lines:
        keys = [row["old_key"] for row in csv.DictReader(lines)]
    plain = [key for key in keys if re.fullmatch(r"[a-z_0-9.]+", key)]
    assert len(plain) > 120
    unanswered = [
        key
        for key in plain
        if not any(find_rule(program, key) for program in ("ppo", "sft", "sft1", "generation"))
    ]
    assert unanswered == []


def find_calls() -> list[tuple[str, set[str]]]:
    """Return message names and placeholder values of all calls in the sources."""
    calls = [
        node
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    named_find = [
        call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "find"
    ]
    named = [
        (call.args[0], call)
        for call in named_find
        if call.args and isinstance(call.args[0], ast.Constant)
    ]
    return [
        (name.value, {str(each.arg) for each in call.keywords})
        for name, call in named
        if name.value in messages()
    ]


def fields_of(template: str) -> set[str]:
    """Return the names that a template shows, without what is looked up in them."""
    return {field.partition("[")[0] for _, field, _, _ in Formatter().parse(template) if field}


def test_calls_give_every_value_that_their_message_shows() -> None:
    assert len(find_calls()) > 40
    for name, given in find_calls():
        assert fields_of(messages()[name][1]) - {"version", "key"} == given, name


def given_names() -> dict[str, set[str]]:
    """Return the names that builders pass to the rows of each step."""
    result: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "apply_rows":
                step = node.args[1]
                if isinstance(step, ast.Constant):
                    names = result.setdefault(str(step.value), set())
                    for each in node.keywords:
                        names |= {each.arg} if each.arg else BLOCKS
    return result


def names_of(row: Row) -> set[str]:
    """Return the facts, and values from the builder, that a row reads; not those of messages."""
    keys = [text for each in (*row.when, *row.when_key) for text in (each.key, each.argument)]
    names = set(BRACES.findall(" ".join((row.old, row.new, *keys))))
    names |= {each.word for each in row.when if each.word.isidentifier()} - WORDS
    # A key without a dot, in front of a word, is a fact or a configuration group.
    names |= {each.key for each in row.when if each.key in FACTS}
    of_value = row.argument if row.converter in ("fact", "words") else row.factor
    return (names | {of_value}) - {""}


def test_every_name_of_a_row_is_a_fact_or_comes_from_the_builder() -> None:
    given, shown = given_names(), {"key", "value", "new", "old", "settings"}
    for step, each_row in ((step, row) for step, rows in steps().items() for row in rows):
        known = set(FACTS) | given.get(step, set()) | {"version", "family"}
        assert names_of(each_row) - known == set(), each_row
        if name := message_of(each_row):
            of_message = shown if not each_row.sets else {"key", "word", "names"}
            assert fields_of(messages()[name][1]) - of_message - known == set(), name


def test_every_fact_is_used_by_a_row_or_a_message() -> None:
    used = {name for row in table_rows() for name in names_of(row)}
    used |= {name for row in table_rows() for name in fields_of(template_of(row))}
    assert set(FACTS) - used == set()


def template_of(row: Row) -> str:
    name = message_of(row)
    return messages()[name][1] if name else ""
