"""Mistakes of someone who has just read README.md, most of them with `experiment=quickstart`."""

from tools.wrong_inputs.cases import Case, write_file

NOT_AUDITED = "not tried"
OWN_ROWS = ("data.train.prompt_key=problem", "data.train.answer_key=solution")

QUICKSTART_CASES = (
    Case(
        name="own rows in the quickstart",
        is_bare=True,
        arguments=(
            "experiment=quickstart",
            "data.train.name=jsonl",
            "data.train.paths=[train.jsonl]",
            *OWN_ROWS,
        ),
        exit_code=0,
        expects="OK",
        before="told to remove settings that the user had not set, 2",
    ),
    Case(
        name="own rows in the quickstart, without name",
        is_bare=True,
        arguments=("experiment=quickstart", "data.train.paths=[train.jsonl]"),
        expects="set data.train=jsonl or another",
        before="asked for max_rows, 2",
    ),
    Case(
        name="quickstart as SFT",
        is_bare=True,
        arguments=("experiment=quickstart", "task=sft"),
        expects="set warm_start=null",
        before="told to remove warm_start, which the user had not set, 2",
    ),
    Case(
        name="CSV table",
        prepare=write_file("../table.csv", "problem,solution\n1 + 1?,2\n"),
        arguments=("data.train.paths=[table.csv]",),
        expects="to_json",
        before="correct or remove the line, 2",
    ),
    Case(
        name="JSON document over several lines",
        rows='{\n  "problem": "1 + 1?",\n  "solution": "2"\n}\n',
        expects="each row on its own line",
        before="correct or remove the line, 2",
    ),
    Case(
        name="folder in data.train.paths",
        arguments=("data.train.paths=[model]",),
        expects="is a folder",
        before="correct the path, 2",
    ),
    Case(
        name="pattern in data.train.paths",
        arguments=('data.train.paths=["*.jsonl"]',),
        expects="atterns are not expanded",
        before="correct the path, 2",
    ),
    Case(
        name="text for a list of paths",
        arguments=("data.train.paths=train.jsonl",),
        expects="data.train.paths is 'train.jsonl', but must be",
        before=NOT_AUDITED,
    ),
    Case(
        name="file of a reward instead of its module",
        arguments=("reward.function=my_rewards.py:ok",),
        expects="my_rewards:ok",
        before="No module named 'my_rewards', 2",
    ),
    Case(
        name="device gpu",
        arguments=("actor.engine.device=gpu",),
        expects="device is 'gpu', but must be",
        before=NOT_AUDITED,
    ),
    Case(
        name="run.resume=yes",
        arguments=("run.resume=yes",),
        expects="use never, auto, or the path of a step directory",
        before=NOT_AUDITED,
    ),
    Case(
        name="report of a folder without a run",
        is_bare=True,
        arguments=("--report", "model"),
        mode="",
        expects="model",
        before=NOT_AUDITED,
    ),
)
