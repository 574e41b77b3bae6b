"""Any text, and any text that looks like a script.

Our own error type or a reading, in bounded time, and the same reading twice.

The rewriting too: the same bytes twice, a new script that is read without complaint, and nothing
old left in it where no one is asked.
"""

import time

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from temper_legacy_shim.errors import ScriptError, ShimError
from temper_legacy_shim.scripts.migrate import migrate_script
from temper_legacy_shim.scripts.script_reading import read_script

LIMIT_S = 60
"""A reading takes milliseconds; a machine that seven others share may be slow, and a hang has no
end.
"""

_NAMES = st.sampled_from(["A", "B", "x", "LIST", "@", "#", "1", "?", "HOME"])
_PLAIN = [
    "a",
    "1",
    "0",
    "-1",
    "a b",
    "*",
    "[a-z]",
    "{a,b}",
    "{1..3}",
    "~",
    "key=value",
    "a.b=c",
    "'q'",
    "$'\\n'",
    "\\",
    "#",
    "${",
    "$((",
]
_EXPANDED = [
    "$A",
    '"$A"',
    "${B:-x}",
    "${LIST[@]}",
    "$((A+1))",
    "$(echo a)",
    "`echo b`",
    '"${A//a/b}"',
    "${#A}",
    "${A%%*}",
    "${!A}",
    "${A:1:2}",
]
_SMALL = st.sampled_from([*_PLAIN, *_EXPANDED])
_STARTING = [
    "python3 -m verl.trainer.main_ppo data.a=1 trainer.b=$A",
    'bash -c "$A"',
    'eval "$B"',
    "f",
    "shift",
    "set -- a b",
]
_LAUNCHES = st.sampled_from([*_STARTING, "exit", "return", "break"])


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3).map("\n".join)
    return st.one_of(
        st.builds("if {}; then\n{}\nelse\n{}\nfi".format, inner, several, several),
        st.builds(
            "for {} in {} {}; do\n{}\ndone".format,
            st.sampled_from(["A", "x"]),
            _SMALL,
            _SMALL,
            several,
        ),
        st.builds("while {}; do\n{}\ndone".format, inner, several),
        st.builds("case {} in\n{}) {} ;;\n*) {} ;;\nesac".format, _SMALL, _SMALL, inner, inner),
        st.builds("f() {{\n{}\n}}".format, several),
        st.builds("( {} )".format, inner),
        st.builds("{} | {} && {} || {} &".format, inner, inner, inner, inner),
        st.builds("A=$({})".format, inner),
        st.builds("cat <<EOF\n{}\nEOF".format, inner),
        st.builds("for ((i = 0; i < {}; i++)); do\n{}\ndone".format, _SMALL, several),
    )


_SIMPLE = st.one_of(
    st.builds("{}={}{}".format, st.sampled_from(["A", "B", "x"]), _SMALL, _SMALL),
    st.builds("LIST+=({} {})".format, _SMALL, _SMALL),
    st.builds("[ {} = {} ]".format, _SMALL, _SMALL),
    st.builds("[[ {} == {} && -n {} ]]".format, _SMALL, _SMALL, _SMALL),
    st.builds("echo {} ${{{}}}".format, _SMALL, _NAMES),
    st.builds("(( {} ))".format, _SMALL),
    _LAUNCHES,
)
_COMMANDS = st.recursive(_SIMPLE, _compound, max_leaves=12)
_SCRIPTS = st.lists(_COMMANDS, max_size=6).map("\n".join)
_CHARACTERS = st.text(alphabet="ab1 \n\t$(){}[]\"'`\\|&;<>#=+-*/%!?@:,.~^", max_size=120)


def _read(text: str) -> object:
    started = time.monotonic()
    try:
        reading = read_script(text)
    except ScriptError as error:
        return str(error)
    finally:
        assert time.monotonic() - started < LIMIT_S
    return (
        [[field.text.shown() for field in event.fields] for event in reading.events],
        reading.notes,
        len(reading.alternatives),
    )


def _check(text: str) -> None:
    assert _read(text) == _read(text)


_OVERRIDES = st.sampled_from(
    [
        *(
            "algorithm.adv_estimator=grpo",
            "algorithm.adv_estimator=gae",
            "data.train_batch_size=64",
            "data.train_batch_size=$A",
        ),
        *(
            "data.train_files=$HOME/a.parquet",
            "data.train_files=\"['$A','$B']\"",
            "actor_rollout_ref.model.path=${A:-m}",
            "a.b=$(date)",
        ),
        *(
            "actor_rollout_ref.rollout.n=$((4 * 2))",
            "+fork.key='a b'",
            "trainer.nnodes=$x",
            "trainer.logger=['console','wandb']",
            '"$@"',
        ),
        *(
            "trainer.experiment_name=run_$(hostname)",
            "actor_rollout_ref.actor.optim.lr=1e-6 # tuned",
            '"${LIST[@]}"',
            "$B",
            "~data.x",
        ),
        *(
            "actor_rollout_ref.rollout.name=sglang",
            "trainer.use_legacy_worker_impl=enable",
            "data.max_response_length=${LIST[0]}",
        ),
        *(
            "--config-name=ppo_megatron_trainer",
            "model_engine=megatron",
            "critic.ppo_micro_batch_size=`echo 4`",
            "data.image_key=images",
        ),
    ]
)
_ENTRIES = st.sampled_from(
    [
        *(
            "python3 -m verl.trainer.main_ppo",
            "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer",
        ),
        *(
            "A=1 nohup python -m verl.trainer.main_ppo",
            "ray job submit --address=$A -- python3 -m recipe.dapo.main_dapo",
        ),
        *(
            "srun -N 2 python3 -u -m verl.trainer.main_ppo",
            "python3 -m verl.trainer.main_generation",
            "python verl/trainer/main_ppo.py",
        ),
    ]
)
_ENDS = st.sampled_from(["", " 2>&1 | tee log", " > log &", " || exit 1", " # done"])
_RUNS = st.builds(
    lambda entry, overrides, separator, end: separator.join([entry, *overrides]) + end,
    _ENTRIES,
    st.lists(_OVERRIDES, max_size=6),
    st.sampled_from([" ", " \\\n    "]),
    _ENDS,
)
_LISTS = st.lists(_OVERRIDES, max_size=4).map(
    lambda items: "LIST=(\n    " + "\n    ".join(items) + "\n)"
)
_SETS = st.sampled_from(
    ["A=4", "B=trainer.nnodes=2", "x=$A", "[ -n $A ]", "shift", "echo done", "# a remark"]
)
_NESTED = st.recursive(st.one_of(_RUNS, _LISTS, _SETS), _compound, max_leaves=5)
_PROJECTS = st.lists(
    st.one_of(_RUNS, _LISTS, _SETS, _NESTED, _NESTED, _COMMANDS), min_size=1, max_size=5
).map("\n".join)


def _check_new_script(text: str) -> bool:
    """Return whether a new script was written for it."""
    started = time.monotonic()
    try:
        first = migrate_script(text)
    except ShimError:
        return False
    finally:
        assert time.monotonic() - started < LIMIT_S
    if first.script is None:
        assert not first.launches
        return False
    again = migrate_script(text).script
    assert again is not None
    assert (again.text, again.notes, again.persons) == (
        first.script.text,
        first.script.notes,
        first.script.persons,
    )
    if not first.script.persons:
        assert migrate_script(first.script.text).script is None  # nothing old is left in it
    return True


@given(_PROJECTS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_what_launches_is_rewritten_or_refused(text: str) -> None:
    _check_new_script(text)


# Nightly: takes minutes. The test above draws fewer projects every day.
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_projects_are_rewritten_or_refused(part: int) -> None:
    @seed(part)
    @settings(max_examples=1_000, suppress_health_check=[HealthCheck.too_slow])
    @given(_PROJECTS)
    def one(text: str) -> None:
        _check_new_script(text)

    one()


@given(_SCRIPTS)
@settings(max_examples=50)
def test_what_looks_like_a_script_is_read_or_refused(text: str) -> None:
    _check(text)


@given(_CHARACTERS)
@settings(max_examples=150)
def test_any_characters_are_read_or_refused(text: str) -> None:
    _check(text)


# Nightly: takes minutes. The test above draws fewer texts every day.
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(5))
def test_twenty_thousand_texts_are_read_or_refused(part: int) -> None:
    @seed(part)
    @settings(max_examples=4_000, suppress_health_check=[HealthCheck.too_slow])
    @given(st.one_of(_SCRIPTS, _CHARACTERS))
    def one(text: str) -> None:
        _check(text)

    one()


@pytest.mark.parametrize(
    "text",
    [
        "f() { f; f; }\nf",
        "while true; do :; done",
        "x=aaaaaaaaaaaaaaaa\nfor i in {1..60}; do x=$x$x; done",
        "x='$x$x'\nfor i in {1..60}; do eval \"x=$x\"; done",
        "for i in {1..100}; do for j in {1..100}; do for k in {1..100}; do echo; done; done; done",
        "$" + "(" * 300,
        "echo " + "{a,b}" * 40,
        "a=(" + "$(echo 1) " * 3000 + ")",
        "[[ " + "a" * 5000 + " == " + "*a" * 50 + "b ]]",
        "[[ " + "a" * 400 + " =~ (a+)+b ]]",
        "echo ${x/" + "*" * 50 + "/y}",
        "echo $((" + "(" * 200 + "1" + ")" * 200 + "))",
        "x=x\necho $((x))",
        "if " * 200 + "true" + "; then :; fi" * 200,
        'bash -c "$0"; eval "eval \'eval x\'"',
        "f() { eval f; }\nf",
    ],
)
def test_what_would_never_end_is_refused_or_cut_short(text: str) -> None:
    _check(text)


def test_a_list_that_an_endless_loop_lengthens_is_refused() -> None:
    with pytest.raises(ScriptError, match="words"):
        read_script('while LIST=(a "${LIST[@]}" b); do LIST=(c "${LIST[@]}" d); done')
