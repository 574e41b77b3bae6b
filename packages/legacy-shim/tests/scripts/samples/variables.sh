MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DIR=${DIR:-${ROOT:-/data}/${SUB-sub}}
: "${LR:=1e-6}"
NAME=$(basename "$MODEL")
FLAG=${USE_LORA:+actor_rollout_ref.model.lora_rank=8}
HAVE=yes
WITH=${HAVE:+data.have=1}
UNSET_LATER=1
unset UNSET_LATER
INDIRECT=MODEL
python3 -m verl.trainer.main_ppo \
    actor_rollout_ref.model.path=$MODEL \
    data.train_files=$DIR/train.parquet \
    actor_rollout_ref.actor.optim.lr=${LR} \
    trainer.experiment_name="${NAME}_${LR//-/_}" \
    $FLAG $WITH ${HAVE:+data.more=2 "data.more two=3"} \
    trainer.length=${#MODEL} \
    trainer.tail=${MODEL##*/} trainer.head=${MODEL%%/*} trainer.ext=${NAME%.*} trainer.major=${NAME#*.} \
    trainer.lower=${NAME,,} trainer.upper=${NAME^^} trainer.part=${NAME:1:4}${NAME: -2} \
    trainer.swap=${MODEL/Qwen/Llama} trainer.swap_all=${MODEL//Qwen/Llama} trainer.front=${MODEL/#Qwen/L} trainer.back=${MODEL/%7B/8B} \
    trainer.unset=${UNSET_LATER-was_unset} trainer.indirect=${!INDIRECT}
