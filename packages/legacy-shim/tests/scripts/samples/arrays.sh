DATA=(
    # where the data lie
    data.train_files=train.parquet
    data.val_files="val file.parquet"   # with a blank

    data.train_batch_size=1024
)
MODEL=(actor_rollout_ref.model.path=Qwen/Qwen3-8B)
MODEL+=(actor_rollout_ref.model.use_remove_padding=True 'actor_rollout_ref.model.x=a b')
EMPTY=()
declare -A SIZE=([small]=1 [large]=8)
SIZE[huge]=64
LIST=(a b c d e)
LIST[7]=h
unset 'LIST[1]'
read -r FIRST REST <<< "one two three"
IFS=',' read -ra PARTS <<< "x,y,z"
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${MODEL[@]}" "${EMPTY[@]}" ${EMPTY[@]+"${EMPTY[@]}"} \
    trainer.nnodes=${SIZE[large]} trainer.n_gpus_per_node=${SIZE[huge]} \
    trainer.count=${#LIST[@]} trainer.third=${LIST[2]} trainer.last=${LIST[-1]} trainer.slice="${LIST[*]:2:2}" trainer.keys="${!LIST[*]}" \
    trainer.first=$FIRST trainer.rest="$REST" "${PARTS[@]/#/data.part_}" trainer.joined="$(IFS=,; echo "${PARTS[*]}")"
python3 -m verl.trainer.main_ppo ${MODEL[@]} "${DATA[@]:1:2}" data.x="${LIST[@]}"
