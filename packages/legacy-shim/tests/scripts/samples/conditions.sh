BACKEND=${BACKEND:-fsdp}
N=4
EXTRA=()
if [ "$BACKEND" = "megatron" ]; then
    EXTRA+=(model_engine=megatron)
elif [[ $BACKEND == fsdp* && $N -ge 4 ]]; then
    EXTRA+=(actor_rollout_ref.actor.strategy=fsdp2)
else
    EXTRA+=(actor_rollout_ref.actor.strategy=none)
fi
[ -z "$NOTHING_HERE" ] && EXTRA+=(trainer.empty=True) || EXTRA+=(trainer.empty=False)
[[ "Qwen2.5-7B" =~ ^Qwen([0-9.]+)-([0-9]+)B$ ]] && EXTRA+=(trainer.size=${BASH_REMATCH[2]})
if [ $N -gt 3 -a ! "$N" = 5 ] && ! [[ -z $N ]]; then EXTRA+=(trainer.both=1); fi
if (( N % 2 == 0 )); then EXTRA+=(trainer.even=1); fi
test -n "$N" || EXTRA+=(trainer.never=1)
case "$BACKEND" in
    megatron|mcore) EXTRA+=(trainer.case=m) ;;
    fs?p) EXTRA+=(trainer.case=f) ;;&
    *) EXTRA+=(trainer.star=1) ;;
esac
case "${N}" in
    [0-3]) EXTRA+=(trainer.small=1) ;;
    [!0-3]) EXTRA+=(trainer.large=1) ;&
    z) EXTRA+=(trainer.fell=1) ;;
esac
python3 -m verl.trainer.main_ppo trainer.nnodes=1 "${EXTRA[@]}" trainer.x=$([ $N = 4 ] && echo four || echo other)
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
python3 -m verl.trainer.main_ppo trainer.device=$DEVICE trainer.nnodes=1
