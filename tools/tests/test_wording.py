"""Test the checker of names and docstrings."""

from pathlib import Path

import pytest

from tools.wording import Wording, check_folder, check_page, read_wording

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wording() -> Wording:
    return read_wording(ROOT / "tools" / "wording.toml")


def _faults(folder: Path, source: str, wording: Wording, *, name: str = "module.py") -> list[str]:
    (folder / name).write_text(source)
    return check_folder(folder, wording, root=folder)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "def sum_up():\n    '''Of all tensors.'''\n",
            "module.py:2: the function docstring starts with 'Of'",
        ),
        (
            "class Plan:\n    steps: int\n    '''Of the run.'''\n",
            "module.py:3: the field docstring starts with 'Of'",
        ),
        (
            "class A:\n  def __init__(self):\n    self.steps = 1\n    '''By the run.'''\n",
            "module.py:4: the field docstring starts with 'By'",
        ),
        ("'''What a run leaves.'''\n", "module.py:1: the module docstring starts with 'What'"),
        (
            "def read():\n    '''Read nobody's file.'''\n",
            (
                "module.py:2: the docstring says 'nobody': write no one, or say who "
                "(rare in technical English)"
            ),
        ),
        (
            "class WeightParcel: ...\n",
            (
                "module.py:1: 'parcel' in `WeightParcel`: write weight file "
                "(it hides that a file is written)"
            ),
        ),
        ("def run(*, rooms): ...\n", "module.py:1: 'rooms' in `rooms`: write component, context"),
        (
            "self.is_held = True\n",
            "module.py:1: 'held' in `is_held`: write cached, kept or last_sent",
        ),
        (
            "_found = find_files()\n",
            "module.py:1: 'found' in `_found`: write what was found: errors, rows",
        ),
        ("import torch as guest\n", "module.py:1: 'guest' in `guest`: write dependency"),
        (
            "def without_idle(): ...\n",
            "module.py:1: function `without_idle` starts with the preposition 'without'",
        ),
        (
            "def _of_rank(): ...\n",
            "module.py:1: function `_of_rank` starts with the preposition 'of'",
        ),
    ],
)
def test_a_fault_is_reported_with_its_line_and_what_to_write(
    tmp_path: Path, wording: Wording, source: str, fault: str
) -> None:
    (first_fault,) = [
        line for line in _faults(tmp_path, source, wording) if "docstrings start with" not in line
    ][:1]
    assert first_fault.startswith(fault)


@pytest.mark.parametrize(
    "source",
    [
        "def to_device(): ...\n\n\ndef with_seed(): ...\n",
        "@property\ndef in_flight(self):\n    '''Requests that are not answered yet.'''\n",
        "@pytest.fixture\ndef batch():\n    '''Six sequences.'''\n",
        "x = torch.add(a, b).share_memory_()\nguests.rooms()\n",  # names that this file only uses
        "tie_word_embeddings = True\nin_place = False\n",
        "def test_file_is_found(): ...\n",
        "pass\n",
    ],
)
def test_plain_code_has_no_fault(tmp_path: Path, wording: Wording, source: str) -> None:
    assert _faults(tmp_path, source, wording) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "'''The rooms of a run and its laws,\nparcels, residency and guests.'''\n",
            [
                "1: the docstring says 'laws'",
                "1: the docstring says 'rooms'",
                "2: the docstring says 'guests'",
                "2: the docstring says 'parcels'",
                "2: the docstring says 'residency'",
            ],
        ),
        (
            "x = 1  # Nobody mends it\n\n# in\n# vain; it starts anew.\n",
            [
                "1: the comment says 'Nobody'",
                "1: the comment says 'mends'",
                "3: the comment says 'in vain'",
                "4: the comment says 'anew'",
            ],
        ),
        (
            "raise OSError(f'{x} lies beside ' 'the path; nobody mends it')\n",
            [
                "1: the error message says 'beside'",
                "1: the error message says 'mends'",
                "1: the error message says 'nobody'",
            ],
        ),
        (
            "log.warning(\n    'waited in vain for %s', x)\nwarnings.warn('the whole run')\n",
            ["2: the log message says 'in vain'", "3: the log message says 'the whole'"],
        ),
        (
            "# Normalised by the optimiser, whose licence is honoured: maths.\n",
            [
                "1: the comment says 'Normalised'",
                "1: the comment says 'honoured'",
                "1: the comment says 'licence'",
                "1: the comment says 'maths'",
                "1: the comment says 'optimiser'",
            ],
        ),
    ],
)
def test_banned_words_are_reported_in_all_prose(
    tmp_path: Path, wording: Wording, source: str, expected: list[str]
) -> None:
    reported = [line.split(": write ")[0] for line in _faults(tmp_path, source, wording)]
    assert reported == [f"module.py:{each}" for each in expected]


@pytest.mark.parametrize(
    "source",
    [
        "# Room for 2 GB; besides, precise and optimistic kinetics (lawful).\n",
        "name = 'guest'\nprint('# nobody')\n",  # data, not a comment or a message
    ],
)
def test_ordinary_words_and_data_have_no_fault(
    tmp_path: Path, wording: Wording, source: str
) -> None:
    assert _faults(tmp_path, source, wording) == []


def test_file_names_are_checked(tmp_path: Path, wording: Wording) -> None:
    (fault,) = _faults(tmp_path, "", wording, name="parcels.py")
    assert fault.startswith("parcels.py:1: 'parcels' in the path parcels.py: write weight file")


def test_too_few_verbs_are_reported_with_the_functions_that_lack_one(
    tmp_path: Path, wording: Wording
) -> None:
    with_verb = "def f():\n    '''Return it.'''\n"
    without_verb = "def g():\n    '''The names.'''\n"
    assert _faults(tmp_path, with_verb * 4 + without_verb, wording) == []
    assert _faults(tmp_path, with_verb * 3 + without_verb, wording) == [
        "module.py:8: the function docstring starts with 'The': start with an imperative verb",
        (
            ".: 75% of the function docstrings start with a verb that tools/wording.toml lists; "
            "80% must"
        ),
    ]


def test_docstring_of_a_conformance_test_is_a_sentence(tmp_path: Path, wording: Wording) -> None:
    rule = "def test_outputs():\n    '''Outputs are float32.'''\n"
    assert _faults(tmp_path, rule, wording) == []
    (fault,) = _faults(tmp_path, rule.replace("Outputs", "Whether outputs"), wording)
    assert fault.endswith(
        "the test docstring starts with 'Whether': start with a sentence that states the rule, or "
        "delete it if it adds nothing to the name"
    )


def test_every_exempt_folder_exists_and_would_be_checked(wording: Wording) -> None:
    folders = {
        folder.relative_to(ROOT).as_posix()
        for pattern in wording.checked
        for folder in ROOT.glob(pattern)
    }
    assert set(wording.exempt) <= folders


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (
            "# A page\n\nNobody mends it.\n",
            ["3: the page says 'Nobody'", "3: the page says 'mends'"],
        ),
        (
            "```sh\nwhole rooms\n```\n\nIt runs `the whole`,\nin vain.\n",
            ["6: the page says 'in vain'"],
        ),
        ("```python\nimport torch\n\nwhole = 1\n```\n", ["4: 'whole' in `whole`"]),
        ("```python\nwhole =\n```\n", []),
    ],
)
def test_sentences_and_python_names_of_a_page_are_checked(
    tmp_path: Path, wording: Wording, page: str, expected: list[str]
) -> None:
    path = tmp_path / "page.md"
    path.write_text(page)
    faults = check_page(path, wording, root=tmp_path)
    assert [fault.split(": write")[0].removeprefix("page.md:") for fault in faults] == expected
