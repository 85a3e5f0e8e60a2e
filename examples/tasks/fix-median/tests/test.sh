#!/bin/sh
# The program is run, not imported, so that it cannot change the verdict. Its output goes to a file, since a process that
# it leaves running would keep a pipe open.
run() { timeout 10 python3 -I /app/median.py "$@" > /tmp/output; }
passed=1
expect() {
    wanted=$1
    shift
    run "$@"
    [ "$(cat /tmp/output)" = "$wanted" ] || { echo "wrong for: $*"; passed=0; }
}
expect 2.0 3 1 2
expect 9.0 10 9 8
expect 2.5 4 1 2 3
expect 7.0 7
expect -1.5 -1 -2
run
[ $? = 2 ] || { echo "wrong exit code without arguments"; passed=0; }
kill -9 -1 2>/dev/null; sleep 1  # such processes could write the reward after this
echo $passed > /logs/verifier/reward.txt
