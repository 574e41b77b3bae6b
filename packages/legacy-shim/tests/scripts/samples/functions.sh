function launch() {
    local name=$1; shift
    local -r steps=${STEPS:-10}
    python3 -m verl.trainer.main_ppo trainer.experiment_name="$name" trainer.steps=$steps trainer.count=$# "$@"
}
size_of() {
    case $1 in
        small) echo 1 ;;
        *) echo 8; return 0; echo never ;;
    esac
}
launch first trainer.nnodes=$(size_of small)
launch "second run" trainer.nnodes=$(size_of large) trainer.x="a b"
outer=1
change() { outer=2; inner=3; local hidden=4; }
change
( outer=5; launch sub trainer.outer=$outer trainer.nnodes=1 )
launch last trainer.outer=$outer trainer.inner=$inner trainer.hidden=${hidden:-none} trainer.nnodes=1
{ launch grouped trainer.nnodes=1; } 2>&1 | tee log.txt
set -- one two three
python3 -m verl.trainer.main_ppo trainer.args="$*" trainer.num=$# trainer.second=$2 trainer.nnodes=1 "${@:2}"
