for lr in 1e-6 5e-6; do
    for n in 4 8; do
        [ "$lr$n" = 5e-68 ] && continue
        python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=$lr actor_rollout_ref.rollout.n=$n trainer.nnodes=1
    done
done
for ((i = 0; i < 2; i++)); do
    python3 -m verl.trainer.main_ppo trainer.seed=$i trainer.nnodes=1
done
COUNT=0
while [ $COUNT -lt 5 ]; do
    COUNT=$((COUNT + 1))
    if [ $COUNT = 3 ]; then break; fi
done
until (( COUNT >= 6 )); do ((COUNT++)); done
python3 -m verl.trainer.main_ppo trainer.count=$COUNT trainer.nnodes=1
for size in $(seq 1 2); do python3 -m verl.trainer.main_ppo trainer.size=$size trainer.nnodes=1 & done
wait
while read -r key value; do
    python3 -m verl.trainer.main_ppo trainer.$key=$value trainer.nnodes=1
done <<LINES
alpha 1
beta $COUNT
LINES
