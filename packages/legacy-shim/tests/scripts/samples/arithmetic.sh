max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
offload=1
(( micro = 4, micro += 2 ))
let micro++
declare -i count=3
count+=4
python3 -m verl.trainer.main_ppo \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 2)) \
    trainer.a=$((7 / 2)) trainer.b=$((-7 / 2)) trainer.c=$((-7 % 3)) trainer.d=$((2 ** 10)) trainer.e=$((offload ? 10 : 20)) \
    trainer.f=$((0x1f + 010 + 2#101)) trainer.g=$((1 << 4 | 3 & 2 ^ 1)) trainer.h=$((!offload || 5 > 3 && 2 != 2)) \
    trainer.i=$((max_prompt_length++)) trainer.j=$((max_prompt_length)) trainer.k=$[1 + 2] trainer.l=$((9223372036854775807 + 1)) \
    trainer.micro=$micro trainer.count=$count trainer.m=$(( (1,2) )) trainer.n=$((- - 3)) trainer.o=$((~5))
