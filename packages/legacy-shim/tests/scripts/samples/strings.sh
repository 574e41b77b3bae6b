# Overrides in a string, split where it is not quoted.
OPTIONS="trainer.nnodes=2 trainer.n_gpus_per_node=8"
OPTIONS="$OPTIONS trainer.save_freq=10"
OPTIONS+=" trainer.test_freq=5"
ENTRY="-m verl.trainer.main_ppo"
python3 $ENTRY $OPTIONS data.train_files=[{a,b}] data.val_files={x,y}.parquet data.seeds=[{1..3}] data.plain={one} data.pad={08..10} \
    data.star=*.parquet data.brackets=[a-z]
CMD="python3 -m verl.trainer.main_ppo $OPTIONS"
$CMD trainer.project_name=p
eval "$CMD trainer.project_name='with blank'"
bash -c "$CMD trainer.experiment_name=\$HOME/x"
