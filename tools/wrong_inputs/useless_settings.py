"""Settings that are valid one by one, but with which a run fails or learns nothing."""

from tools.wrong_inputs.cases import ROWS, Case, write_file

OK_BEFORE = "OK with --check, no word, 0"
TOO_LATE = "OK with --check; good, 1, in the run"

USELESS_SETTINGS = (
    Case(
        name="learning rate 1000",
        arguments=("actor.engine.optimizer.lr=1000",),
        exit_code=0,
        expects="lr is 1000, with which the first updates of adamw replace the model's weights",
        before=OK_BEFORE,
    ),
    Case(
        name="weight decay that erases the weights",
        arguments=("actor.engine.optimizer.lr=0.01", "actor.engine.optimizer.weight_decay=100"),
        exit_code=0,
        expects="weight decay multiplies weights by 1 - lr * weight_decay = 1 - 0.01 * 100",
        before=OK_BEFORE,
    ),
    Case(
        name="64 prompts per step, 4 rows",
        arguments=("batching.prompts_per_step=64",),
        exit_code=0,
        expects="prompts_per_step is 64, but the training data has 4 rows",
        before=OK_BEFORE,
    ),
    Case(
        name="epochs of less than a step",
        arguments=("batching.prompts_per_step=64", "run.total_epochs=1", "run.total_steps=100"),
        expects="run.total_steps (command line) has no effect with run.total_epochs",
        before="good, 2",
    ),
    Case(
        name="epochs of less than a step, alone",
        is_bare=True,
        arguments=(
            *("algorithm=grpo", "actor.engine.model.path=model", "run.dir=out"),
            *("actor.engine.precision.compute=fp32", "data.train.paths=[train.jsonl]"),
            *("data.train.prompt_key=problem", "data.train.answer_key=solution"),
            *("sampling.max_tokens=8", "run.total_epochs=1"),
        ),
        expects="run.total_epochs is 1, but the data has 4 problems, less than a step",
        before=TOO_LATE,
    ),
    Case(
        name="training with top_k=1",
        arguments=("sampling.top_k=1",),
        expects="sampling.top_k is 1 (greedy) in task rl",
        before=OK_BEFORE,
    ),
    Case(
        name="training with temperature 0",
        arguments=("sampling.temperature=0",),
        expects="sampling.temperature is 0 (greedy) in task rl",
        before="good, 2",
    ),
    Case(
        name="completions as long as the model's positions",
        arguments=("sampling.max_tokens=256", "batching.max_tokens=4096"),
        expects="sampling.max_tokens is 256, but the model in model has 256 positions",
        before=TOO_LATE,
    ),
    Case(
        name="prompt and completion beyond the model's positions",
        arguments=("sampling.max_tokens=255", "batching.max_tokens=4096"),
        expects="tokens and sampling.max_tokens is 255, but the model in model has 256 positions",
        before=TOO_LATE,
    ),
    Case(
        name="warmup longer than the run",
        arguments=("actor.engine.schedule.warmup_steps=50",),
        exit_code=0,
        expects="has 50 warmup steps, but the run has 2 updates",
        before=OK_BEFORE,
    ),
    Case(
        name="schedule shorter than the run",
        arguments=("actor.engine.schedule.kind=cosine", "actor.engine.schedule.total_steps=1"),
        exit_code=0,
        expects="schedule.total_steps is 1, but the run has 2 updates",
        before=OK_BEFORE,
    ),
    Case(
        name="evaluation on the training data",
        arguments=(
            "data.eval.paths=[train.jsonl]",
            *("data.eval.prompt_key=problem", "data.eval.answer_key=solution"),
            "run.eval_sampling.max_tokens=8",
        ),
        exit_code=0,
        expects="data.eval reads train.jsonl, which data.train trains on",
        before=OK_BEFORE,
    ),
    Case(
        name="answers without a number for gsm8k_strict",
        rows=ROWS.replace("#### 2", "two"),
        arguments=("reward.function=gsm8k_strict",),
        expects="is 'two', but must be a number",
        before="good, 2",
    ),
    Case(
        name="chosen and rejected are equal",
        is_bare=True,
        prepare=write_file(
            "../pairs.jsonl", '{"question": "1 + 1?", "chosen": "2", "rejected": "2"}\n'
        ),
        arguments=(
            *("task=dpo", "ref=frozen", "actor.engine.model.path=model", "run.dir=out"),
            *("actor.engine.precision.compute=fp32", "data.train.paths=[pairs.jsonl]"),
            "batching.prompts_per_step=1",
        ),
        expects="fields 'chosen' and 'rejected' are equal",
        before="good, 2",
    ),
)
