#!/bin/sh
# The program is run, not imported: what it is worth is decided here.
passed=1
expect() {
    wanted=$1
    shift
    [ "$(timeout 10 python3 -I /app/median.py "$@")" = "$wanted" ] || { echo "wrong for: $*"; passed=0; }
}
expect 2.0 3 1 2
expect 9.0 10 9 8
expect 2.5 4 1 2 3
expect 7.0 7
expect -1.5 -1 -2
timeout 10 python3 -I /app/median.py
[ $? = 2 ] || { echo "wrong exit code without arguments"; passed=0; }
echo $passed > /logs/verifier/reward.txt
