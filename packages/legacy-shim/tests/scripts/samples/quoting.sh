A='one two'
B="it's $A"
C=$'tab\there\x21'
EMPTY=
python3 -m verl.trainer.main_ppo \
    trainer.logger=['console','wandb'] \
    trainer.logger="['console', \"wandb\"]" \
    'trainer.project_name=with $dollar and "quotes"' \
    "trainer.experiment_name=$B" \
    trainer.a=$A \
    "trainer.c=$C" \
    trainer.empty="$EMPTY" trainer.nothing=$EMPTY \
    data.path=~/not/expanded data.escaped=a\ b\$c\\d \
    "data.backslash=a\nb\\c\`d\"" \
    +data.map="{a: 1, b: [2,3]}" data.half="x"'y'z
HOME_PATH=~/expanded
python3 -m verl.trainer.main_ppo data.train_files=$HOME_PATH/x data.val_files="${HOME}/y" data.c=a$ data.d=$'a\'b' data.e="$" data.f=${NOT_SET:-~/default} data.g="${NOT_SET:-~/quoted}"
